"""Tasks of lesson 8: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Call, Exercise, Mistake, RaceSpec, difference
from labkit.exercises.properties import KERNEL_CASES, PRODUCT, elements_at

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

reference = work.grouped.reference

ROWS = 64
"""Rows of a tile, as the text says and the given launches have it."""


def group_inputs(rows: int, groups: int, width: int, poisoned: bool = False) -> dict[str, Any]:
    """x (rows, groups * width), weight (groups, width, width), bias; perhaps group 1 is NaN and infinite."""
    x, weight = torch.randn(rows, groups * width), torch.randn(groups, width, width) * width**-0.5
    if poisoned:
        x[:, width : 2 * width], weight[1] = math.nan, math.inf
    return {"x": x, "weight": weight, "bias": torch.randn(groups, width)}


def tile_width(width: int, least: int = 16) -> int:
    """Columns of a tile: a power of two, and at least 16 where somebody thought of it."""
    return max(least, 1 << (width - 1).bit_length())


# ---- all groups in one kernel ------------------------------------------------------------------------------


BEYOND = (
    "Beyond D stands the next group's number, or nothing at all. It may be NaN or infinite: times 0?",
    "NaN. x has D along its columns, weight along its columns and its rows: mask all three with d < D.",
)
"""Hints for masks that let a neighbour through."""


def missing(call: Call) -> np.ndarray:
    """Which elements of the result are NaN, where numbers should be."""
    ((mine, right),) = call.result_tensors()
    return (mine.isnan() & ~right.isnan()).numpy()


def neighbour_leaks(calls: Sequence[Call]) -> bool:
    """Whether a neighbour's NaN is in sums, and a group that fills its tile is right where there is none."""
    results = [(call, *result) for call in calls for result in call.result_tensors()]
    if any(len(np.unique(call.launches.stored(mine))) < mine.numel() for call, mine, _ in results):
        return False
    full = [each for each in results if tile_width(each[0].case[2]) == each[0].case[2]]
    right = not any(difference(mine, exact, 0.05) for _, mine, exact in full if not exact.isnan().any())
    return right and any(bool(missing(call).any()) for call in calls if call.case[-1] is True)


def narrow_tile(calls: Sequence[Call]) -> bool:
    """Whether elements are missing only in groups that are wider than many a tile."""
    wide = [call for call in calls if call.case[2] > ROWS]
    others = [call for call in calls if call.case[2] <= ROWS]
    return any(missing(call).any() for call in wide) and not any(missing(call).any() for call in others)


def only_groups(calls: Sequence[Call], written: Callable[[int, int, int, int], bool]) -> bool:
    """Whether just those tiles were stored for which ``written(group, groups, tile, tiles)`` holds.

    Only calls tell it that have at least as many groups as tiles of rows: a group that there is not would
    store to other rows.
    """
    told = [call for call in calls if 1 < call.case[1] >= -(-call.case[0] // ROWS) and len(call.case) == 3]

    def fits(call: Call) -> bool:
        rows, groups, width = call.case
        tiles = -(-rows // ROWS)
        by_group = missing(call).reshape(rows, groups, width)
        return all(
            bool(
                (
                    by_group[tile * ROWS : (tile + 1) * ROWS, group] != written(group, groups, tile, tiles)
                ).all()
            )
            for group, tile in itertools.product(range(groups), range(tiles))
        )

    return bool(told) and all(map(fits, told))


def rows_too_close(calls: Sequence[Call]) -> bool:
    """Whether the end is missing that rows leave over which begin D numbers apart, in calls with one tile."""
    few = [call for call in calls if 1 < call.case[0] <= ROWS and call.case[1] > 1 and len(call.case) == 3]

    def left_over(call: Call) -> bool:
        rows, groups, width = call.case
        return bool(missing(call).ravel()[(rows - 1 + groups) * width :].all())

    return bool(few) and all(left_over(call) for call in few)


def bias_a_tile_apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What comes out when rows of bias are taken to begin as far apart as a tile is wide."""
    G, D = bias.shape
    places = torch.arange(G)[:, None] * tile_width(D) + torch.arange(D)
    return reference(x, weight, elements_at(bias, places))


def matrix_rows_a_tile_apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What comes out when the rows of a matrix are taken to begin as far apart as a tile is wide."""
    G, D = bias.shape
    rows = torch.arange(D)[:, None] * tile_width(D) + torch.arange(D)
    return reference(x, elements_at(weight, torch.arange(G)[:, None, None] * D * D + rows), bias)


def weights_a_row_apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What comes out when the groups' matrices are taken to begin D numbers apart, as rows do."""
    G, D = bias.shape
    places = torch.arange(G * D).view(G, D)[:, :1, None] + torch.arange(D)[:, None] * D + torch.arange(D)
    return reference(x, elements_at(weight, places), bias)


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
        "narrow-tile": Mistake(
            "Groups of up to 64 are right. What about groups of 160?",
            "A tile has to be as wide as a group, or wider: BD = max(16, triton.next_power_of_2(D)).",
            when=narrow_tile,
        ),
        "first-group": Mistake(
            "Only the columns of group 0 were stored. Where in a row of x and of y does group 1 begin?",
            "Behind the D numbers of group 0: group * D is part of the address in x and in y.",
            when=lambda calls: only_groups(calls, lambda group, groups, tile, tiles: group == 0),
        ),
        "axes": Mistake(
            "Which axis of your launch counts the groups, and which one does the kernel take for them?",
            "With the launch (G, triton.cdiv(R, 64)) tl.program_id(0) is the group, and axis 1 counts tiles.",
            when=lambda calls: only_groups(
                calls, lambda group, groups, tile, tiles: group < tiles and tile < groups
            ),
        ),
        "row-stride": Mistake(
            "What is missing stands at the end. How far is it from a row of x or y to the row below?",
            "A row holds all groups, one after the other: G * D numbers.",
            when=rows_too_close,
        ),
        "transposed": Mistake(
            "A weight is (D in, D out). Along which of the two does a sum run?",
            "A row of the tile times a column of w: k, the input, goes down w's rows. Nothing is turned.",
            gives=lambda x, weight, bias: reference(x, weight.mT, bias),
        ),
        "matrix-rows": Mistake(
            "How far is it in memory from a row of a matrix to the row below?",
            "D numbers: a matrix lies there without gaps. BD is only how wide the tile is.",
            gives=matrix_rows_a_tile_apart,
        ),
        "weight-stride": Mistake(
            "Group 0 is right. Where does the matrix of group 1 begin?",
            "Behind the D * D numbers of group 0's.",
            gives=weights_a_row_apart,
        ),
        "bias-row": Mistake(
            "Group 0 is right. Where in bias does the row of group 1 begin?",
            "Behind the D numbers of group 0, without a gap: BD is only how wide the tile is.",
            gives=(
                lambda x, weight, bias: reference(x, weight, bias[:1].expand_as(bias)),
                bias_a_tile_apart,
            ),
        ),
        "neighbour": Mistake(*BEYOND, when=neighbour_leaks),
    },
)
