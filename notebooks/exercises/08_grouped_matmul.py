"""Tasks of lesson 8: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Exercise, Mistake, RaceSpec
from labkit.exercises.properties import KERNEL_CASES, PRODUCT, elements_at, wrong_only_where

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

reference = work.grouped.reference


def group_inputs(rows: int, groups: int, width: int, poisoned: bool = False) -> dict[str, Any]:
    """x (rows, groups * width), weight (groups, width, width), bias; perhaps group 1 is NaN and infinite."""
    x, weight = torch.randn(rows, groups * width), torch.randn(groups, width, width) * width**-0.5
    if poisoned:
        x[:, width : 2 * width], weight[1] = math.nan, math.inf
    return {"x": x, "weight": weight, "bias": torch.randn(groups, width)}


# ---- all groups in one kernel ------------------------------------------------------------------------------


def matrix_rows_a_tile_apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What comes out when the rows of a matrix are taken to begin as far apart as a tile is wide."""
    G, D = bias.shape
    rows = torch.arange(D)[:, None] * max(16, next_power_of_2(D)) + torch.arange(D)
    return reference(x, elements_at(weight, torch.arange(G)[:, None, None] * D * D + rows), bias)


def matrices_apart(apart: Callable[[int, int], int]) -> Callable[..., Tensor]:
    """What comes out when the matrices are taken to begin ``apart(G, D)`` numbers apart."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        G, D = bias.shape
        places = torch.arange(D)[:, None] * D + torch.arange(D)
        begins = torch.arange(G)[:, None, None] * apart(G, D)
        return reference(x, elements_at(weight, begins + places), bias)

    return gives


grouped = Exercise(
    "all groups, in one kernel",
    "grouped",
    reference=reference,
    cases=((1, 1, 1), (7, 2, 31), (70, 3, 20)),
    large=((1, 2, 5, True), (5, 3, 1), (64, 3, 16), (37, 3, 16, True), (4500, 1, 5), (2, 17, 4), (2, 2, 160)),
    vast=((4096, 100, 100), (70_000, 2000, 20), (64, 70_000, 200)),
    inputs=group_inputs,
    properties=PRODUCT,
    **KERNEL_CASES,
    right="One launch: x is read where it lies, y is written where it belongs, and nothing lies between.",
    race=RaceSpec(
        work.grouped,
        {"torch.compile": reference, "labkit": kernels.grouped_linear},
        tuple({"batch": 4096, "groups": 100, "width": width} for width in (64, 100)),
    ),
    mistakes={
        "transposed": Mistake(
            "A row of the tile times a column of w: k, the input, goes down w's rows. Nothing is turned.",
            gives=lambda x, weight, bias: reference(x, weight.mT, bias),
        ),
        "matrix-rows": Mistake(
            "A matrix lies in memory without gaps, and its rows begin D numbers apart. BD is only how wide "
            "the tile is.",
            gives=matrix_rows_a_tile_apart,
        ),
        "matrix-begins": Mistake(
            "Group 0 is right. How many numbers has a matrix, and where does that of group 1 begin?",
            "D * D numbers further on: weight + group * D * D.",
            gives=tuple(matrices_apart(apart) for apart in (lambda G, D: D, lambda G, D: G * D)),
        ),
        "bias-row": Mistake(
            "Group 0 is right. Where in bias does the row of group 1 begin?",
            gives=lambda x, weight, bias: reference(x, weight, bias[:1].expand_as(bias)),
        ),
        "neighbour": Mistake(
            "Beyond D stands the next group's number, or nothing at all. It may be NaN or infinite: times 0?",
            "NaN. x has D along its columns, weight along its columns and its rows: mask all three with "
            "d < D.",
            when=wrong_only_where(lambda call: call.case[-1] is True),
        ),
    },
)
