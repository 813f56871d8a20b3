"""Tasks of lesson 11: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec, difference
from labkit.exercises.properties import KERNEL_CASES, POINTWISE, READ_ONCE

from collections.abc import Callable, Sequence
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


def mean(t: Tensor) -> Tensor:
    """The mean of each row, as a column."""
    return t.mean(-1, keepdim=True)


def row_norms(*scales: Callable[[Tensor, int], Tensor], of: Any = torch.square) -> tuple[Any, ...]:
    """The layer with each of these scales: it multiplies x, and is made of the mean of ``of(x)`` and of W."""
    return tuple(lambda x, w, scale=each: w * x * scale(mean(of(x)), x.shape[-1]) for each in scales)


def block_scale(m: Tensor, W: int) -> Tensor:
    """The scale when the sum is divided by the block's size."""
    return torch.rsqrt(m * W / next_power_of_2(W) + EPS)


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
            "Rows get each other's scale. Along which axis does tl.sum add?",
            "A row lies along axis 1 of the tile: tl.sum(tile * tile, axis=1), a number for each row.",
            gives=one_scale_a_tile,
        ),
        "sum-for-mean": Mistake(
            "Try a row of W ones: its root mean square is 1, so y is the weight. What is yours?",
            "tl.sum adds up. A mean divides the sum by how many numbers there are.",
            gives=row_norms(lambda m, H: torch.rsqrt(m * H + EPS)),
        ),
        "block-for-row": Mistake(
            "With 128 columns it is right, with 33 it is not. Which two sizes are alike only sometimes?",
            "The block has BLOCK places and the row W numbers: the masked ones do not count.",
            gives=row_norms(block_scale),
        ),
        "root": Mistake(
            "Double x: y should stay as it is. What does yours do?",
            "The root mean square divides x, the mean square does not. tl.rsqrt is 1 over the root.",
            gives=row_norms(lambda m, H: 1 / (m + EPS), lambda m, H: torch.sqrt(m + EPS)),
        ),
        "eps": Mistake(
            "Only small rows are wrong. What is added to the mean square, and where?",
            "1e-6 is added to the mean, under the root; not to the sum, and not to the root.",
            gives=row_norms(
                lambda m, H: m.rsqrt(), lambda m, H: 1 / (m.sqrt() + EPS), lambda m, H: (m + EPS / H).rsqrt()
            ),
        ),
        "mean-of-x": Mistake(
            "Which comes first: the square of each number, or the sum over the row?",
            "Square each number, then add up: tl.sum(value * value, axis=0).",
            gives=row_norms(
                *(lambda m, H, k=k: (m * m * H**k + EPS).rsqrt() for k in (0, 1)),
                lambda m, H: (m + EPS).rsqrt(),
                of=torch.positive,
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


Update = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""The new sum, of the sum so far, the maximum so far, the new one and the block."""


def corrected(total: Tensor, top: Tensor, new: Tensor, block: Tensor) -> Tensor:
    """The right one."""
    return total * torch.exp(top - new) + torch.exp(block - new).sum(1, keepdim=True)


def online(
    update: Update = corrected,
    begin: float = torch.finfo(torch.float32).min,
    keeps: bool = False,
    own: bool = False,
) -> Callable[[Tensor], Tensor]:
    """The softmax in blocks, in float32, as a mistake makes it.

    The maximum begins with ``begin``; where it ``keeps`` it stays there, and where each block has its
    ``own`` no older one counts.
    """

    def gives(x: Tensor) -> Tensor:
        x = x.float()
        top, total = torch.full_like(x[:, :1], begin), torch.zeros_like(x[:, :1])
        for block in blocks_of(x):
            new = block.amax(1, keepdim=True)
            new = new if own else torch.maximum(top, new)
            total = update(total, top, new, block)
            top = top if keeps else new
        return (torch.exp(x - top) / total).double()

    return gives


def from_infinity(calls: Sequence[Call]) -> bool:
    """Whether NaN stands only in rows that begin with a block of nothing but minus infinity."""
    found = False
    for call in calls:
        ((mine, right),) = call.result_tensors()
        empty = call.passed["x"][:, :BLOCK].isinf().all(1)
        wrong = mine.isnan().any(1)
        if (wrong & ~empty).any() or difference(mine[~empty], right[~empty], 0.02):
            return False
        found = found or bool(wrong.any())
    return found


def masked_zeros(x: Tensor) -> Tensor:
    """The softmax when masked places hold 0, and take part."""
    x = x.float()
    block = min(BLOCK, next_power_of_2(x.shape[1]))
    places = -x.shape[1] % block
    top = x.amax(1, keepdim=True).clamp(min=0.0 if places else -torch.inf)
    total = torch.exp(x - top).sum(1, keepdim=True) + (places * torch.exp(-top) if places else 0)
    return (torch.exp(x - top) / total).double()


def without_maximum(x: Tensor) -> Tensor:
    """The exponentials over their sum, in float32, where they overflow."""
    made = x.float().exp()
    return (made / made.sum(1, keepdim=True)).double()


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
    large=((2, 4096), (1, 17_000), (5, 300), (4, 70)),
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
        "no-maximum": Mistake(
            "What is exp(100) in float32, and that divided by itself?",
            "Infinite, and then NaN. Subtract the row's maximum from each number first.",
            gives=without_maximum,
        ),
        "from-infinity": Mistake(
            "What is the maximum so far, if a row's first block holds nothing but minus infinity?",
            "Minus infinity, and that less itself is NaN. Begin with -3.4028234e38 instead.",
            when=from_infinity,
        ),
        "from-zero": Mistake(
            "With what does the maximum begin, and what if all numbers of a row are far below it?",
            "Then every exponential is 0, and 0 / 0 is NaN. Begin with -3.4028234e38.",
            gives=(online(begin=0.0), online(begin=-1e30), online(begin=-3e38)),
        ),
        "kept-maximum": Mistake(
            "What is the maximum so far, when the loop comes to the second block?",
            "Behind the sum the new maximum becomes the old one.",
            gives=online(keeps=True),
        ),
        "old-maximum": Mistake(
            "Which maximum do you subtract from the new block's numbers?",
            "The new one, which is at least as large as each of them: exp is 1 at most then.",
            gives=online(
                lambda total, top, new, block: (
                    total * torch.exp(top - new) + torch.exp(block - top).sum(1, keepdim=True)
                )
            ),
        ),
        "flipped": Mistake(
            "If the maximum grows, does the old sum become larger or smaller?",
            "Smaller: the factor is exp(old maximum - new maximum), which is 1 at most.",
            gives=online(
                lambda total, top, new, block: (
                    total * torch.exp(new - top) + torch.exp(block - new).sum(1, keepdim=True)
                )
            ),
        ),
        "old-sum": Mistake(
            "Rows of one block are right. What was subtracted in the sum so far, and what in the new block?",
            "An older maximum. Multiply the sum so far by exp(old maximum - new maximum).",
            gives=online(lambda total, top, new, block: total + torch.exp(block - new).sum(1, keepdim=True)),
        ),
        "last-block": Mistake(
            "Rows of one block are right. Which blocks are in your sum at the end?",
            "Add each block's sum to what was there before.",
            gives=online(lambda total, top, new, block: torch.exp(block - new).sum(1, keepdim=True)),
        ),
        "masked-zeros": Mistake(
            "What do masked places hold, and what does that do to the maximum and the sum?",
            'Minus infinity changes neither: other=float("-inf").',
            gives=masked_zeros,
        ),
    },
)
