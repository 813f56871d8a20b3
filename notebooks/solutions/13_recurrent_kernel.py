"""Solutions of lesson 13's tasks. Each cell is what you would have written in the notebook's."""

# %%
import torch
import triton
import triton.language as tl


# %% [recurrence]
@triton.jit
def recurrence_kernel(a, b, h, T, H, BLOCK: tl.constexpr):
    """One program: BLOCK features of one sequence, step by step."""
    sequence = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = feature < H
    state = tl.zeros([BLOCK], tl.float32)  # stays in registers; only what is stored is rounded
    for t in range(T):
        at = (sequence * T + t) * H + feature  # a step has H features, not BLOCK
        gate = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
        new = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
        state = gate * state + new
        tl.store(h + at, state, mask=inside)


def recurrence(a, b):
    """h (B, T, H), where each step is a times the step before, plus b; a and b (B, T, H)."""
    a, b = a.contiguous(), b.contiguous()
    (B, T, H), h = a.shape, torch.empty_like(a)
    recurrence_kernel[B, triton.cdiv(H, 128)](a, b, h, T, H, BLOCK=128, num_warps=1)
    return h


# %% [ahead]
@triton.jit
def ahead_kernel(a, b, h, T, H, U: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK features of one sequence. Step t + U is loaded before step t is stored."""
    sequence = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = feature < H
    state = tl.zeros([BLOCK], tl.float32)
    coming_a, coming_b = (), ()
    for u in tl.static_range(U):  # before the first round the first U steps set out
        at = (sequence * T + u) * H + feature
        coming_a += (tl.load(a + at, mask=inside & (u < T), other=0.0).to(tl.float32),)
        coming_b += (tl.load(b + at, mask=inside & (u < T), other=0.0).to(tl.float32),)
    for first in range(0, T, U):
        now_a, now_b, coming_a, coming_b = coming_a, coming_b, (), ()
        for u in tl.static_range(U):
            t = first + u
            at = (sequence * T + t) * H + feature
            # Before this step's store: no load is moved over a store that might change what it reads.
            ahead = inside & (t + U < T)
            coming_a += (tl.load(a + at + U * H, mask=ahead, other=0.0).to(tl.float32),)
            coming_b += (tl.load(b + at + U * H, mask=ahead, other=0.0).to(tl.float32),)
            state = now_a[u] * state + now_b[u]
            tl.store(h + at, state, mask=inside & (t < T))  # T need not be a multiple of U


def ahead(a, b, U=16):
    """The recurrence of a and b (B, T, H), with loads U steps ahead."""
    a, b = a.contiguous(), b.contiguous()
    (B, T, H), h = a.shape, torch.empty_like(a)
    ahead_kernel[B, triton.cdiv(H, 128)](a, b, h, T, H, U=U, BLOCK=128, num_warps=1)
    return h
