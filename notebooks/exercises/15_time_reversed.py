"""Tasks of lesson 15: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises import judge
from labkit.exercises.engine import Call, Exercise, Mistake, RaceSpec, difference
from labkit.exercises.properties import KERNEL, KERNEL_CASES, POINTWISE, READ_ONCE

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

states = work.linear_recurrence.reference

Gives = Callable[..., Any]
BEFORE = judge.find("13_recurrent_kernel")


def upstream_inputs(batch: int, steps: int, width: int) -> dict[str, Tensor]:
    """dh, which is like h, a and h, all (batch, steps, width)."""
    given = BEFORE["recurrence"].inputs(batch, steps, width)
    h = states(given["a"], given["b"])
    return {"dh": h + 0.5 * torch.randn_like(h), "a": given["a"], "h": h}


def moved(x: Tensor, by: int) -> Tensor:
    """x (B, T, H), later by up to two steps, zeros where nothing comes from; negative is earlier."""
    return F.pad(x, (0, 0, 2, 2))[:, 2 - by : 2 - by + x.shape[1]]


def gradient(dh: Tensor, a: Tensor, gate: int) -> Tensor:
    """g_t = dh_t + a_(t + gate) * g_(t+1), from the last step to the first."""
    return states(moved(a, -gate).flip(1), dh.flip(1)).flip(1)


def gradients(g: Any = lambda dh, a: gradient(dh, a, 1), last: Any = lambda h: moved(h, 1)) -> Gives:
    """da and db, or what a mistake makes of them: db is ``g(dh, a)``, da is db times ``last(h)``."""
    return lambda dh, a, h: (g(dh, a) * last(h), g(dh, a))


def layer_of(answer: Gives) -> Gives:
    """What is raced: the cell's layer, of which the answer is the backward pass."""
    if "recurrence_layer" not in answer.__globals__:
        raise ValueError("recurrence_layer: the cell has to define it, below the class Recurrence")
    return answer.__globals__["recurrence_layer"]  # type: ignore[no-any-return]


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


TRIED: dict[str, Any] = {"properties": (KERNEL, *POINTWISE, READ_ONCE), **KERNEL_CASES}

backward = Exercise(
    "time reversed",
    "recurrence_backward",
    reference=gradients(),
    cases=((1, 1, 1), (1, 3, 4), (2, 5, 20)),
    large=((1, 2, 128), (2, 2, 140), (1, 300, 8), (1, 1, 1030)),
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
        as_layer=layer_of,
        counted=False,
    ),
    mistakes={
        "not-reversed": Mistake(
            "Which step's gradient needs no other step's? Is that the first one in your loop?",
            "The last step: nobody uses its state. So the loop begins with t = T - 1.",
            gives=tuple(gradients(lambda dh, a, by=by: states(moved(a, by), dh)) for by in (0, 1, -1)),
        ),
        "no-carry": Mistake(
            "Let dh be 1 at the last step, 0 elsewhere. Which of the inputs b had a part in the last state?",
            "All of them, through the gates: step t hands a_t * g_t to step t - 1, which adds it to its dh.",
            gives=gradients(lambda dh, a: dh),
        ),
        "other-gate": Mistake(
            "h_(t+1) = a_(t+1) h_t + b. Which step's gate stands between h_t and h_(t+1)?",
            "The later one's. Multiply g by the gate of its own step before you hand it on.",
            gives=(
                *(gradients(lambda dh, a, gate=gate: gradient(dh, a, gate)) for gate in (0, 2)),
                gradients(lambda dh, a: gradient(dh, torch.ones_like(a), 1)),
            ),
        ),
        "other-state": Mistake(
            "a_t multiplied a state in the forward pass. That of which step?",
            "h_(t-1), the one before: zero at step 0. Where does it lie, seen from step t's places?",
            gives=(
                gradients(last=lambda h: h),
                gradients(last=lambda h: moved(h, -1)),
                gradients(last=lambda h: torch.cat((0 * h[:, :1], h[:, 1:]), 1)),
            ),
        ),
        "before-the-first": Mistake(
            "What lies H places before the first step of a sequence?",
            "Another sequence, or nothing. The state before step 0 is zero: mask this load by t > 0.",
            when=wrong_at_first,
        ),
    },
)

# ---- an episode ends ---------------------------------------------------------------------------------------


def reset_inputs(batch: int, steps: int, width: int, infinite: str = "") -> dict[str, Tensor]:
    """Those of a recurrence that begins anew at some steps.

    The state before such a step, and its gate, may be infinite; or the gate of the step after it.
    """
    given = BEFORE["recurrence"].inputs(batch, steps, width)
    reset = torch.rand(batch, steps) < 0.3
    if steps > 2:
        reset[:, 2] = True
    h = states(torch.where(reset[..., None], 0.0, given["a"]), given["b"])
    dh = h + 0.5 * torch.randn_like(h)
    if infinite == "before":
        h[:, 1] = torch.inf
        given["a"][:, 2] = torch.inf
    if infinite == "after":
        reset[:, 3] = False
        given["a"][:, 3] = torch.inf
    return {"dh": dh, "a": given["a"], "h": h, "reset": reset}


def with_resets(carry: bool = True, da: bool = True, late: int = 0) -> Callable[..., tuple[Tensor, Tensor]]:
    """da and db with resets, where what goes back and da are cut off, or not, perhaps at another step."""

    def gives(dh: Tensor, a: Tensor, h: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
        new = moved(reset[..., None].to(dh.dtype), late) > 0
        g = gradient(dh, torch.where(new, 0.0, a) if carry else a, 1)
        changed = g * moved(h, 1)
        return torch.where(new, 0.0, changed) if da else changed, g

    return gives


def mirrored(da: bool = True, g: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """A step with a reset does not get what the step after it hands back; with ``g`` its own dh neither."""

    def gives(dh: Tensor, a: Tensor, h: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
        new = reset[..., None]
        later = moved(new.to(dh.dtype), 1) > 0
        found = gradient(torch.where(new, 0.0, dh) if g else dh, torch.where(later, 0.0, a), 1)
        changed = found * moved(h, 1)
        return torch.where(new, 0.0, changed) if da else changed, found

    return gives


def step_by_step(
    back: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda new, gate, g: torch.where(new, 0.0, gate * g),
    da: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda new, g, last: torch.where(new, 0.0, g * last),
) -> Callable[..., tuple[Tensor, Tensor]]:
    """da and db, also where something is infinite, or what a mistake makes of them.

    ``back`` is what a step hands back, of whether it is a reset, its gate and its g.
    """

    def gives(dh: Tensor, a: Tensor, h: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
        carry, found = torch.zeros_like(dh[:, 0]), []
        for t in reversed(range(dh.shape[1])):
            found.append(dh[:, t] + carry)
            carry = back(reset[:, t, None], a[:, t], found[-1])
        g = torch.stack(found[::-1], 1)
        return da(reset[..., None], g, moved(h, 1)), g

    return gives


BACK: tuple[Any, ...] = (
    lambda new, gate, g: torch.where(new, 0.0, gate * g),
    lambda new, gate, g: gate * torch.where(new, 0.0, g),
    lambda new, gate, g: torch.where(new, 0.0, gate) * g,
    lambda new, gate, g: gate * g * ~new,
)
OF_GATE: tuple[Any, ...] = (
    lambda new, g, last: torch.where(new, 0.0, g * last),
    lambda new, g, last: g * torch.where(new, 0.0, last),
    lambda new, g, last: torch.where(new, 0.0, g) * last,
    lambda new, g, last: g * last * ~new,
)
TIMES_ZERO = tuple(step_by_step(back, da) for back in BACK for da in OF_GATE)[1:]
"""Products with a zero that was chosen: NaN where the other factor is infinite."""


def in_finite_calls(*gives: Gives) -> Callable[[Sequence[Call]], bool]:
    """Whether an answer does what one of these does, where nothing is infinite."""

    def when(calls: Sequence[Call]) -> bool:
        told = [call for call in calls if len(call.case) == 3 and call.dtype is torch.float32]

        def does(wrong: Gives) -> bool:
            return not any(
                difference(mine, other, 0.01)
                for call in told
                for (mine, _), other in zip(call.result_tensors(), wrong(*call.passed.values()), strict=True)
            )

        return bool(told) and any(map(does, gives))

    return when


reset = Exercise(
    "an episode ends",
    "reset_backward",
    reference=step_by_step(),
    cases=((1, 1, 1), (1, 3, 4), (2, 5, 20)),
    large=((2, 6, 5, "before"), (2, 6, 5, "after"), (2, 9, 140), (1, 300, 8)),
    vast=((2**24, 2, 70), (2**30 + 8, 2, 2)),
    inputs=reset_inputs,
    **TRIED,
    right="What was before an episode has no part in it, not even if it was infinite.",
    mistakes={
        "not-cut": Mistake(
            "Between which two steps does a reset stand, and what may not go from one to the other?",
            "From step t with a reset nothing goes back to step t - 1: the carry is zero there.",
            gives=(with_resets(carry=False), with_resets(carry=False, da=False)),
        ),
        "da-kept": Mistake(
            "At a reset h_t = b_t. What does the loss have to do with a_t there?",
            "Nothing: da is zero at this step.",
            gives=step_by_step(da=lambda new, g, last: g * last),
        ),
        "inverted": Mistake(
            "Where reset is true, which of its two values does tl.where choose?",
            "The first one: tl.where(new, 0.0, ...).",
            when=in_finite_calls(lambda dh, a, h, reset: with_resets()(dh, a, h, ~reset)),
        ),
        "other-step": Mistake(
            "Which step's reset do you load, and which step's gradients do you make?",
            "A reset at step t cuts what goes from t back to t - 1, and a_t. It is no matter to step t + 1.",
            when=in_finite_calls(with_resets(late=1), with_resets(late=-1), mirrored(), mirrored(da=False)),
        ),
        "g-zeroed": Mistake(
            "At a reset h_t = b_t. Does the loss have to do with b_t there?",
            "Yes, as at every step: db = g. What is zero there is da, and what goes back from this step.",
            when=in_finite_calls(mirrored(g=True), mirrored(g=True, da=False)),
        ),
        "times-zero": Mistake(
            "What is infinity times 0?",
            "NaN, and a gate may be infinite, too. Choose the whole product: tl.where(new, 0.0, gate * g).",
            gives=TIMES_ZERO,
        ),
    },
)
