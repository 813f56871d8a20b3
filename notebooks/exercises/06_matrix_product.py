"""Tasks of lesson 6: what is right, what people write instead, and what helps them on."""

from labkit import work
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import KERNEL_CASES, PRODUCT, elements_at

import math
from collections.abc import Callable
from functools import partial, reduce
from itertools import product as product_of
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from triton.tools.tensor_descriptor import TensorDescriptor

DEPTH = 32
"""Of a step along K: of the first product in all dtypes, of the one with descriptors in float32."""
RACE = RaceSpec(work.matmul, {"cuBLAS": linear}, ({"batch": 4096, "width": 4096},), counted=False)


HANDED_ROWS = 260
"""Rows of x in the case of the product in which the answer is told other sizes than its own."""
HANDED = 128, 64, 16, 2
"""BM, BN, BK and num_stages in that case."""


def depth_of(x: Tensor) -> int:
    """Columns of x in a step."""
    return HANDED[2] if len(x) == HANDED_ROWS else DEPTH


def matrices(M: int, N: int, K: int, poisoned: bool = False) -> dict[str, Any]:
    """x (M, K) and weight (N, K); poisoned: with rows of which no number may come into another row's sums."""
    given = {"x": torch.randn(M, K), "weight": torch.randn(N, K)}
    if poisoned:
        given["x"][-1], given["weight"][-1] = math.nan, math.inf
    return given


def reading_on(x: Tensor, weight: Tensor) -> Tensor:
    """What comes out when the last step takes what lies behind each row: the row below, NaN behind all."""
    columns = -(-x.shape[1] // depth_of(x)) * depth_of(x)
    a, b = (
        elements_at(each, torch.arange(len(each))[:, None] * x.shape[1] + torch.arange(columns))
        for each in (x, weight)
    )
    return a @ b.T


def column_first(x: Tensor, weight: Tensor, depth: int) -> Tensor:
    """What comes out when tiles of 128 rows of weight are loaded at [start, column]."""
    (N, K), y = weight.shape, x.new_zeros(len(x), len(weight))
    beyond = torch.nn.functional.pad(weight, (0, N + depth, 0, K + 128))
    for column, start in product_of(range(0, N, 128), range(0, K, depth)):
        tile = beyond[start : start + 128, column : column + depth]
        part = x[:, start : start + depth]
        y[:, column : column + 128] += (part @ tile[:, : part.shape[1]].T)[:, : N - column]
    return y


def rows_apart(matrix: Tensor, numbers: int) -> Tensor:
    """What loads bring when rows are taken to begin so many numbers apart."""
    rows, columns = matrix.shape
    return elements_at(matrix, torch.arange(rows)[:, None] * numbers + torch.arange(columns))


def in_steps(combine: Callable[[list[Tensor]], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """What ``combine`` makes of the products of all tiles along K."""

    def gives(x: Tensor, weight: Tensor) -> Tensor:
        depth = depth_of(x)
        return combine(list(map(linear, x.split(depth, 1), weight.split(depth, 1))))

    return gives


def doubled_in_each_step(x: Tensor, weight: Tensor) -> Tensor:
    """What comes out when each step adds the sums to themselves, too; in float32 it becomes infinite."""
    return in_steps(partial(reduce, lambda total, part: 2 * total + part))(x.float(), weight.float()).double()


def steps_of_one(x: Tensor, weight: Tensor) -> Tensor:
    """What comes out when the next step begins one number further on: early numbers come in less often."""
    times = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).clamp(max=depth_of(x))
    return linear(x * times, weight)


def begins_at_its_number(matrix: Tensor) -> Tensor:
    """The rows that come when tile t of 128 rows is loaded from row t on; zeros are behind the last one."""
    row = torch.arange(len(matrix))
    return torch.nn.functional.pad(matrix, (0, 0, 0, 128))[row // 128 + row % 128]


STEPS = {
    "last-step": Mistake(
        "Each step sets `total` anew. It has to go on from what it was: tl.dot adds its third argument.",
        gives=in_steps(lambda parts: parts[-1]),
    ),
    "not-kept": Mistake(
        "tl.dot returns the new sums, and leaves `total` as it is. Give them a name.",
        gives=in_steps(lambda parts: torch.zeros_like(parts[0])),
    ),
    "same-step": Mistake(
        "With K = 64 you get twice the product of the first 32 places. What changes from step to step?",
        gives=in_steps(lambda parts: len(parts) * parts[0]),
    ),
    "steps-of-one": Mistake(
        "range(0, K) takes K steps. How many numbers of a row does one step take?",
        "BK: the next step begins behind them, range(0, K, BK).",
        gives=steps_of_one,
    ),
    "added-twice": Mistake(
        "What tl.dot returns has `total` in it already. Add it once: by the third argument, or by +=.",
        gives=doubled_in_each_step,
    ),
}
"""What may happen to a loop over K."""

# ---- the product -------------------------------------------------------------------------------------------


def called(answer: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """Call the answer, with tiles of another size in one case, as the cells after it do."""
    return answer(x, weight, *HANDED) if len(x) == HANDED_ROWS else answer(x, weight)


def not_handed_on(call: Call) -> str:
    """Whether the launch of that case is not told what the answer was."""
    if len(call.passed["x"]) != HANDED_ROWS:
        return ""
    for _, given in call.launches.kernels:
        numbers = [value for value in given.values() if isinstance(value, int)]
        if given.get("num_stages") != HANDED[3] or not {*HANDED[:3]} <= {*numbers}:
            return f"it was called with BM, BN, BK and num_stages of {HANDED}, and the kernel with others."
    return ""


product = Exercise(
    "the product",
    "product",
    reference=linear,
    cases=((1, 1, 1), (5, 3, 31), (37, 66, 70)),
    large=(
        (4, 3, 33, True),
        (3, 5, 64),
        (2, 3, 1030),
        (HANDED_ROWS, 140, 70),
        (2, 260, 33),
        (1, 1, 8300),
        (3, 5, 0),
    ),
    vast=((40, 1_000_000, 2200), (2**26 + 1, 40, 40)),
    inputs=matrices,
    call=called,
    right="Each number that a program loads is used 64 times, and nothing beyond a tensor is loaded.",
    properties=(
        *PRODUCT,
        Property(
            "not-handed-on",
            not_handed_on,
            "Your function is told how large the tiles are, and how many stages there are. Who has to know?",
            "The grid, and the launch: later cells call it with other ones.",
        ),
    ),
    **KERNEL_CASES,
    mistakes={
        **STEPS,
        "row-length": Mistake(
            "How many numbers has a row of weight, and how many a row of x? The next row begins behind them.",
            "K: number k of row n lies at weight + n * K + k, and x has rows of K numbers, too.",
            gives=(
                lambda x, weight: x @ rows_apart(weight, len(weight)).T,
                lambda x, weight: rows_apart(x, len(x)) @ weight.T,
            ),
        ),
        "turned-weight": Mistake(
            "weight is (N, K): number k of row n lies at weight + n * K + k.",
            gives=lambda x, weight: x @ weight.reshape(weight.shape[::-1]),
        ),
        "no-mask": Mistake(
            "Try K = 32, 64 and 33. Which come out right, and what does the last tile of the other hold?",
            "Part of the next row. Join a condition on `k` to the one on rows by &, in both loads.",
            gives=reading_on,
        ),
    },
    race=RACE,
)


# ---- the product with descriptors --------------------------------------------------------------------------


def no_descriptors(call: Call) -> str:
    """Whether tiles are loaded from addresses."""
    given = [value for _, arguments in call.launches.kernels for value in arguments.values()]
    count = sum(isinstance(value, TensorDescriptor) for value in given)
    found = ("no descriptor", "only one descriptor")[count] if count < 2 else ""
    return f"the result is right, and {found} has a part in it." if found else ""


described = Exercise(
    "the product with descriptors",
    "described",
    reference=linear,
    cases=((1, 1, 8), (5, 19, 40), (33, 40, 72)),
    large=((2, 3, 264), (130, 3, 40), (2, 140, 24), (1, 1, 8296)),
    vast=((4096, 4096, 512), (2**26 + 1, 40, 40)),
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
        "blocks": Mistake(
            "x.load takes two numbers, the first row and the first column: [tl.program_id(0) * BM, start].",
            raises=r"[Ee]xpected a scalar|'int' object is not (iterable|subscriptable).*\n.*\.load\(\[",
        ),
        "wide-row": Mistake(
            "Row and column of x.load have 32 bits: [tl.program_id(0) * BM, start], as it is.",
            "64 bits are for an address, as the one of the store, where a row is multiplied by N.",
            raises="only support 32 bit|Expected a 32-bit integer",
        ),
        "tile-for-row": Mistake(
            "In which row does tile 1 begin?",
            "In row BM of x, and row BN of weight: tl.program_id counts tiles.",
            gives=(
                lambda x, weight: linear(begins_at_its_number(x), weight),
                lambda x, weight: linear(x, begins_at_its_number(weight)),
                lambda x, weight: linear(begins_at_its_number(x), begins_at_its_number(weight)),
            ),
        ),
        "column-first": Mistake(
            "weight.load([row, column]): which of your two numbers says where in N the tile begins?",
            "The first one: weight lies as (N, K). Only the tile that comes is turned.",
            gives=tuple(partial(column_first, depth=depth) for depth in (DEPTH, 2 * DEPTH)),
        ),
        "turned-tile": Mistake(
            "weight.load([row, column]) brings a tile (BN, BK), as weight lies: row first, then column.",
            "tl.dot wants (BK, BN) there: `b.T` is the tile turned.",
            raises="equal reduction dimensions",
        ),
        "step-for-column": Mistake(
            "The second number is a column of the matrix. In which column does step 1 begin, if BK is 32?",
            "In column 32: range(0, K, BK) counts columns. A number that counts steps has to be times BK.",
            raises=r"16-byte aligned.*\n.*\.load\(",
        ),
        "own-launch": Mistake(
            "A descriptor's rows begin at multiples of 16 bytes. What becomes of a matrix whose rows do not?",
            "launch_described copies such a matrix first, and makes both descriptors.",
            raises=r"16-byte aligned.*\n.*(from_tensor|TensorDescriptor)\(",
        ),
        "pointer": Mistake(
            "x.load([row, column]) gives the whole tile that begins there: no addresses, and no mask.",
            raises=r"tl\.load\(|descriptor.*(\+|add)|(\+|add).*descriptor",
        ),
    },
    race=RACE,
)
