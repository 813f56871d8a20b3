"""Tasks of lesson 7: what is right, what people write instead, and what helps them on."""

from labkit import work
from labkit.exercises import common_hints
from labkit.exercises.engine import Exercise, Mistake, RaceSpec, case_values
from labkit.exercises.properties import KERNEL_CASES, PRODUCT, elements_at, wrong_exactly_where

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

layer = work.linear_gelu.reference

# ---- what an epilogue saves --------------------------------------------------------------------------------


def of_times(combine: Callable[[float, float], float]) -> Callable[..., float]:
    """What ``combine`` makes of the times of the product and of the second kernel."""

    def gives(
        rows: int, width: int, out: int, itemsize: int, bytes_per_us: float, operations_per_us: float
    ) -> float:
        product = 2 * rows * width * out / operations_per_us
        return combine(product, 2 * rows * out * itemsize / bytes_per_us)

    return gives


best = Exercise(
    "what an epilogue saves",
    "best_gain",
    reference=of_times(lambda product, second: (product + second) / product),
    # In all of them the product's arithmetic takes longer than its bytes, and in the last one the second
    # kernel takes longer than the product.
    cases=(
        *((8192, 512, 4096, 2, 4.2e6, 8e8), (2048, 4096, 300, 2, 2e6, 3e8), (4096, 512, 4096, 4, 1e6, 5e7)),
        (8192, 256, 4096, 2, 2e6, 4e8),
    ),
    inputs=case_values("rows", "width", "out", "itemsize", "bytes_per_us", "operations_per_us"),
    tolerance=0.005,
    right="It is 1 + itemsize * operations_per_us / (width * bytes_per_us): the wider, the less.",
    mistakes={
        "multiplications-only": Mistake(
            "How many operations does each number of the result take for one column of x?",
            gives=of_times(lambda product, second: (product / 2 + second) / (product / 2)),
        ),
        "one-way": Mistake(
            "The second kernel loads each number and stores it: two tensors of rows x out cross memory.",
            gives=of_times(lambda product, second: (product + second / 2) / product),
        ),
        "share": Mistake(
            "The time before over the time after: (product + second) / product.",
            gives=(
                of_times(lambda product, second: second / product),
                of_times(lambda product, second: product / (product + second)),
            ),
        ),
    },
)

# ---- the epilogue ------------------------------------------------------------------------------------------


def layer_inputs(M: int, N: int, K: int, size: float = 1.0) -> dict[str, Any]:
    """x (M, K), weight (N, K) and bias (N,): z has a standard deviation of 1.4, or of some ``size``."""
    return {"x": size * torch.randn(M, K), "weight": torch.randn(N, K) / K**0.5, "bias": torch.randn(N)}


LARGE, DEPTH = 128, 32
"""Rows and columns of a tile, and its columns of x in float32."""


def bias_at(place: Callable[[Tensor, Tensor], Tensor], beyond: float = 0.0) -> Any:
    """What comes out with the bias at ``place(row, column)``; ``beyond`` stands behind the last one."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = linear(x, weight)
        row, col = torch.arange(len(x))[:, None].expand(z.shape), torch.arange(len(weight)).expand(z.shape)
        return gelu(z + elements_at(bias, place(row, col), beyond), approximate="tanh")

    return gives


def bias_in_each_step(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What comes out when each step of the loop adds the bias."""
    return layer(x, weight, len(x.split(DEPTH, 1)) * bias)


def epilogue_in_each_step(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What comes out when each step of the loop adds the bias and applies GELU to the sums."""
    total = torch.zeros((), dtype=x.dtype)
    for a, b in zip(x.split(DEPTH, 1), weight.split(DEPTH, 1), strict=True):
        total = gelu(total + linear(a, b) + bias, approximate="tanh")
    return total


epilogue = Exercise(
    "an epilogue of bias and GELU",
    "linear_gelu",
    reference=layer,
    cases=((1, 1, 8), (5, 19, 40), (33, 40, 72)),
    large=((2, 3, 264), (130, 3, 8), (2, 140, 24), (1, 1, 8296), (3, 5, 40, 50.0)),
    vast=((8192, 4096, 512), (2**26 + 1, 40, 40)),
    inputs=layer_inputs,
    right="The sums never reach memory: one tensor is written, and no second kernel touches it again.",
    properties=PRODUCT,
    **KERNEL_CASES,
    mistakes={
        "bias-after": Mistake(
            "b stands inside of gelu: add it to the sums, and give the result to GELU.",
            gives=lambda x, w, b: gelu(linear(x, w), approximate="tanh") + b,
        ),
        "no-gelu": Mistake(
            "GELU is missing from what is stored: does tl.store have the name that gelu's result got?",
            gives=linear,
        ),
        "bias-by-row": Mistake(
            "bias has N numbers, one for each column. As [None, :] a block of BN numbers is a row.",
            gives=(
                bias_at(lambda row, col: row),
                bias_at(lambda row, col: col // LARGE * LARGE + row % LARGE),
                bias_at(lambda row, col: col // LARGE * LARGE + row % LARGE, math.nan),
            ),
        ),
        "first-bias": Mistake(
            "A tile needs the biases of its own columns: load at bias + n.",
            gives=bias_at(lambda row, col: col % LARGE),
        ),
        "overflow": Mistake(
            *common_hints.OVERFLOW, when=wrong_exactly_where(lambda call: len(call.case) == 4)
        ),
        "in-the-loop": Mistake(
            "Bias and GELU come once, when the loop is over. Let their lines begin where `for` begins.",
            gives=(bias_in_each_step, epilogue_in_each_step),
        ),
    },
    race=RaceSpec(
        work.linear_gelu,
        {"PyTorch": layer, "torch.compile": layer},
        ({"batch": 8192, "width": 512, "out": 4096},),
        roundings=3,
    ),
)
