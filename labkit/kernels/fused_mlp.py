"""Blocks of Linear, RMSNorm and GELU: what lies between two products as one kernel, or a whole stack as one.

``norm_gelu`` is gelu(rms_norm(z + bias) gain), forward and backward. ``fused_mlp`` is block after block, the
products too, while a program's rows stay on chip; it has no backward.
"""

from collections.abc import Callable
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
    interpreted,
    needs_grad,
    next_power_of_2,
    no_gradient,
    offset64,
    once_differentiable,
    operator,
)

EPS = tl.constexpr(1e-6)
"""Added to the mean square in RMSNorm."""
MAX_WIDTH = 2**20
"""Features of a row: a program holds whole rows, and a Triton block holds at most so many elements."""

# ---- norm_gelu: kernels ------------------------------------------------------------------------------------
# z is (R, W). A program holds tiles (BM, BW) of whole rows; BW is W rounded up to a power of two.


@triton.jit
def gelu_gate(u):
    """The gate of gelu(u) = u * gate, in the tanh form: (1 + tanh(v)) / 2 = sigmoid(2 v)."""
    return tl.sigmoid(1.5957691216057308 * (u + 0.044715 * u * u * u))  # 2 sqrt(2 / pi)


@triton.jit
def inverse_rms(z, W: tl.constexpr):
    """1 / sqrt(mean(z**2) + eps) of each row: (BM, 1) from z (BM, BW), which is zero beyond W columns."""
    return tl.rsqrt(tl.sum(z * z, 1) / W + EPS)[:, None]


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
    """dz, and for each program its rows' sums of the gradients of bias and gain: parts (programs, 2, W)."""
    n = tl.arange(0, BW)  # (BW,)
    b = tl.load(bias + n, n < W, other=0.0).to(tl.float32)[None, :]  # (1, BW)
    g = tl.load(gain + n, n < W, other=0.0).to(tl.float32)[None, :]
    db, dg = tl.zeros([BM, BW], tl.float32), tl.zeros([BM, BW], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, BM), tl.num_programs(0), num_stages=STAGES):
        row = (tile * BM + tl.arange(0, BM))[:, None]  # (BM, 1), 64-bit where R is
        at, inside = row.to(tl.int64) * W + n[None, :], (row < R) & (n < W)[None, :]  # (BM, BW)
        value = tl.load(z + at, inside, other=0.0).to(tl.float32) + b
        upstream = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        scale = inverse_rms(value, W)  # (BM, 1)
        unit = value * scale
        u = unit * g
        gate = gelu_gate(u)
        slope = gate + u * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 3 * 0.044715 * u * u)
        du = upstream * slope  # 0 in rows beyond R
        dn = du * g
        change = scale * (dn - unit * (tl.sum(dn * unit, 1) / W)[:, None])
        tl.store(dz + at, change, inside)
        db += change
        dg += du * unit
    mine = parts + tl.program_id(0) * 2 * W + n
    tl.store(mine, tl.sum(db, 0), n < W)
    tl.store(mine + W, tl.sum(dg, 0), n < W)


@triton.jit
def sum_kernel(parts, dbias, dgain, P, W, BP: tl.constexpr, BW: tl.constexpr):
    """Add up parts (P, 2, W) over P in a fixed order; program_id(1) is 0 for dbias, 1 for dgain."""
    n, sums = tl.program_id(0) * BW + tl.arange(0, BW), tl.zeros([BP, BW], tl.float32)
    which = tl.program_id(1)
    for first in range(0, P, BP):
        p = first + tl.arange(0, BP)[:, None]  # (BP, 1)
        sums += tl.load(parts + (2 * p + which) * W + n[None, :], (p < P) & (n < W)[None, :], other=0.0)
    total = tl.sum(sums, 0)  # (BW,)
    if which == 0:
        tl.store(dbias + n, total, n < W)
    else:
        tl.store(dgain + n, total, n < W)


# ---- norm_gelu: launches -----------------------------------------------------------------------------------


def norm_gelu_tile(limits: DeviceLimits, R: int, W: int) -> dict[str, int]:
    """Sizes of a tile: 2048 elements, but fewer rows while not every multiprocessor has a tile."""
    BW = max(16, next_power_of_2(W))
    share = next_power_of_2(cdiv(R, limits.multiprocessors))
    return dict(W=W, BM=min(max(1, 2048 // BW), share), BW=BW)


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
    parts = torch.empty(programs, 2, W, dtype=torch.float32, device=z.device)
    norm_gelu_grad_kernel[(programs,)](dy, z, bias, gain, dz, parts, R, **tile, STAGES=3)
    sum_kernel[(cdiv(W, 8), 2)](parts, dbias, dgain, programs, W, BP=128, BW=8)
    return dz, dbias, dgain


class NormGeluFunction(torch.autograd.Function):
    """``norm_gelu`` with its gradients, once differentiable."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(z, bias, gain)
        return norm_gelu_forward(z, bias, gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return norm_gelu_backward(dy, *ctx.saved_tensors)


def norm_gelu(z: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    """gelu(n * gain), where n = (z + bias) / sqrt(mean((z + bias)**2) + 1e-6), mean over the last dimension.

    Args:
        z: (..., W), W up to 2**20; float32, float16 or bfloat16, any strides.
        bias, gain: (W,), of z's dtype and device.

    Returns:
        (..., W), contiguous, of z's dtype; computed in float32 and rounded once. GELU in its tanh form,
        0.5 u (1 + tanh(sqrt(2 / pi) (u + 0.044715 u**3))).

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    RMSNorm: https://arxiv.org/abs/1910.07467; GELU and its tanh form: https://arxiv.org/abs/1606.08415.
    """
    check_tensor("z", z, (..., None))
    W = z.shape[-1]
    if W > MAX_WIDTH:
        raise ValueError(f"z: has rows of {W} features, should be at most {MAX_WIDTH}")
    check_tensor("bias", bias, (W,), like=z)
    check_tensor("gain", gain, (W,), like=z)
    z, bias, gain = autocast(z, bias, gain)
    if needs_grad(z, bias, gain):
        return NormGeluFunction.apply(z, bias, gain)
    return norm_gelu_forward(z, bias, gain)


# ---- fused_mlp: kernel -------------------------------------------------------------------------------------
# x is (R, W), weight (L, W, W) as in nn.Linear, bias and gain (L, W).


@triton.jit
def dot_ieee(a, b):
    """a @ b, float32 by multiply-adds without tensor cores. With ``common.dot``, three products of TF32, the
    kernel takes 250 registers instead of 80, and more shared memory."""
    if interpreted():  # the interpreter's own products of bfloat16 are wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def fused_mlp_kernel(
    x, weight, bias, gain, y, R, first, last, W: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr
):
    """A program takes BM whole rows, which the norm needs, through the blocks ``first`` to ``last`` - 1.

    Nothing is stored between two blocks, and no program waits for another. The compiler pipelines the loop:
    where two weights fit in shared memory, the next block's is loaded while this one is multiplied.
    """
    start = tl.program_id(0) + 0 * R  # 64-bit where R is
    m, n = tl.arange(0, BM)[:, None], tl.arange(0, BW)  # (BM, 1), (BW,)
    tile = offset64(start, BM * W)  # offsets within a tile need 32 bits only
    at, columns = m * W + n[None, :], n < W  # (BM, BW), (BW,)
    inside = (start * BM + m < R) & columns[None, :]  # (BM, BW)
    square = columns[:, None] & columns[None, :]  # (BW, BW)
    h = tl.load(x + tile + at, inside, other=0.0)  # (BM, BW)
    for i in tl.range(first, last):
        w = tl.load(weight + i * W * W + n[None, :] * W + n[:, None], square, other=0.0)  # (in, out)
        b = tl.load(bias + i * W + n, columns, other=0.0).to(tl.float32)  # (BW,)
        g = tl.load(gain + i * W + n, columns, other=0.0).to(tl.float32)
        z = dot_ieee(h, w) + b[None, :]  # (BM, BW)
        u = z * inverse_rms(z, W) * g[None, :]
        h = (u * gelu_gate(u)).to(h.dtype)
    tl.store(y + tile + at, h, inside)


# ---- fused_mlp: launches -----------------------------------------------------------------------------------


def weight_stages(limits: DeviceLimits, BW: int, itemsize: int) -> int:
    """3 pipeline stages where two weights fit in shared memory, 2 where one does, a ValueError where none."""
    room = (limits.shared_bytes or 2**30) - 8192
    for stages in (3, 2):
        if (stages - 1) * BW * BW * itemsize <= room:
            return stages
    raise ValueError("weight: that of one block does not fit in this GPU's shared memory")


def rows_per_program(limits: DeviceLimits, R: int, BW: int, itemsize: int) -> int:
    """16 rows while not every multiprocessor has a program, then 32; 64 fit only beside a small weight."""
    most = 64 if BW <= 128 and itemsize == 2 else 32
    for rows in (16, 32):
        if rows * limits.multiprocessors >= R or rows == most:
            return rows
    return 64


@operator(fake=lambda x, *_: empty_contiguous(x))
def fused_mlp_forward(
    x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, blocks_per_launch: int
) -> Tensor:
    x, weight, bias, gain = x.contiguous(), weight.contiguous(), bias.contiguous(), gain.contiguous()
    (R, W), depth = x.shape, weight.shape[0]
    if not depth or not x.numel():
        return x.clone()
    if weight.numel() >= 2**31:  # the kernel counts weights in 32 bits: half of the blocks at a time
        half = depth // 2
        x = fused_mlp_forward(x, weight[:half], bias[:half], gain[:half], blocks_per_launch)
        return fused_mlp_forward(x, weight[half:], bias[half:], gain[half:], blocks_per_launch)
    limits, BW = device_limits(x.device), max(16, next_power_of_2(W))
    BM = rows_per_program(limits, R, BW, x.itemsize)
    tuned = dict(num_warps=8 if BM * BW >= 4096 else 4, num_stages=weight_stages(limits, BW, x.itemsize))
    for first in range(0, depth, blocks_per_launch):
        y, last = torch.empty_like(x), min(first + blocks_per_launch, depth)
        grid = (cdiv(R, BM),)
        fused_mlp_kernel[grid](x, weight, bias, gain, y, R, first, last, W=W, BM=BM, BW=BW, **tuned)
        x = y
    return x


def fused_mlp(blocks_per_launch: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Make a function of (x, weight, bias, gain) that runs a stack of Linear, RMSNorm, GELU blocks.

    h = gelu(rms_norm(h weight[i].T + bias[i]) * gain[i]) for i = 0 to L-1, from h = x. rms_norm(z) is
    z / sqrt(mean(z**2) + 1e-6) over a row, and GELU is in its tanh form.

    Args:
        blocks_per_launch: at least 1; a number above L is one launch for all blocks.

    Returns:
        A function that takes
        x: (R, W); float32, float16 or bfloat16, any strides;
        weight: (L, W, W), each as in nn.Linear (out, in), of x's dtype and device. One of them has to fit in
        the shared memory of a multiprocessor: W up to 256 in 16 bits and 128 in float32 on an H200;
        bias, gain: (L, W), of x's dtype and device;
        and returns h, (R, W), contiguous, of x's dtype, rounded once after each block. It has no backward.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument, and for a weight that is too
            large for the GPU.
        RuntimeError: if autograd would have to record the call.

    RMSNorm: https://arxiv.org/abs/1910.07467; GELU and its tanh form: https://arxiv.org/abs/1606.08415.
    """
    if blocks_per_launch < 1:
        raise ValueError(f"blocks_per_launch: is {blocks_per_launch}, should be at least 1")

    def call(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
        check_tensor("x", x, (None, None))
        W = x.shape[1]
        check_tensor("weight", weight, (*getattr(weight, "shape", ())[:1], W, W), like=x)
        check_tensor("bias", bias, (len(weight), W), like=x)
        check_tensor("gain", gain, (len(weight), W), like=x)
        no_gradient("fused_mlp", x, weight, bias, gain)
        return fused_mlp_forward(*autocast(x, weight, bias, gain), blocks_per_launch)

    return call
