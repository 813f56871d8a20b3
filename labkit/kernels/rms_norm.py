"""RMSNorm over the last dimension, weight * x / sqrt(mean(x**2) + eps), and gelu(rms_norm(z + bias) gain)."""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from labkit.kernels.affine import early_launch, sum_columns
from labkit.kernels.common import (
    DeviceLimits,
    activation_and_derivative,
    cdiv,
    check_eps,
    check_tensor,
    device_limits,
    differentiable,
    empty_contiguous,
    gelu_gate,
    interpreted,
    needs_grad,
    next_power_of_2,
    offset64,
    operator,
    promote,
    spaced_rows,
)

MAX_WIDTH = 8192
"""The most columns: a program holds whole rows in registers."""
FLAT_WIDTH = 32
"""The most columns, by bytes of a number, of rows taken as a flat block where they begin at odd addresses."""
FLAT_BYTES = 4096
"""Bytes of such a block, of each tensor. A thread has 8 numbers of each, so that registers suffice."""
WINDOW_WIDTH = 512
"""The fewest columns, where their number is odd, from which on windows pay in the forward."""
LANE, WARPS = 16, 16
"""Numbers of such a tile for each lane; warps on a multiprocessor, with 128 registers for each thread."""
FLAT_WARPS, FLAT_GRAD_WARPS = 24, 16
"""Warps for which a multiprocessor has registers, forward and backward: 80 and 128 for each thread."""
MAX_NORM_GELU_WIDTH = 2**20
"""The most features of norm_gelu: a program holds whole rows, and a Triton block at most so many elements."""
NORM_GELU_EPS = tl.constexpr(1e-6)
"""Added to the mean square in norm_gelu."""

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
def norm_windows(
    x, dy, out, w, shift, tile, M, eps, STRIDE: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Store y of a tile, or with dy its dx; returns each number's part of the weight's gradient, (BM, BH).

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
    if dy is None:
        part, result = value, value * scale * w
    else:
        g = tl.where(own, tl.load(dy + at, read, other=0.0).to(tl.float32), 0.0)
        mean = tl.sum(g * w * value, 1, keep_dims=True) / H  # does not wait for the scale
        scale = tl.where(m < M, scale, 0.0)  # no NaN from rows beyond M, even where eps is 0
        unit = value * scale
        part, result = g * unit, scale * (g * w - unit * (mean * scale))
    whole = (first >= shift) & (first + V <= shift + H) & (m < M)
    tl.store(out + at, result, whole)
    if H % V != 0:
        tl.store(out + at, result, own & (whole == 0))  # the ends of rows
    return part


@triton.jit
def rms_norm_windows_kernel(
    x, dy, weight, out, parts, M, eps, STRIDE: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """y, or with dy dx, and each program's part of the weight's gradient: parts (programs, H), float32."""
    if EARLY and not interpreted():
        tl.extra.cuda.gdc_launch_dependents()  # sum_columns waits for the parts
    j = tl.arange(0, BH)[None, :]
    shift = ((tl.program_id(0) * BM + tl.arange(0, BM)) * H % V)[:, None]  # (BM, 1)
    column = j - shift  # (BM, BH)
    w = tl.load(weight + column, (column >= 0) & (column < H), other=0.0).to(tl.float32)
    dw = tl.zeros([BM, BH], tl.float32)
    last = (M - 1) // BM  # M + BM - 1 may exceed 32 bits where M does not
    for tile in tl.range(tl.program_id(0), last, tl.num_programs(0), num_stages=STAGES):
        dw += norm_windows(x, dy, out, w, shift, tile, M, eps, STRIDE, H, V, BM, BH, False)
    if last % tl.num_programs(0) == tl.program_id(0):
        dw += norm_windows(x, dy, out, w, shift, last, M, eps, STRIDE, H, V, BM, BH, True)
    if dy is not None:
        if BM > 1 and H % V != 0:
            dw = tl.gather(dw, tl.minimum(j + shift, BH - 1), 1)  # number j is in column j again
        if BM > 1:
            dw, column = tl.sum(dw, 0, keep_dims=True), j
        tl.store(parts + tl.program_id(0) * H + column, dw, (column >= 0) & (column < H))


# A block of R narrow rows is flat, (E,), and begins at a multiple of 16 bytes; tl.gather sorts it by rows.


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
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dx, and each program's part of the weight's gradient: parts (programs, H), float32."""
    if EARLY and not interpreted():
        tl.extra.cuda.gdc_launch_dependents()
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


# ---- launch sizes: from the bytes that a multiprocessor keeps on their way, 32 to 64 KB -------------------


@cache
def norm_plan(H: int, itemsize: int) -> dict[str, int]:
    """Sizes of the forward: as many rows as make 2 KB, at most 32 elements per lane."""
    BH = next_power_of_2(H)
    rows = next_power_of_2(cdiv(2048, H * itemsize))
    return dict(H=H, BM=min(rows, max(1, 1024 // BH)), BH=BH, num_warps=max(1, BH // 512))


@cache
def rows_plan(M: int, H: int, itemsize: int, grad: bool, limits: DeviceLimits) -> tuple[int, dict[str, int]]:
    """Number of programs that read windows, the fewest that need no further round over M rows, and sizes."""
    V, BH = 16 // itemsize, next_power_of_2(H)
    while H + V - math.gcd(H, V) > BH:  # narrower loads rather than a window of twice the columns
        V //= 2
    period = V // math.gcd(H, V)  # rows after which a shift repeats itself
    warps = min(16, max(1, BH // (32 * LANE)))
    BM = max(1, 32 * LANE * warps // BH)
    step = max(1, period // BM)  # programs are a multiple of it, for a program's shifts to stay the same
    stages = min(3 if grad else 4, stages_that_fit((1 + grad) * WARPS // warps * BM * BH * itemsize, limits))
    places = WARPS // warps * limits.multiprocessors
    programs = step * even_programs(cdiv(M, step * BM), max(1, places // step))
    return programs, dict(H=H, V=V, BM=BM, BH=BH, STAGES=stages, num_warps=warps, maxnreg=128)


def even_programs(tiles: int, places: int) -> int:
    """The fewest programs that need no more rounds over the tiles than ``places`` do."""
    return cdiv(tiles, cdiv(tiles, places))


def takes_flat_blocks(H: int, itemsize: int, load_bytes: int = 8) -> bool:
    """Whether rows of H numbers are narrow and begin where not even so many bytes can be loaded at once."""
    return FLAT_WIDTH * itemsize >= H and H * itemsize % load_bytes != 0


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
    sum_columns(parts[None], total)
    return total


@operator(fake=lambda x, weight, eps: empty_contiguous(x))
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    (x,), stride = spaced_rows(x)
    y, weight, H, M = empty_contiguous(x), weight.contiguous(), len(weight), x.numel() // len(weight)
    even = stride == H  # else the rows are those of a chunk, say, and the plain kernel takes them as they lie
    if M and even and takes_flat_blocks(H, x.itemsize):
        programs, blocks, rest, sizes = flat_plan(M, H, x.itemsize, device_limits(x.device), FLAT_WARPS)
        rms_norm_flat_kernel[(programs,)](x, weight, y, blocks, rest, eps, **sizes)
    elif M and even and H % 2 and H >= WINDOW_WIDTH:
        programs, sizes = rows_plan(M, H, x.itemsize, False, device_limits(x.device))
        rms_norm_windows_kernel[(programs,)](x, None, weight, y, None, M, eps, stride, EARLY=False, **sizes)
    elif M:
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
    if takes_flat_blocks(H, x.itemsize, 16):
        programs, blocks, rest, sizes = flat_plan(M, H, x.itemsize, limits, FLAT_GRAD_WARPS)
        parts = torch.empty(programs, H, dtype=torch.float32, device=x.device)
        rms_norm_grad_flat_kernel[(programs,)](
            dy, x.contiguous(), weight, dx, parts, blocks, rest, eps, EARLY=early, **sizes
        )
    else:
        programs, sizes = rows_plan(M, H, x.itemsize, True, limits)
        if H % sizes["V"]:  # windows that are shifted need rows without gaps
            x, stride = x.contiguous(), H
        parts = torch.empty(programs, H, dtype=torch.float32, device=x.device)
        rms_norm_windows_kernel[(programs,)](x, dy, weight, dx, parts, M, eps, stride, EARLY=early, **sizes)
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


# ---- norm_gelu: kernels; z is (R, W), tiles (BM, BW) have whole rows, BW a power of two --------------------


@triton.jit
def inverse_rms(z, W: tl.constexpr):
    """1 / sqrt(mean(z**2) + eps) of each row: (BM, 1) from z (BM, BW), which is zero beyond W columns."""
    return tl.rsqrt(tl.sum(z * z, 1) / W + NORM_GELU_EPS)[:, None]


@triton.jit
def norm_gelu_kernel(z, bias, gain, y, R, W: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr):
    first = (tl.program_id(0) + 0 * R) * BM  # 64-bit where R is
    row, n = (first + tl.arange(0, BM))[:, None], tl.arange(0, BW)  # (BM, 1), (BW,)
    at, inside = row.to(tl.int64) * W + n[None, :], (row < R) & (n < W)[None, :]  # (BM, BW)
    b = tl.load(bias + n, n < W, other=0.0).to(tl.float32)[None, :]  # (1, BW)
    g = tl.load(gain + n, n < W, other=0.0).to(tl.float32)[None, :]
    value = tl.load(z + at, inside, other=0.0).to(tl.float32) + b  # (BM, BW)
    u = value * inverse_rms(value, W) * g
    tl.store(y + at, u * gelu_gate(u), inside)


@triton.jit
def norm_gelu_grad_kernel(
    dy, z, bias, gain, dz, parts, R,
    W: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dz, and for each program its rows' sums of the gradients of bias and gain: parts (2, programs, W)."""
    n = tl.arange(0, BW)  # (BW,)
    b = tl.load(bias + n, n < W, other=0.0).to(tl.float32)[None, :]  # (1, BW)
    g = tl.load(gain + n, n < W, other=0.0).to(tl.float32)[None, :]
    db, dg = tl.zeros([BM, BW], tl.float32), tl.zeros([BM, BW], tl.float32)
    tiles = (R - 1) // BM + 1  # R + BM - 1 may exceed 32 bits where R does not
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = (tile * BM + tl.arange(0, BM))[:, None]  # (BM, 1), 64-bit where R is
        at, inside = row.to(tl.int64) * W + n[None, :], (row < R) & (n < W)[None, :]  # (BM, BW)
        value = tl.load(z + at, inside, other=0.0).to(tl.float32) + b
        upstream = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        scale = inverse_rms(value, W)  # (BM, 1)
        unit = value * scale
        u = unit * g
        _, slope = activation_and_derivative(u, "gelu_tanh")
        du = upstream * slope  # 0 in rows beyond R
        dn = du * g
        change = scale * (dn - unit * (tl.sum(dn * unit, 1) / W)[:, None])
        tl.store(dz + at, change, inside)
        db += change
        dg += du * unit
    mine = parts + tl.program_id(0).to(tl.int64) * W + n
    tl.store(mine, tl.sum(db, 0), n < W)
    tl.store(mine + offset64(tl.num_programs(0), W), tl.sum(dg, 0), n < W)


# ---- norm_gelu: launches -----------------------------------------------------------------------------------


def norm_gelu_tile(limits: DeviceLimits, R: int, W: int) -> dict[str, int]:
    """Sizes of a tile: 2048 elements, but fewer rows while not every multiprocessor has a tile."""
    BW = max(16, next_power_of_2(W))
    share = next_power_of_2(cdiv(R, limits.multiprocessors))
    warps = 4 if BW <= 4096 else min(32, BW // 512)  # with 4 a thread would have 64 numbers and more
    return dict(W=W, BM=min(max(1, 2048 // BW), share), BW=BW, num_warps=warps)


@operator(fake=lambda z, bias, gain: empty_contiguous(z))
def norm_gelu_forward(z: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    z, bias, gain = z.contiguous(), bias.contiguous(), gain.contiguous()
    y, W = torch.empty_like(z), z.shape[-1]
    if z.numel():
        R = z.numel() // W
        tile = norm_gelu_tile(device_limits(z.device), R, W)
        norm_gelu_kernel[(cdiv(R, tile["BM"]),)](z, bias, gain, y, R, **tile)
    return y


@operator(fake=lambda dy, *inputs: tuple(empty_contiguous(t) for t in inputs))
def norm_gelu_backward(dy: Tensor, z: Tensor, bias: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dz, dbias, dgain."""
    dy, z, bias, gain = dy.contiguous(), z.contiguous(), bias.contiguous(), gain.contiguous()
    dz, dbias, dgain = torch.empty_like(z), torch.empty_like(bias), torch.empty_like(gain)
    if not z.numel():
        return dz, dbias.zero_(), dgain.zero_()
    W, limits = z.shape[-1], device_limits(z.device)
    R, multiprocessors = z.numel() // W, limits.multiprocessors
    tile = norm_gelu_tile(limits, R, W)
    tiles = cdiv(R, tile["BM"])
    programs = min(tiles, max(multiprocessors, min(tiles // 4, 4 * multiprocessors)))
    parts = torch.empty(2, programs, W, dtype=torch.float32, device=z.device)
    stages = min(3, stages_that_fit(2 * tile["BM"] * tile["BW"] * z.itemsize, limits))
    norm_gelu_grad_kernel[(programs,)](dy, z, bias, gain, dz, parts, R, **tile, STAGES=stages)
    sum_columns(parts, dbias, dgain)
    return dz, dbias, dgain


NormGeluFunction = differentiable(norm_gelu_forward, norm_gelu_backward, lambda *given: given[:-1])


def norm_gelu(z: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    """gelu(n * gain), where n = (z + bias) / sqrt(mean((z + bias)**2) + 1e-6), mean over the last dimension.

    Args:
        z: (..., W), W up to 2**20; float32, float16 or bfloat16, any strides.
        bias, gain: (W,), of z's dtype and device.

    Returns:
        (..., W), contiguous, of z's dtype, or of the widest inside torch.autocast, where the dtypes may
        differ; computed in float32 and rounded once. GELU in its tanh form,
        0.5 u (1 + tanh(sqrt(2 / pi) (u + 0.044715 u**3))).

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    RMSNorm: https://arxiv.org/abs/1910.07467; GELU and its tanh form: https://arxiv.org/abs/1606.08415.
    """
    check_tensor("z", z, (..., None))
    W = z.shape[-1]
    if W > MAX_NORM_GELU_WIDTH:
        raise ValueError(f"z: has rows of {W} features, should be at most {MAX_NORM_GELU_WIDTH}")
    check_tensor("bias", bias, (W,), like=z)
    check_tensor("gain", gain, (W,), like=z)
    z, bias, gain = promote(z, bias, gain)
    call = NormGeluFunction.apply if needs_grad(z, bias, gain) else norm_gelu_forward
    return call(z, bias, gain)
