"""Exercises of lesson 3: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import Exercise, Mistake, RaceSpec, case_values, difference
from labkit.exercises.properties import KERNEL_CASES, PRODUCT, elements_at
from labkit.kernels.linear import linear_act, matmul
from labkit.workloads.mlp import LINEAR_GELU, MATMUL, linear_gelu

import math
from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, pad

# ---- the K loop --------------------------------------------------------------------------------------------

DEPTH = 32
"""Of a tile along K, as the scaffold launches it."""


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


SQUARES = ({"batch": 4096, "width": 4096}, {"batch": 4096, "width": 4097, "out": 4096})
"""A square product, and one whose rows no wide load can take."""

product = Exercise(
    "the K loop",
    "product",
    reference=linear,
    cases=((1, 1, 1), (5, 3, 31), (37, 66, 70)),
    large=((3, 5, 64), (2, 3, 1030), (260, 70, 5), (2, 260, 33)),
    inputs=lambda M, N, K: {"x": torch.randn(M, K), "weight": torch.randn(N, K)},
    right="Each number that a program loads is used 64 times, and nothing beyond a tensor is loaded.",
    properties=PRODUCT,
    **KERNEL_CASES,
    mistakes={
        "unwritten": Mistake(
            "Which rows and columns did nobody write? Who should have?",
            "tl.program_id(0) counts tiles of BM rows of x, and tl.program_id(1) tiles of BN rows of weight.",
        ),
        "first-step": Mistake(
            "Where K is at most 32 it's right. Which numbers does your program never load when K is 70?",
            "One tl.dot covers BK places along K. Repeat it for start in range(0, K, BK), with `k` moved on.",
            gives=in_steps(lambda parts: parts[0]),
        ),
        "last-step": Mistake(
            "With K = 70 the result is the product of the last 6 places. Where did the sums of 64 others go?",
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
                lambda x, weight: x @ weight.reshape(weight.shape[::-1]),
            ),
        ),
        "no-mask": Mistake(
            "Try K = 32, 64 and 33. Which come out right, and what does the last tile of the other hold?",
            "Part of the next row. Join a condition on `k` to the one on rows by &, in both loads.",
            gives=reaching(DEPTH)[0],
        ),
        "one-operand": Mistake(
            "Where the result isn't NaN it's right. What is 0 times NaN?",
            "One operand is zero beyond K, the other holds anything: its load needs the condition on `k`.",
            gives=reaching(DEPTH)[1:],
        ),
        "off-by-one": Mistake(
            "A row has K places. What are the numbers of its first and of its last one?",
            "They are 0 and K - 1. Put K - 1 and K into your condition: only the first may be true.",
            gives=(*reaching(1), lambda x, weight: linear(x[:, :-1], weight[:, :-1])),
        ),
        "whole-tiles": Mistake(
            "With K = 70, what happens to the places 64 to 69?",
            "They belong to the sum, too: let the loop run to K, and decide for each place in `k` by itself.",
            gives=lambda x, w: linear(x[:, : (end := x.shape[1] // DEPTH * DEPTH)], w[:, :end]),
        ),
        "not-turned": Mistake(
            "tl.dot sums over the columns of its first block and the rows of its second. What are yours?",
            "The sum goes over BK: a is (BM, BK), and b, a tile of weight, (BN, BK). b.T is (BK, BN).",
            raises="equal reduction dimensions",
        ),
        "sums-in-16-bits": Mistake(
            "In float32 it works. In which dtype does tl.dot give its sums, and in which did yours begin?",
            "Sums need float32, whatever x is: tl.zeros([BM, BN], tl.float32). Only the store rounds.",
            raises=r"AssertionError.*\n.*tl\.dot\(",
        ),
        "column-of-addresses": Mistake(
            "Which shape have the addresses that you store to? A tile needs (BM, BN).",
            "The rows of weight are columns of y. [None, :] makes a row of a block, as does .T of a column.",
            raises=r"[Pp]ointer argument to have shape",
        ),
        "no-shape": Mistake(
            "x and weight are addresses of first elements. How far is it from one row to the next?",
            "Rows lie one behind the other: row r of x begins at x + r * K.",
            raises=r"\.(shape|stride|numel|size)\b",
        ),
    },
    race=RaceSpec(MATMUL, {"F.linear": linear, "labkit": matmul}, SQUARES),
)

# ---- the epilogue ------------------------------------------------------------------------------------------

ROOT = math.sqrt(2 / math.pi)


def layer_inputs(M: int, N: int, K: int) -> dict[str, Any]:
    """x (M, K), weight (N, K) and bias (N,): z has a standard deviation of 1.4."""
    return {"x": torch.randn(M, K), "weight": torch.randn(N, K) / K**0.5, "bias": torch.randn(N)}


def of_z(*formulas: Any) -> tuple[Any, ...]:
    """What comes out when z = x W^T + b goes through these formulas."""
    return tuple(lambda x, w, b, formula=each: formula(linear(x, w, b)) for each in formulas)


LARGE = 128
"""Rows and columns of a tile of the epilogue."""


def bias_at(place: Callable[[Tensor, Tensor], Tensor], beyond: float = 0.0) -> Any:
    """What comes out with the bias at ``place(row, column)``; ``beyond`` stands behind the last one."""

    def gives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = linear(x, weight)
        row, col = torch.arange(len(x))[:, None].expand(z.shape), torch.arange(len(weight)).expand(z.shape)
        return gelu(z + elements_at(bias, place(row, col), beyond), approximate="tanh")

    return gives


def nearly_right(calls: Any) -> bool:
    """Whether float32 results are as far off as a rounding to 16 bits."""
    exact = [call for call in calls if call.dtype is torch.float32]
    return [any(difference(c.got, c.want, by) for c in exact) for by in (2**-14, 2**-6)] == [True, False]


def inner(z: Tensor, cube: float = 0.044715) -> Tensor:
    """u of the tanh form."""
    return ROOT * (z + cube * z**3)


RIVALS: dict[str, Any] = dict.fromkeys(("eager", "torch.compile"), linear_gelu)
# cuBLASLt's product with bias and GELU in its epilogue
RIVALS["_addmm_activation"] = lambda x, w, b: torch._addmm_activation(b, x, w.T, use_gelu=True)
RIVALS["labkit"] = linear_act
LAYERS = ({"batch": 8192, "width": 768, "hidden": 3072}, {"batch": 8192, "width": 4096, "hidden": 4096})
"""A product whose epilogue is a large share, and one where it hardly counts."""

epilogue = Exercise(
    "an epilogue of bias and GELU",
    "linear_gelu",
    reference=linear_gelu,
    cases=((1, 1, 8), (5, 19, 40), (33, 40, 72)),
    large=((2, 3, 264), (130, 3, 8), (2, 140, 24)),
    inputs=layer_inputs,
    right="z never reaches memory: one tensor is written, and no second kernel reads and writes it again.",
    properties=PRODUCT,
    **KERNEL_CASES,
    mistakes={
        "no-bias": Mistake(
            "Take weights of zero. What should come out, and what does?",
            "bias has a number for each column of the tile: load BN of them, and add them to all rows.",
            gives=lambda x, w, b: gelu(linear(x, w), approximate="tanh"),
        ),
        "bias-after": Mistake(
            "Where is b in the formula: inside of gelu, or outside?",
            "Add it to the sums, and give the result to GELU.",
            gives=lambda x, w, b: gelu(linear(x, w), approximate="tanh") + b,
        ),
        "bias-by-row": Mistake(
            "Subtract z from total for a few rows and columns. Along which of them does your bias change?",
            "bias has N numbers, one for each column. As [None, :] a block of BN numbers is a row.",
            gives=(
                bias_at(lambda row, col: row),
                bias_at(lambda row, col: row, math.nan),
                bias_at(lambda row, col: col // LARGE * LARGE + row % LARGE),
            ),
        ),
        "first-bias": Mistake(
            "Take weights of zero, and look at a row of z with N = 140. Which biases are in it?",
            "A tile needs those of its BN columns, and these begin BN further on for each `n`.",
            gives=(bias_at(lambda row, col: 0 * col), bias_at(lambda row, col: col % LARGE)),
            when=lambda calls: any(call.want.shape[1] > LARGE for call in calls),
        ),
        "unwritten": Mistake(
            "With M = 130 or N = 140 there is more than one tile. Which of their elements did nobody write?",
            "Rows begin at m * BM, columns at n * BN. Do you call store_tile, with rows before columns?",
        ),
        "sigmoid": Mistake(
            "gelu gives nearly 0 for -5, 0.841 for 1 and nearly 10 for 10. Where are you off?",
            "The sigmoid is the share of z that passes: multiply z by it. Inside stands 2u, u with its root.",
            gives=of_z(
                lambda z: z,
                lambda z: torch.sigmoid(2 * inner(z)),
                lambda z: z * torch.sigmoid(inner(z)),
                lambda z: z * torch.sigmoid(2 * inner(z) / ROOT),
            ),
        ),
        "another-gelu": Mistake(
            "Near zero it's right. How far are you from the reference at z = 2?",
            "Of several GELUs this is the tanh form: 0.044715 belongs to z * z * z, the root to both terms.",
            gives=of_z(
                gelu,
                lambda z: z * torch.sigmoid(1.702 * z),
                lambda z: z * torch.sigmoid(2 * inner(z, 0.0)),
                lambda z: z * torch.sigmoid(2 * ROOT * (z + 0.044715 * z**2)),
                lambda z: z * torch.sigmoid(2 * (ROOT * z + 0.044715 * z**3)),
            ),
            when=lambda calls: calls[0].dtype is torch.float32,  # in 16 bits some can't be told from it
        ),
        "rounded-sums": Mistake(
            "It's right to three digits. Which line rounds float32 to 16 bits before the end?",
            "Bias and GELU take the sums as they are. Only the store rounds.",
            when=nearly_right,
        ),
        "tanh": Mistake(
            "Triton has no tanh that runs everywhere. Which function is the text's formula made of?",
            "(1 + tanh(u)) / 2 is the sigmoid of 2u: tl.sigmoid.",
            raises=r"tanh|libdevice",
        ),
    },
    race=RaceSpec(LINEAR_GELU, RIVALS, LAYERS, roundings=3),
)

# ---- does fusing pay? --------------------------------------------------------------------------------------

DEVICES = ((7.5e14, 4.2e12), (6e13, 2.4e11), (1e14, 4e12))
"""FLOP/s of a matmul and bytes/s: roughly an H200, an L4, and a device with little arithmetic."""
SHAPES = ((8192, 768, 3072), (32768, 128, 512), (8192, 4096, 11008), (16, 4096, 14336), (128, 512, 4096))
"""rows, d, h: near the ridge, below it, far above it; and few rows, where the weights are the most bytes."""


COUNTS = {"operations": 4, "x": 1, "weights": 2, "stored": 2, "fused": 1, "passes": 3}
"""Operations for each of rows * d * h; tensors that are read, stored without fusing and with it, and that the
second kernel moves."""


def model(floor: Any = max, of_fused: Any = None, **changes: int) -> Any:
    """A prediction with other counts, or another function of the two floors, for the fused kernel too."""
    n = COUNTS | changes

    def speedup(rows: int, d: int, h: int, rate: float, bandwidth: float) -> float:
        computed, tensor = n["operations"] * rows * d * h / rate, 2 * rows * h / bandwidth
        read = 2 * (n["x"] * rows * d + n["weights"] * h * d) / bandwidth
        gemm = floor(computed, read + n["stored"] * tensor)
        fused = (of_fused or floor)(computed, read + n["fused"] * tensor)
        return float((gemm + n["passes"] * tensor) / fused)

    return speedup


def models(**others: Any) -> tuple[Any, ...]:
    """The prediction with each of these other values, one at a time."""
    return tuple(model(**{name: each}) for name, values in others.items() for each in values)


ONE_FLOOR = (lambda computed, moved: computed, lambda computed, moved: moved)

pays = Exercise(
    "predict whether fusing pays",
    "speedup",
    reference=model(),
    cases=tuple((*shape, *device) for shape in SHAPES for device in DEVICES),
    inputs=case_values("rows", "d", "h", "rate", "bandwidth"),
    tolerance=0.005,
    right="Where arithmetic rules it is 1 + 1.5 rate / (bandwidth d): the wider, the less fusing brings.",
    mistakes={
        "operations": Mistake(
            "With 1 row, d = 2 and h = 1: how many multiplications and additions, and how many bytes?",
            "Two sums of two products: 4 multiplications, 4 additions. A number has 2 bytes.",
            gives=(*models(operations=(2, 8)), *(model(operations=2, weights=1, stored=n) for n in (1, 2))),
        ),
        "floors": Mistake(
            "What takes the time of a product where d is 128, and what where d is 4096?",
            "Bytes, then operations. Both run at once, so the slower one is the time, in gemm and in fused.",
            gives=(
                *models(floor=(min, add, *ONE_FLOOR), of_fused=ONE_FLOOR),
                *(model(each, max) for each in ONE_FLOOR),
            ),
        ),
        "written": Mistake(
            "Which tensors of rows x h does the first kernel store without fusing, which with it?",
            "The second kernel needs gate and up. The fused one stores what the second one would have.",
            gives=(model(fused=2), model(fused=0), model(stored=1), model(stored=0, fused=0)),
        ),
        "read": Mistake(
            "Take 16 rows. What do the products read before they write anything, and what of it is most?",
            "Both weights, h x d each, and x once: fused or not.",
            gives=(*models(weights=(0, 1), x=(0, 2)), model(x=0, weights=0), model(x=2, weights=1)),
        ),
        "second-kernel": Mistake(
            "Which tensors does the second kernel load, and which does it store?",
            "GELU and the product are one kernel: gate and up come in, one tensor goes out.",
            gives=models(passes=(0, 1, 2, 4, 5)),
        ),
    },
)
