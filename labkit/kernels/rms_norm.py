"""y = weight * x / sqrt(mean(x**2) + eps) over the last dimension: RMSNorm, forward and backward."""

import math
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
)

MAX_WIDTH = 8192
"""The most columns: a program holds whole rows in registers."""
FLAT_WIDTH = 128
"""The most columns of rows that are taken as a flat block where they begin at odd addresses."""
FLAT_BYTES = 4096
"""Bytes of such a block, of each tensor. A thread has 8 numbers of each, so that registers suffice."""
FLAT_WARPS, FLAT_GRAD_WARPS = 24, 16
"""Warps for which a multiprocessor has registers, forward and backward: 80 and 128 for each thread."""

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


# Rows of few columns that begin at odd addresses: a block of R rows is flat, (E,), and begins at a multiple
# of 16 bytes. Loads and stores are wide, and sums over a row go through shared memory, by tl.gather.


@triton.jit
def row_sums(flat, R: tl.constexpr, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):
    """Sums (BR,) over the rows of R * H numbers, flat (E,). Neighbouring lanes read H numbers apart."""
    n, m = tl.arange(0, BH * BR) // BR, tl.arange(0, BH * BR) % BR
    inside = (n < H) & (m < R)
    picked = tl.gather(flat, tl.where(inside, m * H + n, 0), 0)
    return tl.sum(tl.where(inside, picked, 0.0).reshape(BH, BR), 0)


@triton.jit
def norm_block(
    x, y, w, first, count, eps, R: tl.constexpr, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Normalise the rows in ``count`` numbers from ``first`` on; w (E,) is the weight of each."""
    i = tl.arange(0, E)
    value = tl.load(x + first + i, i < count, other=0.0).to(tl.float32)  # (E,)
    scale = tl.rsqrt(row_sums(value * value, R, H, BR, BH) / H + eps)  # (BR,)
    scale = tl.gather(scale, tl.minimum(i // H, BR - 1), 0)  # (E,)
    tl.store(y + first + i, value * scale * w, i < count)


@triton.jit
def rms_norm_flat_kernel(
    x, weight, y, blocks, rest, eps, R: tl.constexpr, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr,
    E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y of ``blocks`` blocks of R rows, and of ``rest`` numbers in fewer rows."""
    w = tl.load(weight + tl.arange(0, E) % H).to(tl.float32)  # (E,)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        norm_block(x, y, w, tl.cast(block, tl.int64) * (R * H), R * H, eps, R, H, BR, BH, E)
    if (rest > 0) & (tl.program_id(0) == tl.num_programs(0) - 1):
        norm_block(x, y, w, tl.cast(blocks, tl.int64) * (R * H), rest, eps, R, H, BR, BH, E)


@triton.jit
def norm_grad_block(
    dy, x, dx, w, first, count, eps, R: tl.constexpr, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Store dx of the rows in ``count`` numbers from ``first`` on; returns each number's part of dw: (E,)."""
    i = tl.arange(0, E)
    row = tl.minimum(i // H, BR - 1)
    value = tl.load(x + first + i, i < count, other=0.0).to(tl.float32)  # (E,)
    g = tl.load(dy + first + i, i < count, other=0.0).to(tl.float32)
    scale = tl.rsqrt(row_sums(value * value, R, H, BR, BH) / H + eps)  # (BR,)
    scale = tl.gather(tl.where(tl.arange(0, BR) * H < count, scale, 0.0), row, 0)  # (E,), no NaN beyond
    unit = value * scale
    mean = tl.gather(row_sums(g * w * unit, R, H, BR, BH) / H, row, 0)
    tl.store(dx + first + i, scale * (g * w - unit * mean), i < count)
    return g * unit


@triton.jit
def rms_norm_grad_flat_kernel(
    dy, x, weight, dx, parts, blocks, rest, eps,
    R: tl.constexpr, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, E: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and each program's part of the weight's gradient: parts (programs, H), float32."""
    w, dw = tl.load(weight + tl.arange(0, E) % H).to(tl.float32), tl.zeros([E], tl.float32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        dw += norm_grad_block(dy, x, dx, w, tl.cast(block, tl.int64) * (R * H), R * H, eps, R, H, BR, BH, E)
    if (rest > 0) & (tl.program_id(0) == tl.num_programs(0) - 1):
        dw += norm_grad_block(dy, x, dx, w, tl.cast(blocks, tl.int64) * (R * H), rest, eps, R, H, BR, BH, E)
    m, n = tl.arange(0, BH * BR) // BH, tl.arange(0, BH * BR) % BH
    inside = (n < H) & (m < R)
    picked = tl.where(inside, tl.gather(dw, tl.where(inside, m * H + n, 0), 0), 0.0)
    n = tl.arange(0, BH)
    tl.store(parts + tl.program_id(0) * H + n, tl.sum(picked.reshape(BR, BH), 0), n < H)


@triton.jit
def sum_kernel(parts, total, P, H, BP: tl.constexpr, BH: tl.constexpr):
    """Add up parts (P, H) over P in a fixed order: the result is the same from run to run."""
    n, sums = tl.program_id(0) * BH + tl.arange(0, BH), tl.zeros([BP, BH], tl.float32)
    for first in range(0, P, BP):
        p = (first + tl.arange(0, BP)).to(tl.int64)[:, None]  # (BP, 1)
        sums += tl.load(parts + p * H + n[None, :], (p < P) & (n < H)[None, :], other=0.0)
    tl.store(total + n, tl.sum(sums, 0), n < H)


# ---- launch sizes: from the bytes that a multiprocessor keeps on their way, 32 to 64 KB -------------------


@cache
def norm_plan(H: int, itemsize: int) -> dict[str, int]:
    """Sizes of the forward: as many rows as make 2 KB, at most 32 elements per lane."""
    BH = next_power_of_2(H)
    rows = next_power_of_2(cdiv(2048, H * itemsize))
    return dict(H=H, BM=min(rows, max(1, 1024 // BH)), BH=BH, num_warps=max(1, BH // 512))


@cache
def norm_grad_plan(M: int, H: int, itemsize: int, limits: DeviceLimits) -> tuple[int, dict[str, int]]:
    """Number of programs of the backward, the fewest that need no further round over M rows, and sizes."""
    BH = next_power_of_2(H)
    warps = 1 if H < 512 else 2 if H <= 1024 else max(4, next_power_of_2(H) // 1024)
    BM, each = max(1, 1024 * warps // BH), max(1, 16 // (itemsize * warps))  # programs per multiprocessor
    stages = min(3, stages_that_fit(2 * BM * BH * itemsize, limits))
    programs = even_programs(cdiv(M, BM), each * limits.multiprocessors)
    return programs, dict(H=H, BM=BM, BH=BH, STAGES=stages, num_warps=warps)


def even_programs(tiles: int, places: int) -> int:
    """The fewest programs that need no more rounds over the tiles than ``places`` do."""
    return cdiv(tiles, cdiv(tiles, places))


def takes_flat_blocks(H: int, itemsize: int) -> bool:
    """Whether rows of H numbers are narrow, and begin at addresses that not even 8 bytes can be loaded from.

    Even then 32 lanes that read H numbers apart meet in a bank of shared memory by twos at most.
    """
    return H <= FLAT_WIDTH and H * itemsize % 8 != 0


@cache
def flat_plan(
    M: int, H: int, itemsize: int, limits: DeviceLimits, most_warps: int
) -> tuple[int, int, int, dict[str, int]]:
    """Programs, whole blocks, numbers left over, and sizes, for ``most_warps`` on each multiprocessor."""
    E = FLAT_BYTES // itemsize
    warps = E // (8 * 32)
    vector = 16 // itemsize
    step = vector // math.gcd(H, vector)  # rows after which one begins at a multiple of 16 bytes again
    R = E // H // step * step
    blocks, rest = M // R, M % R * H
    programs = even_programs(max(1, blocks), max(1, most_warps // warps * limits.multiprocessors))
    sizes = dict(R=R, H=H, BR=next_power_of_2(R), BH=next_power_of_2(H), E=E, STAGES=3, num_warps=warps)
    return programs, blocks, rest, sizes


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
    if M and takes_flat_blocks(H, x.itemsize):
        programs, blocks, rest, sizes = flat_plan(M, H, x.itemsize, device_limits(x.device), FLAT_WARPS)
        rms_norm_flat_kernel[(programs,)](x, weight, y, blocks, rest, eps, **sizes)
    elif M:
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
    M, limits = x.numel() // H, device_limits(x.device)
    if takes_flat_blocks(H, x.itemsize):
        programs, blocks, rest, sizes = flat_plan(M, H, x.itemsize, limits, FLAT_GRAD_WARPS)
        parts = torch.empty(programs, H, dtype=torch.float32, device=x.device)
        rms_norm_grad_flat_kernel[(programs,)](dy, x, weight, dx, parts, blocks, rest, eps, **sizes)
    else:
        programs, sizes = norm_grad_plan(M, H, x.itemsize, limits)
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
