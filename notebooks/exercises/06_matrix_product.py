"""Tasks of lesson 6: what is right, what people write instead, and what helps them on."""

from labkit import work
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import KERNEL_CASES, PRODUCT, elements_at

import inspect
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from triton.tools.tensor_descriptor import TensorDescriptor

DEPTH = 32
"""Of a step along K: of the first product in all dtypes, of the one with descriptors in float32."""
RACE = RaceSpec(work.matmul, {"cuBLAS": linear}, ({"batch": 4096, "width": 4096},), counted=False)


def matrices(M: int, N: int, K: int) -> dict[str, Any]:
    """x (M, K) and weight (N, K)."""
    return {"x": torch.randn(M, K), "weight": torch.randn(N, K)}


def loaded(operand: Tensor, step: int, columns: int = 0) -> Tensor:
    """What comes in when rows are taken to begin ``step`` elements apart, and to have so many columns."""
    columns = columns or operand.shape[1]
    return elements_at(operand, torch.arange(len(operand))[:, None] * step + torch.arange(columns))


def reaching(places: int) -> tuple[Any, ...]:
    """What comes out when loads let so many places beyond K through: both of them, that of x, of weight."""

    def product(x: Tensor, weight: Tensor, too_far: tuple[bool, bool]) -> Tensor:
        K = x.shape[1]
        columns = min(K + places, -(-K // DEPTH) * DEPTH)
        a, b = (
            loaded(each, K, columns) if far else pad(each, (0, columns - K))
            for each, far in zip((x, weight), too_far, strict=True)
        )
        return a @ b.T

    return tuple(partial(product, too_far=each) for each in ((True, True), (True, False), (False, True)))


def in_steps(combine: Callable[[list[Tensor]], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """What ``combine`` makes of the products of all tiles along K."""
    return lambda x, weight: combine(list(map(linear, x.split(DEPTH, 1), weight.split(DEPTH, 1))))


STEPS = {
    "first-step": Mistake(
        "Where K is at most 32 it's right. Which numbers does your program never load when K is larger?",
        "One tl.dot covers BK places along K. Repeat it for start in range(0, K, BK), with `k` moved on.",
        gives=in_steps(lambda parts: parts[0]),
    ),
    "last-step": Mistake(
        "With a larger K the result is the product of the last step alone. What became of the others?",
        "Each step sets `total` anew. It has to go on from what it was: tl.dot adds its third argument.",
        gives=in_steps(lambda parts: parts[-1]),
    ),
    "not-kept": Mistake(
        "All of y is 0, as `total` was in the beginning. What does tl.dot do with its result?",
        "It returns the new sums, and leaves `total` as it is. Give them a name.",
        gives=in_steps(lambda parts: 0 * parts[0]),
    ),
    "added-twice": Mistake(
        "Where K is at most 32 it's right. What does tl.dot return when you hand it `total`?",
        "Its result has `total` in it already. Add it once: by the third argument, or by +=.",
        gives=in_steps(partial(reduce, lambda total, part: 2 * total + part)),
    ),
    "whole-tiles": Mistake(
        "Where K is no multiple of BK, what happens to the last places of a row?",
        "They belong to the sum, too: let the loop run to K. What lies beyond K is 0.",
        gives=lambda x, w: linear(x[:, : (end := x.shape[1] // DEPTH * DEPTH)], w[:, :end]),
    ),
    "sums-in-16-bits": Mistake(
        "In float32 it works. In which dtype does tl.dot give its sums, and in which did yours begin?",
        "Sums need float32, whatever x is: tl.zeros([BM, BN], tl.float32). Only the store rounds.",
        raises=r"AssertionError(?!.*(reduction dimensions|same dtype)).*\n.*tl\.dot\(",
    ),
}
"""What may happen to a loop over K."""

# ---- the product -------------------------------------------------------------------------------------------


def called(answer: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """Call the answer, with tiles of another size in one case, as the cells after it do."""
    return answer(x, weight, 128, 128, 32) if len(x) == 260 else answer(x, weight)


product = Exercise(
    "the product",
    "product",
    reference=linear,
    cases=((1, 1, 1), (5, 3, 31), (37, 66, 70)),
    large=((3, 5, 64), (2, 3, 1030), (260, 140, 70), (2, 260, 33), (1, 2, 2100), (3, 5, 0)),
    vast=((40, 1_000_000, 2200), (2**26 + 1, 40, 40)),
    inputs=matrices,
    call=called,
    right="Each number that a program loads is used 64 times, and nothing beyond a tensor is loaded.",
    properties=PRODUCT,
    **KERNEL_CASES,
    mistakes={
        **STEPS,
        "same-step": Mistake(
            "With K = 64 you get twice the product of the first 32 places. What changes from step to step?",
            "The places along K are start to start + BK.",
            gives=in_steps(lambda parts: len(parts) * parts[0]),
        ),
        "row-length": Mistake(
            "Row 0 of x and row 0 of weight give the right number. Where does row 1 of each begin?",
            "Rows lie one behind the other, with K numbers each: place k of row r of x is x + r * K + k.",
            gives=(
                lambda x, weight: linear(loaded(x, 1), loaded(weight, 1)),
                lambda x, weight: linear(loaded(x, 1), weight),
                lambda x, weight: linear(x, loaded(weight, 1)),
                lambda x, weight: linear(x, loaded(weight, len(weight))),
            ),
        ),
        "turned-weight": Mistake(
            "How many rows has weight, and how many numbers has each of them?",
            "weight is (N, K): number k of row n lies at weight + n * K + k.",
            gives=lambda x, weight: x @ weight.reshape(weight.shape[::-1]),
        ),
        "no-mask": Mistake(
            "Try K = 32, 64 and 33. Which come out right, and what does the last tile of the other hold?",
            "Part of the next row. Join a condition on `k` to the one on rows by &, in both loads.",
            gives=reaching(DEPTH)[0],
        ),
        "off-by-one": Mistake(
            "A row has K places. What are the numbers of its first and of its last one?",
            "They are 0 and K - 1. Put K - 1 and K into your condition: only the first may be true.",
            gives=(*reaching(1), lambda x, weight: linear(x[:, :-1], weight[:, :-1])),
        ),
    },
    race=RACE,
)


# ---- the product with descriptors --------------------------------------------------------------------------

TILE = 128
"""Rows and columns of a tile, as the scaffold launches it."""
Corner = Callable[[int, int], tuple[int, int]]


def taken(matrix: Tensor, corner: tuple[int, int]) -> Tensor:
    """The tile (TILE, DEPTH) that begins at a row and a column, with zeros beyond the matrix."""
    row, column = corner
    tile = matrix[row : row + TILE, column : column + DEPTH]
    return pad(tile, (0, DEPTH - tile.shape[1], 0, TILE - tile.shape[0]))


def from_corners(of_x: Corner, of_w: Corner) -> Callable[[Tensor, Tensor], Tensor]:
    """What comes out when program p of an axis takes its tiles at ``of_x(p, start)``, ``of_w(p, start)``."""

    def gives(x: Tensor, weight: Tensor) -> Tensor:
        y = x.new_zeros(len(x), len(weight))
        for m in range(0, len(x), TILE):
            for n in range(0, len(weight), TILE):
                sums = sum(
                    taken(x, of_x(m // TILE, start)) @ taken(weight, of_w(n // TILE, start)).T
                    for start in range(0, x.shape[1], DEPTH)
                )
                part = y[m : m + TILE, n : n + TILE]
                part += sums[: len(part), : part.shape[1]]
        return y

    return gives


def corner(p: int, start: int) -> tuple[int, int]:
    """Where a tile begins."""
    return p * TILE, start


def swapped(p: int, start: int) -> tuple[int, int]:
    """Column before row."""
    return start, p * TILE


def number(p: int, start: int) -> tuple[int, int]:
    """The number of the tile, and not of its first row."""
    return p, start


def no_descriptors(call: Call) -> str:
    """Whether tiles are loaded from addresses."""
    given = [value for _, arguments in call.launches.kernels for value in arguments.values()]
    made = any(
        "make_tensor_descriptor" in inspect.getsource(kernel.fn) for kernel, _ in call.launches.kernels
    )
    there = made or any(isinstance(value, TensorDescriptor) for value in given)
    return "" if there else "the result is right, and no descriptor has a part in it."


described = Exercise(
    "the product with descriptors",
    "described",
    reference=linear,
    cases=((1, 1, 8), (5, 19, 40), (33, 40, 72)),
    large=((2, 3, 264), (130, 3, 40), (2, 140, 24), (1, 1, 2104)),
    vast=((2**26 + 1, 40, 40),),
    inputs=matrices,
    right="To load, nobody computes addresses or masks: one thread asks for a whole tile.",
    properties=(
        *PRODUCT,
        Property(
            "no-descriptors",
            no_descriptors,
            "Where do your loads get their addresses and masks from?",
            "From nowhere: launch_described hands x and weight in as descriptors, and x.load([row, column]) "
            "brings a tile.",
        ),
    ),
    **KERNEL_CASES,
    mistakes={
        **STEPS,
        "same-step": Mistake(
            "With K = 64 you get twice the product of the first 32 places. What changes from step to step?",
            "The tile of a step begins at column `start`.",
            gives=in_steps(lambda parts: len(parts) * parts[0]),
        ),
        "swapped": Mistake(
            "Of [row, column], which one moves from step to step?",
            "The rows stay, and the columns begin at `start`: x.load([tl.program_id(0) * BM, start]).",
            gives=(
                from_corners(swapped, swapped),
                from_corners(swapped, corner),
                from_corners(corner, swapped),
            ),
        ),
        "number-for-row": Mistake(
            "With M = 130 there are two tiles of rows. At which row does the second one begin?",
            "At tl.program_id(0) * BM. A descriptor counts rows, and not tiles.",
            gives=(from_corners(number, number), from_corners(number, corner), from_corners(corner, number)),
        ),
        "blocks": Mistake(
            "What does x.load take: all places of a tile, or where the tile begins?",
            "Two numbers, the first row and the first column: [tl.program_id(0) * BM, start].",
            raises=r"[Ee]xpected a scalar",
        ),
        "step-for-column": Mistake(
            "At which column begins the tile of the second step?",
            "At BK: a descriptor counts columns, and not steps.",
            raises=r"must be 16-byte aligned.*\n.*\.load\(",
        ),
        "rows-not-aligned": Mistake(
            "A descriptor wants rows that begin at multiples of 16 bytes. Which K has such rows in 16 bits?",
            "Multiples of 8. For the others launch_described copies x and weight, by aligned_rows.",
            raises="must be 16-byte aligned",
        ),
        "pointer": Mistake(
            "x and weight are no addresses here. What can you ask of a descriptor?",
            "x.load([row, column]) gives the whole tile that begins there: no addresses, and no mask.",
            raises=r"tl\.load\(|descriptor.*(\+|add)|(\+|add).*descriptor",
        ),
    },
    race=RACE,
)
