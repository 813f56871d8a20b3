"""Tasks of lesson 5: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec, difference
from labkit.exercises.properties import (
    ATOMICS,
    KERNEL,
    KERNEL_CASES,
    LOADS_INSIDE,
    POINTWISE,
    READ_ONCE,
    column_mistakes,
    large_reads,
)

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

chain = work.gelu_mul.reference

gelu = partial(functional.gelu, approximate="tanh")
CASES: dict[str, Any] = {
    "cases": ((1, 1), (3, 5), (40, 70), (0, 8)),
    "large": ((100, 33), (2, 300), (600, 3), (40, 70, True), (4, 6, False, 12.0)),
    "vast": ((500_000, 40),),
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


def nan_elsewhere(calls: Sequence[Call]) -> bool:
    """Whether just the case with NaN in a corner is wrong: by NaN in sums of other columns."""
    wrong = [call for call in calls if difference(call.got, call.want, 0.05)]
    found = all(call.case[2:] == (True,) and nan_sums_elsewhere(call) for call in wrong)
    return bool(wrong) and found


def nan_sums_elsewhere(call: Call) -> bool:
    return any(bool((mine.isnan() & ~right.isnan()).any()) for mine, right in call.result_tensors())


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
    "One NaN in a corner of the matrix, and other columns' sums are NaN as well. What is 0 times NaN?",
    "NaN. A place outside of the tile is not loaded at all where its load has mask=inside, other=0.0.",
    when=nan_elsewhere,
)
NOT_UNPACKED = Mistake(
    "How many results does each function return that your kernel calls?",
    "gelu_and_slope returns two: value, slope = gelu_and_slope(z).",
    raises="'tuple' object has no attribute",
)
ONE_ROW = (
    "How many parts has each sum? If all of them are stored at the same place, which one is left?",
    "`parts` has a row for each row of tiles: store at parts + tl.program_id(1) * width + column.",
)
"""Hints for parts that overwrite each other."""

# ---- sums in a fixed order ---------------------------------------------------------------------------------


def column_sums(x: Tensor) -> Tensor:
    """The sums over the rows."""
    return x.sum(0)


def only_rows(wanted: Callable[[int, int], slice]) -> Callable[[Tensor], Tensor]:
    """The sums of a tile's rows alone, for tiles of 32 rows."""
    return lambda x: x[wanted(len(x), 32)].sum(0)


LAST = only_rows(lambda rows, tile: slice((rows - 1) // tile * tile, rows))
FIRST = only_rows(lambda rows, tile: slice(0, tile))
WHOLE = only_rows(lambda rows, tile: slice(0, rows // tile * tile))
HALF_TILES = only_rows(lambda rows, tile: slice(0, -(-rows // tile) * (tile // 2)))
SAME_ROWS = (
    "Which rows does the second row of tiles add up? Are they others than those of the first one?",
    "The tile begins at row tl.program_id(1) * ROWS.",
)
"""Hints for tiles that all have the same rows."""
LAST_ROWS = (
    "Do the last rows go into the sum, where `rows` is no multiple of ROWS? Try 40 rows and tiles of 32.",
    "Round up: triton.cdiv(rows, ROWS) rows of tiles, of the same ROWS that the kernel is given.",
)
"""Hints for a remainder of rows that is left out."""


def first_again(x: Tensor) -> Tensor:
    """The sum of the first tile, once for each row of tiles."""
    return FIRST(x) * -(-len(x) // 32)


sums = Exercise(
    "sums in a fixed order",
    "column_sums",
    reference=column_sums,
    inputs=matrices("x"),
    **CASES,
    properties=SUMS,
    right="Each part has a place of its own, so nobody's result depends on who comes first.",
    mistakes={
        "one-row": Mistake(
            *ONE_ROW,
            gives=(FIRST, LAST),
        ),
        "same-rows": Mistake(*SAME_ROWS, gives=first_again),
        "last-rows": Mistake(*LAST_ROWS, gives=(WHOLE, HALF_TILES)),
        "times-zero": TIMES_ZERO,
    },
)

# ---- the backward pass -------------------------------------------------------------------------------------


def slope(z: Tensor) -> Tensor:
    """The derivative of GELU in its tanh form."""
    leaf = z.detach().requires_grad_()
    return torch.autograd.grad(gelu(leaf).sum(), leaf)[0]


def gradients(dy: Tensor, x: Tensor, bias: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dbias and dother."""
    z = x + bias
    dx = dy * other * slope(z)
    return dx, dx.sum(0), dy * gelu(z)


def changed(change: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """The gradients of changed arguments."""
    return lambda *given: gradients(*change(*given))


def with_sum(dx: Tensor, dother: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both gradients, and the sum of the first over the rows."""
    return dx, dx.sum(0), dother


def in_dother(
    dy: Tensor, x: Tensor, bias: Tensor, other: Tensor, factor: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with another factor than gelu(z) in dother."""
    dx, dbias, _ = gradients(dy, x, bias, other)
    return dx, dbias, dy * factor(x + bias, other)


def with_bias(dbias: Callable[..., Tensor]) -> Callable[..., Any]:
    """The gradients with another one for the bias, made of dx, dother and dy."""

    def gives(dy: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dx, _, dother = gradients(dy, *given)
        return dx, dbias(dx, dother, dy), dother

    return gives


def layer_of(answer: Callable[..., Any]) -> Callable[..., Any]:
    """What is raced: the cell's ``chain``, of which the answer is the backward pass."""
    if "chain" not in answer.__globals__:
        raise ValueError("chain: the cell has to define it, below the class Chain")
    return answer.__globals__["chain"]  # type: ignore[no-any-return]


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
        as_layer=layer_of,
    ),
    mistakes={
        **column_mistakes(gradients),
        "times-zero": TIMES_ZERO,
        "no-bias": Mistake(
            "With a bias of zero it is right. Where was the bias in the forward pass?",
            "z is x + bias here, too: compute it again before you take gelu_and_slope(z).",
            gives=changed(lambda dy, x, bias, other: (dy, x, 0 * bias, other)),
        ),
        "value-for-slope": Mistake(
            "How much does gelu(z) change for a small step in z? Is that gelu(z) itself?",
            "It is the slope, the second result of gelu_and_slope(z).",
            gives=(
                lambda dy, x, bias, other: with_sum(dy * other * gelu(x + bias), dy * gelu(x + bias)),
                lambda dy, x, bias, other: with_sum(dy * other * gelu(x + bias), dy * slope(x + bias)),
            ),
        ),
        "slope-in-both": Mistake(
            "dother: if other grows by a little, how much does y grow?",
            "By gelu(z) times that. The slope, and other itself, belong to dx alone.",
            gives=tuple(
                partial(in_dother, factor=factor)
                for factor in (
                    lambda z, other: slope(z),
                    lambda z, other: other * gelu(z),
                    lambda z, other: other,
                    lambda z, other: z,
                )
            ),
        ),
        "sum-of-other": Mistake(
            "bias was added to x. Which gradient is summed over the rows to make dbias?",
            "dx: the same number that you store to dx goes into the sum.",
            gives=(
                with_bias(lambda dx, dother, dy: dy.sum(0)),
                with_bias(lambda dx, dother, dy: dother.sum(0)),
            ),
        ),
        "not-unpacked": NOT_UNPACKED,
        "one-row": Mistake(
            *ONE_ROW,
            gives=(
                with_bias(lambda dx, dother, dy: FIRST(dx)),
                with_bias(lambda dx, dother, dy: LAST(dx)),
            ),
        ),
        "same-rows": Mistake(*SAME_ROWS, gives=with_bias(lambda dx, dother, dy: first_again(dx))),
        "last-rows": Mistake(*LAST_ROWS, gives=with_bias(lambda dx, dother, dy: WHOLE(dx))),
    },
)
