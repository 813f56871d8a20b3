"""Tasks of lesson 7: what is right, what people write instead, and what helps them on."""

from labkit import work
from labkit.exercises.engine import Exercise, Mistake, RaceSpec, case_values
from labkit.exercises.properties import KERNEL_CASES, PRODUCT, elements_at

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

layer = work.linear_gelu.reference

# ---- what an epilogue saves --------------------------------------------------------------------------------

COUNTS = {"operations": 2, "moved": 2}
"""Operations for each number of the result and column of x; tensors that the second kernel moves."""


def parts(
    rows: int,
    width: int,
    out: int,
    itemsize: int,
    bytes_per_us: float,
    operations_per_us: float,
    **changes: int,
) -> tuple[float, float]:
    """The time of the product and of the second kernel, perhaps with other counts."""
    n = COUNTS | changes
    product = n["operations"] * rows * width * out / operations_per_us
    return product, n["moved"] * rows * out * itemsize / bytes_per_us


def gain(**changes: int) -> Callable[..., float]:
    """How many times as fast, perhaps with other counts."""

    def gives(*given: Any) -> float:
        product, second = parts(*given, **changes)
        return (product + second) / product

    return gives


def of_parts(combine: Callable[[float, float], float]) -> Callable[..., float]:
    """What ``combine`` makes of the two times."""
    return lambda *given: combine(*parts(*given))


best = Exercise(
    "what an epilogue saves",
    "best_gain",
    reference=gain(),
    # In all of them the product's arithmetic takes longer than its bytes.
    cases=((8192, 512, 4096, 2, 4.2e6, 8e8), (2048, 4096, 300, 2, 2e6, 3e8), (4096, 512, 4096, 4, 1e6, 5e7)),
    inputs=case_values("rows", "width", "out", "itemsize", "bytes_per_us", "operations_per_us"),
    tolerance=0.005,
    right="It is 1 + itemsize * operations_per_us / (width * bytes_per_us): the wider, the less.",
    mistakes={
        "multiplications-only": Mistake(
            "How many operations does each number of the result take for one column of x?",
            "A multiplication and an addition: two.",
            gives=gain(operations=1),
        ),
        "one-way": Mistake(
            "What does the second kernel do with each number besides computing?",
            "It loads it and stores it: two tensors of rows x out cross memory.",
            gives=gain(moved=1),
        ),
        "share": Mistake(
            "Without the second kernel, what is left of the time? And how many times as fast is that?",
            "The time before over the time after: (product + second) / product.",
            gives=(
                of_parts(lambda product, second: product / (product + second)),
                of_parts(lambda product, second: second / product),
                of_parts(lambda product, second: product / second),
                of_parts(lambda product, second: second / (product + second)),
            ),
        ),
        "width-for-out": Mistake(
            "Which shape has the tensor that goes from one kernel to the other?",
            "It is the result of the product: rows x out.",
            gives=lambda rows, width, out, itemsize, bytes_per_us, operations_per_us: (
                1 + 2 * rows * width * itemsize / bytes_per_us / (2 * rows * width * out / operations_per_us)
            ),
        ),
    },
)

# ---- the epilogue ------------------------------------------------------------------------------------------


def layer_inputs(M: int, N: int, K: int) -> dict[str, Any]:
    """x (M, K), weight (N, K) and bias (N,): z has a standard deviation of 1.4."""
    return {"x": torch.randn(M, K), "weight": torch.randn(N, K) / K**0.5, "bias": torch.randn(N)}


LARGE, DEPTH = 128, 32
"""Rows and columns of a tile, and its columns of x in float32."""


def bias_at(place: Callable[[Tensor, Tensor], Tensor], beyond: float = 0.0) -> Any:
    """What comes out with the bias at ``place(row, column)``; ``beyond`` stands behind the last one."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = linear(x, weight)
        row, col = torch.arange(len(x))[:, None].expand(z.shape), torch.arange(len(weight)).expand(z.shape)
        return gelu(z + elements_at(bias, place(row, col), beyond), approximate="tanh")

    return gives


def in_each_step(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What ``change(sums, bias)`` makes of the sums after each step of the loop."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        sums = x.new_zeros(len(x), len(weight))
        for a, b in zip(x.split(DEPTH, 1), weight.split(DEPTH, 1), strict=True):
            sums = change(sums + linear(a, b), bias)
        return sums

    return gives


epilogue = Exercise(
    "an epilogue of bias and GELU",
    "linear_gelu",
    reference=layer,
    cases=((1, 1, 8), (5, 19, 40), (33, 40, 72)),
    large=((2, 3, 264), (130, 3, 8), (2, 140, 24), (1, 1, 2104)),
    vast=((2**26 + 1, 40, 40),),
    inputs=layer_inputs,
    right="The sums never reach memory: one tensor is written, and no second kernel touches it again.",
    properties=PRODUCT,
    **KERNEL_CASES,
    mistakes={
        "bias-after": Mistake(
            "Where is b in the formula: inside of gelu, or outside?",
            "Add it to the sums, and give the result to GELU.",
            gives=lambda x, w, b: gelu(linear(x, w), approximate="tanh") + b,
        ),
        "bias-by-row": Mistake(
            "Take weights of zero. Does your result change along a row, or along a column?",
            "bias has N numbers, one for each column. As [None, :] a block of BN numbers is a row.",
            gives=(
                bias_at(lambda row, col: row),
                bias_at(lambda row, col: row, math.nan),
                bias_at(lambda row, col: col // LARGE * LARGE + row % LARGE),
                bias_at(lambda row, col: col // LARGE * LARGE + row % LARGE, math.nan),
            ),
        ),
        "first-bias": Mistake(
            "Take weights of zero, and look at a row of the result with N = 140. Which biases are in it?",
            "A tile needs those of its own columns: load at bias + n.",
            gives=(bias_at(lambda row, col: 0 * col), bias_at(lambda row, col: col % LARGE)),
            when=lambda calls: any(call.want.shape[1] > LARGE for call in calls),
        ),
        "no-gelu": Mistake(
            "Look at the results below zero. What does GELU make of them?",
            "Call gelu on the sums and the bias before you store.",
            gives=linear,
        ),
        "in-the-loop": Mistake(
            "How often is the bias added, and how often is GELU applied?",
            "Once for each result, when the loop is over: move it below the loop.",
            gives=(
                in_each_step(lambda sums, bias: gelu(sums + bias, approximate="tanh")),
                lambda x, w, b: gelu(
                    in_each_step(lambda sums, bias: sums + bias)(x, w, b), approximate="tanh"
                ),
            ),
        ),
        "erf": Mistake(
            "It's right to three digits. GELU has two forms: which one does the text ask for?",
            "The one with tanh, which the lesson's `gelu` computes.",
            gives=lambda x, w, b: gelu(linear(x, w) + b),
        ),
    },
    race=RaceSpec(
        work.linear_gelu,
        {"PyTorch": layer, "torch.compile": layer},
        ({"batch": 8192, "width": 512, "out": 4096},),
        roundings=3,
    ),
)
