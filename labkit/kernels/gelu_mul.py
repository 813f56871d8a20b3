"""y = gelu(x + bias) * other: the pointwise part of a gated MLP, forward and backward."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.affine import (
    ROW_BYTES,
    SUM_ROWS,
    fold_rows,
    store_sums,
    sum_columns,
    sum_plan,
    tile_rows,
)
from labkit.kernels.common import (
    autocast,
    cdiv,
    check_tensor,
    device_limits,
    empty_contiguous,
    needs_grad,
    once_differentiable,
    operator,
)
from labkit.kernels.linear import activate, activation_and_derivative

# ---- kernels: x and other are folded as in affine.py: (rows, width), and a tail that fills no row ----------


@triton.jit
def gelu_mul_flat_kernel(x, bias, other, y, count, width, BLOCK: tl.constexpr):
    """Without folds, (count,), where 16 neighbours have 16 neighbouring biases."""
    FAST: tl.constexpr = y.dtype.element_ty != tl.float32
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = at < count
    z = tl.load(x + at, inside).to(tl.float32) + tl.load(bias + at % width, inside).to(tl.float32)
    value = activate(z, "gelu_tanh", FAST) * tl.load(other + at, inside).to(tl.float32)
    tl.store(y + at, value, inside)


@triton.jit
def gelu_mul_kernel(
    x, bias, other, y, rows, width, period, tail, blocks,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y of tiles (ROWS, COLS); the programs of the first rows also do the tail."""
    FAST: tl.constexpr = y.dtype.element_ty != tl.float32
    width = width // VECTOR * VECTOR
    column = (tl.program_id(0) % blocks + 0 * width) * COLS + tl.arange(0, COLS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]  # (ROWS, COLS)
    shift = tl.load(bias + column % period, column < width).to(tl.float32)  # (COLS,)
    z = tl.load(x + at, mask).to(tl.float32) + shift[None, :]
    value = activate(z, "gelu_tanh", FAST) * tl.load(other + at, mask).to(tl.float32)
    tl.store(y + at, value, mask)
    if tl.program_id(0) < blocks:
        end = tl.cast(rows, tl.int64) * width + column
        last = activate(tl.load(x + end, column < tail).to(tl.float32) + shift, "gelu_tanh", FAST)
        last *= tl.load(other + end, column < tail).to(tl.float32)
        tl.store(y + end, last, column < tail)


@triton.jit
def gelu_mul_grad_kernel(
    dy, x, bias, other, dx, dother, dbias, rows, width, tail, blocks, groups, period,
    NARROW: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dx and dother, and the sums of dx over the rows of each program, as affine's backward has them."""
    width = width // VECTOR * VECTOR
    column = (tl.program_id(0) % blocks + 0 * width) * COLS + tl.arange(0, COLS)
    group = tl.program_id(0) // blocks
    inside = column < width
    shift = tl.load(bias + column % period, inside).to(tl.float32)  # (COLS,)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in tl.range(group * ROWS, rows, groups * ROWS, num_stages=3):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * width + column[None, :]  # (ROWS, COLS)
        mask = (row < rows)[:, None] & inside[None, :]
        total += gelu_mul_grad(dy, x, other, dx, dother, at, mask, shift[None, :])
    total = tl.sum(total, 0)  # (COLS,)
    if group == groups - 1:  # of all groups it has the fewest tiles
        end = tl.cast(rows, tl.int64) * width + column
        total += gelu_mul_grad(dy, x, other, dx, dother, end, column < tail, shift)
    store_sums(dbias, total, column, group, width, period, NARROW)


@triton.jit
def gelu_mul_grad(dy, x, other, dx, dother, at, mask, shift):
    """Store dx and dother of some elements, and return dx in float32."""
    FAST: tl.constexpr = dx.dtype.element_ty != tl.float32
    z = tl.load(x + at, mask, other=0.0).to(tl.float32) + shift
    up = tl.load(dy + at, mask, other=0.0).to(tl.float32)
    value, derivative = activation_and_derivative(z, "gelu_tanh", FAST)
    change = up * tl.load(other + at, mask, other=0.0).to(tl.float32) * derivative
    tl.store(dx + at, change, mask)
    tl.store(dother + at, up * value, mask)
    return change


# ---- launches ----------------------------------------------------------------------------------------------


@operator(fake=lambda x, bias, other: empty_contiguous(x))
def gelu_mul_forward(x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    x, bias, other = x.contiguous(), bias.contiguous(), other.contiguous()
    y, count, period, cols = torch.empty_like(x), x.numel(), x.shape[-1], ROW_BYTES // x.element_size()
    if not count:
        return y
    if period % 16 == 0 and count < 2**31:  # the flat kernel counts elements in 32 bits
        gelu_mul_flat_kernel[(cdiv(count, cols),)](x, bias, other, y, count, period, BLOCK=cols)
        return y
    rows, width, tail, vector = fold_rows(count, period, cols, x.element_size())
    height, blocks = min(4, tile_rows(count, cols, device_limits(x.device))), cdiv(width, cols)
    grid, sizes = (max(1, cdiv(rows, height)) * blocks,), (rows, width, period, tail, blocks)
    gelu_mul_kernel[grid](x, bias, other, y, *sizes, VECTOR=vector, ROWS=height, COLS=cols)
    return y


@operator(fake=lambda dy, x, bias, other: tuple(empty_contiguous(t) for t in (x, bias, other)))
def gelu_mul_backward(dy: Tensor, x: Tensor, bias: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dbias, dother."""
    dy, x, bias, other = dy.contiguous(), x.contiguous(), bias.contiguous(), other.contiguous()
    dx, dbias, dother = torch.empty_like(x), torch.empty_like(bias), torch.empty_like(other)
    if not x.numel():
        return dx, dbias.zero_(), dother
    period = x.shape[-1]
    plan = sum_plan(x.numel(), period, x.element_size(), device_limits(x.device))
    sums = torch.empty(1, plan.partials, period, device=x.device, dtype=torch.float32)
    into = dbias if plan.partials == 1 else sums
    constants = dict(NARROW=plan.narrow, VECTOR=plan.vector, ROWS=SUM_ROWS, COLS=plan.cols)
    grid = (plan.programs,)
    gelu_mul_grad_kernel[grid](dy, x, bias, other, dx, dother, into, *plan.sizes, period, **constants)
    if plan.partials > 1:
        sum_columns(sums, dbias)
    return dx, dbias, dother


class GeluMulFunction(torch.autograd.Function):
    """``gelu_mul`` with its gradients, once differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias, other)
        return gelu_mul_forward(x, bias, other)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return gelu_mul_backward(dy, *ctx.saved_tensors)


def gelu_mul(x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """gelu(x + bias) * other, GELU in its tanh form: z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z**3))).

    Args:
        x: (..., N); float32, float16 or bfloat16, any strides.
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
    if needs_grad(x, bias, other):
        return GeluMulFunction.apply(x, bias, other)
    return gelu_mul_forward(x, bias, other)
