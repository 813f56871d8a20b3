"""Pointwise layers with a vector along the last dimension: x * weight + bias, and gelu(x + bias) * other.

The first is a Linear layer whose matrix is diagonal, the second the pointwise part of a gated MLP.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.calls import autocast, check_tensor, differentiable, needs_grad, operator
from labkit.kernels.common import (
    DeviceLimits,
    cdiv,
    device_limits,
    empty_contiguous,
    gelu,
    gelu_and_derivative,
    interpreted,
    next_power_of_2,
    offset64,
    spaced_rows,
)

ROW_BYTES = 2048
"""Bytes of one row that a program reads at once: 16 for each of its 128 threads."""
LEAST_ROWS = 16
"""Rows are folded where so many are left: what fills no folded row, and the sums, are then small beside x."""
TILES = 32
"""Tiles for each multiprocessor that the forward keeps, about four waves, when it makes tiles taller."""
AFFINE_HEIGHTS, GELU_MUL_HEIGHTS = (8, 4, 2), (4, 2, 1)
"""Rows of a tile of the forward. The second one loads two tensors, and so twice as much a row."""

# ---- affine: kernels; x is folded: (rows, width), and a tail that fills no row -----------------------------
# ``width // VECTOR * VECTOR`` tells the compiler that every row is aligned, where VECTOR has 16 bytes;
# ``0 * width`` makes indices of columns 64-bit where the width is, and costs nothing elsewhere.


@triton.jit
def in_inputs(at, row, column, stride, VECTOR: tl.constexpr):
    """Where in the inputs, whose rows begin ``stride`` apart, that is which is ``at`` in the output.

    stride is None where both lie alike: the kernel is then compiled without it.
    """
    if stride is None:
        return at
    else:
        return row[:, None] * (stride // VECTOR * VECTOR) + column[None, :]


@triton.jit
def store_pointwise(x, other, y, source, at, inside, scale, shift):
    """Store x * scale + shift of some elements, or with ``other`` gelu(x + shift) * other.

    source, at: where they are in the inputs, and in y. scale, shift: those of the columns, (COLS,), which are
    the last axis of these.
    """
    value = tl.load(x + source, inside).to(tl.float32)
    if other is None:
        value = value * scale + shift
    else:
        FAST: tl.constexpr = y.dtype.element_ty != tl.float32
        value = gelu(value + shift, FAST) * tl.load(other + source, inside).to(tl.float32)
    tl.store(y + at, value, inside)


@triton.jit
def fold_kernel(
    x, weight, bias, other, y, rows, width, stride, period, tail, blocks,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y of tiles (ROWS, COLS) of folded rows; the programs of the first rows also do the tail.

    Rows of x and other begin ``stride`` elements apart, or like y's. Without ``other``, of x's shape, it is
    that of ``affine``, else that of ``gelu_mul``, which has no weight.
    """
    width = width // VECTOR * VECTOR
    column = (tl.program_id(0) % blocks + 0 * width) * COLS + tl.arange(0, COLS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]  # (ROWS, COLS)
    source = in_inputs(at, row, column, stride, VECTOR)
    scale = 1.0
    if weight is not None:
        scale = tl.load(weight + column % period, column < width).to(tl.float32)  # (COLS,)
    shift = tl.load(bias + column % period, column < width).to(tl.float32)
    store_pointwise(x, other, y, source, at, mask, scale, shift)
    if tl.program_id(0) < blocks:
        end = tl.cast(rows, tl.int64) * width + column
        store_pointwise(x, other, y, end, end, column < tail, scale, shift)


@triton.jit
def backward_kernel(
    dy, x, weight, dx, dweight, dbias, rows, width, stride, tail, blocks, groups, period,
    NARROW: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dx, and sums of dy * x and of dy over the rows of each program, for ``store_sums``.

    Rows of x begin ``stride`` elements apart, or like those of dy and dx.
    """
    if EARLY and not interpreted():
        tl.extra.cuda.gdc_launch_dependents()
    width = width // VECTOR * VECTOR
    column = (tl.program_id(0) % blocks + 0 * width) * COLS + tl.arange(0, COLS)
    group = tl.program_id(0) // blocks
    inside = column < width
    scale = tl.load(weight + column % period, inside).to(tl.float32)  # (COLS,)
    wx = tl.zeros([ROWS, COLS], tl.float32)
    wy = tl.zeros([ROWS, COLS], tl.float32)
    for first in tl.range(group * ROWS, rows, groups * ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * width + column[None, :]  # (ROWS, COLS)
        mask = (row < rows)[:, None] & inside[None, :]
        up = tl.load(dy + at, mask, other=0.0).to(tl.float32)
        source = in_inputs(at, row, column, stride, VECTOR)
        wx += up * tl.load(x + source, mask, other=0.0).to(tl.float32)
        wy += up
        tl.store(dx + at, up * scale[None, :], mask)
    wx, wy = tl.sum(wx, 0), tl.sum(wy, 0)  # (COLS,)
    if group == groups - 1:  # of all groups it has the fewest tiles
        end = tl.cast(rows, tl.int64) * width + column
        up = tl.load(dy + end, column < tail, other=0.0).to(tl.float32)
        wx += up * tl.load(x + end, column < tail, other=0.0).to(tl.float32)
        wy += up
        tl.store(dx + end, up * scale, column < tail)
    store_sums(dweight, wx, column, group, width, period, NARROW)
    store_sums(dbias, wy, column, group, width, period, NARROW)


@triton.jit
def store_sums(sums, mine, column, group, width, period, NARROW: tl.constexpr):
    """Store a program's sums (COLS,): as row ``group`` of sums (groups, width), where its columns are.

    With NARROW, the next power of two to ``period``, the sums of the same of ``period`` columns are added up
    first, through shared memory: sums (programs, period).
    """
    if NARROW:
        COLS: tl.constexpr = mine.shape[0]
        MOST: tl.constexpr = 2 * COLS // NARROW  # of the same columns, more than half of NARROW apart
        same, which = tl.arange(0, MOST * NARROW) % NARROW, tl.arange(0, MOST * NARROW) // NARROW
        first = (tl.program_id(0) % tl.cdiv(width, COLS)).to(tl.int64) * COLS % period
        at = (same + (period - first)) % period + which * period
        inside = (same < period) & (at < COLS)
        mine = tl.where(inside, tl.gather(mine, tl.where(inside, at, 0).to(tl.int32), 0), 0.0)
        total, same = tl.sum(mine.reshape(MOST, NARROW), 0), tl.arange(0, NARROW)
        tl.store(sums + tl.program_id(0) * period + same, total, same < period)
    else:
        tl.store(sums + offset64(group, width) + column, mine, column < width)


@triton.jit
def column_sum_kernel(
    sums, dweight, dbias, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr
):
    """Add up sums (2, rows, width) over rows in a fixed order; program_id(1) is 1 for dbias, else 0."""
    if EARLY and not interpreted():
        tl.extra.cuda.gdc_wait()  # for the kernel that computes the sums
    column = (tl.program_id(0) + 0 * width) * COLS + tl.arange(0, COLS)
    sums += offset64(tl.program_id(1), rows) * width
    total = tl.zeros([ROWS, COLS], tl.float32)
    # Rows of all programs may have 2**31 sums, those of one tile (ROWS, COLS) have half of that at most.
    row, at = tl.arange(0, ROWS), tl.arange(0, ROWS)[:, None] * width + column[None, :]
    for first in range(0, rows, ROWS):
        mask = (first + row < rows)[:, None] & (column < width)[None, :]
        total += tl.load(sums + offset64(first, width) + at, mask, other=0.0)
    if tl.program_id(1) == 0:
        tl.store(dweight + column, tl.sum(total, 0), column < width)
    else:
        tl.store(dbias + column, tl.sum(total, 0), column < width)


# ---- affine: launches --------------------------------------------------------------------------------------


def fold_rows(count: int, period: int, cols: int, itemsize: int, stride: int) -> tuple[int, int, int, int]:
    """Fold k rows of ``period`` elements into one: (rows, width, tail, vector) for ``count`` elements in all.

    Rows of an odd number of elements begin at addresses that no wide load can take; k rows taken as one
    begin at multiples of ``vector`` elements, which are 16 bytes. Narrow rows are folded to fill whole tiles
    of ``cols`` columns, others only as far as alignment asks, and both to fewer than 2**30 columns. ``tail``
    elements fill no folded row. Where nothing is folded, rows may be unaligned: ``vector`` is 1 then. Rows
    that begin ``stride`` elements apart, and not one behind the other, cannot be folded.
    """
    batch, vector = count // max(1, period), 16 // itemsize
    if stride != period:
        return batch, period, 0, vector if (period | stride) % vector == 0 else 1
    choices = [(vector, 1)] if period >= 4 * cols else [(cols, LEAST_ROWS), (vector, 1)]
    for unit, fewest in choices:
        k = unit // math.gcd(period, unit)
        if batch >= fewest * k and k * period < 2**30:
            return batch // k, k * period, batch % k * period, vector
    return batch, period, 0, vector if period % vector == 0 else 1


def tile_rows(elements: int, cols: int, heights: tuple[int, ...], limits: DeviceLimits) -> int:
    """Rows of a tile of the forward, for which a program reads the parameters once: one of the heights.

    As many as leave TILES for each multiprocessor, so that the last programs to run are few, and at most 32
    elements for each thread; else the last one.
    """
    most = min(4096, elements // (TILES * max(1, limits.multiprocessors)))
    return next((rows for rows in heights if rows * cols <= most), heights[-1])


def launch_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor, other: Tensor | None, heights: tuple[int, ...]
) -> Tensor:
    """y, of x's shape; heights: those of a tile, see ``tile_rows``."""
    (x, *others), stride = spaced_rows(x) if other is None else spaced_rows(x, other)
    row = [None if t is None else t.contiguous() for t in (weight, bias)]
    y, count, period, cols = empty_contiguous(x), x.numel(), x.shape[-1], ROW_BYTES // x.element_size()
    if count:
        rows, width, tail, vector = fold_rows(count, period, cols, x.element_size(), stride)
        height, blocks = tile_rows(count, cols, heights, device_limits(x.device)), cdiv(width, cols)
        grid = (max(1, cdiv(rows, height)) * blocks,)
        sizes = rows, width, None if stride == period else stride, period, tail, blocks
        given = x, *row, others[0] if others else None, y
        fold_kernel[grid](*given, *sizes, VECTOR=vector, ROWS=height, COLS=cols)
    return y


@operator(fake=lambda x, weight, bias: empty_contiguous(x))
def affine_forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return launch_forward(x, weight, bias, None, AFFINE_HEIGHTS)


class SumPlan(NamedTuple):
    """How the backward shares out x (batch, period), folded, over programs, and the shape of their sums."""

    rows: int
    width: int
    tail: int
    vector: int
    cols: int
    blocks: int
    groups: int
    """Programs are (groups, blocks): a block is ``cols`` columns, a group each so many-th tile of rows."""
    narrow: int
    """The next power of two to the period where a program adds up columns that are the same in x, or 0."""
    partials: int
    """Sums for each column of x; with one the program's own sum is the result."""

    @property
    def programs(self) -> int:
        return self.groups * self.blocks


AFFINE_TILE, GELU_MUL_TILE = (4, 3, 2), (2, 2, 4)
"""Rows of a tile of the backward, tiles on their way or at work, and programs for each multiprocessor."""


@cache
def sum_plan(
    count: int, period: int, itemsize: int, tile: tuple[int, int, int], stride: int, limits: DeviceLimits
) -> SumPlan:
    """As many rows folded into one, which then begin at multiples of 16 bytes, as leave the least idle.

    Idle are columns of the last block beyond the width, places without a program, and some in the last round.
    Rows that begin ``stride`` elements apart, and not one behind the other, are not folded.
    """
    cols, vector, batch = ROW_BYTES // itemsize, 16 // itemsize, count // period
    height, places = tile[0], max(1, tile[2] * limits.multiprocessors)

    def shared_out(k: int) -> tuple[float, int, int, int, int]:
        """The share of the time that programs are busy; rows, width, blocks, groups, for k rows as one."""
        rows, width = batch // k, k * period
        blocks, tiles = cdiv(width, cols), max(1, cdiv(rows, height))
        rounds = cdiv(tiles, max(1, min(tiles, places // blocks)))
        groups = cdiv(tiles, rounds)
        time = rounds * cdiv(groups * blocks, places) * height * cols
        return rows * width / (time * places), rows, width, blocks, groups

    step = vector // math.gcd(period, vector)
    most = min(batch // LEAST_ROWS, 2**30 // period, 2 * cols // period + 16 * step)
    most = most if stride == period else 0
    k = max(range(step, most + 1, step) or [1], key=lambda k: (round(shared_out(k)[0], 2), -k))
    _, rows, width, blocks, groups = shared_out(k)
    narrow = next_power_of_2(period) if 2 * period <= cols and groups * width > period else 0
    partials = groups * blocks if narrow else groups * width // period
    vector = vector if (width | (0 if stride == period else stride)) % vector == 0 else 1
    return SumPlan(rows, width, batch % k * period, vector, cols, blocks, groups, narrow, partials)


def early_launch(x: Tensor) -> bool:
    """Whether the second kernel is launched before the first has ended, as compute capability 9.0 can."""
    return device_limits(x.device).has_tma


def sum_columns(sums: Tensor, *totals: Tensor) -> None:
    """Add up sums (1 or 2, partials, period) over the partials, into one or two totals (period,)."""
    _, partials, period = sums.shape
    rows = min(1024, max(64, next_power_of_2(partials)))
    early, cols = early_launch(sums), max(8, min(32, 4096 // rows))
    launch: Any = dict(EARLY=early, num_warps=8) | (dict(launch_pdl=True) if early else {})
    grid, sizes = (cdiv(period, cols), len(totals)), dict(ROWS=rows, COLS=cols)
    column_sum_kernel[grid](sums, totals[0], totals[-1], partials, period, **sizes, **launch)


def launch_backward(
    kernel: Any, tile: tuple[int, int, int], stride: int, dy: Tensor, x: Tensor, *others: Tensor,
    totals: Sequence[Tensor],
) -> None:  # fmt: skip
    """Launch a backward with its tensors; sums over all rows go to the one or two ``totals``.

    stride: how many elements apart rows of the forward's inputs begin.
    """
    period = x.shape[-1]
    plan = sum_plan(x.numel(), period, x.element_size(), tile, stride, device_limits(x.device))
    sums = torch.empty(len(totals), plan.partials, period, device=x.device, dtype=torch.float32)
    several = plan.partials > 1
    kernel[(plan.programs,)](
        dy, x, *others, *(sums.unbind() if several else totals),
        plan.rows, plan.width, None if stride == period else stride,
        plan.tail, plan.blocks, plan.groups, period,
        NARROW=plan.narrow, VECTOR=plan.vector, ROWS=tile[0], COLS=plan.cols, STAGES=tile[1],
        EARLY=several and early_launch(x),
    )  # fmt: skip
    if several:
        sum_columns(sums, *totals)


@operator(fake=lambda dy, x, weight: tuple(empty_contiguous(t) for t in (x, weight, weight)))
def affine_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias."""
    (x,), stride = spaced_rows(x)
    dy, weight = dy.contiguous(), weight.contiguous()
    dx, dweight, dbias = empty_contiguous(x), torch.empty_like(weight), torch.empty_like(weight)
    if not x.numel():
        return dx, dweight.zero_(), dbias.zero_()
    launch_backward(backward_kernel, AFFINE_TILE, stride, dy, x, weight, dx, totals=(dweight, dbias))
    return dx, dweight, dbias


AffineFunction = differentiable(affine_forward, affine_backward, lambda x, weight, bias, y: (x, weight))


def frozen_backward(dy: Tensor, weight: Tensor) -> tuple[Tensor]:
    """dx alone, where nobody asks for sums over rows: x is neither kept nor read again."""
    return (affine_forward(dy, weight, torch.zeros_like(weight)),)


FrozenAffineFunction = differentiable(affine_forward, frozen_backward, lambda x, weight, bias, y: (weight,))


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x * weight + bias.

    Args:
        x: (..., N); float32, float16 or bfloat16, any strides.
        weight, bias: (N,), of x's dtype and device. Inside torch.autocast their dtypes may differ: x is cast
            to autocast's dtype, as nn.Linear does, and the parameters are read as they are.

    Returns:
        (..., N), contiguous, of x's dtype (inside autocast of that); computed in float32 and rounded once.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    In reverse, dx = dy * weight, dweight = sum of dy * x and dbias = sum of dy over all rows, added in a
    fixed order. Without a gradient of weight and bias, x is not kept. Source: PyTorch forum, "Surprisingly
    low performance in pseudo-Linear layer".
    """
    check_tensor("x", x, (..., None))
    check_tensor("weight", weight, (x.shape[-1],), like=x)
    check_tensor("bias", bias, (x.shape[-1],), like=x)
    (x,) = autocast(x)
    if needs_grad(weight, bias):
        return AffineFunction.apply(x, weight, bias)
    return FrozenAffineFunction.apply(x, weight, bias) if needs_grad(x) else affine_forward(x, weight, bias)


# ---- gelu_mul: kernels; x and other are folded like x of affine --------------------------------------------


@triton.jit
def gelu_mul_grad_kernel(
    dy, x, bias, other, dx, dother, dbias, rows, width, stride, tail, blocks, groups, period,
    NARROW: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dx and dother, and the sums of dx over the rows of each program, as affine's backward has them.

    Rows of x and other begin ``stride`` elements apart, or like the others.
    """
    if EARLY and not interpreted():
        tl.extra.cuda.gdc_launch_dependents()
    width = width // VECTOR * VECTOR
    column = (tl.program_id(0) % blocks + 0 * width) * COLS + tl.arange(0, COLS)
    group = tl.program_id(0) // blocks
    inside = column < width
    # zero beyond the width: what is added up there has to be a number
    shift = tl.load(bias + column % period, inside, other=0.0).to(tl.float32)  # (COLS,)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in tl.range(group * ROWS, rows, groups * ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * width + column[None, :]  # (ROWS, COLS)
        mask = (row < rows)[:, None] & inside[None, :]
        source = in_inputs(at, row, column, stride, VECTOR)
        total += gelu_mul_grad(dy, x, other, dx, dother, source, at, mask, shift[None, :])
    total = tl.sum(total, 0)  # (COLS,)
    if group == groups - 1:  # of all groups it has the fewest tiles
        end = tl.cast(rows, tl.int64) * width + column
        total += gelu_mul_grad(dy, x, other, dx, dother, end, end, column < tail, shift)
    store_sums(dbias, total, column, group, width, period, NARROW)


@triton.jit
def gelu_mul_grad(dy, x, other, dx, dother, source, at, mask, shift):
    """Store dx and dother of some elements, ``source`` in x and other, and return dx in float32."""
    FAST: tl.constexpr = dx.dtype.element_ty != tl.float32
    z = tl.load(x + source, mask, other=0.0).to(tl.float32) + shift
    up = tl.load(dy + at, mask, other=0.0).to(tl.float32)
    value, derivative = gelu_and_derivative(z, FAST)
    change = up * tl.load(other + source, mask, other=0.0).to(tl.float32) * derivative
    tl.store(dx + at, change, mask)
    tl.store(dother + at, up * value, mask)
    return change


# ---- gelu_mul: launches ------------------------------------------------------------------------------------


@operator(fake=lambda x, bias, other: empty_contiguous(x))
def gelu_mul_forward(x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    return launch_forward(x, None, bias, other, GELU_MUL_HEIGHTS)


@operator(fake=lambda dy, x, bias, other: tuple(empty_contiguous(t) for t in (x, bias, other)))
def gelu_mul_backward(dy: Tensor, x: Tensor, bias: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dbias, dother."""
    (x, other), stride = spaced_rows(x, other)
    dy, bias = dy.contiguous(), bias.contiguous()
    dx, dbias, dother = empty_contiguous(x), torch.empty_like(bias), empty_contiguous(other)
    if not x.numel():
        return dx, dbias.zero_(), dother
    tensors = dy, x, bias, other, dx, dother
    launch_backward(gelu_mul_grad_kernel, GELU_MUL_TILE, stride, *tensors, totals=(dbias,))
    return dx, dbias, dother


GeluMulFunction = differentiable(gelu_mul_forward, gelu_mul_backward, lambda *given: given[:-1])


def gelu_mul(x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """gelu(x + bias) * other, GELU in its tanh form: z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z**3))).

    Args:
        x: (..., N); float32, float16 or bfloat16, any strides. The halves of a ``chunk(2, -1)``, as x and
            other, are read as they lie.
        bias: (N,), of x's dtype and device.
        other: of x's shape, dtype and device.

    Returns:
        (..., N), contiguous, of x's dtype, computed in float32 and rounded once. In 16 bits a GPU computes
        tanh by one instruction, and the result may be off by another 2**-12 of (x + bias) * other.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    In reverse, with z = x + bias: dx = dy * other * gelu'(z), dother = dy * gelu(z), and dbias is the sum of
    dx over all rows, added in a fixed order. Neither z nor gelu(z) is kept.
    """
    check_tensor("x", x, (..., None))
    check_tensor("bias", bias, (x.shape[-1],), like=x)
    check_tensor("other", other, tuple(x.shape), like=x)
    x, bias, other = autocast(x, bias, other)
    call = GeluMulFunction.apply if needs_grad(x, bias, other) else gelu_mul_forward
    return call(x, bias, other)
