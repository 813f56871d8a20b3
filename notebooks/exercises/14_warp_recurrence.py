"""Tasks of lesson 14: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises import judge
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import (
    KERNEL_CASES,
    POINTWISE,
    READ_ONCE,
    late_load,
    wrong_exactly_where,
    wrong_only_where,
)

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

pytorch_loop = work.rms_recurrence.reference

EPS = 1e-6
BEFORE = judge.find("13_recurrent_kernel")
"""Its loads run ahead in the same way."""


def sequence_inputs(batch: int, steps: int, width: int) -> dict[str, Tensor]:
    """a, of which some are negative and some are zero, b and the weight; some b so small that eps counts."""
    shape = batch, steps, width
    a = 1 - 1.4 * torch.rand(shape).square()
    a = torch.where(torch.rand(shape) < 0.05, 0.0, a)
    b = torch.randn(shape) * 10.0 ** torch.randint(-3, 1, (batch, steps, 1))
    b[:, 0] *= 0.01  # the first state is normalised to about 1, whatever its size
    return {"a": a, "b": b, "weight": 1 + 0.5 * torch.randn(width)}


def states_with(
    scale: Callable[[Tensor, int], Tensor] = lambda m, H: torch.rsqrt(m + EPS),
    carried: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda u, normal, h: h,
) -> Callable[..., Tensor]:
    """h (B, T, H), or what a mistake makes of it.

    ``scale`` is made of the mean square of u = a h + b, and of H. What the next step gets is made of u, of u
    times this scale, and of h, which has the weight, too.
    """

    def gives(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
        before, h = torch.zeros_like(a[:, 0]), []
        for gate, new in zip(a.unbind(1), b.unbind(1), strict=True):
            u = gate * before + new
            normal = u * scale(u.square().mean(-1, keepdim=True), u.shape[-1])
            h.append(weight * normal)
            before = carried(u, normal, h[-1])
        return torch.stack(h, 1)

    return gives


TRIED: dict[str, Any] = {"inputs": sequence_inputs, **KERNEL_CASES}
NORM_MISTAKES = {
    "not-carried": Mistake(
        "The state is h, after the norm and the weight: what you store is also what the next step gets.",
        gives=(
            states_with(carried=lambda u, normal, h: u),
            states_with(carried=lambda u, normal, h: normal),
        ),
    ),
    "sum-for-mean": Mistake(
        "tl.sum adds up, and the mean divides by H.",
        gives=states_with(lambda m, H: torch.rsqrt(m * H + EPS)),
    ),
    "block-for-row": Mistake(
        "The block has BLOCK places, and the sequence H features: the masked ones do not count.",
        gives=states_with(lambda m, H: torch.rsqrt(m * H / next_power_of_2(H) + EPS)),
    ),
    "no-eps": Mistake(
        "Where x is small, which of the two counts more, mean(x²) or the 10⁻⁶ that is added to it?",
        gives=states_with(lambda m, H: torch.rsqrt(m)),
    ),
    "each-step": BEFORE["recurrence"].mistakes["each-step"],
    "wide-row": Mistake(
        "Narrow sequences are right. Does your BLOCK cover all H features of a wide one?",
        "One program needs all of them for their sum: BLOCK = triton.next_power_of_2(H).",
        when=wrong_only_where(lambda call: call.case[2] > 64),
    ),
}


def steps_ahead(call: Call) -> int:
    """U as the lesson's launch chooses it."""
    return max(1, min(8, 1024 // next_power_of_2(call.case[2])))


AHEAD_MISTAKES = {
    "tuples": BEFORE["ahead"].mistakes["tuples"],
    "too-few-blocks": BEFORE["ahead"].mistakes["too-few-blocks"],
    "two-dtypes": BEFORE["ahead"].mistakes["two-dtypes"],
    "last-round": Mistake(
        "It is right where T is a multiple of U. How many rounds do 9 steps take, if U = 8?",
        "Two: range(0, T, U) begins one for the steps that are left, too.",
        when=wrong_exactly_where(lambda call: call.case[1] % steps_ahead(call) > 0),
    ),
    "next-round": Mistake(
        "The first U steps are right. Which step's blocks do you append while step t is worked on?",
        "Those of step t + U, which begins U * H numbers further on. Each round begins with empty tuples.",
        when=wrong_exactly_where(lambda call: call.case[1] > steps_ahead(call)),
    ),
    "ends-early": BEFORE["ahead"].mistakes["ends-early"],
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
    reference=states_with(),
    cases=((1, 1, 1), (2, 1, 5), (2, 5, 20)),
    large=((1, 3, 128), (1, 1100, 33), (2, 3, 200), (1, 2, 2100)),
    vast=((2**24, 2, 70),),
    **TRIED,
    properties=(*POINTWISE, READ_ONCE, ONE_WARP),
    right="The state and its sum never leave the registers of a warp.",
    race=race(512),
    mistakes=NORM_MISTAKES,
)

# ---- loads ahead -------------------------------------------------------------------------------------------


def not_ahead(call: Call) -> str:
    """Whether a step is loaded only when fewer than U steps were left to store before it."""
    B, T, H = call.passed["b"].shape
    # Else: the stores of several programs. U is 8 in a narrow layer.
    return "" if B > 1 or T < 9 or H > 8 else late_load(call, 8)


normed_ahead = Exercise(
    "a norm at every step, with loads ahead",
    "normed_ahead",
    reference=states_with(),
    cases=((1, 1, 1), (1, 9, 5), (1, 16, 3), (2, 5, 20)),
    large=((1, 600, 5), (2, 33, 128), (1, 7, 300), (1, 2, 2100)),
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
    mistakes=NORM_MISTAKES | AHEAD_MISTAKES,
)
