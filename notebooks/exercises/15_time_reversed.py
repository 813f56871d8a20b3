"""Tasks of lesson 15: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises import judge
from labkit.exercises.engine import Call, Exercise, Mistake, RaceSpec, defined_in_cell, difference
from labkit.exercises.properties import (
    KERNEL,
    KERNEL_CASES,
    POINTWISE,
    READ_ONCE,
    elements_at,
    gives_where,
    wrong_only_where,
)

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

states = work.linear_recurrence.reference

Gives = Callable[..., Any]
BEFORE = judge.find("13_recurrent_kernel")


def upstream_inputs(batch: int, steps: int, width: int, infinite: bool = False) -> dict[str, Tensor]:
    """dh, which is like h, a and h, all (batch, steps, width).

    The last states may be infinite: they are in no gradient, and in front of the next sequence.
    """
    given = BEFORE["recurrence"].inputs(batch, steps, width)
    h = states(given["a"], given["b"])
    dh = h + 0.5 * torch.randn_like(h)
    if infinite:
        h[:, -1] = torch.inf
    return {"dh": dh, "a": given["a"], "h": h}


def moved(x: Tensor, by: int) -> Tensor:
    """x (B, T, H), one step later, or earlier where ``by`` is -1, with zeros where nothing comes from."""
    return F.pad(x, (0, 0, 1, 1))[:, 1 - by : 1 - by + x.shape[1]]


def gradient(dh: Tensor, a: Tensor, gate: int) -> Tensor:
    """g_t = dh_t + a_(t + gate) * g_(t+1), from the last step to the first."""
    return states(moved(a, -gate).flip(1), dh.flip(1)).flip(1)


def gradients(g: Any = lambda dh, a: gradient(dh, a, 1), last: Any = lambda h: moved(h, 1)) -> Gives:
    """da and db, or what a mistake makes of them: db is ``g(dh, a)``, da is db times ``last(h)``."""
    return lambda dh, a, h: (g(dh, a) * last(h), g(dh, a))


def wrong_at_first(calls: Sequence[Call]) -> bool:
    """Whether da is wrong at the first steps alone."""
    found = False
    for call in calls:
        (da, right_da), (db, right_db) = call.result_tensors()
        if da.is_contiguous() and len(np.unique(call.launches.stored(da))) < da.numel():
            return False  # that is another matter
        if difference(db, right_db, 0.05) or difference(da[:, 1:], right_da[:, 1:], 0.05):
            return False
        found = found or bool(difference(da[:, :1], right_da[:, :1], 0.05))
    return found


def first_step_alone(calls: Sequence[Call]) -> bool:
    """Whether db is wrong at step 0 of each sequence, and right at all others."""
    pairs = [call.result_tensors()[1] for call in calls]
    first = [difference(got[:, :1], right[:, :1], 0.05) for got, right in pairs]
    return all(first) and not any(difference(got[:, 1:], right[:, 1:], 0.05) for got, right in pairs)


FIRST_LEFT_OUT = Mistake(
    "All steps but step 0 are right. Where does your loop end?",
    "range(T - 1, 0, -1) ends at step 1. Let i count range(T), and t be T - 1 - i.",
    when=first_step_alone,
)
REVERSED = Mistake(
    "A kernel's loop goes over range. Which step is number i, counted from the end?",
    "T - 1 - i.",
    raises="reversed",
)
BEFORE_THE_FIRST = Mistake(
    "What lies H places before the first step of a sequence?",
    "Another sequence, or nothing. The state before step 0 is zero: this load has the mask t > 0, too, and "
    "other=0.0.",
    when=wrong_at_first,
)
TRIED: dict[str, Any] = {"properties": (KERNEL, *POINTWISE, READ_ONCE), **KERNEL_CASES}

backward = Exercise(
    "time reversed",
    "recurrence_backward",
    reference=gradients(),
    cases=((1, 1, 1), (1, 3, 4), (2, 5, 20)),
    large=((1, 2, 128), (2, 2, 140, True), (1, 1100, 2), (1, 1, 4100)),
    vast=((2**24, 2, 70),),
    inputs=upstream_inputs,
    **TRIED,
    right="Three tensors in and two out, each once: the forward's loop, walked backwards.",
    race=RaceSpec(
        work.linear_recurrence,
        {"PyTorch": states, "labkit": kernels.linear_recurrence},
        ({"batch": 512, "time": 256, "width": 128},),
        dtype="float32",
        direction="backward",
        as_layer=defined_in_cell("recurrence_layer"),
        counted=False,
    ),
    mistakes={
        "no-carry": Mistake(
            "Step t hands a_t * g_t to step t - 1, which adds it to its dh.",
            gives=gradients(lambda dh, a: dh),
        ),
        "other-gate": Mistake(
            "Between h_t and h_(t+1) stands the later step's gate. So what step t hands on is a_t * g_t: "
            "multiply at the end of a step, and not where it comes in.",
            gives=(
                gradients(lambda dh, a: gradient(dh, a, 0)),
                gradients(lambda dh, a: gradient(dh, torch.ones_like(a), 1)),
            ),
        ),
        "other-state": Mistake(
            "a_t multiplied a state in the forward pass. That of which step?",
            gives=gradients(last=lambda h: h),
        ),
        "one-step-back": Mistake(
            "It goes back by one step only. What does a step hand on: its own dh, or all that it got?",
            "All: g is dh and what came from step t + 1, and a_t * g goes on.",
            gives=gradients(lambda dh, a: dh + moved(a * dh, -1)),
        ),
        "forwards": Mistake(
            "Of which step do you know the gradient first?",
            "Of the last one: no later step hands anything to it. So begin there, with t = T - 1 - i.",
            gives=gradients(lambda dh, a: states(moved(a, 1), dh)),
        ),
        "first-left-out": FIRST_LEFT_OUT,
        "reversed": REVERSED,
        "before-the-first": BEFORE_THE_FIRST,
    },
)

# ---- an episode ends ---------------------------------------------------------------------------------------


def reset_inputs(batch: int, steps: int, width: int, infinite: str = "") -> dict[str, Tensor]:
    """Those of a recurrence that begins anew at some steps.

    The state before such a step, and its gate, may be infinite; or the gate of the step after it; or the last
    states, which are in no gradient, and in front of the next sequence.
    """
    given = BEFORE["recurrence"].inputs(batch, steps, width)
    reset = torch.rand(batch, steps) < 0.3
    if steps > 2:
        reset[:, 2] = True
    if steps > 4:  # sequences differ
        reset[1:, 4] = ~reset[:1, 4]
    h = states(torch.where(reset[..., None], 0.0, given["a"]), given["b"])
    dh = h + 0.5 * torch.randn_like(h)
    if infinite == "before":
        h[:, 1] = torch.inf
        given["a"][:, 2] = torch.inf
    if infinite == "last":
        h[:, -1] = torch.inf
    if infinite == "after":
        reset[:, 3] = False
        given["a"][:, 3] = torch.inf
    return {"dh": dh, "a": given["a"], "h": h, "reset": reset}


def finite(call: Call) -> bool:
    """Whether nothing in a call is infinite."""
    return len(call.case) == 3


OTHER_PLACES: tuple[Callable[..., Tensor], ...] = (
    lambda sequence, step, feature, T, H: (sequence * T + step) * H + feature,
    lambda sequence, step, feature, T, H: sequence,
    lambda sequence, step, feature, T, H: step * H + feature,
)
"""Where one loads `reset` in place of (sequence, step)."""
Chosen = Callable[[Tensor, Tensor], Tensor]


def step_by_step(
    comes: Chosen = lambda new, carry: carry,
    goes: Chosen = lambda new, carry: torch.where(new, 0.0, carry),
    da: Chosen = lambda new, product: torch.where(new, 0.0, product),
) -> Callable[..., tuple[Tensor, Tensor]]:
    """da and db, also where something is infinite, or what a mistake makes of them.

    ``comes`` is what a step takes of what the step after it hands back, ``goes`` what it hands back itself:
    made, as ``da`` is, of whether the step has a reset, and of the product that it is without one.
    """

    def of_features(reset: Tensor) -> Tensor:
        return reset if reset.dim() == 3 else reset[..., None]

    def gives(dh: Tensor, a: Tensor, h: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
        carry, found = torch.zeros_like(dh[:, 0]), []
        for t in reversed(range(dh.shape[1])):
            new = of_features(reset)[:, t]
            found.append(dh[:, t] + comes(new, carry))
            carry = goes(new, a[:, t] * found[-1])
        g = torch.stack(found[::-1], 1)
        return da(of_features(reset), g * moved(h, 1)), g

    return gives


def reset_at(place: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """What comes out when `reset` is loaded at ``place(sequence, step, feature, T, H)``."""

    def gives(dh: Tensor, a: Tensor, h: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
        B, T, H = a.shape
        sequence, step, feature = (
            torch.arange(n).view(s) for n, s in ((B, (-1, 1, 1)), (T, (-1, 1)), (H, -1))
        )
        at = torch.broadcast_to(place(sequence, step, feature, T, H), a.shape)
        return step_by_step()(dh, a, h, elements_at(reset.double(), at, beyond=1.0) != 0)

    return gives


reset = Exercise(
    "an episode ends",
    "reset_backward",
    reference=step_by_step(),
    cases=((1, 1, 1), (1, 3, 4), (2, 5, 20)),
    large=((2, 6, 5, "before"), (2, 6, 5, "after"), (2, 9, 140, "last"), (1, 1100, 2), (2, 2, 2100)),
    vast=((2**24, 2, 70), (2**30 + 8, 2, 2)),
    inputs=reset_inputs,
    **TRIED,
    right="What was before an episode has no part in it, not even if it was infinite.",
    mistakes={
        "not-cut": Mistake(
            "From step t with a reset nothing goes back to step t - 1: the carry is zero there.",
            gives=step_by_step(goes=lambda new, carry: carry),
        ),
        "da-kept": Mistake(
            "At a reset h_t = b_t. What does the loss have to do with a_t there?",
            when=gives_where(finite, step_by_step(da=lambda new, product: product)),
        ),
        "other-step": Mistake(
            "A reset at step t cuts what goes from t back to t - 1, and a_t. It is no matter to step t + 1.",
            gives=step_by_step(lambda new, carry: torch.where(new, 0.0, carry), lambda new, carry: carry),
        ),
        "reset-place": Mistake(
            "reset is (B, T): a step of a sequence has one, for all of its features. Where does it lie?",
            "reset + sequence * T + t.",
            when=lambda calls: any(gives_where(finite, reset_at(place))(calls) for place in OTHER_PLACES),
        ),
        "times-zero": Mistake(
            "Infinity times 0 is NaN, and a state or a gate may be infinite. Choose whole products: for da "
            "tl.where(new, 0.0, g * before), for the carry tl.where(new, 0.0, gate * g).",
            when=wrong_only_where(lambda call: len(call.case) == 4),
        ),
        "one-sequence": Mistake(
            "A single sequence is right. Where in `reset` do the steps of sequence 1 begin?",
            "T numbers further on: reset + sequence * T + t.",
            when=wrong_only_where(lambda call: call.case[0] > 1),
        ),
        "first-left-out": FIRST_LEFT_OUT,
        "reversed": REVERSED,
        "before-the-first": BEFORE_THE_FIRST,
    },
)
