"""Solutions of lesson 9's exercises. Each cell is what you would have written in the notebook's."""

# %%
import torch
import triton
import triton.language as tl
from torch import Tensor


# %% [floor]
def floor_us(rows, multiplications, in_and_out, weights, itemsize, bytes_per_us, flops_per_us):
    """Microseconds below which no network of these layers can stay, however its kernels are cut.

    rows: steps of all sequences; multiplications: a list, of each layer for one row; in_and_out: numbers of a
    row that come from memory and go there; weights: numbers of all weights, which are read once.
    """
    # What lies between two layers does not count: one kernel for all of them would keep it on the chip.
    moved = (rows * in_and_out + weights) * itemsize
    # Of each layer, for each row; a multiplication comes with an addition.
    done = 2 * rows * sum(multiplications)
    # Memory and arithmetic work at the same time, so the slower one decides.
    return max(moved / bytes_per_us, done / flops_per_us)


# %% [cell]
@triton.jit
def both_kernel(z, candidate, gain, result, T, eps, H: tl.constexpr, BH: tl.constexpr):
    row, n = tl.program_id(0), tl.arange(0, BH)
    inside = n < H
    w = tl.load(gain + n, inside, other=0.0).to(tl.float32)
    s, r = tl.zeros([BH], tl.float32), tl.zeros([BH], tl.float32)
    for t in range(T):
        at = (row * T + t) * H + n
        gate = tl.load(z + at, inside, other=0.0).to(tl.float32)
        value = tl.load(candidate + at, inside, other=0.0).to(tl.float32)
        s = (1 - gate) * s + gate * value
        u = (1 - gate) * r + s  # of this step's s, which never goes to memory
        # The lanes from H on hold zeros, so they add nothing to the sum; but the mean is one over H, not BH.
        r = w * u / tl.sqrt(tl.sum(u * u) / H + eps)
        tl.store(result + at, r, inside)


def both(z: Tensor, candidate: Tensor, gain: Tensor) -> Tensor:
    """Both recurrences over (B, T, H) in one loop, led by the gates z in (0, 1)."""
    z, candidate, gain = z.contiguous(), candidate.contiguous(), gain.contiguous()
    (B, T, H), result = z.shape, torch.empty_like(z)
    both_kernel[(B,)](z, candidate, gain, result, T, 1e-6, H=H, BH=triton.next_power_of_2(H))
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
