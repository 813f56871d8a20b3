"""Solutions of lesson 2's exercises. Each cell is what you would have written in the notebook's."""

# %%
import labkit as lab

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gelu(z):  # as in the lesson
    return z * tl.sigmoid(1.5957691216 * (z + 0.044715 * z * z * z))


@triton.jit
def gelu_slope(z):
    s = tl.sigmoid(1.5957691216 * (z + 0.044715 * z * z * z))
    return s + z * s * (1 - s) * 1.5957691216 * (1 + 3 * 0.044715 * z * z)


# %% [chain]
@triton.jit
def chain_kernel(x, bias, other, y, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = at < count
    shift = tl.load(bias + at % width, mask=inside).to(tl.float32)
    z = tl.load(x + at, mask=inside).to(tl.float32) + shift
    # z and gelu(z) stay in registers. In eager PyTorch each of them goes to memory and comes back.
    value = gelu(z) * tl.load(other + at, mask=inside).to(tl.float32)
    tl.store(y + at, value, mask=inside)


def chain(x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """gelu(x + bias) * other: x and other (rows, width), contiguous; bias (width,)."""
    lab.no_gradient("chain", x, bias, other)
    y = torch.empty_like(x)
    # 16 bytes of each tensor for each of 128 threads
    block = 2048 // x.element_size()
    grid = (triton.cdiv(x.numel(), block),)
    chain_kernel[grid](x, bias, other, y, x.numel(), x.shape[-1], BLOCK=block)
    return y


# %% [backward]
@triton.jit
def chain_backward_kernel(dy, x, bias, other, dx, dother, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = at < count
    shift = tl.load(bias + at % width, mask=inside).to(tl.float32)
    # z again: one addition here, against a tensor written by the forward and read now.
    z = tl.load(x + at, mask=inside).to(tl.float32) + shift
    up = tl.load(dy + at, mask=inside).to(tl.float32)
    scale = tl.load(other + at, mask=inside).to(tl.float32)
    tl.store(dx + at, up * scale * gelu_slope(z), mask=inside)
    tl.store(dother + at, up * gelu(z), mask=inside)


def chain_backward(dy: Tensor, x: Tensor, bias: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dother, each (rows, width), from dy, x and other, contiguous, and bias (width,)."""
    dx, dother = torch.empty_like(x), torch.empty_like(x)
    block = 2048 // x.element_size()
    grid = (triton.cdiv(x.numel(), block),)
    chain_backward_kernel[grid](dy, x, bias, other, dx, dother, x.numel(), x.shape[-1], BLOCK=block)
    return dx, dother


# %% [floor]
def floor_us(elements, gelus, bandwidth, processors, clock):
    """Microseconds that the fused chain takes at least in bf16, with `gelus` GELUs one after the other."""
    # x and other in, y out, two bytes each
    memory = 3 * 2 * elements / bandwidth
    # an exponential and a division in each GELU; each multiprocessor does 16 of them a cycle
    special = 2 * gelus * elements / (16 * processors * clock)
    # Some warps compute while others wait for memory, so the slower one decides.
    return 1e6 * max(memory, special)
