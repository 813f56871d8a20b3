"""Tasks of lesson 13: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec, difference
from labkit.exercises.properties import (
    KERNEL_CASES,
    POINTWISE,
    READ_ONCE,
    last_steps_missing,
    late_load,
    lost_exactly_where,
    stored_again,
    wrong_exactly_where,
)

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

pytorch_loop = work.linear_recurrence.reference


def race(rivals: dict[str, Any]) -> RaceSpec:
    """A race over so many sequences that their tensors do not fit into a cache."""
    size = {"batch": 512, "time": 256, "width": 128}
    return RaceSpec(work.linear_recurrence, rivals, (size,), dtype="float32", counted=False)


def sequence_inputs(batch: int, steps: int, width: int, *ahead: int) -> dict[str, Any]:
    """a, of which some are negative and some are zero, and b, both (batch, steps, width); steps ahead."""
    shape = batch, steps, width
    a = 1 - 1.4 * torch.rand(shape).square()
    given = {"a": torch.where(torch.rand(shape) < 0.05, 0.0, a), "b": torch.randn(shape)}
    return given | ({"U": ahead[0]} if ahead else {})


def first_step_missing(calls: Sequence[Call]) -> bool:
    """Whether the first step of each wrong result was never stored, and all others are right."""
    wrong = [call for call in calls if difference(call.got, call.want, 0.05)]
    return bool(wrong) and all(
        bool(call.got[:, 0].isnan().all()) and not difference(call.got[:, 1:], call.want[:, 1:], 0.05)
        for call in wrong
    )


recurrence = Exercise(
    "the loop over time",
    "recurrence",
    reference=pytorch_loop,
    cases=((1, 1, 1), (2, 1, 5), (2, 5, 20)),
    large=((1, 2, 128), (2, 2, 140), (1, 1100, 2), (1, 1, 4100)),
    vast=((2**24, 2, 70),),
    inputs=sequence_inputs,
    properties=(*POINTWISE, READ_ONCE),
    **KERNEL_CASES,
    right="Each number crosses memory once, and the state never leaves the registers.",
    race=race({"PyTorch": pytorch_loop, "labkit": kernels.linear_recurrence}),
    mistakes={
        "no-carry": Mistake(
            "Try it with a = 1 and b = 1: h should be 1, 2, 3. What is yours?",
            "It is 1 at every step. Which name does the next step read, and which one do you set?",
            gives=lambda a, b: b,
        ),
        "same-step": Mistake(
            "Each step has an a and a b of its own: load both in the loop, at an address that has t in it.",
            gives=lambda a, b: pytorch_loop(a[:, :1].expand_as(a), b[:, :1].expand_as(b)),
        ),
        "first-step": Mistake(
            "All steps but the first are right. Who stores step 0?",
            "The loop, if it begins with t = 0 and a state of zeros: a * 0 + b is b.",
            when=first_step_missing,
        ),
        "each-step": Mistake(
            "With a single step everything is right. At which places does step 1 load and store?",
            "The store belongs into the loop, and t into each address. Of a tensor (B, T, H), a sequence has "
            "T * H numbers and a step H.",
            when=lost_exactly_where(lambda call: call.case[1] > 1),
        ),
    },
)

# ---- loads that run ahead ----------------------------------------------------------------------------------


def loaded_late(call: Call) -> str:
    """Of a sequence that is one program's: the first step that is loaded too late, in words, or ""."""
    B, _, H = call.passed["a"].shape
    return "" if B > 1 or H > 8 else late_load(call, call.passed["U"])  # else: stores of several programs


AHEAD = Property(
    "not-ahead",
    loaded_late,
    "Steps 0 to U - 1 are loaded before the first round. Which one sets out while step 0 is worked on?",
    "Step U, before step 0 is stored: each turn appends the block of step t + U, then uses that of step t.",
    "And the launch hands on the U that your function was given.",
    contiguous_only=True,
)


def blocks_of(at: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """What comes out where step t takes the blocks of step ``at(t, U)``, and zeros where there is none."""

    def gives(a: Tensor, b: Tensor, U: int) -> Tensor:
        taken = at(torch.arange(a.shape[1]), U)
        there = (taken < a.shape[1])[:, None]
        return pytorch_loop(*(each[:, taken.clamp(max=a.shape[1] - 1)] * there for each in (a, b)))

    return gives


ahead = Exercise(
    "loads that run ahead",
    "ahead",
    reference=lambda a, b, U: pytorch_loop(a, b),
    cases=((1, 1, 1, 1), (1, 9, 5, 1), (2, 5, 20, 2)),
    large=(
        (1, 11, 5, 2),
        (2, 3, 33, 4),
        (2, 3, 140, 2),
        (1, 600, 1, 16),
        (1, 12, 3, 4),
        (1, 40, 2, 32),
        (1, 7, 2, 3),
    ),
    vast=((2**24, 2, 70, 2),),
    inputs=sequence_inputs,
    properties=(*POINTWISE, READ_ONCE, AHEAD),
    **KERNEL_CASES,
    right="Loads run U steps ahead, and wait in registers for their turn.",
    race=race({"labkit": kernels.linear_recurrence}),
    mistakes={
        "same-steps": Mistake(
            "The first U steps are right. Which step's block do you append while step t is worked on?",
            gives=blocks_of(lambda t, U: torch.where(t < U, t, t - U)),
        ),
        "coming-used": Mistake(
            "now_a and now_b are this round's. What is appended in this round is for the next one.",
            gives=blocks_of(lambda t, U: t + U),
        ),
        "first-round": Mistake(
            "Before each round hand `coming_a` on as `now_a`, and begin a new, empty tuple.",
            gives=blocks_of(lambda t, U: t % U),
        ),
        "last-round": Mistake(
            "It is right where T is a multiple of U. How many rounds does T = 9 take, if U = 2?",
            "Five: range(0, T, U) begins one for the steps that are left, too.",
            when=lost_exactly_where(lambda call: call.case[1] % call.case[3] > 0),
        ),
        "one-round": Mistake(
            "Up to U steps everything is right. What brings the kernel to the steps after those?",
            "A loop of rounds, for first in range(0, T, U). Its step u is step first + u, also in stores.",
            when=lost_exactly_where(lambda call: call.case[1] > call.case[3]),
        ),
        "rounds-of-one": Mistake(
            "It is right where U is 1. How many steps are there from one round to the next?",
            "U: for first in range(0, T, U).",
            when=lambda calls: (
                stored_again(calls)
                and wrong_exactly_where(lambda call: call.case[3] > 1 and call.case[1] > 1)(calls)
            ),
        ),
        "ends-early": Mistake(
            "The first steps are right, and the last ones were never stored. Does your loop come to them, "
            "and which steps does the mask of the store let through?",
            "In range(0, T, U) a round begins at every U-th step below T. Step t is stored where t < T: "
            "t + U is for the loads.",
            when=last_steps_missing,
        ),
        "comma": Mistake(
            "Without a comma it is the block itself. A tuple of one block is (block,).",
            raises="'tuple' object has no attribute 'd?type'|can only concatenate tuple",
        ),
        "two-dtypes": Mistake(
            "A tuple begins each round with blocks of the same dtypes. Which of your loads are converted?",
            "All of them, or none: those before the loop, and those inside of it.",
            raises="error encountered during parsing",
        ),
        "append": Mistake(
            "A tuple cannot be changed. How do you get a longer one?",
            "coming_a += (block,)",
            raises=r"no attribute '?append|item assign",
        ),
        "tuples": Mistake(
            "A tuple is made while the kernel is compiled. Which of your indices is known only when it runs?",
            "That of a loop over T; the u of `tl.static_range(U)` is known.",
            raises=r"CompileError: AssertionError:?\n|no attribute '?index",
        ),
        "too-few-blocks": Mistake(
            "How many blocks has this tuple when the line runs, and which index does the line use?",
            "`now_a` gets the U blocks of a round once, before the loop over u. So its index is u, not t. "
            "And each of U turns appends one to the new tuple: coming_a += (block,).",
            raises="tuple index",
        ),
    },
)
