"""Tasks of lesson 16: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises import judge
from labkit.exercises.engine import Exercise, Mistake, RaceSpec
from labkit.exercises.properties import KERNEL_CASES, POINTWISE, READ_ONCE

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

states = work.linear_recurrence.reference

BEFORE = judge.find("13_recurrent_kernel")
STEPS, BLOCK = 128, 8
"""Of the launch that is given."""
Pair = tuple[Tensor, Tensor]
TwoSteps = Callable[[Tensor, Tensor, Tensor, Tensor], Pair]


def scanned(two: TwoSteps, a: Tensor, b: Tensor, dim: int = 1) -> Pair:
    """What steps are from the first to each of them, where ``two`` joins two, as a tree does."""
    by, steps = 1, a.shape[dim]
    while by < steps:
        early = [each.narrow(dim, 0, steps - by) for each in (a, b)]
        late = [each.narrow(dim, by, steps - by) for each in (a, b)]
        first = [each.narrow(dim, 0, by) for each in (a, b)]
        a, b = (torch.cat(pair, dim) for pair in zip(first, two(*early, *late), strict=True))
        by *= 2
    return a, b


def right_two(a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor) -> Pair:
    return a2 * a1, a2 * b1 + b2


def in_blocks(
    two: TwoSteps = right_two,
    scan: Callable[[TwoSteps, Tensor, Tensor], Pair] = scanned,
    states_of: Callable[..., Tensor] = lambda gates, new, state, a: gates * state + new,
    carry: Callable[[Tensor, Tensor], Tensor] = lambda block, new: block[:, -1:],
) -> Callable[[Tensor, Tensor], Tensor]:
    """h (B, T, H), block by block of STEPS steps.

    A block's states are made of its scanned gates and inputs, of the state before it, and of its own gates;
    what is carried on is made of these states and the scanned inputs.
    """

    def gives(a: Tensor, b: Tensor) -> Tensor:
        state, done = torch.zeros_like(a[:, :1]), []
        for a_block, b_block in zip(a.split(STEPS, 1), b.split(STEPS, 1), strict=True):
            gates, new = scan(two, a_block, b_block)
            done.append(states_of(gates, new, state, a_block))
            state = carry(done[-1], new)
        return torch.cat(done, 1)

    return gives


def first_block_alone(a: Tensor, b: Tensor) -> Tensor:
    """Only the first block hands its last state on."""
    parts = zip(a.split(2 * STEPS, 1)[:1], b.split(2 * STEPS, 1)[:1], strict=True)
    late = zip(a.split(STEPS, 1)[2:], b.split(STEPS, 1)[2:], strict=True)
    return torch.cat([in_blocks()(*part) for part in (*parts, *late)], 1)


def over_features(two: TwoSteps, a: Tensor, b: Tensor) -> Pair:
    """A scan along the features of each program."""
    parts = zip(a.split(BLOCK, 2), b.split(BLOCK, 2), strict=True)
    gates, new = zip(*(scanned(two, *part, dim=2) for part in parts), strict=True)
    return torch.cat(gates, 2), torch.cat(new, 2)


def long_inputs(batch: int, steps: int, width: int) -> dict[str, Tensor]:
    """a, so close to 1 that a state is felt hundreds of steps later, and b, both (batch, steps, width)."""
    a = 1 - 0.01 * torch.rand(batch, steps, width)
    return {"a": a, "b": torch.randn(batch, steps, width)}


TWO_STEPS_MISTAKES = {
    "other-order": Mistake(
        "Which of the two steps comes first in time: (a1, b1) or (a2, b2)? Whose b meets the other's gate?",
        "b1 was there before the second step, which multiplies it by a2. b2 comes in after that.",
        gives=in_blocks(lambda a1, b1, a2, b2: (a1 * a2, a1 * b2 + b1)),
    ),
    "not-a-step": Mistake(
        "Write down h2 for h0 = 1, a1 = 0.5, a2 = 0.25 and b1 = b2 = 1. What do your two numbers make of h0?",
        "Put h1 = a1 h0 + b1 into h2 = a2 h1 + b2. What multiplies h0, and what is added?",
        gives=(
            in_blocks(lambda a1, b1, a2, b2: (a2 * a1, b1 + b2)),
            in_blocks(lambda a1, b1, a2, b2: (a2 + a1, a2 * b1 + b2)),
            in_blocks(lambda a1, b1, a2, b2: (a2 * a1, a1 * b1 + b2)),
            in_blocks(lambda a1, b1, a2, b2: (a2 * a1, a2 * b1)),
            in_blocks(lambda a1, b1, a2, b2: (a2 * a1, a2 * (b1 + b2))),
            in_blocks(lambda a1, b1, a2, b2: (a2 * a1, a2 * a1 * b1 + b2)),
        ),
    ),
    "arguments": Mistake(
        "In which order do the four numbers arrive?",
        "First both of the earlier step, then both of the later one: a1, b1, a2, b2.",
        gives=in_blocks(lambda a1, b1, a2, b2: (b1 * a1, b1 * a2 + b2)),
    ),
    "results": Mistake(
        "In which order do the two results leave `two_steps`?",
        "First the gate of both steps together, then what is added.",
        gives=in_blocks(lambda a1, b1, a2, b2: (a2 * b1 + b2, a2 * a1)),
    ),
    "gate-of-one": Mistake(
        "It is right for two steps. Join the result with a third step by hand: which gate does it have?",
        "The joint gate is what multiplies h0 after both steps: both gates are in it.",
        gives=(
            in_blocks(lambda a1, b1, a2, b2: (a2, a2 * b1 + b2)),
            in_blocks(lambda a1, b1, a2, b2: (a1, a2 * b1 + b2)),
        ),
    ),
}
SCAN_MISTAKES = {
    "gates-stored": Mistake(
        "The scan gives two blocks back. Which of them did you store?",
        "The first is the product of all gates up to each step. The state is in the second.",
        gives=in_blocks(states_of=lambda gates, new, state, a: gates),
    ),
    "no-scan": Mistake(
        "The first step is right. Which of the steps before it does the second one know?",
        "What the scan returns is new: gate, new = tl.associative_scan((gate, new), ...).",
        gives=lambda a, b: b,
    ),
    "axis": Mistake(
        "Your block is (steps, features). Along which of the two axes are steps joined?",
        "Along axis 0: axis 1 joins features, which do not know of each other.",
        gives=in_blocks(scan=over_features),
    ),
}
TRIED: dict[str, Any] = {"properties": (*POINTWISE, READ_ONCE), **KERNEL_CASES}


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
    large=((1, 2, 128), (2, 60, 20), (1, 128, 8)),
    vast=((2**24, 2, 70),),
    inputs=BEFORE["recurrence"].inputs,
    **TRIED,
    right="All steps are loaded at once, and joined like a tree.",
    race=race(128),
    mistakes={**TWO_STEPS_MISTAKES, **SCAN_MISTAKES},
)

scan = Exercise(
    "the state carried on",
    "scan",
    reference=states,
    cases=((1, 1, 1), (1, 130, 3), (2, 5, 20)),
    large=((1, 300, 8), (2, 129, 20), (1, 128, 9)),
    vast=((2**24, 2, 70),),
    inputs=long_inputs,
    **TRIED,
    right="A block needs one state of all that was before it.",
    race=race(2048),
    mistakes={
        "no-carry": Mistake(
            "The first 128 steps are right. What of step 127 is in what you store for step 128?",
            "Nothing. The last row of a block's states goes into all states of the next one, by its gates.",
            gives=in_blocks(states_of=lambda gates, new, state, a: new),
        ),
        "gate-left-out": Mistake(
            "How much of the state before a block is left after its third step?",
            "gate * state, where gate is scanned: the product of the gates from the block's first step on.",
            gives=(
                in_blocks(states_of=lambda gates, new, state, a: state + new),
                in_blocks(states_of=lambda gates, new, state, a: a * state + new),
            ),
        ),
        "mixed": Mistake(
            "One step makes gate * h + new. What does the joint step of a block make of the state before?",
            "The same: gate * state + new, with the scanned gate and the scanned new.",
            gives=(
                in_blocks(states_of=lambda gates, new, state, a: gates * new + state),
                in_blocks(states_of=lambda gates, new, state, a: gates * (state + new)),
                in_blocks(states_of=lambda gates, new, state, a: gates * new),
                in_blocks(states_of=lambda gates, new, state, a: gates * state),
            ),
        ),
        "carry-of-block": Mistake(
            "Two blocks are right, the third is not. What do you carry on, and what is it made of?",
            "The last of the states, with all that was before the block in it; not the last of the scan.",
            gives=in_blocks(carry=lambda block, new: new[:, -1:]),
        ),
        "other-step": Mistake(
            "Which of a block's steps is the one before the next block?",
            "The last one: tl.where(step == STEPS - 1, states, 0.0), summed up along the steps.",
            gives=(
                in_blocks(carry=lambda block, new: block[:, :1]),
                in_blocks(carry=lambda block, new: block.sum(1, keepdim=True)),
                in_blocks(carry=lambda block, new: block[:, -2:-1] if block.shape[1] > 1 else block[:, -1:]),
                first_block_alone,
            ),
        ),
        **TWO_STEPS_MISTAKES,
        **SCAN_MISTAKES,
    },
)
