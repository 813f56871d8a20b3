"""Exercises of lesson 4: what is right, what people write instead, and what helps them on."""

from labkit.exercises import judge
from labkit.exercises.common_hints import STORES_OUTSIDE
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import PRODUCT, elements_at
from labkit.kernels import grouped_linear
from labkit.measure.correctness import DTYPES
from labkit.workloads.grouped import GROUPED, grouped_reference

import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

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


solutions = cache(lambda: judge.solutions("04_grouped_matmul"))


def one_tile(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The first exercise's solution: one tile of rows for each program."""
    return solutions().grouped(x, weight, bias)


def one_tile_of_8_warps(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same kernel with the 8 warps that ``stays`` has at these widths."""
    R, (G, D, _), y = len(x), weight.shape, torch.empty_like(x)
    sizes = dict(D=D, BM=ROWS, BD=tile_width(D), num_warps=8)
    solutions().grouped_kernel[(G * -(-R // ROWS),)](x, weight, bias, y, R, G, **sizes)
    return y


def race(rivals: dict[str, Gives], *widths: int) -> RaceSpec:
    """A race beside those and the finished kernel, at groups of these widths."""
    sizes = tuple({"batch": 4096, "groups": 100, "width": width} for width in widths)
    return RaceSpec(GROUPED, rivals | {"labkit": grouped_linear}, sizes)


TRIED: dict[str, Any] = {"dtypes": DTYPES, "properties": PRODUCT}
GROUP_MISTAKES = {
    "transposed": Mistake(
        "A weight is (D in, D out). Along which of the two does a sum run?",
        "A row of the tile times a column of w: k, the input, goes down w's rows. Nothing is turned.",
        gives=lambda x, weight, bias: grouped_reference(x, weight.mT, bias),
    ),
    "no-bias": Mistake(
        "What comes out is the product alone. Does anything that you loaded reach the store?",
        "The bias of a column is added to all rows of the tile: [None, :] makes a row of it.",
        gives=lambda x, weight, bias: grouped_reference(x, weight, 0 * bias),
    ),
}

# ---- all groups in one kernel ------------------------------------------------------------------------------


def masked(in_x: int = 0, in_weight: int = 0, in_y: int = 0, only_rows: bool = False) -> tuple[Gives, ...]:
    """What comes out when the accesses let so many places of a tile through beyond the group's.

    With ``only_rows`` weight lets them through along its rows, not its columns. Programs run in the
    interpreter's order, groups first; what lies beyond a tensor is NaN. For tiles of at least 16 and of 1.
    """

    def gives(x: Tensor, weight: Tensor, bias: Tensor, least: int) -> Tensor:
        R, (G, D, _), d = len(x), weight.shape, np.arange(tile_width(weight.shape[1], least))
        beyond = np.full(len(d) * (D + 1), math.nan)
        x_all, w_all, b_all = (np.concatenate((t.numpy().ravel(), beyond)) for t in (x, weight, bias))
        y = np.full(x.numel() + len(d), math.nan)
        for first, group in itertools.product(range(0, R, ROWS), range(G)):
            at = np.arange(first, min(first + ROWS, R))[:, None] * G * D + group * D + d
            a = np.where(d < D + in_x, x_all[at], 0)
            square = (d[:, None] < D + in_weight) & (d < D + (0 if only_rows else in_weight))
            w = np.where(square, w_all[group * D * D + d[:, None] * D + d], 0)
            columns = slice(0, max(0, D + in_y))
            y[at[:, columns]] = (a @ w + np.where(d < D, b_all[group * D + d], 0))[:, columns]
        return torch.from_numpy(y[: x.numel()]).view_as(x)

    return partial(gives, least=16), partial(gives, least=1)


ALL = 10**6
"""More places than any tile has: no condition on the column."""
ONE_OR_ALL = np.vstack((np.ones(3, int), np.eye(3, dtype=int)))
"""One place too many in all three accesses, or in one of them."""


def bias_a_tile_apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What comes out when rows of bias are taken to begin as far apart as a tile is wide."""
    G, D = bias.shape
    places = torch.arange(G)[:, None] * tile_width(D) + torch.arange(D)
    return grouped_reference(x, weight, elements_at(bias, places))


grouped = Exercise(
    "all groups, in one kernel",
    "grouped",
    reference=grouped_reference,
    cases=((1, 1, 1), (7, 2, 31), (70, 3, 20)),
    large=((1, 2, 5, True), (5, 3, 1), (64, 3, 16), (37, 3, 16, True), (300, 2, 5), (2, 17, 4), (2, 2, 160)),
    inputs=group_inputs,
    **TRIED,
    right="One launch: x is read where it lies, y is written where it belongs, and nothing lies between.",
    race=race({"torch.compile": grouped_reference}, 64, 100),  # as wide as a tile, and in between
    mistakes={
        **GROUP_MISTAKES,
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
            "Beyond D stands the next group's number, or nothing at all. It may be NaN or infinite: times 0?",
            "NaN. x has D along its columns, weight along its columns and its rows: mask all three.",
            gives=masked(ALL) + masked(0, ALL) + masked(0, ALL, only_rows=True),
        ),
        "off-by-one": Mistake(
            "A group has D columns. What are the numbers of its first and of its last one?",
            "They are 0 and D - 1, and D is the neighbour's first. Which of these does yours let in?",
            gives=tuple(each for places in (*ONE_OR_ALL, *-ONE_OR_ALL) for each in masked(*places)),
        ),
        "first-weight": Mistake(
            "Group 0 is right. Which weight does group 1 take?",
            "A group's weight is D rows of D numbers: how many stand before that of group g?",
            gives=lambda x, weight, bias: grouped_reference(x, weight[:1].expand_as(weight), bias),
        ),
        "unwritten": Mistake(
            "Which elements were stored? A case has groups of 160: how wide is your tile there?",
            "Each group needs triton.cdiv(R, BM) programs. Is each axis of the grid read as what it counts?",
            "A row of x and of y holds all groups, one after the other: the row below begins G * D further.",
        ),
        "stores-outside": Mistake(
            *STORES_OUTSIDE,
            "How far is it from a group's first column to the next group's? BD is the tile's width, not D.",
        ),
        "bias-row": Mistake(
            "Group 0 is right. Where in bias does the row of group 1 begin?",
            "Behind the D numbers of group 0, without a gap: BD is only how wide the tile is.",
            gives=(
                lambda x, weight, bias: grouped_reference(x, weight, bias[:1].expand_as(bias)),
                bias_a_tile_apart,
            ),
        ),
    },
)

# ---- the weight stays --------------------------------------------------------------------------------------


def sums_go_on(every: bool) -> Gives:
    """What comes out when a program's sums go on from tile to tile; with ``every``, the bias does, too."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor, per: int) -> Tensor:
        y = grouped_reference(x, weight, bias * every)
        tiles = pad(y, (0, 0, 0, -len(x) % ROWS)).view(-1, ROWS, y.shape[1])
        sums = torch.cat([part.cumsum(0) for part in tiles.split(per)]).flatten(0, 1)
        return sums[: len(x)] + bias.flatten() * (not every)

    return gives


def weight_again(call: Call) -> str:
    """Of all programs together: each has one group's weight, once."""
    x, weight, per = (call.passed[name] for name in ("x", "weight", "per"))
    programs = math.ceil(len(x) / ROWS / per)  # of each group
    times = len(call.launches.loaded(weight)) / weight.numel() / programs
    return f"each program loads its weight {times:.3g} times." if times > 1 else ""


stays = Exercise(
    "the weight stays",
    "stays",
    reference=lambda x, weight, bias, per: grouped_reference(x, weight, bias),
    cases=((1, 1, 1, 1), (70, 2, 5, 2), (200, 2, 20, 2)),
    large=((130, 3, 16, 1), (250, 2, 8, 3)),
    inputs=lambda rows, groups, width, per: group_inputs(rows, groups, width) | {"per": per},
    dtypes=DTYPES,
    properties=(
        *PRODUCT,
        Property(
            "weight-again",
            weight_again,
            "Which of your loads depend on the tile, and which are the same for all tiles of a program?",
            "What doesn't change stands before the loop: the weight, and the bias.",
        ),
    ),
    right="Each program loads its weight once, and the loads of x can run ahead: they wait for no result.",
    # stays has 8 warps, so the same kernel as before races with 4 and with 8
    race=race({"one tile a program": one_tile, "one tile, 8 warps": one_tile_of_8_warps}, 100, 128),
    mistakes={
        "running-sum": Mistake(
            "The first tile of each program is right. What does your sum hold when the second one begins?",
            "Lesson 3 added along K. Here a tile has all of K, and rows of its own: what should it add to?",
            gives=(sums_go_on(False), sums_go_on(True)),
        ),
        "unwritten": Mistake(
            "Write down the tiles of parts 0 and 1: for per = 1, then for per = 2. Which ones are missing?",
            "Part i // G begins behind `per` tiles of each part before it. Each turn has its tile's rows.",
        ),
    },
)

# ---- narrow groups, packed ---------------------------------------------------------------------------------


def packed_with(
    place: Callable[..., Tensor] = lambda k, n, first, D: (first * D + k) * D + n % D,
    meet: Callable[..., Tensor] = lambda k, n, D: k // D == n // D,
) -> Gives:
    """What comes out with the weight at ``place`` for row k and column n of a tile, where these ``meet``.

    ``first`` is the first group of the pack; where a row and a column do not meet stands zero.
    """

    def gives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        G, D, _ = weight.shape
        parts = []
        for first in range(0, G, 64 // D):
            columns = slice(first * D, min(first + 64 // D, G) * D)
            n = torch.arange(columns.stop - columns.start)
            k = n[:, None]
            w = elements_at(weight, place(k, n, first, D)).where(meet(k, n, D), 0.0)
            parts.append(x[:, columns] @ w + bias.flatten()[columns])
        return torch.cat(parts, 1)

    return gives


packed = Exercise(
    "narrow groups, packed",
    "packed",
    reference=grouped_reference,
    cases=((1, 1, 1), (3, 2, 32), (70, 3, 32)),
    large=((5, 3, 16), (7, 9, 8), (64, 4, 16), (9, 2, 64), (130, 70, 2)),
    inputs=group_inputs,
    **TRIED,
    right="A tile of 64 columns is 128 bytes a row, whatever D is; the zeros cost operations only.",
    race=race({"one tile a program": one_tile}, 16, 32),
    mistakes={
        **GROUP_MISTAKES,
        "no-zeros": Mistake(
            "Set one group of x to zero. Which groups of y change, and which should?",
            "Row k belongs to group k // D of the pack, column n to n // D. Where they differ stands zero.",
            gives=packed_with(meet=lambda k, n, D: k >= 0),
        ),
        "no-remainder": Mistake(
            "The first group of each pack is right. Which column of its own weight is column n of the tile?",
            "A weight has D columns: count them from the beginning of the group, not of the pack.",
            gives=packed_with(lambda k, n, first, D: (first * D + k) * D + n),
        ),
        "wide-rows": Mistake(
            "How many numbers has a row of weight in memory, and how many has a row of your tile?",
            "D and 64: the wide tile is nowhere in memory. Each row of it has D numbers from there.",
            gives=packed_with(lambda k, n, first, D: first * D * D + k * 64 + n),
        ),
        "other-weight": Mistake(
            "See weight as (G * D, D), one below the other. Which row of it belongs to row k of pack 1?",
            "Row first * D + k, where `first` is its first group: PACK groups stand before that of pack 1.",
            gives=(
                packed_with(lambda k, n, first, D: (first * D + k % D) * D + n % D),
                packed_with(lambda k, n, first, D: k * D + n % D),
                # the number of the pack in place of its first group's
                packed_with(lambda k, n, first, D: (first * D // 64 * D + k) * D + n % D),
                packed_with(lambda k, n, first, D: k % D * D + n % D),
            ),
        ),
        "same-place": Mistake(
            "Row k and column n of w meet if they are of one group. What do k % D and n % D say of them?",
            "Their places inside of a group. Which operation gives the number of the group?",
            gives=packed_with(meet=lambda k, n, D: k % D == n % D),
        ),
        "unwritten": Mistake(
            "All that you stored is right, and some elements never were. Which pack and rows has program i?",
            "There are cdiv(G, PACK) packs, the last perhaps not full. Columns end where a row of x does.",
        ),
    },
)
