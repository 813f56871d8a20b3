"""Exercises of lesson 4: what is right, what people write instead, and what helps them on."""

from labkit.exercises import judge
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import PRODUCT
from labkit.kernels import grouped_linear
from labkit.measure.correctness import DTYPES
from labkit.workloads.grouped import GROUPED, grouped_reference

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import ModuleType
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


@cache
def solutions() -> ModuleType:
    """The solutions of this lesson."""
    return judge.solutions("04_grouped_matmul")


def one_tile(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The first exercise's solution: one tile of rows for each program."""
    y: Tensor = solutions().grouped(x, weight, bias)
    return y


def one_tile_of_8_warps(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same kernel with the 8 warps that ``stays`` has at these widths."""
    R, (G, D, _), y = len(x), weight.shape, torch.empty_like(x)
    sizes = dict(D=D, BM=ROWS, BD=tile_width(D), num_warps=8)
    solutions().grouped_kernel[(G * -(-R // ROWS),)](x, weight, bias, y, R, G, **sizes)
    return y


def not_all_stored(calls: Sequence[Call]) -> bool:
    """Whether something was stored, all of it right, and some elements were never stored."""
    count = missing = 0
    for call in calls:
        got, want = call.result_tensors()[0]
        stored = torch.from_numpy(np.unique(call.launches.stored(got)))
        count, missing = count + len(stored), missing + got.numel() - len(stored)
        mine, right = (each.double().flatten()[stored] for each in (got, want))
        if not torch.isclose(mine, right, 0.05, 0.05, equal_nan=True).all():
            return False
    return count > 0 and missing > 0


# ---- all groups in one kernel ------------------------------------------------------------------------------


def kernels_with_masks(
    in_x: int = 0, in_weight: int = 0, in_y: int = 0, only_rows: bool = False
) -> tuple[Gives, ...]:
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


ALL_PLACES = 10**6
"""More places than any tile has: no condition on the column."""
ONE_OR_ALL = np.vstack((np.ones(3, int), np.eye(3, dtype=int)))
"""One place too many in all three accesses, or in one of them."""


def with_bias_at(place: Callable[..., Tensor]) -> Gives:
    """What comes out with other elements of bias, at ``place(row, group, d, G, D)``."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        G, D = bias.shape
        row, column = torch.arange(len(x))[:, None], torch.arange(G * D)
        at = place(row, column // D, column % D, G, D)
        values = bias.flatten()[at.clamp(max=G * D - 1)].where(at < G * D, math.nan)
        return grouped_reference(x, weight, 0 * bias) + values

    return gives


def with_columns(tile: int) -> Gives:
    """What comes out of tiles of so many columns, whatever D is: sums end there, and nobody stores beyond."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        G, D, _ = weight.shape
        y = grouped_reference(x.unflatten(1, (G, D))[..., :tile].flatten(1), weight[:, :tile], bias)
        y.view(len(x), G, D)[..., tile:] = math.nan
        return y

    return gives


def groups_a_tile_apart(calls: Sequence[Call]) -> bool:
    """Whether groups were stored as far apart as a tile is wide: that is how far the last one misses y."""
    far = []
    for call in calls:
        G, D = call.passed["bias"].shape
        far.append((G - 1) * (tile_width(D) - D))
        if call.stored_outside != far[-1]:
            return False
    return any(far)


def one_row_after_the_other(calls: Sequence[Call]) -> bool:
    """Whether rows were stored D apart, and not G * D."""
    told = False
    for call in calls:
        (got, _), (G, D) = call.result_tensors()[0], call.passed["bias"].shape
        stored, end = call.launches.stored(got), (len(got) + G - 1) * D
        if end < got.numel():
            if not len(stored) or stored.max() >= end:
                return False
            told = True
    return told


RACED = {"batch": 4096, "groups": 100}
CASES = ((1, 1, 1), (1, 2, 5, True), (5, 3, 1), (7, 2, 31), (70, 3, 20), (64, 3, 16), (37, 3, 16, True))
LARGE = ((300, 7, 5), (2, 70, 4), (2, 2, 160))

grouped = Exercise(
    "all groups, in one kernel",
    "grouped",
    reference=grouped_reference,
    cases=CASES,
    large=LARGE,
    inputs=group_inputs,
    dtypes=DTYPES,
    properties=PRODUCT,
    right="One launch: x is read where it lies, y is written where it belongs, and nothing lies between.",
    race=RaceSpec(
        GROUPED,
        {"torch.compile": grouped_reference, "labkit": grouped_linear},
        # as wide as a tile, and in between
        (RACED | {"width": 64}, RACED | {"width": 100}),
    ),
    mistakes={
        "no-mask": Mistake(
            "Take D = 20. How many columns has the tile, and whose are the last of them?",
            "The tile has 32, and from 20 on they are the next group's. For which of them is each of your "
            "masks false?",
            gives=(
                *kernels_with_masks(ALL_PLACES, ALL_PLACES, ALL_PLACES),
                *kernels_with_masks(ALL_PLACES, ALL_PLACES),
            ),
        ),
        "only-loads": Mistake(
            "The sums are right. To which columns does a program store, and whose are they?",
            "What stands at its end goes over the next group's results. What kept them out of the loads?",
            gives=kernels_with_masks(in_y=ALL_PLACES),
        ),
        "one-load": Mistake(
            "Beyond D stands the next group's number, or nothing at all. It may be NaN or infinite: times 0?",
            "NaN, so a zero from one side isn't enough. Which load still brings what lies beyond D?",
            "x has D along its columns, weight along its columns and its rows: mask all three.",
            gives=(
                *kernels_with_masks(in_x=ALL_PLACES),
                *kernels_with_masks(in_weight=ALL_PLACES),
                *kernels_with_masks(in_weight=ALL_PLACES, only_rows=True),
            ),
        ),
        "off-by-one": Mistake(
            "A group has D columns. What are the numbers of its first and of its last one?",
            "They are 0 and D - 1, and D is the neighbour's first. Which of these does yours let in?",
            gives=tuple(
                each for places in (*ONE_OR_ALL, *-ONE_OR_ALL) for each in kernels_with_masks(*places)
            ),
        ),
        "no-other": Mistake(
            "A load leaves the masked places of its block alone. Which number stands there then?",
            "On a GPU whatever the register held before. Yours has to be one that adds nothing to a sum.",
            "tl.load takes it as `other`, in x as well as in weight.",
            gives=lambda x, weight, bias: (
                grouped_reference(x, weight, bias)
                + (math.nan if tile_width(weight.shape[1]) > weight.shape[1] else 0.0)
            ),
        ),
        "transposed": Mistake(
            "weight is (G, D in, D out). Along which of the two does a sum run?",
            "A row of the tile times a column of w: k, the input, goes down w's rows. Nothing is turned.",
            gives=lambda x, weight, bias: grouped_reference(x, weight.mT, bias),
        ),
        "first-weight": Mistake(
            "Group 0 is right. Which weight does group 1 take?",
            "A group's weight is D rows of D numbers: how many stand before that of group g?",
            gives=lambda x, weight, bias: grouped_reference(x, weight[:1].expand_as(weight), bias),
        ),
        "row-length": Mistake(
            "How far is it in memory from a number of x to the one below it?",
            "A row of x holds all groups, one after the other: G * D numbers.",
            when=one_row_after_the_other,
        ),
        "tile-width": Mistake(
            "How far is it in memory from the first column of a group to the first of the next?",
            "BD is how wide the tile is. A group has D columns, and the next one follows without a gap.",
            when=groups_a_tile_apart,
        ),
        "fixed-tile": Mistake(
            "A case has groups of 160. A program has all of D: how wide is its tile there, and yours?",
            "BD depends on D: the power of two from D on, which triton.next_power_of_2 knows.",
            gives=tuple(with_columns(tile) for tile in (32, 64, 128)),
            when=lambda calls: any(call.passed["bias"].shape[1] > 128 for call in calls),
        ),
        "unwritten": Mistake(
            "All that you stored is right, and some elements were never stored. Which programs should have?",
            "Count them: tiles of rows, rounded up (triton.cdiv), times groups. Each needs a program.",
            "Does each number of your grid count what the kernel reads from the same axis of program_id?",
            when=not_all_stored,
        ),
        "no-bias": Mistake(
            "What comes out is the product alone. Does anything that you loaded reach the store?",
            "The bias of a column is added to all rows of the tile: [None, :] makes a row of it.",
            gives=lambda x, weight, bias: grouped_reference(x, weight, 0 * bias),
        ),
        "bias-row": Mistake(
            "Group 0 is right. Where in bias does the row of group 1 begin?",
            "Behind the D numbers of group 0. What does your address say of the group?",
            gives=with_bias_at(lambda row, group, d, G, D: d + 0 * row),
        ),
        "bias-tile-width": Mistake(
            "Where D is 16 it's right. How long is a row of bias, D or BD?",
            "BD is the tile's width only: in memory one row follows the other without a gap.",
            gives=with_bias_at(lambda row, group, d, G, D: group * tile_width(D) + d),
        ),
    },
)

# ---- the weight stays --------------------------------------------------------------------------------------


def stays_inputs(rows: int, groups: int, width: int, per: int) -> dict[str, Any]:
    """The same, and how many tiles a program takes."""
    return group_inputs(rows, groups, width) | {"per": per}


def tiles_written(tiles_of: Callable[[int, int, int], range]) -> Gives:
    """What comes out when part i of the rows has the tiles ``tiles_of(i, per, tiles)``; the rest is NaN."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor, per: int) -> Tensor:
        want, tiles = grouped_reference(x, weight, bias), -(-len(x) // ROWS)
        y = torch.full_like(want, math.nan)
        for part in range(-(-tiles // per)):
            for tile in tiles_of(part, per, tiles):
                y[tile * ROWS : (tile + 1) * ROWS] = want[tile * ROWS : (tile + 1) * ROWS]
        return y

    return gives


def sums_go_on(every: bool) -> Gives:
    """What comes out when a program's sums go on from tile to tile; with ``every``, the bias does, too."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor, per: int) -> Tensor:
        product = grouped_reference(x, weight, 0 * bias)
        tiles = -(-len(x) // ROWS)
        y = product.new_zeros(tiles * ROWS, product.shape[1])
        y[: len(x)] = product
        y = y.view(tiles, ROWS, -1)
        row = bias.flatten()
        sums = [part.cumsum(0) for part in y.split(per)]
        times = [torch.arange(1, len(part) + 1)[:, None, None] if every else 1 for part in sums]
        whole = [part + count * row for part, count in zip(sums, times, strict=True)]
        return torch.cat(whole).flatten(0, 1)[: len(x)]

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
    cases=((1, 1, 1, 1), (70, 2, 5, 2), (130, 3, 16, 1), (200, 2, 20, 2), (250, 2, 8, 3)),
    inputs=stays_inputs,
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
    race=RaceSpec(
        GROUPED,
        # stays has 8 warps, so the same kernel as before races with 4 and with 8
        {"one tile a program": one_tile, "one tile, 8 warps": one_tile_of_8_warps, "labkit": grouped_linear},
        (RACED | {"width": 100}, RACED | {"width": 128}),
    ),
    mistakes={
        "one-tile": Mistake(
            "Of each part, the first tile is right. What does a program do after its first one?",
            "A loop over the tiles of its part, and the row in it depends on the tile.",
            gives=(
                tiles_written(lambda part, per, tiles: range(part * per, part * per + 1)),
                tiles_written(lambda part, per, tiles: range(part, part + 1)),
                tiles_written(lambda part, per, tiles: range(0, 1)),
            ),
        ),
        "part-start": Mistake(
            "Write down which tiles parts 0 and 1 take: first for per = 1, then for per = 2.",
            "Each part before it has taken `per` tiles. Where does that leave the next one to begin?",
            gives=(
                tiles_written(lambda part, per, tiles: range(part, part + per)),
                tiles_written(lambda part, per, tiles: range(part, per)),
                tiles_written(lambda part, per, tiles: range(part * per, per)),
            ),
        ),
        "last-of-part": Mistake(
            "The last tile of each part is missing. What is the last value that a range takes?",
            "range(a, b) ends before b.",
            gives=tiles_written(lambda part, per, tiles: range(part * per, part * per + per - 1)),
        ),
        "last-tile": Mistake(
            "The last rows hold what nobody wrote. How many tiles do 70 rows need, of 64 each?",
            "A division that rounds up counts the tile that isn't full: tl.cdiv.",
            gives=tiles_written(lambda part, per, tiles: range(part * per, min(part * per + per, tiles - 1))),
        ),
        "running-sum": Mistake(
            "The first tile of each program is right. What does your sum hold when the second one begins?",
            "Lesson 3 added along K. Here a tile has all of K, and rows of its own: what should it add to?",
            gives=(sums_go_on(False), sums_go_on(True)),
        ),
        "unwritten": Mistake(
            "All that you stored is right, and some rows never were. Which group and part has program i?",
            "The launch counts G programs for each part: i // G is the part. With which tile does it begin?",
            "G = 2, per = 2, 4 tiles: write down group, part and tiles of programs 0 to 3.",
            when=not_all_stored,
        ),
    },
)

# ---- narrow groups, packed ---------------------------------------------------------------------------------


def with_pack_weight(matrix: Callable[[Tensor, int, int, int], Tensor]) -> Gives:
    """What comes out when ``matrix(weight, first, groups, D)`` multiplies the groups of a pack."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        G, D, _ = weight.shape
        parts = []
        for first in range(0, G, 64 // D):
            groups = min(64 // D, G - first)
            columns = slice(first * D, (first + groups) * D)
            parts.append(x[:, columns] @ matrix(weight, first, groups, D) + bias.flatten()[columns])
        return torch.cat(parts, 1)

    return gives


def beside(weight: Tensor, first: int, groups: int, D: int) -> Tensor:
    """The weights below one another, repeated to the right: no zeros."""
    return weight[first : first + groups].flatten(0, 1).repeat(1, groups)


def same_place(weight: Tensor, first: int, groups: int, D: int) -> Tensor:
    """The weights repeated to the right, with numbers only where both places in a group are the same."""
    return beside(weight, first, groups, D) * torch.eye(D).repeat(groups, groups)


def as_wide_rows(weight: Tensor, first: int, groups: int, D: int) -> Tensor:
    """Blocks on the diagonal, taken from rows as long as the pack is wide."""
    at = first * D * D + torch.arange(groups * D)[:, None] * 64 + torch.arange(groups * D)
    values = torch.cat((weight.flatten(), weight.new_full((64 * 64,), math.nan)))[at]
    return values.where(torch.block_diag(*torch.ones(groups, D, D)).bool(), 0)


def without_remainder(weight: Tensor, first: int, groups: int, D: int) -> Tensor:
    """Blocks on the diagonal, their columns counted from the pack's first."""
    at = (first * D + torch.arange(groups * D))[:, None] * D + torch.arange(groups * D)
    values = torch.cat((weight.flatten(), weight.new_full((64 * D,), math.nan)))[at]
    return values.where(torch.block_diag(*torch.ones(groups, D, D)).bool(), 0)


packed = Exercise(
    "narrow groups, packed",
    "packed",
    reference=grouped_reference,
    cases=((1, 1, 1), (3, 2, 32), (5, 3, 16), (7, 9, 8), (70, 5, 32), (64, 4, 16), (9, 2, 64)),
    large=((130, 70, 2),),
    inputs=group_inputs,
    dtypes=DTYPES,
    properties=PRODUCT,
    right="A tile of 64 columns is 128 bytes a row, whatever D is; the zeros cost operations only.",
    race=RaceSpec(
        GROUPED,
        {"one tile a program": one_tile, "labkit": grouped_linear},
        (RACED | {"width": 16}, RACED | {"width": 32}),
    ),
    mistakes={
        "no-zeros": Mistake(
            "Set one group of x to zero. Which groups of y change, and which should?",
            "A row and a column of w may belong to two groups. What number should stand there?",
            "Row k belongs to group k // D of the pack, column n to n // D. Mask the load where they differ.",
            gives=with_pack_weight(beside),
        ),
        "no-remainder": Mistake(
            "The first group of each pack is right. Which column of its own weight is column n of the tile?",
            "A weight has D columns: count them from the beginning of the group, not of the pack.",
            gives=with_pack_weight(without_remainder),
        ),
        "wide-rows": Mistake(
            "How many numbers has a row of weight in memory, and how many has a row of your tile?",
            "D and 64: the wide tile is nowhere in memory. Each row of it has D numbers from there.",
            gives=with_pack_weight(as_wide_rows),
        ),
        "first-weight": Mistake(
            "The first group of each pack is right. Whose weight does the second one take?",
            "Below the D rows of one weight lie those of the next: row k of the pack is row first * D + k.",
            gives=with_pack_weight(
                lambda weight, first, groups, D: torch.block_diag(*[weight[first]] * groups)
            ),
        ),
        "first-pack": Mistake(
            "The first pack is right. Which group is the first of pack 1, and which one does yours take?",
            "A pack has PACK groups: so many stand before pack 1's, with D rows of weight each.",
            gives=(
                with_pack_weight(lambda weight, first, groups, D: torch.block_diag(*weight[:groups])),
                with_pack_weight(  # the number of the pack in place of its first group's
                    lambda weight, first, groups, D: torch.block_diag(*weight[first * D // 64 :][:groups])
                ),
            ),
        ),
        "group-0": Mistake(
            "Group 0 is right. Whose weight do all the others take?",
            "See weight as (G * D, D), one below the other. Which row of it belongs to column k of pack 1?",
            gives=with_pack_weight(lambda weight, first, groups, D: torch.block_diag(*[weight[0]] * groups)),
        ),
        "same-place": Mistake(
            "Row k and column n of w meet if they are of one group. What do k % D and n % D say of them?",
            "Their places inside of a group. Which operation gives the number of the group?",
            gives=with_pack_weight(same_place),
        ),
        "transposed": Mistake(
            "A weight is (D in, D out). Along which of the two does a sum run?",
            "k, the input, goes down w's rows, and n, the output, across. Nothing is turned.",
            gives=lambda x, weight, bias: grouped_reference(x, weight.mT, bias),
        ),
        "unwritten": Mistake(
            "All that you stored is right, and some elements never were. Which pack and rows has program i?",
            "There are cdiv(G, PACK) packs: the last one may not be full, and counts all the same.",
            "Is your mask of columns true up to D, or up to the end of a row?",
            when=not_all_stored,
        ),
        "no-bias": Mistake(
            "What comes out is the product alone. Does anything that you loaded reach the store?",
            "The bias of a column is added to all rows of the tile: [None, :] makes a row of it.",
            gives=lambda x, weight, bias: grouped_reference(x, weight, 0 * bias),
        ),
    },
)
