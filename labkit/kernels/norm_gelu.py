"""gelu(rms_norm(z + bias) gain): what lies between two products of a block, in one pass each way."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.common import (
    Gpu,
    autocast,
    cdiv,
    check_tensor,
    gpu_of,
    needs_grad,
    next_power_of_2,
    once_differentiable,
    operator,
)

EPS = tl.constexpr(1e-6)
"""What RMSNorm adds to the mean square."""
WIDEST = 2**20
"""Features of a row: a program holds whole rows, and a Triton block no more elements than that."""

# ---- kernels: z (R, W); a program holds tiles (BM, BW) of whole rows, BW a power of two, at least W --------


@triton.jit
def gelu_gate(u):
    """gelu(u) = u * gate, in the tanh form: tanh(v) = 2 sigmoid(2v) - 1."""
    return tl.sigmoid(1.5957691216057308 * (u + 0.044715 * u * u * u))  # 2 sqrt(2 / pi)


@triton.jit
def scale_of(z, W: tl.constexpr):
    """One over the root of each row's mean square: (BM, 1) from (BM, BW), zeros beyond the W columns."""
    return tl.rsqrt(tl.sum(z * z, 1) / W + EPS)[:, None]


@triton.jit
def norm_gelu_kernel(z, bias, gain, y, R, W: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr):
    first = (tl.program_id(0) + 0 * R) * BM  # in 64 bits where R has them
    row, n = (first + tl.arange(0, BM))[:, None], tl.arange(0, BW)  # (BM, 1), (BW,)
    at, inside = row.to(tl.int64) * W + n[None, :], (row < R) & (n < W)[None, :]  # (BM, BW)
    b = tl.load(bias + n, n < W, other=0.0).to(tl.float32)[None, :]  # (1, BW)
    g = tl.load(gain + n, n < W, other=0.0).to(tl.float32)[None, :]
    value = tl.load(z + at, inside, other=0.0).to(tl.float32) + b  # (BM, BW)
    u = value * scale_of(value, W) * g
    tl.store(y + at, u * gelu_gate(u), inside)


@triton.jit
def norm_gelu_grad_kernel(
    dy, z, bias, gain, dz, parts, R,
    W: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dz, and the sums over this program's rows of the gradients of bias and gain: parts (programs, 2, W)."""
    n = tl.arange(0, BW)  # (BW,)
    b = tl.load(bias + n, n < W, other=0.0).to(tl.float32)[None, :]  # (1, BW)
    g = tl.load(gain + n, n < W, other=0.0).to(tl.float32)[None, :]
    db, dg = tl.zeros([BM, BW], tl.float32), tl.zeros([BM, BW], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, BM), tl.num_programs(0), num_stages=STAGES):
        row = (tile * BM + tl.arange(0, BM))[:, None]  # (BM, 1); tile is as wide as R
        at, inside = row.to(tl.int64) * W + n[None, :], (row < R) & (n < W)[None, :]  # (BM, BW)
        value = tl.load(z + at, inside, other=0.0).to(tl.float32) + b
        upstream = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        scale = scale_of(value, W)  # (BM, 1)
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
    """Sums parts (P, 2, W) over P, in a fixed order; program_id(1) is 0 for dbias, 1 for dgain."""
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


# ---- launches ----------------------------------------------------------------------------------------------


def tile_of(gpu: Gpu, R: int, W: int) -> dict[str, int]:
    """A tile: few rows, until each multiprocessor has one; the columns' power of two."""
    BW = max(16, next_power_of_2(W))
    share = next_power_of_2(cdiv(R, gpu.multiprocessors))
    return dict(W=W, BM=min(max(1, 2048 // BW), share), BW=BW)


@operator(fake=lambda z, bias, gain: torch.empty_like(z, memory_format=torch.contiguous_format))
def norm_gelu_forward(z: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    z, bias, gain = z.contiguous(), bias.contiguous(), gain.contiguous()
    y, W = torch.empty_like(z), z.shape[-1]
    if z.numel():
        R = z.numel() // W
        tile = tile_of(gpu_of(z.device), R, W)
        norm_gelu_kernel[(cdiv(R, tile["BM"]),)](z, bias, gain, y, R, **tile)
    return y


def _like_inputs(dy: Tensor, z: Tensor, bias: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    like = torch.contiguous_format
    return (
        torch.empty_like(z, memory_format=like),
        torch.empty_like(bias, memory_format=like),
        torch.empty_like(gain, memory_format=like),
    )


@operator(fake=_like_inputs)
def norm_gelu_backward(dy: Tensor, z: Tensor, bias: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dz, dbias, dgain."""
    dy, z, bias, gain = dy.contiguous(), z.contiguous(), bias.contiguous(), gain.contiguous()
    dz, dbias, dgain = _like_inputs(dy, z, bias, gain)
    if not z.numel():
        return dz, dbias.zero_(), dgain.zero_()
    W, gpu = z.shape[-1], gpu_of(z.device)
    R = z.numel() // W
    tile = tile_of(gpu, R, W)
    tiles, places = cdiv(R, tile["BM"]), gpu.multiprocessors
    programs = min(tiles, max(places, min(tiles // 4, 4 * places)))
    parts = torch.empty(programs, 2, W, dtype=torch.float32, device=z.device)
    norm_gelu_grad_kernel[(programs,)](dy, z, bias, gain, dz, parts, R, **tile, STAGES=3)
    sum_kernel[(cdiv(W, 8), 2)](parts, dbias, dgain, programs, W, BP=128, BW=8)
    return dz, dbias, dgain


class NormGelu(torch.autograd.Function):
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
    if W > WIDEST:
        raise ValueError(f"z: has rows of {W}, should be at most {WIDEST} wide")
    check_tensor("bias", bias, (W,), like=z)
    check_tensor("gain", gain, (W,), like=z)
    z, bias, gain = autocast(z, bias, gain)
    if needs_grad(z, bias, gain):
        return NormGelu.apply(z, bias, gain)
    return norm_gelu_forward(z, bias, gain)
