"""Tasks of lesson 14: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises import judge
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import KERNEL_CASES, POINTWISE, READ_ONCE

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton import next_power_of_2

pytorch_loop = work.rms_recurrence.reference

EPS = 1e-6
BEFORE = judge.find("13_recurrent_kernel")
"""Its loops have no norm. Most of their mistakes can be made here, too."""
Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""What is stored and what is carried on, of what was carried, a, b and the weight."""


def sequence_inputs(batch: int, steps: int, width: int) -> dict[str, Tensor]:
    """a, of which some are negative and some are zero, b and the weight; some b so small that eps counts."""
    shape = batch, steps, width
    a = 1 - 1.4 * torch.rand(shape).square()
    a = torch.where(torch.rand(shape) < 0.05, 0.0, a)
    b = torch.randn(shape) * 10.0 ** torch.randint(-3, 1, (batch, steps, 1))
    b[:, 0] *= 0.01  # the first state is normalised to about 1, whatever its size
    return {"a": a, "b": b, "weight": 1 + 0.5 * torch.randn(width)}


def states_with(step: Step) -> Callable[..., Tensor]:
    """h (B, T, H) of a loop with this step."""

    def gives(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
        carried, h = torch.zeros_like(a[:, 0]), []
        for gate, new in zip(a.unbind(1), b.unbind(1), strict=True):
            stored, carried = step(carried, gate, new, weight)
            h.append(stored)
        return torch.stack(h, 1)

    return gives


def normed_with(
    scale: Callable[[Tensor, int], Tensor] = lambda m, H: torch.rsqrt(m + EPS),
    of: Callable[[Tensor], Tensor] = torch.square,
    weighted: bool = True,
) -> Callable[..., Tensor]:
    """The layer with this scale, made of the mean of ``of(u)`` and of H."""

    def step(h: Tensor, a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        u = a * h + b
        h = u * scale(of(u).mean(-1, keepdim=True), u.shape[-1]) * (w if weighted else 1)
        return h, h

    return states_with(step)


def unnormed_carry(h: Tensor, a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """u is carried on in the place of h."""
    u = a * h + b
    return w * u * torch.rsqrt(u.square().mean(-1, keepdim=True) + EPS), u


def weight_stored_only(h: Tensor, a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The weight is in what is stored, and not in what is carried on."""
    u = a * h + b
    normal = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + EPS)
    return w * normal, normal


def norm_of_step(h: Tensor, a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """b is normalised, and not the sum."""
    h = a * h + w * b * torch.rsqrt(b.square().mean(-1, keepdim=True) + EPS)
    return h, h


right_states = normed_with()


def blocks_of(at: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """What comes out where step t takes the blocks of step ``at(t, U)``, with the given launch's U."""

    def gives(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
        U = max(1, min(8, 1024 // next_power_of_2(a.shape[2])))
        taken = at(torch.arange(a.shape[1]), U)
        return right_states(a[:, taken], b[:, taken], weight)

    return gives


TRIED: dict[str, Any] = {"inputs": sequence_inputs, **KERNEL_CASES}
NORM_MISTAKES = {
    "not-carried": Mistake(
        "What is stored at the first step is right. What goes into the second one?",
        "The state is h, after the norm and the weight: what you store is also what the next step gets.",
        gives=(states_with(unnormed_carry), states_with(weight_stored_only)),
    ),
    "norm-of-new": Mistake(
        "Of what are the squares added up: of the new input, or of what the state has become with it?",
        "Of x = a * state + b.",
        gives=states_with(norm_of_step),
    ),
    "no-carry": Mistake(
        "Step 0 is right. Which name does the next step read, and which one do you set?",
        "The state begins with zeros before the loop, and each step sets it anew.",
        gives=states_with(
            lambda h, a, b, w: (w * b * torch.rsqrt(b.square().mean(-1, keepdim=True) + EPS), 0 * h)
        ),
    ),
    "sum-for-mean": Mistake(
        "With one feature it is right. What is H times too large?",
        "tl.sum adds up, and the mean divides by H.",
        gives=normed_with(lambda m, H: torch.rsqrt(m * H + EPS)),
    ),
    "block-for-row": Mistake(
        "With 128 features it is right, with 33 it is not. Which two sizes are alike only sometimes?",
        "The block has BLOCK places, and the sequence H features: the masked ones do not count.",
        gives=normed_with(lambda m, H: torch.rsqrt(m * H / next_power_of_2(H) + EPS)),
    ),
    "root": Mistake(
        "Double b of the first step: h should hardly change. What does yours do?",
        "The root mean square divides, the mean square does not. tl.rsqrt is 1 over the root.",
        gives=(normed_with(lambda m, H: 1 / (m + EPS)), normed_with(lambda m, H: (m + EPS).sqrt())),
    ),
    "eps": Mistake(
        "Only small states are wrong. What is added to the mean square, and where?",
        "1e-6 is added to the mean, under the root; not to the sum, and not to the root.",
        gives=(
            normed_with(lambda m, H: m.rsqrt()),
            normed_with(lambda m, H: 1 / (m.sqrt() + EPS)),
            normed_with(lambda m, H: (m + EPS / H).rsqrt()),
        ),
    ),
}


def race(*batches: int) -> RaceSpec:
    """A race over 256 steps of 128 features."""
    sizes = tuple({"batch": batch, "time": 256, "width": 128} for batch in batches)
    rivals = {"labkit": kernels.rms_recurrence}
    if len(batches) == 1:
        rivals = {"PyTorch": pytorch_loop, **rivals}
    return RaceSpec(work.rms_recurrence, rivals, sizes, dtype="float32", counted=False)


def warps(call: Call) -> str:
    """Several warps for a sequence, where one was asked for."""
    for _, given in call.launches.kernels:
        if given.get("num_warps", 4) != 1:
            return "a program has more than one warp."
    return ""


def warps_of(a: Tensor) -> int:
    """How many warps the second task is asked for."""
    return 2 if len(a) > 1 else 1


def other_warps(call: Call) -> str:
    """Another number of warps than was asked for."""
    wanted = warps_of(call.passed["a"])
    for _, given in call.launches.kernels:
        if (mine := given.get("num_warps", 4)) != wanted:
            return f"a program has num_warps={mine}, where warps={wanted} was asked for."
    return ""


ONE_WARP = Property(
    "warps",
    warps,
    "How many warps has a program, if the launch does not say so?",
    "Four. num_warps=1 in the launch gives each sequence a single warp.",
)

normed = Exercise(
    "a norm at every step",
    "normed",
    reference=right_states,
    cases=((1, 1, 1), (2, 1, 5), (2, 5, 20)),
    large=((1, 3, 128), (1, 300, 33), (2, 3, 200), (1, 2, 2100)),
    vast=((2**24, 2, 70),),
    **TRIED,
    properties=(*POINTWISE, READ_ONCE, ONE_WARP),
    right="The state and its sum never leave the registers of a warp.",
    race=race(512),
    mistakes={
        "last-step": BEFORE["recurrence"].mistakes["last-step"],
        **NORM_MISTAKES,
    },
)

# ---- loads ahead -------------------------------------------------------------------------------------------


def not_ahead(call: Call) -> str:
    """Whether a step is loaded only when fewer than U steps were left to store before it."""
    b, made = call.passed["b"], call.launches
    B, T, H = b.shape
    if B > 1 or T < 9 or H > 8:  # the stores of several programs; U is 8 in a narrow layer
        return ""
    for addresses, before in zip(made.loads, made.stores_before, strict=True):
        places = (addresses.astype(np.int64) - b.data_ptr()) // b.element_size()
        steps = places[(places >= 0) & (places < b.numel())] // H
        if before and len(steps) and steps.min() < before + 8:
            return f"step {steps.min()} of b was loaded when {before} steps had been stored."
    return ""


normed_ahead = Exercise(
    "a norm at every step, with loads ahead",
    "normed_ahead",
    reference=right_states,
    cases=((1, 1, 1), (1, 9, 5), (2, 5, 20)),
    large=((1, 19, 5), (2, 33, 128), (1, 7, 300), (1, 2, 2100)),
    vast=((2**24, 2, 70),),
    **TRIED,
    properties=(
        *POINTWISE,
        READ_ONCE,
        Property(
            "not-ahead",
            not_ahead,
            "Which step sets out while step 0 is worked on?",
            "Step U, before step 0 is stored, as in lesson 13: two tuples, and rounds of U steps.",
            contiguous_only=True,
        ),
        Property(
            "other-warps",
            other_warps,
            "Your function is told how many warps a sequence should have. Who has to hear of it?",
            "The launch: num_warps=warps.",
        ),
    ),
    call=lambda answer, a, b, weight: answer(a, b, weight, warps_of(a)),
    right="The loads run ahead. What is left is the chain of a step, and what else a warp has to do.",
    race=race(16, 512),
    mistakes={
        "tuples": BEFORE["ahead"].mistakes["tuples"],
        "comma": BEFORE["ahead"].mistakes["comma"],
        "same-steps": Mistake(
            *BEFORE["ahead"].mistakes["same-steps"].hints,
            gives=blocks_of(lambda t, U: torch.where(t < U, t, t - U)),
        ),
        "first-round": Mistake(
            *BEFORE["ahead"].mistakes["first-round"].hints, gives=blocks_of(lambda t, U: t % U)
        ),
        **NORM_MISTAKES,
    },
)
