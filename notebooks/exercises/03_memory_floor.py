"""Tasks of lesson 3: what is right, what people write instead, and what helps them on."""

from labkit import work
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import (
    KERNEL,
    KERNEL_CASES,
    NO_OTHER,
    POINTWISE,
    READ_ONCE,
    column_mistakes,
    elements_at,
)

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# ---- the floor of nn.Linear --------------------------------------------------------------------------------


def floor_inputs(rows: int, width: int, itemsize: int, terabytes: float, teraflops: float) -> dict[str, Any]:
    """The arguments, with the rates of a GPU in a second."""
    return {
        "rows": rows,
        "width": width,
        "itemsize": itemsize,
        "bytes_per_us": terabytes * 1e6,
        "operations_per_us": teraflops * 1e6,
    }


Terms = Callable[[int, int, int], tuple[float, float]]
"""From rows, width and itemsize to bytes and operations."""


def floor_of(terms: Terms, of: Callable[[float, float], float] = max) -> Callable[..., float]:
    """The floor where bytes and operations are these, and ``of`` makes one time of the two."""

    def gives(rows: int, width: int, itemsize: int, bytes_per_us: float, operations_per_us: float) -> float:
        moved, operations = terms(rows, width, itemsize)
        return of(moved / bytes_per_us, operations / operations_per_us)

    return gives


def floor_of_times(memory: Callable[[int, int, int, float], float]) -> Callable[..., float]:
    """The floor where the time of the bytes is this, from rows, width, itemsize and the memory's rate."""
    return lambda B, N, e, rate, operations: max(memory(B, N, e, rate), 2 * B * N * N / operations)


def right_terms(B: int, N: int, e: int) -> tuple[float, float]:
    """x, the matrix and y once; a multiplication and an addition for each row and number of the matrix."""
    return (2 * B * N + N * N) * e, 2 * B * N * N


floor = Exercise(
    "the floor of nn.Linear",
    "linear_floor_us",
    reference=floor_of(right_terms),
    cases=(
        (32768, 1024, 4, 3.0, 50.0),
        (32768, 160, 2, 3.0, 650.0),
        (256, 4096, 4, 2.0, 60.0),
        (64, 4096, 2, 3.0, 700.0),
        (1024, 1024, 2, 1.5, 150.0),
        (4096, 64, 4, 3.0, 700.0),
    ),
    inputs=floor_inputs,
    tolerance=0.01,
    right="The longer of the two decides, and which one that is depends on the sizes.",
    mistakes={
        "sum": Mistake(
            "Loads and arithmetic go on at the same time: take the longer one, with max.",
            gives=floor_of(right_terms, lambda memory, arithmetic: memory + arithmetic),
        ),
        "one-way": Mistake(
            "Data goes into the kernel and out of it. Which one do you count?",
            gives=floor_of(lambda B, N, e: ((B * N + N * N) * e, 2 * B * N * N)),
        ),
        "no-matrix": Mistake(
            "With few rows x and y are small. What else does the layer read?",
            "The matrix, N * N numbers.",
            gives=floor_of(lambda B, N, e: (2 * B * N * e, 2 * B * N * N)),
        ),
        "one-of-two": Mistake(
            "Some of these cases are limited by their bytes, others by their operations. How do you choose?",
            "The layer is done when both are: the longer of the two times, max, is the floor. (If you take "
            "it: is your number of operations far too small?)",
            gives=(
                floor_of(right_terms, min),
                floor_of(right_terms, lambda memory, _: memory),
                floor_of(right_terms, lambda _, arithmetic: arithmetic),
            ),
        ),
        "not-each": Mistake(
            "A number of y is a sum of N products. So how many operations do all B * N numbers take?",
            "2 * B * N * N. Their size does not depend on the dtype: only bytes have itemsize in them.",
            gives=(
                floor_of(lambda B, N, e: ((2 * B * N + N * N) * e, 2 * B * N)),
                floor_of(lambda B, N, e: ((2 * B * N + N * N) * e, 2 * B * N * N * e)),
            ),
        ),
        "numbers-for-bytes": Mistake(
            "Which numbers move, and how many bytes has each of them? Does your sum count all in bytes?",
            "(2 * B * N + N * N) * itemsize: those of the matrix have itemsize bytes, too.",
            gives=(
                floor_of(lambda B, N, e: (2 * B * N * e + N * N, 2 * B * N * N)),
                floor_of(lambda B, N, e: (2 * B * N + N * N, 2 * B * N * N)),
                floor_of(lambda B, N, e: (2 * B * N + N * N * e, 2 * B * N * N)),
            ),
        ),
        "brackets": Mistake(
            "Your time is thousands of times too long. Which of the terms that you add up are not in µs?",
            "All bytes are divided by the rate, not the last term only: put brackets around their sum.",
            gives=tuple(
                floor_of_times(memory)
                for memory in (
                    lambda B, N, e, rate: 2 * B * N + N * N * e / rate,
                    lambda B, N, e, rate: 2 * B * N * e + N * N * e / rate,
                    lambda B, N, e, rate: 2 * B * N + N * N / rate,
                )
            ),
        ),
        "each-again": Mistake(
            "At its floor a layer loads each number once. How many numbers have x, the matrix and y?",
            "x and y have B * N numbers each, the matrix N * N: the bytes are those of their sum.",
            gives=(
                floor_of(lambda B, N, e: (2 * B * N * N * e, 2 * B * N * N)),
                floor_of(lambda B, N, e: (B * N * N * e, 2 * B * N * N)),
                floor_of(lambda B, N, e: (2 * B * N * N * N * e, 2 * B * N * N)),
            ),
        ),
        "one-operation": Mistake(
            "A result is a sum of products. How many operations does each term of the sum cost?",
            gives=floor_of(lambda B, N, e: ((2 * B * N + N * N) * e, B * N * N)),
        ),
    },
)

# ---- loads ahead of the stores -----------------------------------------------------------------------------

LANES = 128
"""Elements that one load may bring: one for each thread."""


def loaded_late(call: Call) -> str:
    """Of a call with a single program: whether it loads from x after it has stored."""
    x, made = call.passed["x"], call.launches
    if not 0 < x.numel() <= 4 * LANES:  # the stores of several programs
        return ""
    first, last = x.data_ptr(), x.data_ptr() + x.nbytes
    late = sum(
        any(map(len, made.stores[:before])) and bool(((addresses >= first) & (addresses < last)).any())
        for addresses, before in zip(made.loads, made.stores_before, strict=True)
    )
    several = "1 load from x comes" if late == 1 else f"{late} loads from x come"
    return f"{several} behind a store." if late else ""


def loaded_wide(call: Call) -> str:
    """Whether a load brings more than one element for each thread, of which there are 128."""
    if any(given.get("num_warps", 4) != 4 for _, given in call.launches.kernels):
        return "num_warps changes how many threads a program has."
    widest = max((len(addresses) for addresses in call.launches.loads), default=0)
    return (
        f"one load brings {widest} elements, which is more than one for each thread."
        if widest > LANES
        else ""
    )


def loaded_apart(call: Call) -> str:
    """Whether the elements of x that one load brings are no neighbours."""
    x = call.passed["x"]
    first, last = x.data_ptr(), x.data_ptr() + x.nbytes
    for addresses in call.launches.loads:
        mine = sorted(addresses[(addresses >= first) & (addresses < last)].tolist())
        if any(later - sooner > x.itemsize for sooner, later in pairwise(mine)):
            return "the elements of one load from x are no neighbours."
    return ""


def last_of_four(x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """x and the row's numbers as they are in the last of the four blocks of a program, in place of each."""
    at = torch.arange(x.numel())
    last = at // 512 * 512 + 3 * LANES + at % LANES
    return elements_at(x, last).view(x.shape), row[last % x.shape[1]].view(x.shape)


def one_name_for_all(x: Tensor, row: Tensor) -> Tensor:
    """What comes out when the four products have one name."""
    return torch.mul(*last_of_four(x, row))


def one_name_for_loads(x: Tensor, row: Tensor) -> Tensor:
    """What comes out when the four loads have one name."""
    return last_of_four(x, row)[0] * row


def one_name_multiplied(x: Tensor, row: Tensor) -> Tensor:
    """What comes out when that one block is multiplied again before each store."""
    at = torch.arange(x.numel())
    first, block = at // 512 * 512 + at % LANES, at % 512 // LANES
    total = last_of_four(x, row)[0].flatten()
    for i in range(4):
        total = torch.where(block >= i, total * row[(first + LANES * i) % x.shape[1]], total)
    return total.view(x.shape)


def row_inputs(rows: int, width: int, infinite: bool = False) -> dict[str, Any]:
    """x (rows, width) and row (width,); perhaps some of x are NaN or infinite."""
    x = torch.randn(rows, width)
    if infinite:
        x[0, 1], x[-1, 2] = torch.nan, torch.inf
    return {"x": x, "row": torch.randn(width)}


ahead = Exercise(
    "x * row, loads ahead",
    "ahead",
    reference=torch.mul,
    cases=((1, 1), (3, 5), (37, 33), (1, 512)),
    large=((5, 640), (21, 5000), (2, 300, True)),
    vast=((500_000, 40),),
    inputs=row_inputs,
    **KERNEL_CASES,
    properties=(
        KERNEL,
        *(each for each in POINTWISE if each is not NO_OTHER),  # nothing is summed up: NaN is a lost element
        READ_ONCE,
        Property(
            "not-ahead",
            loaded_late,
            "Read your kernel from top to bottom: does a load from x stand below a store?",
            "Load all four first, each into a name of its own; then multiply; then store all four.",
            contiguous_only=True,
        ),
        Property(
            "wide-loads",
            loaded_wide,
            "How many elements has the block of places that you load from, and how many threads share them?",
            "128 for 128 threads, as in one_by_one_kernel: the kernel differs from it in one thing only. The "
            "launch leaves num_warps as it is.",
        ),
        Property(
            "loads-apart",
            loaded_apart,
            "In one load of one_by_one_kernel, how far apart are the elements of neighbouring threads?",
            "They are neighbours. Load at `at`, at + 128, at + 256 and at + 384.",
            contiguous_only=True,
        ),
    ),
    right="All four loads are on their way before the first store.",
    race=RaceSpec(work.row_product, {"PyTorch": torch.mul}, ({"batch": 32768, "width": 1024},)),
    mistakes={
        "one-name": Mistake(
            "All four stores store the values of the last load. Under which names are the other three kept?",
            "Each needs a name of its own: value, value1, value2, value3.",
            gives=(one_name_for_all, one_name_for_loads, one_name_multiplied),
        ),
        **column_mistakes(torch.mul),
    },
)
