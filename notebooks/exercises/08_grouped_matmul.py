"""Tasks of lesson 8: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Call, Exercise, Mistake, RaceSpec, difference
from labkit.exercises.properties import KERNEL_CASES, PRODUCT

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

reference = work.grouped.reference

ROWS = 64
"""Rows of a tile, as the text says and the given launches have it."""


def group_inputs(rows: int, groups: int, width: int, poisoned: bool = False) -> dict[str, Any]:
    """x (rows, groups * width), weight (groups, width, width), bias; perhaps group 1 is NaN and infinite."""
    x, weight = torch.randn(rows, groups * width), torch.randn(groups, width, width) * width**-0.5
    if poisoned:
        x[:, width : 2 * width], weight[1] = math.nan, math.inf
    return {"x": x, "weight": weight, "bias": torch.randn(groups, width)}


# ---- all groups in one kernel ------------------------------------------------------------------------------


def missing(call: Call) -> np.ndarray:
    """Which elements of the result are NaN, where numbers should be."""
    ((mine, right),) = call.result_tensors()
    return (mine.isnan() & ~right.isnan()).numpy()


def neighbour_leaks(calls: Sequence[Call]) -> bool:
    """Whether a neighbour's NaN is in sums, and a group that fills its tile is right where there is none."""
    results = [(call, *result) for call in calls for result in call.result_tensors()]
    if any(len(np.unique(call.launches.stored(mine))) < mine.numel() for call, mine, _ in results):
        return False
    full = [each for each in results if each[0].case[2] == 16]  # as wide as its tile
    right = not any(difference(mine, exact, 0.05) for _, mine, exact in full if not exact.isnan().any())
    return right and any(bool(missing(call).any()) for call in calls if call.case[-1] is True)


grouped = Exercise(
    "all groups, in one kernel",
    "grouped",
    reference=reference,
    cases=((1, 1, 1), (7, 2, 31), (70, 3, 20)),
    large=((1, 2, 5, True), (5, 3, 1), (64, 3, 16), (37, 3, 16, True), (300, 2, 5), (2, 17, 4), (2, 2, 160)),
    vast=((4096, 100, 100), (70_000, 2000, 20), (64, 60_000, 200)),
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
        "bias-row": Mistake(
            "Group 0 is right. Where in bias does the row of group 1 begin?",
            gives=lambda x, weight, bias: reference(x, weight, bias[:1].expand_as(bias)),
        ),
        "neighbour": Mistake(
            "Beyond D stands the next group's number, or nothing at all. It may be NaN or infinite: times 0?",
            "NaN. x has D along its columns, weight along its columns and its rows: mask all three with "
            "d < D.",
            when=neighbour_leaks,
        ),
    },
)
