"""Tasks of lesson 13: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import KERNEL_CASES, POINTWISE, READ_ONCE

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

pytorch_loop = work.linear_recurrence.reference

SIZE = {"batch": 512, "time": 256, "width": 128}
"""What is raced: so many sequences that their tensors do not fit into a cache."""


def sequence_inputs(batch: int, steps: int, width: int, *ahead: int) -> dict[str, Any]:
    """a, of which some are negative and some are zero, and b, both (batch, steps, width); steps ahead."""
    shape = batch, steps, width
    a = 1 - 1.4 * torch.rand(shape).square()
    given = {"a": torch.where(torch.rand(shape) < 0.05, 0.0, a), "b": torch.randn(shape)}
    return given | ({"U": ahead[0]} if ahead else {})


def states_with_step(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """h (B, T, H), where each step is ``step(the last one, a, b)``; how far ahead loads run is no matter."""

    def gives(a: Tensor, b: Tensor, *_: int) -> Tensor:
        h = [torch.zeros_like(a[:, 0])]
        for now in zip(a.unbind(1), b.unbind(1), strict=True):
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
}


def only_last_step(calls: Any) -> bool:
    """Whether nothing but one step of each sequence was stored, in calls that have many."""
    told = [call for call in calls if call.case[1] > 4]

    def fits(call: Call) -> bool:
        ((mine, _),) = call.result_tensors()
        once = len(call.launches.stores) < call.case[1] * call.case[0]  # else all steps go to one place
        return once and bool((~mine.isnan()).any(2).sum(1).eq(1).all())

    return bool(told) and all(map(fits, told))


recurrence = Exercise(
    "the loop over time",
    "recurrence",
    reference=right_states,
    cases=((1, 1, 1), (2, 1, 5), (2, 5, 20)),
    large=((1, 2, 128), (2, 2, 140), (1, 300, 8), (1, 1, 1030)),
    vast=((2**24, 2, 70),),
    inputs=sequence_inputs,
    properties=(*POINTWISE, READ_ONCE),
    **KERNEL_CASES,
    right="Each number crosses memory once, and the state never leaves the registers.",
    race=RaceSpec(
        work.linear_recurrence,
        {"PyTorch": pytorch_loop, "labkit": kernels.linear_recurrence},
        (SIZE,),
        dtype="float32",
        counted=False,
    ),
    mistakes={
        "last-step": Mistake(
            "How many steps of each sequence are stored? When should a step be stored?",
            "In the loop, as soon as it is there: the store belongs to each step, and to its address.",
            when=only_last_step,
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
    a, U, made = call.passed["a"], call.passed["U"], call.launches
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
    "Steps 0 to U - 1 are loaded before the first round. Which one sets out while step 0 is worked on?",
    "Step U, before step 0 is stored: each turn appends the block of step t + U, then uses that of step t.",
    "And the launch hands on the U that your function was given.",
    contiguous_only=True,
)


def blocks_of(at: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """What comes out where step t takes the blocks of step ``at(t, U)``, and zeros where that is negative."""

    def gives(a: Tensor, b: Tensor, U: int) -> Tensor:
        taken = at(torch.arange(a.shape[1]), U)
        there = ((taken >= 0) & (taken < a.shape[1]))[:, None]
        return right_states(*(each[:, taken.clamp(0, a.shape[1] - 1)] * there for each in (a, b)))

    return gives


ahead = Exercise(
    "loads that run ahead",
    "ahead",
    reference=right_states,
    cases=((1, 1, 1, 1), (1, 9, 5, 1), (2, 5, 20, 2)),
    large=((1, 11, 5, 2), (2, 3, 33, 4), (2, 3, 140, 2), (1, 40, 1, 16)),
    vast=((2**24, 2, 70, 2),),
    inputs=sequence_inputs,
    properties=(*POINTWISE, READ_ONCE, AHEAD),
    **KERNEL_CASES,
    right="Loads run U steps ahead, and wait in registers for their turn.",
    race=RaceSpec(
        work.linear_recurrence,
        {"labkit": kernels.linear_recurrence},
        (SIZE,),
        dtype="float32",
        counted=False,
    ),
    mistakes={
        "same-steps": Mistake(
            "The first U steps are right. Which step's block do you append while step t is worked on?",
            "It will be used U turns later: it has to be that of step t + U.",
            gives=blocks_of(lambda t, U: torch.where(t < U, t, t - U)),
        ),
        "nothing-before": Mistake(
            "The first U steps come out as if their inputs were zero. Who loaded them, and when?",
            "Before the first round, the first U steps have to set out: a loop of its own fills the tuples.",
            gives=blocks_of(lambda t, U: torch.where(t < U, -1, t)),
        ),
        "rounds": Mistake(
            "The first U steps are right. What is the state when the next U begin?",
            "That of the step before. The state begins with zeros once, before all loops.",
            gives=lambda a, b, U: torch.cat(list(map(right_states, a.split(U, 1), b.split(U, 1))), 1),
        ),
        "coming-used": Mistake(
            "Which tuple holds the blocks of this round's steps, and which those of the next one's?",
            "now_a and now_b are this round's. What is appended in this round is for the next one.",
            gives=blocks_of(lambda t, U: t + U),
        ),
        "first-round": Mistake(
            "The first U steps are right. From which end does `coming_a[u]` count? Who drops used blocks?",
            "Nobody. Before each round hand `coming_a` on as `now_a`, and begin a new, empty tuple.",
            gives=blocks_of(lambda t, U: t % U),
        ),
        "comma": Mistake(
            "What is (block), and what is (block,)?",
            "Without a comma it is the block itself. A tuple of one block is (block,).",
            raises="'tuple' object has no attribute 'type'|can only concatenate tuple",
        ),
        "one-step": Mistake(
            "The first U steps are right. Which step does each turn of a round load?",
            "That of step t + U, and t is another one in each turn: first + u.",
            gives=(
                blocks_of(lambda t, U: torch.where(t < U, t, t // U * U)),
                blocks_of(lambda t, U: torch.where(t < U, t, t - 1)),
                blocks_of(lambda t, U: torch.where(t < U, t, t - U + 1)),
            ),
        ),
        "tuples": Mistake(
            "A tuple is made while the kernel is compiled. Which of your indices is known only when it runs?",
            "That of a loop over T; the u of `tl.static_range(U)` is known. `coming_a += (block,)` appends.",
            raises=r"CompileError: AssertionError:?\n|no attribute '?(append|index)|item assign|tuple index",
        ),
        **STEP_MISTAKES,
    },
)
