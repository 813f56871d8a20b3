"""Tasks of lesson 8: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Call, Exercise, Mistake, RaceSpec, difference
from labkit.exercises.properties import KERNEL_CASES, PRODUCT, elements_at
from labkit.work.grouped import reference

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROWS = 64
"""Rows of a tile, as the text says and the given launches have it."""
Gives = Callable[..., Tensor]


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


def masked(in_x: int = 0, in_weight: int = 0, in_y: int = 0, only_rows: bool = False) -> tuple[Gives, ...]:
    """What comes out when the accesses let so many places of a tile through beyond the group's.

    With ``only_rows`` weight lets them through along its rows, not its columns. Programs run in the
    order of the interpreter: ``program_id(0)`` changes last, and counts groups or tiles of rows. What lies
    beyond a tensor is NaN. For tiles of at least 16 and of 1.
    """

    def gives(x: Tensor, weight: Tensor, bias: Tensor, least: int, by_group: bool) -> Tensor:
        R, (G, D, _), d = len(x), weight.shape, np.arange(tile_width(weight.shape[1], least))
        beyond = np.full(len(d) * (D + 1), math.nan)
        x_all, w_all, b_all = (np.concatenate((t.numpy().ravel(), beyond)) for t in (x, weight, bias))
        y = np.full(x.numel() + len(d), math.nan)
        rows, groups = range(0, R, ROWS), range(G)
        places = itertools.product(groups, rows) if by_group else itertools.product(rows, groups)
        for one, other in places:
            group, first = (one, other) if by_group else (other, one)
            at = np.arange(first, min(first + ROWS, R))[:, None] * G * D + group * D + d
            a = np.where(d < D + in_x, x_all[at], 0)
            square = (d[:, None] < D + in_weight) & (d < D + (0 if only_rows else in_weight))
            w = np.where(square, w_all[group * D * D + d[:, None] * D + d], 0)
            columns = slice(0, max(0, D + in_y))
            y[at[:, columns]] = (a @ w + np.where(d < D, b_all[group * D + d], 0))[:, columns]
        return torch.from_numpy(y[: x.numel()]).view_as(x)

    return tuple(partial(gives, least=least, by_group=by) for least in (16, 1) for by in (True, False))


BEYOND = (
    "Beyond D stands the next group's number, or nothing at all. It may be NaN or infinite: times 0?",
    "NaN. x has D along its columns, weight along its columns and its rows: mask all three with d < D.",
)
"""Hints for masks that let a neighbour through."""
ALL = 10**6
"""More places than any tile has: no condition on the column."""
ONE_OR_ALL = np.vstack((np.ones(3, int), np.eye(3, dtype=int)))
"""One place too many in all three accesses, or in one of them."""


def missing(call: Call) -> np.ndarray:
    """Which elements of the result are NaN, where numbers should be."""
    ((mine, right),) = call.result_tensors()
    return (mine.isnan() & ~right.isnan()).numpy()


def neighbour_leaks(calls: Sequence[Call]) -> bool:
    """Whether elements are missing where a neighbour is NaN or infinite, and all is right elsewhere."""
    poisoned = [call for call in calls if len(call.case) > 3]
    others = [result for call in calls if len(call.case) == 3 for result in call.result_tensors()]
    right = not any(difference(mine, exact, 0.05) for mine, exact in others)
    return right and any(missing(call).any() for call in poisoned)


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


def widths_for_groups(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What comes out when the number of groups is taken for their width, and the other way round."""
    width, groups = bias.shape
    matrices = elements_at(weight, torch.arange(groups * width * width).view(groups, width, width))
    return reference(x, matrices, bias.reshape(groups, width))


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


def matrices_a_tile_apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What comes out when a matrix is taken to have as many numbers as a tile."""
    G, D = bias.shape
    first = torch.arange(G)[:, None, None] * tile_width(D) ** 2
    places = first + torch.arange(D)[:, None] * D + torch.arange(D)
    return reference(x, elements_at(weight, places), bias)


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
        "neighbour": Mistake(*BEYOND, when=neighbour_leaks),
        "narrow-tile": Mistake(
            "Groups of up to 64 are right. What about groups of 160?",
            "A tile has to be as wide as a group, or wider: BD = max(16, triton.next_power_of_2(D)).",
            when=narrow_tile,
        ),
        "launches": Mistake(
            "How many launches does your function make, those of PyTorch counted? What does each one cost?",
            "One launch does all: axis 0 counts the groups, and the kernel adds the bias, too.",
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
        "swapped": Mistake(
            "Which number comes first in the shape of bias, and in which order does the kernel take the two?",
            "bias is (G, D). The kernel's arguments are R, G, D.",
            gives=widths_for_groups,
        ),
        "transposed": Mistake(
            "A weight is (D in, D out). Along which of the two does a sum run?",
            "A row of the tile times a column of w: k, the input, goes down w's rows. Nothing is turned.",
            gives=lambda x, weight, bias: reference(x, weight.mT, bias),
        ),
        "no-bias": Mistake(
            "What comes out is the product alone. Does anything that you loaded reach the store?",
            "The bias of a column is added to all rows of the tile: [None, :] makes a row of it.",
            gives=lambda x, weight, bias: reference(x, weight, 0 * bias),
        ),
        "no-mask": Mistake(
            "Take D = 20. How many columns has the tile, and whose are the last of them?",
            "The tile has 32, from 20 on the next group's. For which of them is each of your masks false?",
            gives=masked(ALL, ALL, ALL) + masked(ALL, ALL),
        ),
        "only-loads": Mistake(
            "The sums are right. To which columns does a program store, and whose are they?",
            "What stands at its end goes over the next group's results. What kept them out of the loads?",
            gives=masked(in_y=ALL),
        ),
        "one-load": Mistake(
            *BEYOND,
            gives=masked(ALL) + masked(0, ALL) + masked(0, ALL, only_rows=True),
        ),
        "off-by-one": Mistake(
            "A group has D columns. What are the numbers of its first and of its last one?",
            "They are 0 and D - 1, and D is the neighbour's first. Which of these does yours let in?",
            gives=tuple(each for places in (*ONE_OR_ALL, *-ONE_OR_ALL) for each in masked(*places)),
        ),
        "weight-stride": Mistake(
            "Group 0 is right. Where does the matrix of group 1 begin?",
            "Behind the D * D numbers of group 0's.",
            gives=weights_a_row_apart,
        ),
        "matrix-apart": Mistake(
            "Group 0 is right. How many numbers has a matrix in memory?",
            "D * D: they lie one behind the other. BD is only how wide the tile is.",
            gives=matrices_a_tile_apart,
        ),
        "matrix-rows": Mistake(
            "How far is it in memory from a row of a matrix to the row below?",
            "D numbers: a matrix lies there without gaps. BD is only how wide the tile is.",
            gives=matrix_rows_a_tile_apart,
        ),
        "first-weight": Mistake(
            "Group 0 is right. Which weight does group 1 take?",
            "A group's weight is D rows of D numbers: how many stand before that of group g?",
            gives=lambda x, weight, bias: reference(x, weight[:1].expand_as(weight), bias),
        ),
        "unwritten": Mistake(
            "Each group needs triton.cdiv(R, BM) programs. How many does your launch start?",
            "Does the kernel read each axis as the launch counts it? Axis 0 has groups, axis 1 has rows.",
            "A row of x and of y holds all groups, one after the other: the row below begins G * D further.",
        ),
        "stores-outside": Mistake(
            "Is it the store's mask, or its address? How far is it to the next row, and to the next group?",
            "A row holds all groups, so the next one begins G * D further, and the next group D further. "
            "BD is only how wide the tile is. And the mask needs rows below R and columns below D.",
        ),
        "bias-row": Mistake(
            "Group 0 is right. Where in bias does the row of group 1 begin?",
            "Behind the D numbers of group 0, without a gap: BD is only how wide the tile is.",
            gives=(
                lambda x, weight, bias: reference(x, weight, bias[:1].expand_as(bias)),
                bias_a_tile_apart,
            ),
        ),
    },
)
