"""Solutions of lesson 14's tasks. Each cell is what you would have written in the notebook's."""

# %%
import torch
import triton
import triton.language as tl


# %% [normed]
@triton.jit
def normed_kernel(a, b, weight, h, T, H: tl.constexpr, BLOCK: tl.constexpr):
    """One program: all H features of one sequence, step by step."""
    sequence = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)  # (BLOCK,)
    inside = feature < H
    w = tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
    state = tl.zeros([BLOCK], tl.float32)
    for t in range(T):
        at = (sequence * T + t) * H + feature
        gate = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
        new = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
        x = gate * state + new  # 0 in masked places, so they add nothing to the sum
        state = w * x * tl.rsqrt(tl.sum(x * x, axis=0) / H + 1e-6)
        tl.store(h + at, state, mask=inside)


def normed(a, b, weight):
    """h (B, T, H): x = a * the step before + b, and h = weight * x / sqrt(mean(x * x) + 1e-6)."""
    a, b, weight = a.contiguous(), b.contiguous(), weight.contiguous()
    (B, T, H), h = a.shape, torch.empty_like(a)
    normed_kernel[(B,)](a, b, weight, h, T, H=H, BLOCK=triton.next_power_of_2(H), num_warps=1)
    return h


# %% [normed_ahead]
@triton.jit
def normed_ahead_kernel(a, b, weight, h, T, H: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr):
    """One program: all H features of one sequence. Step t + U is loaded before step t is stored."""
    sequence = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)  # (BLOCK,)
    inside = feature < H
    w = tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
    state = tl.zeros([BLOCK], tl.float32)
    coming_a, coming_b = (), ()
    for u in tl.static_range(U):
        at = (sequence * T + u) * H + feature
        coming_a += (tl.load(a + at, mask=inside & (u < T), other=0.0).to(tl.float32),)
        coming_b += (tl.load(b + at, mask=inside & (u < T), other=0.0).to(tl.float32),)
    for first in range(0, T, U):
        now_a, now_b, coming_a, coming_b = coming_a, coming_b, (), ()
        for u in tl.static_range(U):
            t = first + u
            at = (sequence * T + t) * H + feature
            ahead = inside & (t + U < T)
            coming_a += (tl.load(a + at + U * H, mask=ahead, other=0.0).to(tl.float32),)
            coming_b += (tl.load(b + at + U * H, mask=ahead, other=0.0).to(tl.float32),)
            x = now_a[u] * state + now_b[u]
            state = w * x * tl.rsqrt(tl.sum(x * x, axis=0) / H + 1e-6)
            tl.store(h + at, state, mask=inside & (t < T))


def normed_ahead(a, b, weight, warps=1):
    """The same, with loads that run ahead; so many warps have a sequence."""
    a, b, weight = a.contiguous(), b.contiguous(), weight.contiguous()
    (B, T, H), h = a.shape, torch.empty_like(a)
    BLOCK = triton.next_power_of_2(H)
    U = max(1, min(8, 1024 // BLOCK))  # fewer steps ahead, where a step has more features
    normed_ahead_kernel[(B,)](a, b, weight, h, T, H=H, U=U, BLOCK=BLOCK, num_warps=warps)
    return h
