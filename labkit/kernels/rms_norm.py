"""RMSNorm over the last dimension: weight * x / sqrt(mean(x**2) + eps)."""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from labkit.kernels.affine import early_launch, sum_columns
from labkit.kernels.calls import check_eps, check_tensor, differentiable, needs_grad, operator
from labkit.kernels.common import (
    DeviceLimits,
    cdiv,
    device_limits,
    empty_contiguous,
    interpreted,
    next_power_of_2,
    spaced_rows,
)

MAX_WIDTH = 8192
"""The most columns: a program holds whole rows in registers."""
LANE, WARPS = 16, 16
"""Numbers of a backward tile for each lane; warps on a multiprocessor, with 128 registers a thread."""

# ---- kernels: x is (M, H), a tile (BM, BH) has whole rows --------------------------------------------------


@triton.jit
def rms_norm_kernel(
    x, weight, y, M, eps, STRIDE: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr
):
    """y (M, H) of x, whose rows begin STRIDE numbers apart."""
    m = (tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM))[:, None]  # (BM, 1)
    n = tl.arange(0, BH)[None, :]  # (1, BH)
    inside = (m < M) & (n < H)
    value = tl.load(x + m * STRIDE + n, inside, other=0.0).to(tl.float32)  # (BM, BH)
    w = tl.load(weight + n, n < H, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / H + eps)  # (BM, 1)
    tl.store(y + m * H + n, value * scale * w, inside)


# A window begins at a row's address rounded down to V numbers, 16 bytes: loads are wide at any width. Number
# j is in column j - shift. A program's tiles all have the same shift: its weights and sums stay in registers.


@triton.jit
def norm_grad_tile(
    x, dy, dx, w, shift, tile, M, eps, STRIDE: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Store dx of a tile; returns each number's part of the weight's gradient, (BM, BH).

    Rows of x begin STRIDE numbers apart; if that is not H, H is a multiple of V, and no window is shifted.

    Vectors that reach into the next row are read whole, but not in the LAST tile: behind it is no row.
    """
    m = (tl.cast(tile, tl.int64) * BM + tl.arange(0, BM))[:, None]  # (BM, 1)
    j = tl.arange(0, BH)[None, :]
    first = j // V * V  # of a vector: masks of it leave loads and stores wide
    at, own = m * H // V * V + j, (j >= shift) & (j < shift + H) & (m < M)  # (BM, BH)
    read = own if LAST else first < shift + H
    source = at if STRIDE == H else m * STRIDE + j
    value = tl.where(own, tl.load(x + source, read, other=0.0).to(tl.float32), 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / H + eps)  # (BM, 1)
    g = tl.where(own, tl.load(dy + at, read, other=0.0).to(tl.float32), 0.0)
    mean = tl.sum(g * w * value, 1, keep_dims=True) / H  # does not wait for the scale
    scale = tl.where(m < M, scale, 0.0)  # no NaN from rows beyond M, even where eps is 0
    unit = value * scale
    change = scale * (g * w - unit * (mean * scale))
    whole = (first >= shift) & (first + V <= shift + H) & (m < M)
    tl.store(dx + at, change, whole)
    if H % V != 0:
        tl.store(dx + at, change, own & (whole == 0))  # the ends of rows
    return g * unit


@triton.jit
def rms_norm_grad_kernel(
    x, dy, weight, dx, parts, M, eps, STRIDE: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """dx, and each program's part of the weight's gradient: parts (programs, H), float32."""
    if EARLY and not interpreted():
        tl.extra.cuda.gdc_launch_dependents()  # sum_columns waits for the parts
    j = tl.arange(0, BH)[None, :]
    shift = ((tl.program_id(0) * BM + tl.arange(0, BM)) * H % V)[:, None]  # (BM, 1)
    column = j - shift  # (BM, BH)
    w = tl.load(weight + column, (column >= 0) & (column < H), other=0.0).to(tl.float32)
    dw = tl.zeros([BM, BH], tl.float32)
    last = (M - 1) // BM  # M + BM - 1 may exceed 32 bits where M does not
    for tile in tl.range(tl.program_id(0), last, tl.num_programs(0), num_stages=STAGES):
        dw += norm_grad_tile(x, dy, dx, w, shift, tile, M, eps, STRIDE, H, V, BM, BH, False)
    if last % tl.num_programs(0) == tl.program_id(0):
        dw += norm_grad_tile(x, dy, dx, w, shift, last, M, eps, STRIDE, H, V, BM, BH, True)
    if BM > 1 and H % V != 0:
        dw = tl.gather(dw, tl.minimum(j + shift, BH - 1), 1)  # number j is in column j again
    if BM > 1:
        dw, column = tl.sum(dw, 0, keep_dims=True), j
    tl.store(parts + tl.program_id(0) * H + column, dw, (column >= 0) & (column < H))


# ---- launch sizes: from the bytes that a multiprocessor keeps on their way, 32 to 64 KB -------------------


@cache
def norm_plan(H: int, itemsize: int) -> dict[str, int]:
    """Sizes of the forward: as many rows as make 2 KB, at most 32 elements per lane."""
    BH = next_power_of_2(H)
    rows = next_power_of_2(cdiv(2048, H * itemsize))
    return dict(H=H, BM=min(rows, max(1, 1024 // BH)), BH=BH, num_warps=max(1, BH // 512))


@cache
def grad_plan(M: int, H: int, itemsize: int, limits: DeviceLimits) -> tuple[int, dict[str, int]]:
    """Programs of the backward, the fewest that need no further round over M rows, and sizes."""
    V, BH = 16 // itemsize, next_power_of_2(H)
    while H + V - math.gcd(H, V) > BH:  # narrower loads rather than a window of twice the columns
        V //= 2
    period = V // math.gcd(H, V)  # rows after which a shift repeats itself
    warps = min(16, max(1, BH // (32 * LANE)))
    BM = max(1, 32 * LANE * warps // BH)
    if H % V and BH <= 64:
        BM = min(16, BM // 2)  # the shifts of many short rows would take too many registers
    step = max(1, period // BM)  # programs are a multiple of it, for a program's shifts to stay the same
    stages = min(3, stages_that_fit(2 * WARPS // warps * BM * BH * itemsize, limits))
    places = WARPS // warps * limits.multiprocessors
    programs = step * even_programs(cdiv(M, step * BM), max(1, places // step))
    return programs, dict(H=H, V=V, BM=BM, BH=BH, STAGES=stages, num_warps=warps, maxnreg=128)


def even_programs(tiles: int, places: int) -> int:
    """The fewest programs that need no more rounds over the tiles than ``places`` do."""
    return cdiv(tiles, cdiv(tiles, places))


def stages_that_fit(stage_bytes: int, limits: DeviceLimits) -> int:
    """Pipeline stages that fit in shared memory, which holds all but one; 99 KB where interpreted."""
    room = (limits.shared_bytes or 99 * 1024) - 4096
    return 1 + room // stage_bytes


# ---- launches ----------------------------------------------------------------------------------------------


def sum_partials(parts: Tensor, like: Tensor) -> Tensor:
    """Float32 parts (P, H) added up over P in a fixed order, in the dtype of ``like`` (H,)."""
    total = torch.empty_like(like)
    sum_columns(parts[None], total)
    return total


@operator(fake=lambda x, weight, eps: empty_contiguous(x))
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    (x,), stride = spaced_rows(x)
    y, weight, H, M = empty_contiguous(x), weight.contiguous(), len(weight), x.numel() // len(weight)
    if M:
        sizes = norm_plan(H, x.itemsize)
        rms_norm_kernel[(cdiv(M, sizes["BM"]),)](x, weight, y, M, eps, stride, **sizes)
    return y


@operator(fake=lambda dy, x, weight, eps: (empty_contiguous(x), empty_contiguous(weight)))
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """dx, dweight."""
    (x,), stride = spaced_rows(x)
    dy, weight = dy.contiguous(), weight.contiguous()
    dx, H = empty_contiguous(x), len(weight)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    M, limits, early = x.numel() // H, device_limits(x.device), early_launch(x)
    programs, sizes = grad_plan(M, H, x.itemsize, limits)
    if H % sizes["V"]:  # windows that are shifted need rows without gaps
        x, stride = x.contiguous(), H
    parts = torch.empty(programs, H, dtype=torch.float32, device=x.device)
    rms_norm_grad_kernel[(programs,)](x, dy, weight, dx, parts, M, eps, stride, EARLY=early, **sizes)
    return dx, sum_partials(parts, weight)


RMSNormFunction = differentiable(rms_norm_forward, rms_norm_backward, lambda x, weight, eps, y: (x, weight))


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """weight * x / sqrt(mean(x**2) + eps), the mean over the last dimension.

    Args:
        x: (..., H); float32, float16 or bfloat16, any strides; rows evenly apart, as those of a chunk
            are, are not copied. PyTorch computes rows of more than 8192.
        weight: (H,), of x's device and of its dtype or float32, inside torch.autocast of any of the three.
        eps: added to the mean square; 0 or more.

    Returns:
        (..., H), contiguous, of x's dtype whatever that of the weight is, as F.rms_norm returns it; computed
        in float32 and rounded once. torch.autocast changes nothing, and x and weight are not cast. (There
        F.rms_norm is the same on a CPU; on a GPU, from PyTorch 2.12 on, it casts all to float32 and returns
        that.)

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    With s = 1 / sqrt(mean(x**2) + eps) and g = weight * dy: dx = s * (g - x * s**2 * mean(g * x)), and
    dweight is the sum over rows of dy * x * s, added in a fixed order. The norm is that of
    https://arxiv.org/abs/1910.07467.
    """
    check_tensor("x", x, (..., None))
    check_tensor("weight", weight, (x.shape[-1],), like=x, or_float32=True)
    check_eps(eps)
    if not 0 < len(weight) <= MAX_WIDTH:
        return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    call = RMSNormFunction.apply if needs_grad(x, weight) else rms_norm_forward
    return call(x, weight, eps)
