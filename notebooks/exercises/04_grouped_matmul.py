"""Exercises of lesson 4: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import Exercise, Mistake, RaceSpec, case_values
from labkit.exercises.properties import KERNEL_CASES, PRODUCT
from labkit.kernels import grouped_linear
from labkit.workloads.grouped import GROUPED, grouped_reference

import itertools
import math
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

# ---- the floor ---------------------------------------------------------------------------------------------

DEVICES = ((7.5e14, 4.2e12), (6e13, 2.4e11), (2e13, 4e11))
"""FLOP/s and bytes/s: roughly those of an H200, an L4 and a laptop."""
SHAPES = (
    (4096, 64, 32, 48),
    (16, 128, 512, 128),
    (8192, 16, 128, 256),
    (65536, 4, 1024, 2048),
    (256, 8, 2048, 512),
)
"""rows, groups, d_in, d_out: narrow groups, few rows (where the weights are the most bytes), wide groups."""


def slower_time_us(moved: float, computed: float) -> float:
    """The larger of two times in seconds, in microseconds."""
    return 1e6 * max(moved, computed)


def floor_with(result: Any = slower_time_us, **factors: Any) -> Any:
    """The floor with factors for ``x``, ``weight``, ``y`` and ``operations``, of the sizes."""

    def floor_us(*sizes: Any) -> Any:
        rows, groups, d_in, d_out, itemsize, bandwidth, rate = sizes
        counts = {"x": rows * groups * d_in, "weight": groups * d_in * d_out, "y": rows * groups * d_out}
        counts["operations"] = 2 * rows * counts["weight"]
        counts |= {name: counts[name] * factor(*sizes[:5]) for name, factor in factors.items()}
        computed = counts.pop("operations") / rate
        return result(sum(counts.values()) * itemsize / bandwidth, computed)

    return floor_us


def factors(factor: Any, *choices: str) -> tuple[Any, ...]:
    """The floor with a factor for these counts, one choice of them after the other."""
    return tuple(floor_with(**dict.fromkeys(names.split(), factor)) for names in choices)


floor = Exercise(
    "derive the floor",
    "floor_us",
    reference=floor_with(),
    cases=tuple((*shape, size, *device[::-1]) for shape in SHAPES for size in (2, 4) for device in DEVICES),
    inputs=case_values("rows", "groups", "d_in", "d_out", "itemsize", "bandwidth", "rate"),
    tolerance=0.005,
    right="Up to a width of about rate / bandwidth times itemsize, a group can at best be as fast as a copy.",
    mistakes={
        "not-the-larger": Mistake(
            "Take groups of 32, then of 2048. Which of your two times keeps the device busy longer?",
            "Narrow groups wait for memory, wide ones for arithmetic, and both run at once. So which one "
            "of two numbers is the floor?",
            gives=tuple(
                floor_with(lambda *both, pick=pick: 1e6 * pick(*both))
                for pick in (add, min, lambda moved, computed: moved, lambda moved, computed: computed)
            ),
        ),
        "unit": Mistake(
            "Compare yours with the answer digit by digit. In which unit is it?",
            "bytes / bandwidth is in seconds, and a second has a million microseconds.",
            gives=tuple(floor_with(lambda *both, unit=unit: unit * max(both)) for unit in (1, 1e3, 1e9)),
        ),
        "left-out": Mistake(
            "Which tensors cross memory? Count those that are read and those that are written.",
            "x and weight come in, y goes out. With 16 rows the weight is the largest of the three.",
            gives=factors(lambda *sizes: 0, "x", "weight", "y"),
        ),
        "dense": Mistake(
            "With how many matrices is one number of x multiplied?",
            "With its own group's only: that is what groups save. There are `groups` matrices of d_in by "
            "d_out, and none between two groups.",
            gives=factors(lambda rows, groups, *_: groups, "weight", "operations", "weight operations"),
        ),
        "multiply-adds": Mistake(
            "A number of y is a sum of d_in products. How many multiplications and additions is that?",
            "As many of one as of the other, and `rate` counts both.",
            gives=factors(lambda *sizes: 0.5, "operations"),
        ),
        "numbers-for-bytes": Mistake(
            "`bandwidth` is in bytes a second. What did you count?",
            "Numbers, and each of them has `itemsize` bytes.",
            gives=factors(lambda rows, groups, d_in, d_out, itemsize: 1 / itemsize, "x weight y"),
        ),
    },
)

# ---- the neighbour -----------------------------------------------------------------------------------------

ROWS = 32
"""Rows of a tile, as the scaffold launches it."""


def products(x: Tensor, weight: Tensor) -> Tensor:
    """Each group's columns of x (rows, groups * width) times its matrix (width, width), side by side."""
    parts = [part @ matrix for part, matrix in zip(x.chunk(len(weight), 1), weight, strict=True)]
    return torch.cat(parts, 1)


def group_inputs(rows: int, groups: int, width: int, poisoned: bool = False) -> dict[str, Any]:
    """x (rows, groups * width), weight (groups, width, width); perhaps group 1 is NaN and infinite."""
    x, weight = torch.randn(rows, groups * width), torch.randn(groups, width, width) * width**-0.5
    if poisoned:
        x[:, width : 2 * width], weight[1] = math.nan, math.inf
    return {"x": x, "weight": weight}


def tile_width(width: int) -> int:
    """Columns of a tile: a power of two, and at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def kernel_with_masks(in_x: int = 0, in_weight: int = 0, in_y: int = 0) -> Any:
    """What comes out when the accesses let so many places of `d` through beyond the group's.

    Programs run in the interpreter's order; what lies beyond a tensor is NaN.
    """

    def gives(x: Tensor, weight: Tensor) -> Tensor:
        R, (G, D, _), d = len(x), weight.shape, np.arange(tile_width(weight.shape[1]))
        beyond = np.full(len(d) * (D + 1), math.nan)
        x_all, w_all = (np.concatenate((t.numpy().ravel(), beyond)) for t in (x, weight))
        y = np.full(x.numel() + len(d), math.nan)
        for first, group in itertools.product(range(0, R, ROWS), range(G)):
            at = np.arange(first, min(first + ROWS, R))[:, None] * G * D + group * D + d
            a = np.where(d < D + in_x, x_all[at], 0)
            square = np.maximum(d[:, None], d) < D + in_weight
            w = np.where(square, w_all[group * D * D + d[:, None] * D + d], 0)
            columns = slice(0, max(0, D + in_y))
            y[at[:, columns]] = (a @ w)[:, columns]
        return torch.from_numpy(y[: x.numel()]).view_as(x)

    return gives


ALL_PLACES = 10**6
"""More places than any tile has: no condition on `d`."""
ONE_OR_ALL = np.vstack((np.ones(3, int), np.eye(3, dtype=int)))
"""One place too many in all three accesses, or in one of them."""

neighbour = Exercise(
    "find what writes into the neighbour's group",
    "neighbour",
    reference=products,
    cases=((1, 1, 1), (1, 2, 5, True), (5, 3, 1), (7, 2, 31), (33, 3, 20), (37, 3, 16)),
    large=((300, 2, 5), (2, 70, 4), (2, 2, 260)),
    inputs=group_inputs,
    untouched="8c9d6348d161",
    right="Each program keeps to its own group, whatever its neighbours hold.",
    properties=PRODUCT,
    **KERNEL_CASES,
    mistakes={
        "no-mask": Mistake(
            "Take D = 20. How many columns has the tile, and whose are the last of them?",
            "The tile has 32, and from 20 on they are the next group's. For which places in `d` is your "
            "mask false?",
            "Three accesses go too far: let none of them have places where d is D or more.",
            gives=kernel_with_masks(ALL_PLACES, ALL_PLACES, ALL_PLACES),
        ),
        "only-store": Mistake(
            "The right places are stored. How many products does tl.dot sum up for each of them?",
            "As many as the tile has columns, and the next group's are among them: they have to be zero "
            "when they are loaded.",
            gives=kernel_with_masks(ALL_PLACES, ALL_PLACES),
        ),
        "only-loads": Mistake(
            "The sums are right now. To which columns does a program store, and whose are they?",
            "The zeros at its end go over the next group's results. What kept them out of the loads?",
            gives=kernel_with_masks(in_y=ALL_PLACES),
        ),
        "one-load": Mistake(
            "Group 1 of a case is NaN and infinite. What is 0 times these?",
            "NaN, so a zero from one side isn't enough. Which load still brings the next group?",
            "x has `d` along its columns, weight along its columns and its rows: mask all three.",
            gives=(kernel_with_masks(in_x=ALL_PLACES), kernel_with_masks(in_weight=ALL_PLACES)),
        ),
        "off-by-one": Mistake(
            "A group has D columns. What are the numbers of its first and of its last one?",
            "They are 0 and D - 1, and D is the neighbour's first. Which of these does yours let in?",
            gives=tuple(kernel_with_masks(*places) for places in (*ONE_OR_ALL, *-ONE_OR_ALL)),
        ),
        "no-other": Mistake(
            "A load leaves the masked places of its block alone. Which number stands there then?",
            "On a GPU whatever the register held before. Yours has to be one that adds nothing to a sum.",
            "tl.load takes it as `other`, in x as well as in weight.",
            gives=lambda x, weight: (
                products(x, weight) + (math.nan if tile_width(weight.shape[1]) > weight.shape[1] else 0.0)
            ),
        ),
    },
)

# ---- the bias ----------------------------------------------------------------------------------------------


def with_bias_at(place: Any) -> Any:
    """What comes out with other elements of bias, at ``place(row, group, d, G, D)``."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        G, D = bias.shape
        row, column = torch.arange(len(x))[:, None], torch.arange(G * D)
        at = place(row, column // D, column % D, G, D)
        values = bias.flatten()[at.clamp(max=G * D - 1)].where(at < G * D, math.nan)
        return products(x, weight) + values

    return gives


bias = Exercise(
    "write the bias epilogue",
    "with_bias",
    reference=lambda x, weight, bias: products(x, weight) + bias.flatten(),
    cases=((1, 1, 1), (5, 3, 1), (7, 4, 24), (40, 3, 20), (37, 3, 16), (3, 2, 33)),
    large=((300, 2, 5), (2, 70, 4), (2, 2, 260)),
    inputs=lambda R, G, D: group_inputs(R, G, D) | {"bias": torch.randn(G, D)},
    right="The bias costs one row a program; a kernel of its own would read and write all of y.",
    properties=PRODUCT,
    **KERNEL_CASES,
    mistakes={
        "no-bias": Mistake(
            "What comes out is the product alone. Does anything that you loaded reach total?",
            "A sum that has no name is gone: the store takes `total`.",
            gives=lambda x, weight, bias: products(x, weight),
        ),
        "first-row": Mistake(
            "Group 0 is right. Where in bias does the row of group 1 begin?",
            "Behind the D numbers of group 0. What does your address say of the group?",
            gives=with_bias_at(lambda row, group, d, G, D: d + 0 * row),
        ),
        "tile-width": Mistake(
            "Where D is 16 or 32 it's right. How long is a row of bias, D or BD?",
            "BD is the tile's width only: in memory one row follows the other without a gap.",
            gives=with_bias_at(lambda row, group, d, G, D: group * tile_width(D) + d),
        ),
        "by-rows": Mistake(
            "Does the bias of a column change from one row of x to the next?",
            "No, and `row` and `at` are places in x. Which two names does the address need?",
            gives=(
                with_bias_at(lambda row, group, d, G, D: (row * G + group) * D + d),
                with_bias_at(lambda row, group, d, G, D: row * D + d),
                with_bias_at(lambda row, group, d, G, D: row),
            ),
        ),
    },
    race=RaceSpec(
        GROUPED,
        {"einsum": grouped_reference, "torch.compile": grouped_reference, "labkit": grouped_linear},
        # a hundred groups, as wide as a tile and in between
        ({"batch": 4096, "groups": 100, "width": 64}, {"batch": 4096, "groups": 100, "width": 100}),
    ),
)
