"""Tasks of lesson 11: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import KERNEL_CASES, POINTWISE, READ_ONCE

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

reference = work.rms_norm.reference
right_softmax = work.softmax.reference

EPS = 1e-6


def row_inputs(rows: int, width: int) -> dict[str, Any]:
    """x (rows, width), with rows of all sizes, some so small that eps counts; weight (width,)."""
    sizes = 10.0 ** torch.randint(-3, 2, (rows, 1))
    return {"x": sizes * (0.5 + torch.randn(rows, width)), "weight": 1 + 0.5 * torch.randn(width)}


def scaled_by(scale: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The layer where ``scale`` of each row's sum of squares, and of W, is what multiplies x."""
    return lambda x, w: w * x * scale(x.square().sum(-1, keepdim=True), x.shape[-1])


# ---- several rows in a program -----------------------------------------------------------------------------


def one_row_a_turn(call: Call) -> str:
    """As many stores as rows, where rows are so short that a program should store several at once."""
    rows, width = call.case
    stores = len(call.launches.stores)
    return (
        f"{stores} stores for {rows} rows of {width} numbers."
        if rows >= 64 > width and stores >= rows
        else ""
    )


def one_scale_a_tile(x: Tensor, w: Tensor) -> Tensor:
    """The layer when all rows of a tile have one sum, in tiles of 1024 numbers as the text says."""
    tiles = x.split(max(1, 1024 // next_power_of_2(x.shape[1])))
    return torch.cat([w * tile * torch.rsqrt(tile.square().sum() / x.shape[1] + EPS) for tile in tiles])


def one_scale_a_column(x: Tensor, w: Tensor) -> Tensor:
    """The layer when each column of such a tile has a sum."""
    tiles = x.split(max(1, 1024 // next_power_of_2(x.shape[1])))
    return torch.cat([w * tile * torch.rsqrt(tile.square().sum(0) / x.shape[1] + EPS) for tile in tiles])


rows_norm = Exercise(
    "RMSNorm, several rows a program",
    "rows_norm",
    reference=reference,
    cases=((1, 1), (3, 5), (70, 33)),
    large=((4, 128), (2, 5000), (9, 600)),
    vast=((2**25 + 1, 70), (40, 70_000)),
    inputs=row_inputs,
    properties=(
        *POINTWISE,
        READ_ONCE,
        Property(
            "one-row",
            one_row_a_turn,
            "How many rows has the tile of a program, if a row has 33 numbers?",
            "ROWS = max(1, 1024 // BLOCK), and triton.cdiv(rows, ROWS) programs.",
            contiguous_only=True,
        ),
    ),
    right="There are few programs to start, and each of them has enough to load.",
    race=RaceSpec(
        work.rms_norm,
        {"torch.compile": reference, "labkit": kernels.rms_norm},
        ({"batch": 2**20, "width": 64}, {"batch": 2**16, "width": 1024}),  # 256 MB for x
        dtype="float32",
    ),
    mistakes={
        "all-rows": Mistake(
            "A row lies along axis 1 of the tile: tl.sum(tile * tile, axis=1), a number for each row.",
            gives=(one_scale_a_tile, one_scale_a_column),
        ),
        "sum-for-mean": Mistake(
            "tl.sum adds up. A mean divides the sum by how many numbers there are.",
            gives=scaled_by(lambda total, W: torch.rsqrt(total + EPS)),
        ),
        "block-for-row": Mistake(
            "The block has BLOCK places and the row W numbers: the masked ones do not count.",
            gives=scaled_by(lambda total, W: torch.rsqrt(total / next_power_of_2(W) + EPS)),
        ),
        "eps": Mistake(
            "1e-6 is added to the mean, under the root; not to the sum, and not to the root.",
            gives=(
                scaled_by(lambda total, W: torch.rsqrt(total / W)),
                scaled_by(lambda total, W: torch.rsqrt((total + EPS) / W)),
                scaled_by(lambda total, W: 1 / (torch.sqrt(total / W) + EPS)),
            ),
        ),
    },
    **KERNEL_CASES,
)

# ---- softmax of long rows ----------------------------------------------------------------------------------

BLOCK = 1024
"""The largest block, as the given launch has it."""


def long_rows(rows: int, width: int) -> dict[str, Any]:
    """x (rows, width), larger to the right; in some rows exponentials are infinite or 0 in float32."""
    x = 2 * torch.randn(rows, width) + torch.linspace(0, 6, width)
    x += 120 * ((torch.arange(rows) + 2 * rows) % 3 - 1)[:, None]
    if width > BLOCK:
        x[0] *= 0.2  # so near to each other that a difference in 16 bits is felt
        x[0, :BLOCK] = -torch.inf  # a block with nothing in it
        x[-1, BLOCK:] -= 240  # a later block with a much smaller maximum
    if rows == 4:
        x -= 2e30  # numbers that only float32 and bfloat16 hold, all far below zero
        x[0] = torch.finfo(torch.float32).min  # as a mask of attention leaves a row of which nothing counts
    return {"x": x}


def blocks_of(x: Tensor) -> list[Tensor]:
    """The blocks that a row is read in."""
    return list(x.split(min(BLOCK, next_power_of_2(x.shape[1])), 1))


def online(
    factor: Callable[[Tensor, Tensor], Any] = lambda top, new: torch.exp(top - new),
    keeps: bool = False,
    joined: Callable[[Tensor, Tensor], Tensor] = torch.maximum,
) -> Callable[[Tensor], Tensor]:
    """The softmax in blocks, in float32, as a mistake makes it.

    ``factor`` corrects the sum so far, of the maximum so far and the new one. Where the maximum so far
    ``keeps`` its value, it is always the one that it begins with. ``joined`` makes the new one of the maximum
    so far and that of a block.
    """

    def gives(x: Tensor) -> Tensor:
        x = x.float()
        top = torch.full_like(x[:, :1], torch.finfo(torch.float32).min)
        total = torch.zeros_like(top)
        for block in blocks_of(x):
            new = joined(top, block.amax(1, keepdim=True))
            total = total * factor(top, new) + torch.exp(block - new).sum(1, keepdim=True)
            top = top if keeps else new
        return (torch.exp(x - top) / total).double()

    return gives


def from_minus_infinity(x: Tensor) -> Tensor:
    """The softmax when the maximum begins with minus infinity: NaN where the first block has nothing else."""
    lost = (blocks_of(x)[0] == -torch.inf).all(1, keepdim=True)
    return torch.where(lost, torch.nan, right_softmax(x))


def masked_lowest(x: Tensor) -> Tensor:
    """The softmax when masked places hold the lowest number of float32, and take part."""
    x = x.float()
    places = -x.shape[1] % min(BLOCK, next_power_of_2(x.shape[1]))
    top = x.amax(1, keepdim=True)
    lowest = torch.finfo(torch.float32).min
    total = torch.exp(x - top).sum(1, keepdim=True) + places * torch.exp(lowest - top)
    return (torch.exp(x - top) / total).double()


def masked_zeros(x: Tensor) -> Tensor:
    """The softmax when masked places hold 0, and take part."""
    x = x.float()
    block = min(BLOCK, next_power_of_2(x.shape[1]))
    places = -x.shape[1] % block
    top = x.amax(1, keepdim=True).clamp(min=0.0 if places else -torch.inf)
    total = torch.exp(x - top).sum(1, keepdim=True) + (places * torch.exp(-top) if places else 0)
    return (torch.exp(x - top) / total).double()


def own_maximum(x: Tensor) -> Tensor:
    """The softmax when each block's part of the sum is made with the block's own maximum."""
    x = x.float()
    top, total = torch.full_like(x[:, :1], torch.finfo(torch.float32).min), 0
    for block in blocks_of(x):
        own = block.amax(1, keepdim=True)
        new = torch.maximum(top, own)
        total, top = total * torch.exp(top - new) + torch.exp(block - own).sum(1, keepdim=True), new
    return (torch.exp(x - top) / total).double()


def without_maximum(x: Tensor) -> Tensor:
    """The softmax when no maximum is subtracted."""
    shifted = torch.exp(x.float())
    return (shifted / shifted.sum(1, keepdim=True)).double()


def zero_in_maximum(x: Tensor) -> Tensor:
    """The softmax when masked places hold 0 in the maximum, and do not take part in the sum."""
    x = x.float()
    places = -x.shape[1] % min(BLOCK, next_power_of_2(x.shape[1]))
    shifted = torch.exp(x - x.amax(1, keepdim=True).clamp(min=0.0 if places else -torch.inf))
    return (shifted / shifted.sum(1, keepdim=True)).double()


def read_three_times(call: Call) -> str:
    """More than two passes over x."""
    x = call.passed["x"]
    times = len(call.launches.loaded(x)) / max(1, x.numel())
    return f"each number of x is loaded {times:.3g} times." if x.is_contiguous() and times > 2 else ""


softmax = Exercise(
    "the softmax of long rows",
    "softmax",
    reference=right_softmax,
    cases=((1, 1), (3, 5), (2, 1500)),
    large=((2, 4096), (1, 70_000), (5, 300), (4, 70)),
    vast=((2**25 + 1, 70), (1, 2**20 + 8)),
    inputs=long_rows,
    properties=(
        *POINTWISE,
        Property(
            "three-passes",
            read_three_times,
            "How often does your kernel go along a row? What does one pass find, and could it find both?",
            "In one loop keep the maximum and the sum so far. If the maximum grows, correct the sum.",
            contiguous_only=True,
        ),
    ),
    **KERNEL_CASES,
    right="One pass finds maximum and sum, whatever the length of a row.",
    race=RaceSpec(
        work.softmax,
        {"PyTorch": right_softmax, "torch.compile": right_softmax},
        ({"batch": 2048, "width": 32768},),
        dtype="float32",
    ),
    mistakes={
        "kept-maximum": Mistake(
            "Behind the sum the new maximum becomes the old one.",
            gives=online(keeps=True),
        ),
        "of-this-block": Mistake(
            "The new maximum is that of all blocks so far. What becomes of the old one on your line?",
            "tl.maximum(old, tl.max(block, axis=0)) keeps the larger of the two.",
            gives=(online(joined=lambda top, new: new), own_maximum),
        ),
        "masked-lowest": Mistake(
            "A row may hold nothing but the lowest number of float32. Do masked places with it count there?",
            'They do. Minus infinity is lower still, and adds nothing to any sum: other=float("-inf").',
            gives=masked_lowest,
        ),
        "flipped": Mistake(
            "The old sum becomes smaller: the factor is exp(old maximum - new maximum), which is 1 at most.",
            gives=online(lambda top, new: torch.exp(new - top)),
        ),
        "old-sum": Mistake(
            "Rows of one block are right. What was subtracted in the sum so far, and what in the new block?",
            gives=online(lambda top, new: 1),
        ),
        "minus-infinity": Mistake(
            "A row may begin with a block of minus infinity. What are the old and the new maximum then, and "
            "what is their difference?",
            "Infinity minus infinity is NaN. Let the maximum begin with a number, the smallest of float32.",
            gives=from_minus_infinity,
        ),
        "not-divided": Mistake(
            "What should the results of a row add up to?",
            gives=lambda x: torch.exp(x - x.amax(1, keepdim=True)),
        ),
        "no-maximum": Mistake(
            "Where x is large, exp(x) is infinite, and where a row is far below 0, each exp(x) is 0.",
            "exp(x - maximum) is between 0 and 1, and 1 where x is the maximum.",
            gives=without_maximum,
        ),
        "zero-in-maximum": Mistake(
            "Which numbers take part in your maximum that are not in the row? Those of masked places, or "
            "the one that it begins with?",
            "With a 0 among them the maximum of a row far below 0 is 0, and each exp(x - 0) is 0 as well: "
            'other=float("-inf").',
            gives=zero_in_maximum,
        ),
        "masked-zeros": Mistake(
            'Masked places change neither maximum nor sum if they hold minus infinity: other=float("-inf").',
            gives=masked_zeros,
        ),
    },
)
