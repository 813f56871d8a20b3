"""Solutions of lesson 1's exercises. Each cell is what you would have written in the notebook's."""

# %%
import labkit as lab

import time

import torch
import triton
import triton.language as tl
from torch import Tensor


# %% [mask]
@triton.jit
def double_kernel(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # One true or false for each place of the block. Elements are numbered 0 to count - 1,
    # so place `count` is outside. In all blocks but the last it is true everywhere.
    inside = at < count
    tl.store(y + at, 2 * tl.load(x + at, mask=inside), mask=inside)


# %% [affine]
@triton.jit
def affine_kernel(x, weight, bias, y, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = at < count
    # The parameters repeat with every row, so element `at` takes the one of its column.
    # They are few and stay in cache: only x and y cross memory, each of them once.
    scale = tl.load(weight + at % width, mask=inside).to(tl.float32)
    shift = tl.load(bias + at % width, mask=inside).to(tl.float32)
    # Values are converted as they arrive. Where memory is the floor, arithmetic in float32
    # costs no time, and the result is rounded once, by the store.
    value = tl.load(x + at, mask=inside).to(tl.float32) * scale + shift
    tl.store(y + at, value, mask=inside)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x * weight + bias: x (rows, width), contiguous; weight and bias (width,)."""
    lab.no_gradient("affine", x, weight, bias)
    y = torch.empty_like(x)
    # A program has 128 threads unless you say otherwise: 2 KiB are 16 bytes for each of them.
    block = 2048 // x.element_size()
    grid = (triton.cdiv(x.numel(), block),)
    affine_kernel[grid](x, weight, bias, y, x.numel(), x.shape[-1], BLOCK=block)
    return y


# %% [benchmark]
def time_us(gpu, layer, batch, width):
    """Device time of one call of the layer, in microseconds."""
    # Many calls, so that one launch, one wait and a rare slow call hardly count.
    calls = 50
    # Drawing is work for the device: once, before the clock starts.
    x = gpu.randn(batch, width)
    # The first call compiles the layer.
    layer(x)
    # Both of the above are only queued. Without this wait the clock would count them too.
    gpu.synchronize()
    start = gpu.clock_us()
    for _ in range(calls):
        layer(x)
    # The loop ends when the calls are queued, not when they are done.
    gpu.synchronize()
    stop = gpu.clock_us()
    return (stop - start) / calls


# %% [graph]
def graph_us(call, calls=100, replays=10):
    """Device time of one call, in microseconds: capture many calls, replay, divide."""
    # The first call compiles, which can't be captured.
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Launches in here are recorded, and nothing runs. Python is as slow as ever, but nobody times it.
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    # The first replay uploads the graph to the device.
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    # Each is one launch for all the calls: the device finds its work waiting.
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (calls * replays) * 1e6
