"""Tasks of lesson 12: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import (
    Call,
    Exercise,
    Mistake,
    Property,
    RaceSpec,
    defined_in_cell,
    difference,
)
from labkit.exercises.properties import ATOMICS, KERNEL, KERNEL_CASES, POINTWISE, READ_ONCE, large_reads

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton import next_power_of_2

norm = work.rms_norm.reference

EPS = 1e-6
Formula = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of dy, the weight, u = x s, s and x, where s is one over each row's root mean square."""


def norm_inputs(rows: int, width: int, programs: int = 0, cancels: bool = False) -> dict[str, Any]:
    """dy and x (rows, width), weight (width,), and a number of programs if there is one.

    dy is like y: see the lesson. Or the last row's part of the sum nearly cancels the others', each of which
    is larger than any number of float16.
    """
    x = (0.5 + torch.rand(rows, 1)) * torch.randn(rows, width)
    x[-1] *= 0.003  # so small that eps counts
    weight = 1 + 0.5 * torch.randn(width)
    y = norm(x, weight)
    dy = y + 0.5 * torch.randn_like(y)
    if cancels:
        x = 8 * torch.randn(1, width).expand(rows, width).clone()
        dy = 40_000 * torch.randn(1, width).sign().expand(rows, width).clone()
        dy[-1] *= -0.99 * (rows - 1)
    given = {"dy": dy, "x": x, "weight": weight}
    return given | ({"programs": programs} if programs else {})


def mean(t: Tensor) -> Tensor:
    """The mean of each row, as a column."""
    return t.mean(-1, keepdim=True)


def right_scale(m: Tensor, W: int) -> Tensor:
    return torch.rsqrt(m + EPS)


def block_scale(m: Tensor, W: int) -> Tensor:
    """The scale when the sum of squares is divided by the block's size."""
    return torch.rsqrt(m * W / next_power_of_2(W) + EPS)


def right_dx(g: Tensor, w: Tensor, u: Tensor, s: Tensor, x: Tensor) -> Tensor:
    return s * (w * g - u * mean(w * g * u))


def block_dx(g: Tensor, w: Tensor, u: Tensor, s: Tensor, x: Tensor) -> Tensor:
    """dx when the sum of w g u is divided by the block's size."""
    return s * (w * g - u * mean(w * g * u) * x.shape[-1] / next_power_of_2(x.shape[-1]))


def right_dw(g: Tensor, w: Tensor, u: Tensor, s: Tensor, x: Tensor) -> Tensor:
    return g * u


def gradients(
    dx: Formula = right_dx,
    dw: Formula = right_dw,
    rows: Callable[[Tensor, int], Tensor] = lambda terms, programs: terms,
    scale: Callable[[Tensor, int], Tensor] = right_scale,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """dx and the weight's gradient, or what a mistake makes of them; ``rows`` chooses those of the sum."""

    def gives(dy: Tensor, x: Tensor, weight: Tensor, programs: int = 1) -> tuple[Tensor, Tensor]:
        s = scale(mean(x.square()), x.shape[-1])
        given = dy, weight, x * s, s, x
        return dx(*given), rows(dw(*given), programs).sum(0)

    return gives


def many_parts(call: Call) -> str:
    """A sum by PyTorch that reads as much as x, where few parts are enough."""
    large = large_reads(call) if call.case[0] >= 4 * call.case[2] else []
    return f"PyTorch's {large[0]} reads a tensor as large as x." if large else ""


def read_by_pytorch(call: Call) -> str:
    """More than one operation of PyTorch that reads as much as x: one is the sum of the parts."""
    large = large_reads(call) if call.case[0] > 1 < call.case[1] else []
    return f"PyTorch's {', '.join(large)} read tensors as large as x." if len(large) > 1 else ""


def stored_in_loop(call: Call) -> str:
    """Stores beyond those of dx and of a part for each program."""
    rows, width, programs = call.case
    stored = sum(len(addresses) for addresses in call.launches.stores)
    needed = rows * width + programs * width  # those that have no row may store zeros
    return f"{stored} numbers are stored, where {needed} are enough." if stored > needed else ""


def scratch(call: Call) -> dict[str, Tensor]:
    """The tensors that kernels are given, and that are neither inputs nor results."""
    known = {each.data_ptr() for each in (*call.passed.values(), *call.got) if isinstance(each, Tensor)}
    given = {name: each for _, arguments in call.launches.kernels for name, each in arguments.items()}
    return {
        name: each
        for name, each in given.items()
        if isinstance(each, Tensor) and each.is_floating_point() and each.data_ptr() not in known
    }


def parts_in_16_bits(call: Call) -> str:
    """Whether a kernel is given a tensor in 16 bits that is neither an input nor a result."""
    for name, each in scratch(call).items():
        if each.dtype is not torch.float32:
            return f"{name} is a tensor in {str(each.dtype).removeprefix('torch.')}."
    return ""


def parts_not_filled(calls: Sequence[Call]) -> bool:
    """Whether the weight's gradient has a NaN, and the parts were loaded, or not all of them stored."""
    for call in calls:
        if call.got[1].isnan().any():
            for each in scratch(call).values():
                stored = np.unique(call.launches.stored(each))
                if len(call.launches.loaded(each)) or len(stored) < each.numel():
                    return True
    return False


PARTS = Property(
    "parts-in-16-bits",
    parts_in_16_bits,
    "Thousands of parts are added up. In which dtype are they, and how many digits has it?",
    "float32, whatever x is: torch.empty(..., device=x.device) without a dtype.",
    contiguous_only=True,
    before_values=True,
)


MISTAKES = {
    "parts-not-filled": Mistake(
        "What is in `parts` before the kernel runs? And who stores which row of it?",
        "Nothing that you could use: it is uninitialised. So nothing is loaded from it, and program p stores "
        "its whole part to row p, which begins at p * W.",
        when=parts_not_filled,
    ),
    "mean-term": Mistake(
        "Double x in a row where it is not tiny: y stays as it is. So what is the sum of dx times x there?",
        "Zero, nearly. The term that makes it so is u times the mean of w g u, taken away from w g.",
        gives=(
            gradients(lambda g, w, u, s, x: s * g * w),
            gradients(lambda g, w, u, s, x: s * (g * w - u * mean(g * w))),
            gradients(lambda g, w, u, s, x: s * (g * w - u * mean(g * u))),
            gradients(lambda g, w, u, s, x: s * (g * w + u * mean(g * w * u))),
        ),
    ),
    "x-for-u": Mistake(
        "u = x s stands twice in dx, and the whole difference is multiplied by s.",
        gives=(
            gradients(lambda g, w, u, s, x: g * w - u * mean(g * w * u)),
            gradients(lambda g, w, u, s, x: s * (g * w - u * mean(g * w * x))),
        ),
    ),
    "sum-for-mean": Mistake(
        "The mean of w g u: tl.sum adds up, and the sum has to be divided by W.",
        gives=gradients(lambda g, w, u, s, x: s * (g * w - u * x.shape[-1] * mean(g * w * u))),
    ),
    "block-for-row": Mistake(
        "The block has BLOCK places and the row W numbers: the masked ones do not count.",
        gives=(
            gradients(block_dx, scale=block_scale),
            gradients(block_dx),
            gradients(scale=block_scale),
        ),
    ),
    "no-eps": Mistake(
        "A row of tiny numbers is wrong. What is added to the mean of its squares?",
        "s = 1 / sqrt(mean(x * x) + 1e-6), with the mean first.",
        gives=(
            gradients(scale=lambda m, W: torch.rsqrt(m)),
            gradients(scale=lambda m, W: torch.rsqrt((m * W + EPS) / W)),
        ),
    ),
    "dw-term": Mistake(
        "y = w u. What is its derivative by w, times dy?",
        gives=(
            gradients(dw=lambda g, w, u, s, x: g * x),
            gradients(dw=lambda g, w, u, s, x: g * w * u),
            gradients(dw=lambda g, w, u, s, x: g * s),
        ),
    ),
}


def race(layer: str, counted: bool) -> RaceSpec:
    """A race in float32 with 65536 rows, as many as the table has most often."""
    return RaceSpec(
        work.rms_norm,
        {"labkit": kernels.rms_norm},
        tuple({"batch": 65536, "width": width} for width in (256, 512)),
        dtype="float32",
        direction="backward",
        as_layer=defined_in_cell(layer),
        counted=counted,
    )


row_backward = Exercise(
    "the backward pass, a program for each row",
    "row_backward",
    reference=gradients(),
    cases=((1, 4), (5, 3), (9, 33), (64, 40), (2, 40, 0, True)),
    large=((3, 640), (70, 128), (1, 9000)),
    vast=((2**25 + 1, 70),),
    inputs=norm_inputs,
    **KERNEL_CASES,
    properties=(
        KERNEL,
        ATOMICS,
        PARTS,
        *POINTWISE[1:],
        READ_ONCE,
        Property(
            "read-by-pytorch",
            read_by_pytorch,
            "How often is x read in all, by your kernel and by PyTorch?",
            "The program has its row of x in registers: it can add up the squares itself. PyTorch adds up "
            "the parts, and nothing else.",
            contiguous_only=True,
        ),
    ),
    right="x and dy are read once, and each row's sums are made once.",
    race=race("row_layer", counted=True),
    mistakes=MISTAKES,
)


def every_row(terms: Tensor, programs: int) -> Tensor:
    """What is summed where each program takes all rows from its first one on: row i counts i + 1 times."""
    count = torch.arange(1, len(terms) + 1, dtype=terms.dtype).clamp(max=min(programs, len(terms)))
    return terms * count[:, None]


def only_first_rows(calls: Sequence[Call]) -> bool:
    """Whether dx is right in the first P rows, and was never written in the others."""
    late = False
    for call in calls:
        programs, got, want = call.case[2], call.got[0], call.want[0]
        if difference(got[:programs], want[:programs], 0.05) or not bool(got[programs:].isnan().all()):
            return False
        late = late or len(got) > programs
    return late


few_backward = Exercise(
    "the backward pass, many rows a program",
    "few_backward",
    reference=gradients(),
    cases=((1, 4, 2), (5, 3, 2), (9, 33, 4), (64, 40, 16)),
    large=((1, 9000, 1), (100, 8, 2), (3, 640, 2), (6, 128, 9), (40, 16, 4)),
    vast=((2**25 + 1, 70, 2**24), (2**25 + 1, 70, 2**25 + 1)),
    inputs=norm_inputs,
    **KERNEL_CASES,
    properties=(
        KERNEL,
        ATOMICS,
        PARTS,
        *POINTWISE[1:],
        READ_ONCE,
        Property(
            "many-parts",
            many_parts,
            "Which operation of PyTorch reads that much? What is left for PyTorch to add up?",
            "The parts, a row for each program: dw is added up in registers, and stored after the loop.",
            contiguous_only=True,
        ),
        Property(
            "stored-in-loop",
            stored_in_loop,
            "How often does a program store its part of the weight's gradient?",
            "Once: dw is in registers until the loop is over. The store stands behind the loop.",
            contiguous_only=True,
        ),
    ),
    right="x and dy are read once, dx is written once, and the parts are few, in one order.",
    race=race("few_layer", counted=False),  # with as few rows as are counted each program has one
    mistakes={
        "dw-rows": Mistake(
            "dw begins with zeros before the loop, each row adds its part, and it is stored after the loop.",
            gives=gradients(rows=lambda terms, programs: terms[-min(programs, len(terms)) :]),
        ),
        "first-rows": Mistake(
            "dx is there for the first P rows only. Which rows does program p take after row p?",
            "p + P, p + 2P and so on: range(p, rows, P).",
            when=only_first_rows,
        ),
        "every-row": Mistake(
            "Which rows does program p take? p, p + P, p + 2P and so on: range(p, rows, P), with its step.",
            gives=gradients(rows=every_row),
        ),
        **MISTAKES,
    },
)
