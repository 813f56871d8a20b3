"""y = x * weight + bias over the last dimension: a Linear layer whose matrix is diagonal."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.common import (
    autocast,
    cdiv,
    check_tensor,
    device_limits,
    empty_contiguous,
    needs_grad,
    offset64,
    once_differentiable,
    operator,
)

ROW_BYTES = 2048
"""Bytes of one row that a program reads at once: 16 for each of its 128 threads."""

# ---- kernels -----------------------------------------------------------------------------------------------
# x is flat, (count,), or folded: (rows, width), and a tail that fills no row. ``0 * width`` makes indices of
# columns 64-bit where the width is, and costs nothing elsewhere.


@triton.jit
def flat_kernel(x, weight, bias, y, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = at < count
    scale = tl.load(weight + at % width, inside).to(tl.float32)
    shift = tl.load(bias + at % width, inside).to(tl.float32)
    value = tl.load(x + at, inside).to(tl.float32) * scale + shift
    tl.store(y + at, value, inside)


@triton.jit
def fold_kernel(
    x, weight, bias, y, rows, width, period, tail, blocks, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """y of tiles (ROWS, COLS) of folded rows; the programs of the first rows also do the tail."""
    column = (tl.program_id(0) % blocks + 0 * width) * COLS + tl.arange(0, COLS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]  # (ROWS, COLS)
    scale = tl.load(weight + column % period, column < width).to(tl.float32)  # (COLS,)
    shift = tl.load(bias + column % period, column < width).to(tl.float32)
    value = tl.load(x + at, mask).to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(y + at, value, mask)
    if tl.program_id(0) < blocks:
        end = tl.cast(rows, tl.int64) * width + column
        last = tl.load(x + end, column < tail).to(tl.float32) * scale + shift
        tl.store(y + end, last, column < tail)


@triton.jit
def backward_kernel(
    dy, x, weight, dx, sums, rows, width, period, tail, blocks, groups, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """dx, and for each program the sums over its rows of dy * x and of dy: sums (2, groups, width)."""
    column = (tl.program_id(0) % blocks + 0 * width) * COLS + tl.arange(0, COLS)
    group = tl.program_id(0) // blocks
    inside = column < width
    scale = tl.load(weight + column % period, inside).to(tl.float32)  # (COLS,)
    dweight = tl.zeros([ROWS, COLS], tl.float32)
    dbias = tl.zeros([ROWS, COLS], tl.float32)
    for first in tl.range(group * ROWS, rows, groups * ROWS, num_stages=3):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * width + column[None, :]  # (ROWS, COLS)
        mask = (row < rows)[:, None] & inside[None, :]
        up = tl.load(dy + at, mask, other=0.0).to(tl.float32)
        dweight += up * tl.load(x + at, mask, other=0.0).to(tl.float32)
        dbias += up
        tl.store(dx + at, up * scale[None, :], mask)
    dweight, dbias = tl.sum(dweight, 0), tl.sum(dbias, 0)
    if group == 0:
        end = tl.cast(rows, tl.int64) * width + column
        up = tl.load(dy + end, column < tail, other=0.0).to(tl.float32)
        dweight += up * tl.load(x + end, column < tail, other=0.0).to(tl.float32)
        dbias += up
        tl.store(dx + end, up * scale, column < tail)
    tl.store(sums + group * width + column, dweight, inside)
    tl.store(sums + (groups + group) * width + column, dbias, inside)


@triton.jit
def column_sum_kernel(sums, dweight, dbias, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add up sums (2, rows, width) over rows in a fixed order; program_id(1) is 1 for dbias, else 0."""
    column = (tl.program_id(0) + 0 * width) * COLS + tl.arange(0, COLS)
    sums += offset64(tl.program_id(1), rows) * width
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]  # (ROWS, COLS)
        total += tl.load(sums + at, mask, other=0.0)
    if tl.program_id(1) == 0:
        tl.store(dweight + column, tl.sum(total, 0), column < width)
    else:
        tl.store(dbias + column, tl.sum(total, 0), column < width)


# ---- launches ----------------------------------------------------------------------------------------------


def fold_rows(count: int, period: int, cols: int) -> tuple[int, int, int]:
    """Fold k rows of ``period`` elements into one; returns (rows, width, tail) for ``count`` elements in all.

    Rows of an odd number of elements begin at addresses that no wide load can take; k rows taken as one
    begin at aligned ones. Narrow rows are folded to fill whole tiles of ``cols`` columns. Wide rows are
    folded only as far as alignment asks, and the widest not at all, so that the width stays below 2**31.
    ``tail`` elements are left over; all of them, where there are fewer than k rows.
    """
    unit = cols if period < 4 * cols else 16 if period < 2**27 else 1
    k = unit // math.gcd(period, unit)
    rows, left = divmod(count // max(1, period), k)
    return rows, period * (k if rows else left), left * period


def affine_folded(
    x: Tensor, weight: Tensor, bias: Tensor, tile_rows: int = 2, row_bytes: int = ROW_BYTES
) -> Tensor:
    """The forward in tiles of folded rows, for any width."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    y, cols, period = torch.empty_like(x), row_bytes // x.element_size(), x.shape[-1]
    rows, width, tail = fold_rows(x.numel(), period, cols)
    blocks = cdiv(width, cols)
    grid = (max(1, cdiv(rows, tile_rows)) * blocks,)
    sizes = (rows, width, period, tail, blocks)
    fold_kernel[grid](x, weight, bias, y, *sizes, ROWS=tile_rows, COLS=cols)
    return y


@operator(fake=lambda x, weight, bias: empty_contiguous(x))
def affine_forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # With a width that is a multiple of 16, 16 neighbours in x have 16 neighbouring weights: flat loads are
    # wide. The flat kernel counts elements in 32 bits.
    if x.shape[-1] % 16 or x.numel() >= 2**31:
        return affine_folded(x, weight, bias)
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    y, block = torch.empty_like(x), ROW_BYTES // x.element_size()
    flat_kernel[(cdiv(x.numel(), block),)](x, weight, bias, y, x.numel(), x.shape[-1], BLOCK=block)
    return y


@operator(fake=lambda dy, x, weight: tuple(empty_contiguous(t) for t in (x, weight, weight)))
def affine_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    if not x.numel():
        return dx, dweight.zero_(), dbias.zero_()
    cols, period = ROW_BYTES // x.element_size(), x.shape[-1]
    rows, width, tail = fold_rows(x.numel(), period, cols)
    blocks = cdiv(width, cols)
    groups = max(1, min(cdiv(rows, 2), 4 * device_limits(x.device).multiprocessors // blocks))
    sums = torch.empty(2, groups, width, device=x.device, dtype=torch.float32)
    sizes = (rows, width, period, tail, blocks, groups)
    backward_kernel[(groups * blocks,)](dy, x, weight, dx, sums, *sizes, ROWS=2, COLS=cols)
    partials = groups * width // period  # a folded row holds several sums of each column
    # few partial sums of many columns, or many of few: the shape that keeps more programs busy
    shape = dict(ROWS=256, COLS=16, num_warps=8) if partials <= 512 else dict(ROWS=1024, COLS=8, num_warps=16)
    grid = (cdiv(period, shape["COLS"]), 2)
    column_sum_kernel[grid](sums, dweight, dbias, partials, period, **shape)
    return dx, dweight, dbias


class AffineFunction(torch.autograd.Function):
    """``affine`` with its gradients, once differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return affine_forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return affine_backward(dy, *ctx.saved_tensors)


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
    fixed order. Source: PyTorch forum, "Surprisingly low performance in pseudo-Linear layer".
    """
    check_tensor("x", x, (..., None))
    check_tensor("weight", weight, (x.shape[-1],), like=x)
    check_tensor("bias", bias, (x.shape[-1],), like=x)
    (x,) = autocast(x)
    if needs_grad(x, weight, bias):
        return AffineFunction.apply(x, weight, bias)
    return affine_forward(x, weight, bias)
