"""Tasks of lesson 16: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises import judge
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import KERNEL_CASES, POINTWISE, READ_ONCE

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

states = work.linear_recurrence.reference

BEFORE = judge.find("13_recurrent_kernel")
STEPS = 128
"""Of a block, in the launch that is given."""
Pair = tuple[Tensor, Tensor]
TwoSteps = Callable[[Tensor, Tensor, Tensor, Tensor], Pair]


def scanned(
    two: TwoSteps = lambda a1, b1, a2, b2: (a2 * a1, a2 * b1 + b2),
) -> Callable[[Tensor, Tensor], Pair]:
    """What steps (B, T, H) are from the first to each of them, where ``two`` joins two, as a tree does."""

    def gives(a: Tensor, b: Tensor) -> Pair:
        by, steps = 1, a.shape[1]
        while by < steps:
            joined = two(a[:, :-by], b[:, :-by], a[:, by:], b[:, by:])
            a, b = (torch.cat((old[:, :by], new), 1) for old, new in zip((a, b), joined, strict=True))
            by *= 2
        return a, b

    return gives


def states_with(two: TwoSteps) -> Callable[[Tensor, Tensor], Tensor]:
    """h of a single block whose steps ``two`` joins."""
    return lambda a, b: scanned(two)(a, b)[1]


def in_blocks(
    states_of: Callable[..., Tensor] = lambda gate, new, state, a: gate * state + new,
    carry: Callable[[Tensor, Tensor], Tensor] = lambda states, new: states[:, -1:],
) -> Callable[[Tensor, Tensor], Tensor]:
    """h (B, T, H), block by block of STEPS steps.

    A block's states are made of its scanned gates and inputs, of the state before it, and of its own gates;
    what is carried on is made of these states and the scanned inputs.
    """

    def gives(a: Tensor, b: Tensor) -> Tensor:
        state, done = torch.zeros_like(a[:, :1]), []
        for gates, inputs in zip(a.split(STEPS, 1), b.split(STEPS, 1), strict=True):
            gate, new = scanned()(gates, inputs)
            done.append(states_of(gate, new, state, gates))
            state = carry(done[-1], new)
        return torch.cat(done, 1)

    return gives


def carried_once(a: Tensor, b: Tensor) -> Tensor:
    """h where only the first block hands on a state: its last step has the number STEPS - 1, and no other."""
    state, done = torch.zeros_like(a[:, :1]), []
    for gates, inputs in zip(a.split(STEPS, 1), b.split(STEPS, 1), strict=True):
        gate, new = scanned()(gates, inputs)
        done.append(gate * state + new)
        state = done[0][:, STEPS - 1 :] if len(done) == 1 else torch.zeros_like(state)
    return torch.cat(done, 1)


def long_inputs(batch: int, steps: int, width: int, any_gate: bool = False) -> dict[str, Tensor]:
    """a, so close to 1 that a state is felt hundreds of steps later, and b, both (batch, steps, width).

    With ``any_gate`` some are negative and some are zero.
    """
    if any_gate:
        given: dict[str, Tensor] = BEFORE["recurrence"].inputs(batch, steps, width)
        return given
    a = 1 - 0.01 * torch.rand(batch, steps, width)
    return {"a": a, "b": torch.randn(batch, steps, width)}


def step_by_step(call: Call) -> str:
    """Whether no kernel of the answer scans."""
    return "" if call.launches.scans or not call.launches.kernels else "no kernel of yours scans."


SCANS = Property(
    "no-scan",
    step_by_step,
    "tl.associative_scan(blocks, axis, function) joins the steps of a block. A loop takes one after another.",
)
TRIED: dict[str, Any] = {"properties": (*POINTWISE, READ_ONCE, SCANS), **KERNEL_CASES}


def race(time: int) -> RaceSpec:
    """A race of 16 sequences of 128 features."""
    size = {"batch": 16, "time": time, "width": 128}
    beside = {"labkit": kernels.linear_recurrence}
    return RaceSpec(work.linear_recurrence, beside, (size,), dtype="float32", counted=False)


block = Exercise(
    "two steps are one",
    "block_scan",
    reference=states,
    cases=((1, 1, 1), (1, 3, 4), (2, 5, 20)),
    large=((1, 2, 128), (2, 60, 20), (1, 128, 8), (1, 2, 1100)),
    vast=((2**24, 2, 70),),
    inputs=BEFORE["recurrence"].inputs,
    **TRIED,
    right="All steps are loaded at once, and joined like a tree.",
    race=race(128),
    mistakes={
        "other-order": Mistake(
            "b1 was there before the second step, which multiplies it by a2. b2 comes in after that.",
            gives=states_with(lambda a1, b1, a2, b2: (a1 * a2, a1 * b2 + b1)),
        ),
        "not-a-step": Mistake(
            "Put h1 = a1 h0 + b1 into h2 = a2 h1 + b2. What multiplies h0, and what is added?",
            gives=(
                states_with(lambda a1, b1, a2, b2: (a2 * a1, b1 + b2)),
                states_with(lambda a1, b1, a2, b2: (a2 * a1, a1 * b1 + b2)),
            ),
        ),
        "gate-of-one": Mistake(
            "It is right for two steps. Join the result with a third step by hand: which gate does it have?",
            gives=states_with(lambda a1, b1, a2, b2: (a2, a2 * b1 + b2)),
        ),
    },
)

scan = Exercise(
    "the state carried on",
    "scan",
    reference=states,
    cases=((1, 1, 1), (1, 300, 3), (2, 5, 20)),
    large=((2, 129, 20), (1, 128, 9), (1, 8400, 1), (1, 2, 1100), (1, 200, 5, True)),
    vast=((2**24, 2, 70), (1, 2**24, 2)),
    inputs=long_inputs,
    **TRIED,
    right="A block needs one state of all that was before it.",
    race=race(2048),
    mistakes={
        "no-carry": Mistake(
            "The last row of a block's states goes into all states of the next block, by its gates.",
            gives=in_blocks(states_of=lambda gates, new, state, a: new),
        ),
        "gate-left-out": Mistake(
            "gate * state, where gate is scanned: the product of the gates from the block's first step on.",
            gives=(
                in_blocks(states_of=lambda gates, new, state, a: state + new),
                in_blocks(states_of=lambda gates, new, state, a: a * state + new),
            ),
        ),
        "carried-once": Mistake(
            "The first two blocks are right. Which number picks the last row of a block, in each of them?",
            "The row's place in its block, step == STEPS - 1. The number of the step goes on growing.",
            gives=carried_once,
        ),
        "row-by-index": Mistake(
            "Rows of a block cannot be taken out by an index. Which sum over all rows is the last row?",
            "tl.sum(tl.where(step == STEPS - 1, states, 0.0), axis=0, keep_dims=True).",
            raises=(
                r"('int' object is not iterable|is not subscriptable|unsupported tensor index)"
                r".*\n.*states?\["
            ),
        ),
        "carry-of-block": Mistake(
            "Carry on the last of the states, with all that was before the block in it, not the last of the "
            "scan.",
            gives=in_blocks(carry=lambda block, new: new[:, -1:]),
        ),
    },
)
