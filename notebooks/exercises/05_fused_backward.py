"""Tasks of lesson 5: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec, defined_in_cell
from labkit.exercises.properties import (
    ATOMICS,
    KERNEL,
    KERNEL_CASES,
    LOADS_INSIDE,
    POINTWISE,
    READ_ONCE,
    column_mistakes,
    large_reads,
    wrong_only_where,
)

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

chain = work.gelu_mul.reference

gelu = partial(functional.gelu, approximate="tanh")
CASES: dict[str, Any] = {
    "cases": ((1, 1), (3, 5), (40, 70), (0, 8)),
    "large": ((100, 33), (2, 1100), (9000, 3), (40, 70, True), (4, 6, False, 12.0)),
    "vast": ((500_000, 40), (64, 70_000)),
    **KERNEL_CASES,
}
"""How both kernels are tried: below one tile, in the middle of the second one, empty, with many rows."""
MANY_ROWS = 32
"""From so many rows on, the parts of tiles are small beside the matrix."""


def matrices(*names: str) -> Callable[..., dict[str, Tensor]]:
    """Inputs (rows, width), but (width,) for bias; in a case with True each matrix ends with NaN.

    ``size`` is how large the numbers of x are.
    """

    def draw(rows: int, width: int, poisoned: bool = False, size: float = 1.0) -> dict[str, Tensor]:
        given = {name: torch.randn((width,) if name == "bias" else (rows, width)) for name in names}
        given["x"] *= size
        if poisoned:
            for each in given.values():
                if each.dim() == 2:
                    each[-1, -1] = torch.nan
        return given

    return draw


def one_kernel(call: Call) -> str:
    """Several kernels of the answer's own, where one does it."""
    names = [kernel.__name__ for kernel, _ in call.launches.kernels]
    return f"{len(names)} kernels are launched: {', '.join(names)}." if len(names) > 1 else ""


def read_by_pytorch(call: Call) -> str:
    """An operation of PyTorch that reads as much as a whole matrix, where the parts of tiles are enough."""
    large = large_reads(call) if call.case[0] >= MANY_ROWS else []
    return f"PyTorch's {large[0]} reads a tensor as large as the whole matrix." if large else ""


def unwritten_parts(call: Call) -> str:
    """Sums alone that have NaN in them, which is what memory holds that nobody has written."""
    if not call.case[0] or not nan_sums(call):  # without rows there is nothing to write
        return ""
    matrices = [(mine, right) for mine, right in call.result_tensors() if mine.dim() == 2]
    if any(bool((mine.isnan() & ~right.isnan()).any()) for mine, right in matrices):
        return ""
    return "sums are NaN, which is what `parts` holds where nobody has written."


def sums_of_all(call: Call) -> str:
    """Sums that are the same number in each column of a single tile."""
    for mine, right in call.result_tensors():
        alike = mine.dim() == 1 and len(mine) > 1 and bool(((mine == mine[0]) & (mine != 0)).all())
        if alike and not bool((right == right[0]).all()):
            return f"the sums of all {len(mine)} columns are the same number."
    return ""


def nan_sums(call: Call) -> bool:
    """Whether sums over rows are NaN that should be numbers."""
    return any(
        bool(mine.isnan().any()) and not bool(right.isnan().any())
        for mine, right in call.result_tensors()
        if mine.dim() == 1
    )


SUMS = (
    KERNEL,
    ATOMICS,
    Property(
        "loads-outside",
        LOADS_INSIDE.problem,
        "Is the mask wrong, or the address? Where does each tensor end, and which places do you load?",
        "A matrix has rows and columns, and its mask needs both. bias has only columns: bias + j.",
        before_values=True,
    ),
    Property(
        "no-axis",
        sums_of_all,
        "Along which axis does tl.sum add, if it is not told?",
        "tl.sum(tile) adds up the whole tile. tl.sum(tile, axis=0) adds its rows: a sum for each column.",
        before_values=True,
    ),
    *POINTWISE[1:],
    Property(
        "parts-unwritten",
        unwritten_parts,
        "Is each place of `parts` written? Where does the second row of tiles store its sums?",
        "`parts` has triton.cdiv(rows, ROWS) rows of `width` numbers, one for each row of tiles. "
        "The row of this program begins at parts + tl.program_id(1) * width.",
        "Does the launch count tiles of the same ROWS and COLUMNS that it gives to the kernel?",
        before_values=True,
    ),
    Property(
        "kernels",
        one_kernel,
        "How many launches does it take to read each number once?",
        "One kernel: it loads a tile once, and makes everything of it before the tile is gone.",
        contiguous_only=True,
    ),
    Property(
        "read-by-pytorch",
        read_by_pytorch,
        "Which operation of PyTorch goes through the whole matrix? What could it go through instead?",
        "The kernel adds up its tile: tl.sum(tile, axis=0). PyTorch adds up `parts`, which is much smaller.",
        contiguous_only=True,
    ),
)
"""Of a kernel that sums over rows on its way."""

TIMES_ZERO = Mistake(
    "Here the last number of each matrix is NaN, and other columns' sums are NaN as well. What is 0 times "
    "NaN?",
    "NaN. A place outside of the tile is not loaded at all where its load has mask=inside, other=0.0.",
    when=wrong_only_where(lambda call: call.case[2:] == (True,)),
)

TILE_ROWS = 32
"""Of a tile in this lesson's launches."""
ONE_PART = (
    "The sums are those of a single row of tiles. Where does the program below it store its part?",
    "To a place of its own: `parts` has a row for each row of tiles, and PyTorch adds these rows up.",
)


def last_tiles(x: Tensor) -> Tensor:
    """The rows of the last row of tiles, whose parts stay where all go to one place."""
    return x[max(0, len(x) - 1) // TILE_ROWS * TILE_ROWS :]


# ---- sums in a fixed order ---------------------------------------------------------------------------------


sums = Exercise(
    "sums in a fixed order",
    "column_sums",
    reference=lambda x: x.sum(0),
    inputs=matrices("x"),
    **CASES,
    properties=SUMS,
    right="Each part has a place of its own, so nobody's result depends on who comes first.",
    mistakes={"times-zero": TIMES_ZERO, "one-part": Mistake(*ONE_PART, gives=lambda x: last_tiles(x).sum(0))},
)

# ---- the backward pass -------------------------------------------------------------------------------------


def slope(z: Tensor) -> Tensor:
    """The derivative of GELU in its tanh form."""
    leaf = z.detach().requires_grad_()
    return torch.autograd.grad(gelu(leaf).sum(), leaf)[0]


def backward_with(
    dx: Callable[..., Tensor] = lambda dy, z, other: dy * other * slope(z),
    dbias: Callable[..., Tensor] = lambda dx, dy: dx.sum(0),
    dother: Callable[..., Tensor] = lambda dy, z: dy * gelu(z),
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """dx, dbias and dother, or what a mistake makes of one of them."""

    def gives(dy: Tensor, x: Tensor, bias: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = dx(dy, x + bias, other)
        return made, dbias(made, dy), dother(dy, x + bias)

    return gives


gradients = backward_with()


backward = Exercise(
    "all gradients in one pass",
    "chain_backward",
    reference=gradients,
    inputs=matrices("dy", "x", "bias", "other"),
    **CASES,
    properties=(*SUMS, READ_ONCE),
    right="dy, x and other are read once, dx and dother written once, and the sum costs no pass.",
    race=RaceSpec(
        work.gelu_mul,
        {"PyTorch": chain, "torch.compile": chain, "labkit": kernels.gelu_mul},
        ({"batch": 8192, "width": 3072},),
        direction="backward",
        roundings=4,
        as_layer=defined_in_cell("chain"),
    ),
    mistakes={
        **column_mistakes(gradients),
        "times-zero": TIMES_ZERO,
        "value-for-slope": Mistake(
            "How much does gelu(z) change for a small step in z? Is that in your dx?",
            gives=(
                backward_with(dx=lambda dy, z, other: dy * other * gelu(z)),
                backward_with(dx=lambda dy, z, other: dy * other),
            ),
        ),
        "no-dy": Mistake(
            "The loss grows by dy for each step of y. Where does dy stand in your dx?",
            gives=backward_with(dx=lambda dy, z, other: other * slope(z)),
        ),
        "dother": Mistake(
            "If other grows by a little, how much does y grow? And how much the loss?",
            "y grows by gelu(z) times that, and the loss by dy * gelu(z) times that. The slope belongs to dx "
            "alone.",
            gives=(
                backward_with(dother=lambda dy, z: gelu(z)),
                backward_with(dother=lambda dy, z: dy * slope(z)),
            ),
        ),
        "one-part": Mistake(*ONE_PART, gives=backward_with(dbias=lambda dx, dy: last_tiles(dx).sum(0))),
        "sum-of-dy": Mistake(
            "bias was added to x. Which gradient is summed over the rows to make dbias?",
            gives=backward_with(dbias=lambda dx, dy: dy.sum(0)),
        ),
    },
)
