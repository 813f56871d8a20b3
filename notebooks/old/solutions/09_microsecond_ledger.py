"""Solutions of lesson 9's exercises. Each cell is what you would have written in the notebook's."""

# %%
import labkit as lab

import time

import torch
import triton
import triton.language as tl
from torch import Tensor


# %% [cell]
@triton.jit
def both_kernel(z, candidate, gain, result, T, eps, H: tl.constexpr, BH: tl.constexpr):
    """One program: both recurrences of one sequence."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BH)
    inside = n < H
    w = tl.load(gain + n, inside, other=0.0).to(tl.float32)
    s, r = tl.zeros([BH], tl.float32), tl.zeros([BH], tl.float32)
    for t in tl.range(0, T, num_stages=8):  # loads run ahead, as in lesson 7
        at = (row * T + t) * H + n
        gate = tl.load(z + at, inside, other=0.0).to(tl.float32)
        value = tl.load(candidate + at, inside, other=0.0).to(tl.float32)
        s = (1 - gate) * s + gate * value
        u = (1 - gate) * r + s  # of this step's s, which never goes to memory
        # The lanes from H on hold zeros, so they add nothing to the sum; but the mean is one over H, not BH.
        r = w * u / tl.sqrt(tl.sum(u * u) / H + eps)
        tl.store(result + at, r, inside)


def both(z: Tensor, candidate: Tensor, gain: Tensor) -> Tensor:
    """Both recurrences over (B, T, H) in one loop, led by the gates z in (0, 1); gain (H,)."""
    lab.no_gradient("both", z, candidate, gain)
    z, candidate, gain = z.contiguous(), candidate.contiguous(), gain.contiguous()
    (B, T, H), result = z.shape, torch.empty_like(z)
    # One warp: the sum over the features stays within it.
    both_kernel[(B,)](z, candidate, gain, result, T, 1e-6, H=H, BH=triton.next_power_of_2(H), num_warps=1)
    return result


# %% [wall]
def wall_us(launches, kernels):
    """When the last kernel ends, in us after the host begins: it launches one after another without waiting.

    launches: how long the host needs for each launch; kernels: how long the GPU then needs for each. The GPU
    runs them in order, one at a time, each not before its launch is over.
    """
    ready = done = 0.0
    for launch, kernel in zip(launches, kernels, strict=True):
        ready += launch  # the host goes on whatever the GPU does
        # The GPU waits for the launch, or the launched kernel for the one before: for the later of both.
        done = max(done, ready) + kernel
    return done


# %% [entries]
def entries(call, busy_us, bytes_us, products_us):
    """The five entries of one call's wall time, in microseconds: a dict from the names above to numbers.

    call: launches the kernels, and compiles them the first time; busy_us: the time in which kernels run, by
    the profiler; bytes_us and products_us: two lists, of each kernel what its bytes and its products take.
    """
    call()  # compiles, which no capture allows
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            call()
    graph.replay()  # the first replay uploads the graph

    def clock(run):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 100 * 1e6

    wall, device = clock(lambda: [call() for _ in range(100)]), clock(graph.replay)
    traffic = sum(bytes_us)
    # Kernel by kernel: while one multiplies, the bytes of the next one do not move.
    arithmetic = sum(max(0, product - moved) for moved, product in zip(bytes_us, products_us, strict=True))
    return {
        "traffic": traffic,
        "arithmetic": arithmetic,
        "unexplained": busy_us - traffic - arithmetic,
        "between": device - busy_us,
        "launches": wall - device,
    }
