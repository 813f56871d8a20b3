"""y = weight * x / sqrt(mean(x**2) + eps) over the last dimension: RMSNorm, forward and backward."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.common import (
    DeviceLimits,
    autocast,
    cdiv,
    check_tensor,
    device_limits,
    empty_contiguous,
    needs_grad,
    next_power_of_2,
    once_differentiable,
    operator,
    padded_columns,
)

MAX_WIDTH = 8192
"""The most columns: a program holds whole rows in registers."""

# ---- kernels: x is (M, H), a tile (BM, BH) has whole rows --------------------------------------------------


@triton.jit
def rms_norm_kernel(x, weight, y, M, eps, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM))[:, None]  # (BM, 1)
    n = tl.arange(0, BH)[None, :]  # (1, BH)
    inside = (m < M) & (n < H)
    value = tl.load(x + m * H + n, inside, other=0.0).to(tl.float32)  # (BM, BH)
    w = tl.load(weight + n, n < H, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / H + eps)  # (BM, 1)
    tl.store(y + m * H + n, value * scale * w, inside)


@triton.jit
def rms_norm_grad_kernel(
    dy, x, weight, dx, parts, M, eps,
    H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and each program's part of the weight's gradient: parts (programs, H), float32."""
    n = tl.arange(0, BH)[None, :]  # (1, BH)
    w, dw = tl.load(weight + n, n < H, other=0.0).to(tl.float32), tl.zeros([BM, BH], tl.float32)
    tiles = (M - 1) // BM + 1  # M + BM - 1 may exceed 32 bits where M does not
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        m = (tile * BM + tl.arange(0, BM)).to(tl.int64)[:, None]  # (BM, 1)
        at, inside = m * H + n, (m < M) & (n < H)
        value = tl.load(x + at, inside, other=0.0).to(tl.float32)  # (BM, BH)
        g = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(
            tl.sum(value * value, 1, keep_dims=True) / H + eps
        )  # computing it again is cheaper than a load
        unit = value * tl.where(m < M, scale, 0.0)  # no NaN from rows beyond M, even where eps is 0
        dw += g * unit
        g *= w
        tl.store(dx + at, scale * (g - unit * (tl.sum(g * unit, 1, keep_dims=True) / H)), inside)
    tl.store(parts + tl.program_id(0) * H + n, tl.sum(dw, 0, keep_dims=True), n < H)


@triton.jit
def sum_kernel(parts, total, P, H, BP: tl.constexpr, BH: tl.constexpr):
    """Add up parts (P, H) over P in a fixed order: the result is the same from run to run."""
    n, sums = tl.program_id(0) * BH + tl.arange(0, BH), tl.zeros([BP, BH], tl.float32)
    for first in range(0, P, BP):
        p = (first + tl.arange(0, BP)).to(tl.int64)[:, None]  # (BP, 1)
        sums += tl.load(parts + p * H + n[None, :], (p < P) & (n < H)[None, :], other=0.0)
    tl.store(total + n, tl.sum(sums, 0), n < H)


# ---- launch sizes, found by measuring on an H200 -----------------------------------------------------------


@cache
def norm_plan(H: int, itemsize: int) -> dict[str, int]:
    """Sizes of the forward: as many rows as make 2 KB, at most 32 elements per lane."""
    BH = padded_columns(H, itemsize)
    rows = next_power_of_2(cdiv(2048, H * itemsize))
    return dict(H=H, BM=min(rows, max(1, 1024 // BH)), BH=BH, num_warps=max(1, BH // 512))


@cache
def norm_grad_plan(M: int, H: int, itemsize: int, limits: DeviceLimits) -> tuple[int, dict[str, int]]:
    """Number of programs of the backward, the fewest that need no further round over M rows, and sizes."""
    BH = padded_columns(H, itemsize)
    warps = 1 if H < 512 else 2 if H <= 1024 else max(4, next_power_of_2(H) // 1024)
    BM, each = max(1, 1024 * warps // BH), max(1, 16 // (itemsize * warps))  # programs per multiprocessor
    tiles = cdiv(M, BM)
    programs = cdiv(tiles, cdiv(tiles, each * limits.multiprocessors))
    stages = min(3, stages_that_fit(2 * BM * BH * itemsize, limits))
    return programs, dict(H=H, BM=BM, BH=BH, STAGES=stages, num_warps=warps)


def stages_that_fit(stage_bytes: int, limits: DeviceLimits) -> int:
    """Pipeline stages that fit in shared memory, which holds all but one; 99 KB where interpreted."""
    room = (limits.shared_bytes or 99 * 1024) - 4096
    return 1 + room // stage_bytes


# ---- launches ----------------------------------------------------------------------------------------------


def sum_partials(parts: Tensor, like: Tensor) -> Tensor:
    """Float32 parts (P, H) added up over P in a fixed order, in the dtype of ``like`` (H,)."""
    total = torch.empty_like(like)
    sum_kernel[(cdiv(len(like), 8),)](parts, total, *parts.shape, BP=512, BH=8, num_warps=8)
    return total


@operator(fake=lambda x, weight, eps: empty_contiguous(x))
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    y, H = torch.empty_like(x), len(weight)
    M = x.numel() // H
    if M:
        sizes = norm_plan(H, x.itemsize)
        rms_norm_kernel[(cdiv(M, sizes["BM"]),)](x, weight, y, M, eps, **sizes)
    return y


@operator(fake=lambda dy, x, weight, eps: (empty_contiguous(x), empty_contiguous(weight)))
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """dx, dweight."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    dx, H = torch.empty_like(x), len(weight)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    M = x.numel() // H
    programs, sizes = norm_grad_plan(M, H, x.itemsize, device_limits(x.device))
    parts = torch.empty(programs, H, dtype=torch.float32, device=x.device)
    rms_norm_grad_kernel[(programs,)](dy, x, weight, dx, parts, M, eps, **sizes)
    return dx, sum_partials(parts, weight)


class RMSNormFunction(torch.autograd.Function):
    """``rms_norm`` with its gradients, once differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm_forward(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dx, dweight = rms_norm_backward(dy, x, weight, ctx.eps)
        return dx, dweight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """weight * x / sqrt(mean(x**2) + eps), the mean over the last dimension.

    Args:
        x: (..., H), H from 1 to 8192; float32, float16 or bfloat16, any strides.
        weight: (H,), of x's dtype and device.
        eps: added to the mean square.

    Returns:
        (..., H), contiguous, of x's dtype; computed in float32 and rounded once.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    With s = 1 / sqrt(mean(x**2) + eps) and g = weight * dy: dx = s * (g - x * s**2 * mean(g * x)), and
    dweight is the sum over rows of dy * x * s, added in a fixed order. The norm is that of
    https://arxiv.org/abs/1910.07467.
    """
    check_tensor("x", x, (..., None))
    check_tensor("weight", weight, (x.shape[-1],), like=x)
    check_width(weight, MAX_WIDTH)
    x, weight = autocast(x, weight)
    if needs_grad(x, weight):
        return RMSNormFunction.apply(x, weight, eps)
    return rms_norm_forward(x, weight, eps)


def check_width(weight: Tensor, widest: int) -> None:
    """Raise a ValueError unless the weight has 1 to ``widest`` columns."""
    if not 0 < len(weight) <= widest:
        raise ValueError(f"weight: has {len(weight)} columns, a program holds 1 to {widest}")
