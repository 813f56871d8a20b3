"""Exercises of lesson 7: what is right, what people write instead, and what helps them on."""

from labkit import kernels
from labkit.exercises import judge
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec, layer_with_backward
from labkit.exercises.properties import POINTWISE, READ_ONCE
from labkit.measure.correctness import DTYPES
from labkit.workloads import recurrent as work

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Gives = Callable[..., Any]


def race(rivals: dict[str, Gives], *sizes: tuple[int, int, int], **how: Any) -> RaceSpec:
    """A race beside those and the finished kernel in float32, at sizes (batch, time, width)."""
    rivals = rivals | {"labkit": kernels.linear_recurrence}
    shapes = tuple(dict(zip(("batch", "time", "width"), size, strict=True)) for size in sizes)
    return RaceSpec(work.LINEAR_RECURRENCE, rivals, shapes, dtype="float32", **how)


first_solution = cache(lambda: judge.solutions("07_recurrent_kernel").recurrence)
TRIED: dict[str, Any] = {"dtypes": DTYPES, "properties": (*POINTWISE, READ_ONCE)}


# ---- the loop over time ------------------------------------------------------------------------------------


def sequence_inputs(batch: int, steps: int, width: int, zeros: float = 0.05) -> dict[str, Tensor]:
    """a, of which some are negative and a share is zero, and b, both (batch, steps, width)."""
    shape = batch, steps, width
    a = 1 - 1.4 * torch.rand(shape).square()
    return {"a": torch.where(torch.rand(shape) < zeros, 0.0, a), "b": torch.randn(shape)}


def states_with_step(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """h (B, T, H) from tensors (B, T, ...), where each h is ``step(the last one, *the tensors at t)``.

    How many steps ahead an answer loads comes behind the tensors, and changes nothing.
    """

    def gives(*given: Any) -> Tensor:
        tensors = [each for each in given if isinstance(each, Tensor)]
        h = [torch.zeros_like(tensors[0][:, 0])]
        for now in zip(*(each.unbind(1) for each in tensors), strict=True):
            h.append(step(h[-1], *now))
        return torch.stack(h[1:], 1)

    return gives


right_states = states_with_step(lambda h, a, b: a * h + b)
WRONG_STEPS = (
    *(lambda h, a, b: h + b, lambda h, a, b: a * h, lambda h, a, b: h * b + a, lambda h, a, b: a * (h + b)),
    *(lambda h, a, b: h + a * b, lambda h, a, b: a * h + (1 - a) * b),
)
STEP_MISTAKES = {
    "no-carry": Mistake(
        "Try it with a = 1 and b = 1: h should be 1, 2, 3. What is yours?",
        "It is 1 at every step. Which name does the next step read, and which one do you set?",
        gives=lambda a, b, *_: b,
    ),
    "formula": Mistake(
        "Work out two steps by hand for a = 0.5 and b = 1: h is 1, then 1.5. What is yours?",
        "One of a and b multiplies the old state and nothing else, the other is added as it is.",
        gives=tuple(map(states_with_step, WRONG_STEPS)),
    ),
    "first-state": Mistake(
        "Let T be 1. What is h then, and what does yours come to?",
        "It is b: the state before the first step is zeros, and step 0 is a step like any other.",
        gives=lambda a, b, *_: right_states(a, torch.cat((b[:, :1] * (1 + a[:, :1]), b[:, 1:]), 1)),
    ),
}


recurrence = Exercise(
    "the loop over time",
    "recurrence",
    reference=right_states,
    cases=((1, 1, 1), (2, 1, 5), (2, 5, 20)),
    large=((1, 2, 128), (2, 2, 140), (1, 300, 8), (1, 1, 1030)),
    inputs=sequence_inputs,
    **TRIED,
    right="Each number crosses memory once, and the state never leaves the registers.",
    race=race({"PyTorch's loop": work.linear_recurrence}, (16, 128, 128), (512, 64, 128)),
    mistakes={
        "unwritten": Mistake(
            "Let B be 2 and T be 3, and write down where each step of each row is stored. Who is left out?",
            "Store in the loop: steps lie H apart, rows T * H. A row has triton.cdiv(H, BH) programs.",
        ),
        **STEP_MISTAKES,
        "another-round": Mistake(
            "Write down two rounds of your loop by hand. Which a, b and h are in the second one?",
            "Those of step 1: load both anew, make the new state, store that, and then move on.",
            gives=(
                lambda a, b: F.pad(right_states(a, b), (0, 0, 1, -1)),
                lambda a, b: right_states(a[:, :1].expand_as(a), b[:, :1].expand_as(b)),
            ),
        ),
    },
)

# ---- loads that run ahead ----------------------------------------------------------------------------------


def loaded_late(call: Call) -> str:
    """Of a sequence that is one program's: the first step that is loaded too late, in words, or ""."""
    a, U, made = call.passed["a"], call.passed["steps"], call.launches
    B, _, H = a.shape
    if B > 1 or H > 8:  # the stores of several programs
        return ""

    def steps_in(addresses: np.ndarray, tensor: Tensor) -> np.ndarray:
        places = (addresses.astype(np.int64) - tensor.data_ptr()) // tensor.element_size()
        return places[(places >= 0) & (places < tensor.numel())] // H

    latest = [-1]  # step that was stored so far, by the number of stores
    for store in made.stores:
        latest.append(max(latest[-1], *steps_in(store, call.got), -1))
    for addresses, before in zip(made.loads, made.stores_before, strict=True):
        for name in ("a", "b"):
            found, done = steps_in(addresses, call.passed[name]), latest[before]
            if done >= 0 and len(found) and found.min() < done + 1 + U:
                return f"step {found.min()} of {name} was loaded when step {done} had been stored already."
    return ""


AHEAD = Property(
    "not-ahead",
    loaded_late,
    "Steps 0 to U - 1 are loaded before the loop. Which one sets out while step 0 is worked on?",
    "Step U, before step 0 is stored: each turn appends the block of step t + U, then uses that of step t.",
    contiguous_only=True,
)


def blocks_of(at: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """What comes out where step t takes the blocks of step ``at(t, U)``, and zeros where that is negative."""

    def gives(a: Tensor, b: Tensor, U: int) -> Tensor:
        taken = at(torch.arange(a.shape[1]), U)
        return right_states(*(each[:, taken.clamp(0)] * (taken >= 0)[:, None] for each in (a, b)))

    return gives


ahead = Exercise(
    "loads that run ahead",
    "ahead",
    reference=right_states,
    cases=((1, 1, 1, 1), (1, 9, 5, 1), (2, 5, 20, 2)),
    large=((1, 11, 5, 2), (2, 3, 33, 4), (2, 3, 140, 2), (1, 40, 1, 16)),
    inputs=lambda batch, steps, width, ahead: sequence_inputs(batch, steps, width) | {"steps": ahead},
    dtypes=DTYPES,
    properties=(*POINTWISE, READ_ONCE, AHEAD),
    right="U steps are in flight at any time, in registers, and no barrier stands between them.",
    race=race({"one step at a time": lambda a, b: first_solution()(a, b)}, (16, 2048, 128), (1024, 256, 256)),
    mistakes={
        "same-steps": Mistake(
            "The first U steps are right. Which step's block do you append while step t is worked on?",
            "It will be used U turns later: it has to be that of step t + U.",
            gives=blocks_of(lambda t, U: torch.where(t < U, t, t - U)),
        ),
        "nothing-before": Mistake(
            "The first U steps come out as if their inputs were zero. Who loaded them, and when?",
            "Before the loop, the first U steps have to set out: a loop of its own fills the tuples.",
            gives=blocks_of(lambda t, U: torch.where(t < U, -1, t)),
        ),
        "rounds": Mistake(
            "The first U steps are right. What is the state when the next U begin?",
            "That of the step before. The state begins with zeros once, before all loops.",
            gives=lambda a, b, U: torch.cat(list(map(right_states, a.split(U, 1), b.split(U, 1))), 1),
        ),
        "one-block": Mistake(
            "A tuple has U blocks. Which one does each turn take?",
            "coming[u], with the u of the unrolled loop: each of the U turns takes its own.",
            gives=blocks_of(lambda t, U: t // U * U),
        ),
        "first-round": Mistake(
            "The first U steps are right. Which end does `coming[u]` count from, and who drops used blocks?",
            "Nobody. Before each round hand `coming` on under another name, and begin a new, empty tuple.",
            gives=blocks_of(lambda t, U: t % U),
        ),
        "tuples": Mistake(
            "A tuple is made while the kernel is compiled. Which of your indices is known only when it runs?",
            "That of a loop over T; the u of `tl.static_range(U)` is known. `coming += (block,)` appends.",
            raises=r"CompileError: AssertionError:?\n|no attribute '?(append|index)|item assignment",
        ),
        **STEP_MISTAKES,
    },
)

# ---- time reversed -----------------------------------------------------------------------------------------


def upstream_inputs(batch: int, steps: int, width: int) -> dict[str, Tensor]:
    """dh, which is like h, a and h, all (batch, steps, width)."""
    given = sequence_inputs(batch, steps, width)
    h = right_states(given["a"], given["b"])
    return {"dh": h + 0.5 * torch.randn_like(h), "a": given["a"], "h": h}


def gradients(g: Any = lambda dh, a: gradient(dh, a, 1), last: Any = lambda h: moved(h, 1)) -> Gives:
    """da and db, or what a mistake makes of them: db is ``g(dh, a)``, da is db times ``last(h)``."""

    return lambda dh, a, h: (g(dh, a) * last(h), g(dh, a))


def moved(x: Tensor, by: int) -> Tensor:
    """x (B, T, H), later by up to two steps, zeros where nothing comes from; negative is earlier."""
    return F.pad(x, (0, 0, 2, 2))[:, 2 - by : 2 - by + x.shape[1]]


def gradient(dh: Tensor, a: Tensor, gate: int) -> Tensor:
    """g_t = dh_t + a_(t + gate) * g_(t+1), from the last step to the first."""
    return right_states(moved(a, -gate).flip(1), dh.flip(1)).flip(1)


LAYER = layer_with_backward(kernels.linear_recurrence, lambda h, a, b: (a, h))
BACKWARD: dict[str, Any] = {"direction": "backward", "as_layer": LAYER, "roundings": 4}

backward = Exercise(
    "time reversed",
    "recurrence_backward",
    reference=gradients(),
    cases=((1, 1, 1), (1, 3, 4), (2, 5, 20)),
    large=((1, 2, 128), (2, 2, 140), (1, 300, 8), (1, 1, 1030)),
    inputs=upstream_inputs,
    **TRIED,
    right="Three tensors in and two out, each once: the forward's loop, walked backwards.",
    race=race({"PyTorch's loop": work.linear_recurrence}, (16, 128, 128), (1024, 64, 256), **BACKWARD),
    mistakes={
        "not-reversed": Mistake(
            "Which step's gradient needs no other step's? Is that the first one in your loop?",
            "The last step: nobody uses its state. So the loop begins with t = T - 1.",
            gives=tuple(gradients(lambda dh, a, by=by: right_states(moved(a, by), dh)) for by in (0, 1, -1)),
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
            gives=(gradients(last=lambda h: h), gradients(last=lambda h: moved(h, -1))),
        ),
        "first-step": Mistake(
            "All steps but the first are right. Which state was there before step 0?",
            "Zeros. H places before step 0 lies another sequence, or nothing: mask that load by t > 0.",
            gives=gradients(last=lambda h: torch.cat((h[:, :1], h[:, :-1]), 1)),
        ),
        "swapped": Mistake(
            "Two gradients come back. Which of them needs a state?",
            "da = g * h_(t-1), and it is stored to da; db is g alone.",
            gives=lambda dh, a, h: gradients()(dh, a, h)[::-1],
        ),
    },
)

# ---- an episode ends ---------------------------------------------------------------------------------------


def episode_inputs(batch: int, steps: int, width: int, infinite: bool = False) -> dict[str, Tensor]:
    """a, b (batch, steps, width) and reset (batch, steps). With ``infinite`` h is so until the middle."""
    given, begins = sequence_inputs(batch, steps, width, zeros=0), torch.rand(batch, steps) < 0.3
    if infinite:
        given["b"][:, 0] = math.inf
        begins[:, : steps // 2], begins[:, steps // 2] = False, True
    return given | {"reset": begins}


def with_resets(step: Any = lambda h, a, b, new: torch.where(new, b, a * h + b), place: Any = None) -> Any:
    """The states with another step, or with the resets at ``place(row, t, feature, T, H)``."""

    def gives(a: Tensor, b: Tensor, reset: Tensor) -> Tensor:
        row, t, feature = torch.meshgrid(*map(torch.arange, a.shape), indexing="ij")
        at = place(row, t, feature, *a.shape[1:]) if place else row * a.shape[1] + t
        around = F.pad(reset.flatten(), (1, a.numel()), value=True)  # as the memory there is
        return states_with_step(step)(a, b, around[at + 1])

    return gives


def resets_at(*places: Any) -> tuple[Any, ...]:
    """The states with the resets at each of these places."""
    return tuple(with_resets(place=each) for each in places)


reset = Exercise(
    "begin anew where an episode does",
    "with_reset",
    reference=with_resets(),
    cases=((1, 1, 1), (2, 5, 20), (2, 6, 33, True)),
    large=((1, 2, 128), (2, 2, 140), (1, 300, 8), (1, 1, 1030)),
    inputs=episode_inputs,
    **TRIED,
    untouched="0debd177c4e4",
    right="The choice costs one byte for each step of a row, which all of its features share.",
    mistakes={
        "which-steps": Mistake(
            "For which steps should h be b alone, and for which is yours?",
            "True means that an episode begins. `reset` is an address: what is the value for row and t?",
            gives=(
                with_resets(lambda h, a, b, new: a * h + b),
                lambda a, b, reset: b,
                lambda a, b, reset: with_resets()(a, b, ~reset),
            ),
        ),
        "another-step": Mistake(
            "Step t is the first of its episode where reset is true at t. Where does yours begin anew?",
            "One step off. At a reset, which h is dropped: the last one, or the one to be stored?",
            gives=resets_at(*(lambda row, t, feature, T, H, by=by: row * T + t + by for by in (-1, 1))),
        ),
        "another-place": Mistake(
            "In (B, T), how many values lie between two rows, and how many between two steps?",
            "T and 1. All features of a step share one value, so no feature is in its address.",
            gives=resets_at(
                *(lambda row, t, feature, T, H: t, lambda row, t, feature, T, H: row * T),
                lambda row, t, feature, T, H: row * H + t,
                lambda row, t, feature, T, H: (row * T + t) * H + feature,
            ),
        ),
        "drops-b": Mistake(
            "What should h be at a reset, and what is yours?",
            "It is b_t there: only what comes from the step before goes.",
            gives=with_resets(lambda h, a, b, new: torch.where(new, 0.0, a * h + b)),
        ),
        "only-stored": Mistake(
            "At a reset your h is right. From which number does the next step go on?",
            "From `state`, which has heard nothing of the reset.",
            gives=lambda a, b, reset: torch.where(reset[..., None], b, right_states(a, b)),
        ),
        "factor": Mistake(
            "Let h be infinite before a reset. What does your line make of it?",
            "0 times infinity is NaN: no factor drops it. Choose between zero and the product, or the state.",
            gives=(
                with_resets(lambda h, a, b, new: a * h * ~new + b),
                with_resets(lambda h, a, b, new: a * h - a * h * new + b),
                with_resets(lambda h, a, b, new: b * new + (a * h + b) * ~new),
            ),
        ),
    },
)
