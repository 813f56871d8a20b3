"""A small network in one kernel: block after block of Linear, RMSNorm and GELU, a program's rows on chip."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.common import (
    Gpu,
    autocast,
    cdiv,
    check_tensor,
    far,
    gpu_of,
    interpreted,
    next_power_of_2,
    no_gradient,
    operator,
)
from labkit.kernels.norm_gelu import gelu_gate, scale_of

# ---- kernel: x (R, W), weight (L, W, W) as nn.Linear has it, bias and gain (L, W) --------------------------


@triton.jit
def multiply(a, b):
    """a @ b; float32 by multiply-adds, each rounded as float32 is. As three products of TF32, which is what
    ``common.multiply`` does, the kernel takes 250 registers in place of 80, and more shared memory."""
    if interpreted():  # whose own products of bfloat16 are wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def stack_kernel(
    x, weight, bias, gain, y, R, first, last, W: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr
):
    """A program takes BM whole rows, as the norm needs them, through the blocks ``first`` to below ``last``.

    Between two blocks nothing is stored, and no program waits for another. The compiler pipelines the loop:
    where two weights fit on chip, the next block's is on its way while this one is multiplied.
    """
    start = tl.program_id(0) + 0 * R  # in 64 bits where R has them
    m, n = tl.arange(0, BM)[:, None], tl.arange(0, BW)  # (BM, 1), (BW,)
    tile = far(start, BM * W)  # so that offsets within it need 32 bits only
    at, columns = m * W + n[None, :], n < W  # (BM, BW), (BW,)
    inside = (start * BM + m < R) & columns[None, :]  # (BM, BW)
    square = columns[:, None] & columns[None, :]  # (BW, BW)
    h = tl.load(x + tile + at, inside, other=0.0)  # (BM, BW)
    for i in tl.range(first, last):
        w = tl.load(weight + i * W * W + n[None, :] * W + n[:, None], square, other=0.0)  # (in, out)
        b = tl.load(bias + i * W + n, columns, other=0.0).to(tl.float32)  # (BW,)
        g = tl.load(gain + i * W + n, columns, other=0.0).to(tl.float32)
        z = multiply(h, w) + b[None, :]  # (BM, BW)
        u = z * scale_of(z, W) * g[None, :]
        h = (u * gelu_gate(u)).to(h.dtype)
    tl.store(y + tile + at, h, inside)


# ---- launches ----------------------------------------------------------------------------------------------


def stages_for(gpu: Gpu, BW: int, itemsize: int) -> int:
    """Two weights on chip, one of them on its way; or one; an error where not even one fits."""
    room = (gpu.shared_bytes or 2**30) - 8192
    for stages in (3, 2):
        if (stages - 1) * BW * BW * itemsize <= room:
            return stages
    raise ValueError("weight: not one block's fits on chip beside the rows on this GPU")


def rows_for(gpu: Gpu, R: int, BW: int, itemsize: int) -> int:
    """Rows a program: few, until each multiprocessor has one. More fit only beside a small weight."""
    most = 64 if BW <= 128 and itemsize == 2 else 32
    for rows in (16, 32):
        if rows * gpu.multiprocessors >= R or rows == most:
            return rows
    return 64


def _like_x(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, at_once: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator(fake=_like_x)
def stack_forward(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, at_once: int) -> Tensor:
    x, weight, bias, gain = x.contiguous(), weight.contiguous(), bias.contiguous(), gain.contiguous()
    (R, W), depth = x.shape, weight.shape[0]
    if not depth or not x.numel():
        return x.clone()
    if weight.numel() >= 2**31:  # the kernel counts in 32 bits there: one half of the blocks after the other
        half = depth // 2
        x = stack_forward(x, weight[:half], bias[:half], gain[:half], at_once)
        return stack_forward(x, weight[half:], bias[half:], gain[half:], at_once)
    gpu, BW = gpu_of(x.device), max(16, next_power_of_2(W))
    BM = rows_for(gpu, R, BW, x.itemsize)
    tuned = dict(num_warps=8 if BM * BW >= 4096 else 4, num_stages=stages_for(gpu, BW, x.itemsize))
    for first in range(0, depth, at_once):
        y, last = torch.empty_like(x), min(first + at_once, depth)
        grid = (cdiv(R, BM),)
        stack_kernel[grid](x, weight, bias, gain, y, R, first, last, W=W, BM=BM, BW=BW, **tuned)
        x = y
    return x


def blocks(at_once: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A function (x, weight, bias, gain) that computes a stack of blocks, ``at_once`` of them in a launch.

    Each block is h = gelu(rms_norm(h weight[i]ᵀ + bias[i]) gain[i]), from h = x; rms_norm(z) is
    z / sqrt(mean(z**2) + 1e-6) over a row, GELU in its tanh form.

    Args:
        at_once: blocks in a launch, at least 1; more than there are are all of them.

    Args of the function:
        x: (R, W); float32, float16 or bfloat16, any strides.
        weight: (L, W, W), a block's as nn.Linear has it (out, in), of x's dtype and device. One has to fit
            in the memory of a multiprocessor: W up to 256 in 16 bits and 128 in float32 on an H200.
        bias, gain: (L, W), of x's dtype and device.

    Returns:
        (R, W), contiguous, of x's dtype; h is rounded to that dtype after each block, and nothing else is.
        There is no backward.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument; and for a weight too large for
            the GPU.
        RuntimeError: where a gradient would be needed.
    """
    if at_once < 1:
        raise ValueError(f"at_once: is {at_once}, should be at least 1")

    def call(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
        check_tensor("x", x, (None, None))
        W, depth = x.shape[1], weight.shape[0] if getattr(weight, "ndim", 0) == 3 else None
        check_tensor("weight", weight, (depth, W, W), like=x)
        check_tensor("bias", bias, (depth, W), like=x)
        check_tensor("gain", gain, (depth, W), like=x)
        no_gradient("blocks", x, weight, bias, gain)
        return stack_forward(*autocast(x, weight, bias, gain), at_once)

    return call
