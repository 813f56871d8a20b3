"""Exercises of lesson 2: what is right, what people write instead, and what helps them on."""

from labkit.exercises.engine import Call, Exercise, Mistake, RaceSpec, case_values, difference
from labkit.exercises.properties import KERNEL_CASES, PRODUCT
from labkit.kernels.linear import matmul
from labkit.workloads.mlp import GATE_UP, MATMUL

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import silu

# ---- the missing mask --------------------------------------------------------------------------------------

TILE = 32
"""Rows, columns and depth of a tile, as the scaffold launches them."""


def masked_operand(operand: Tensor, mask: Any) -> Tensor:
    """What the loop's loads bring of an operand (rows, K): beyond K the next row, after the last row NaN."""
    K = operand.shape[1]
    row, k = torch.arange(len(operand))[:, None], torch.arange(-(-K // TILE) * TILE)
    values = torch.cat((operand.flatten(), operand.new_full((TILE,), math.nan)))[row * K + k]
    return values.where(mask(k, K, row), 0.0)


def product(of_x: Any, of_weight: Any) -> Any:
    """What comes out when the loads have these conditions, each a function of k, K and row."""
    return lambda x, weight: masked_operand(x, of_x) @ masked_operand(weight, of_weight).T


def within_row(k: Tensor, K: int, row: Tensor) -> Tensor:
    """The right condition."""
    return k < K


def with_masks(*masks: Any) -> tuple[Any, ...]:
    """What comes out with another condition: in both loads, or in one of them."""
    return tuple(
        product(*pair) for mask in masks for pair in ((mask, mask), (mask, within_row), (within_row, mask))
    )


without_masks, *one_operand = with_masks(lambda k, K, row: k >= 0)


ragged = Exercise(
    "find the missing mask",
    "ragged",
    reference=lambda x, weight: x @ weight.T,
    cases=((1, 1, 1), (5, 3, 31), (37, 41, 64), (33, 40, 70)),
    large=((2, 3, 1030), (260, 70, 5), (2, 260, 33)),
    inputs=lambda M, N, K: {"x": torch.randn(M, K), "weight": torch.randn(N, K)},
    untouched="781e87c9a1e1",
    right="Any K is right now, and nothing beyond a tensor is loaded.",
    properties=PRODUCT,
    **KERNEL_CASES,
    mistakes={
        "no-mask": Mistake(
            "Try K = 32, 64 and 33. Which come out right, and what does the last tile of the other hold?",
            "Nothing stops a load along K, so it goes on into the next row. Where does this one end?",
            "Join a condition on k[None, :] to the one on rows by &, each in parentheses, in both loads.",
            gives=without_masks,
        ),
        "one-operand": Mistake(
            "Where the result isn't NaN it's right. What is 0 times NaN?",
            "One operand is zero beyond K. The other holds its next row there, or anything.",
            "Give the other load the same condition on k.",
            gives=tuple(one_operand),
        ),
        "no-other": Mistake(
            "A load leaves the masked places of its block alone. Which number stands there then?",
            "On a GPU whatever the register held before. Yours has to be one that adds nothing to a sum.",
            "tl.load takes it as `other`, as in the scaffold.",
            gives=lambda x, weight: x @ weight.T + (math.nan if x.shape[1] % TILE else 0.0),
        ),
        "off-by-one": Mistake(
            "A row has K places. What are the numbers of its first and of its last one?",
            "They are 0 and K - 1. Put K - 1 and K into your condition: only the first may be true.",
            gives=with_masks(lambda k, K, row: k <= K, lambda k, K, row: k < K - 1),
        ),
        "whole-tiles": Mistake(
            "With K = 70, what happens to the places 64 to 69?",
            "They belong to the sum, though their tile isn't full. Let the loop run to K, and decide for "
            "each place in `k` by itself.",
            gives=with_masks(
                lambda k, K, row: k // TILE * TILE + TILE <= K, lambda k, K, row: k // TILE * TILE + TILE < K
            ),
        ),
        "wrong-axis": Mistake(
            "Along which dimension of the block do the addresses have `k`, along which one your mask?",
            "k[:, None] runs down the rows, and fits only because the tile is as wide as high. Turn it "
            "the way that the address beside it has it.",
            gives=with_masks(lambda k, K, row: row % TILE + k // TILE * TILE < K),
        ),
    },
    race=RaceSpec(
        MATMUL,
        {"F.linear": functional.linear, "labkit": matmul},
        # a square product, and one whose K no tile divides
        ({"batch": 4096, "width": 4096}, {"batch": 4096, "width": 4097, "out": 4096}),
    ),
)

# ---- SwiGLU ------------------------------------------------------------------------------------------------

USUAL, LARGE = 1.5, 100.0
"""Standard deviations of the gates: what a network has, and what overflows a careless exp."""


def gated_inputs(rows: int, hidden: int, depth: int, spread: float) -> dict[str, Any]:
    """x (rows, depth) and w_gate_up (2, hidden, depth); the gates have this standard deviation."""
    scale = torch.tensor([spread, USUAL])[:, None, None] / depth**0.5
    return {"x": torch.randn(rows, depth), "w_gate_up": torch.randn(2, hidden, depth) * scale}


def epilogues(*formulas: Any) -> tuple[Any, ...]:
    """What comes out when the sums gate and up go through these formulas, in float32."""

    def ended(formula: Any) -> Any:
        return lambda x, w_gate_up: formula(*torch.einsum("mk, ghk -> gmh", x, w_gate_up).float())

    return tuple(ended(each) for each in formulas)


def overflows(calls: Sequence[Call]) -> bool:
    """Whether usual gates are right, and large ones wrong only where the result is no finite number."""

    def fits(call: Call) -> bool:
        if not isinstance(call.got, Tensor) or call.got.shape != call.want.shape:
            return False
        finite = call.got.isfinite() | (call.case[-1] == USUAL)
        return not difference(call.got.double().where(finite, call.want), call.want, 1e-4)

    return all(map(fits, calls)) and not all(call.got.isfinite().all() for call in calls)


def two_products(x: Tensor, w_gate_up: Tensor) -> Tensor:
    """silu(x W_gate^T) * (x W_up^T), one product after the other."""
    return silu(functional.linear(x, w_gate_up[0])) * functional.linear(x, w_gate_up[1])


swiglu = Exercise(
    "write the SwiGLU epilogue",
    "swiglu",
    reference=two_products,
    cases=((1, 1, 1, USUAL), (5, 19, 33, USUAL), (33, 40, 70, USUAL), (2, 25, 40, LARGE)),
    large=((2, 3, 1030, USUAL), (260, 3, 5, USUAL), (2, 260, 33, USUAL)),
    inputs=gated_inputs,
    right="gate and up never reach memory: half of the bytes are written, and no second kernel reads them.",
    properties=PRODUCT,
    **KERNEL_CASES,
    mistakes={
        "swapped": Mistake(
            "Two sums come out of split(). Which of them goes through silu?",
            "The first is gate, and it goes through silu; up is multiplied in as it is.",
            gives=epilogues(lambda gate, up: gate * silu(up), lambda gate, up: gate * up.sigmoid()),
        ),
        "sigmoid-only": Mistake(
            "silu(10) is nearly 10. What does yours give for a gate of 10?",
            "The sigmoid lies between 0 and 1: it is the share of z that passes. Multiply z by it.",
            gives=epilogues(lambda gate, up: gate.sigmoid() * up),
        ),
        "wrong-sign": Mistake(
            "A gate of 10 should pass, one of -10 vanish. What do they do in yours?",
            "Work out 1 / (1 + exp(...)) for both, with either sign in the exponent.",
            gives=epilogues(
                lambda gate, up: silu(-gate) * up,
                lambda gate, up: -silu(-gate) * up,
                lambda gate, up: (-gate).sigmoid() * up,
            ),
        ),
        "denominator": Mistake(
            "sigmoid(0) is a half. What does yours divide by at a gate of 0?",
            "Python divides before it adds, so a / 1 + b is a + b. Where does your denominator end?",
            "It is the sum of 1 and the exp, and nothing else: put these two into parentheses.",
            gives=epilogues(
                lambda gate, up: gate / torch.exp(-gate) * up,
                lambda gate, up: gate + torch.exp(-gate) * up,
                lambda gate, up: (gate + torch.exp(-gate)) * up,
            ),
        ),
        "overflow": Mistake(
            "exp(89) is more than a float32 holds. What is infinity / infinity, and 0 times infinity?",
            "Both are NaN, while a number / infinity is 0. On which side of the line may infinity stand?",
            "Below it, alone: write it with one exp, of -gate, or take tl.sigmoid.",
            when=overflows,
        ),
    },
    race=RaceSpec(
        replace(GATE_UP, reference=two_products),
        {"eager": two_products, "torch.compile": two_products},
        ({"batch": 8192, "width": 768, "hidden": 3072}, {"batch": 8192, "width": 4096, "hidden": 11008}),
        roundings=3,
    ),
)

# ---- does fusing pay? --------------------------------------------------------------------------------------

DEVICES = ((7.5e14, 4.2e12), (6e13, 2.4e11), (1e14, 4e12))
"""FLOP/s of a matmul and bytes/s: roughly an H200, an L4, and a device with little arithmetic."""
SHAPES = ((8192, 768, 3072), (32768, 128, 512), (8192, 4096, 11008), (16, 4096, 14336), (128, 512, 4096))
"""rows, d, h: near the ridge, below it, far above it; and few rows, where the weights are the most bytes."""


COUNTS = {"operations": 4, "x": 1, "weights": 2, "stored": 2, "fused": 1, "passes": 3}
"""Operations for each of rows * d * h; tensors that are read, stored without fusing and with it, and that the
second kernel moves."""


def model(floor: Any = max, **changes: int) -> Any:
    """A prediction with other counts, or another function of the two floors."""
    n = COUNTS | changes

    def speedup(rows: int, d: int, h: int, rate: float, bandwidth: float) -> float:
        computed, tensor = n["operations"] * rows * d * h / rate, 2 * rows * h / bandwidth
        read = 2 * (n["x"] * rows * d + n["weights"] * h * d) / bandwidth
        gemm, fused = (floor(computed, read + n[stored] * tensor) for stored in ("stored", "fused"))
        return float((gemm + n["passes"] * tensor) / fused)

    return speedup


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
            "Two sums of two products, each product added to its sum: 4 multiplications, 4 additions. A "
            "number has 2 bytes.",
            gives=(model(operations=2), model(operations=8), model(operations=2, weights=1, stored=1)),
        ),
        "floors": Mistake(
            "What takes the time of a product where d is 128, and what where d is 4096?",
            "Bytes, then operations. Both run at once, so the slower of the two is the time, in gemm and "
            "in fused.",
            gives=tuple(
                model(floor=each)
                for each in (min, add, lambda computed, moved: computed, lambda *each: each[1])
            ),
        ),
        "written": Mistake(
            "Which tensors of rows x h does the first kernel store without fusing, which with it?",
            "The second kernel needs gate and up. The fused one keeps them in registers, and stores what "
            "the second one would have.",
            gives=(model(fused=2), model(fused=0), model(stored=1), model(stored=0, fused=0)),
        ),
        "read": Mistake(
            "Take 16 rows. Which of the tensors that the products read are the largest?",
            "The weights, h x d each. Count both, and x once: fused or not.",
            gives=(model(weights=0), model(weights=1), model(x=0), model(x=2)),
        ),
        "second-kernel": Mistake(
            "Which tensors does the second kernel load, and which does it store?",
            "GELU and the product are one kernel: gate and up come in, one tensor goes out.",
            gives=tuple(model(passes=count) for count in (0, 1, 2, 4, 5)),
        ),
    },
)
