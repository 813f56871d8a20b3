"""Solutions of lesson 15's tasks. Each cell is what you would have written in the notebook's."""

# %%
import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable


# %%
@triton.jit
def forward_kernel(a, b, h, T, H, U: tl.constexpr, BLOCK: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = feature < H
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
            state = now_a[u] * state + now_b[u]
            tl.store(h + at, state, mask=inside & (t < T))


def recurrence(a, b):
    a, b = a.contiguous(), b.contiguous()
    (B, T, H), h = a.shape, torch.empty_like(a)
    forward_kernel[B, triton.cdiv(H, 128)](a, b, h, T, H, U=16, BLOCK=128, num_warps=1)
    return h


# %% [backward]
@triton.jit
def backward_kernel(dh, a, h, da, db, T, H, BLOCK: tl.constexpr):
    """One program: BLOCK features of one sequence, from its last step to its first."""
    sequence = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = feature < H
    carry = tl.zeros([BLOCK], tl.float32)  # what comes back from step t + 1
    for back in range(T):
        t = T - 1 - back
        at = (sequence * T + t) * H + feature
        g = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32) + carry
        # Before step 0 the state is zero. H places before it lies another sequence, or nothing.
        before = tl.load(h + at - H, mask=inside & (t > 0), other=0.0).to(tl.float32)
        gate = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)  # before the stores: all loads together
        tl.store(da + at, g * before, mask=inside)
        tl.store(db + at, g, mask=inside)
        carry = gate * g


def recurrence_backward(dh, a, h):
    """da and db (B, T, H), from dh, a and h (B, T, H)."""
    dh, a, h = dh.contiguous(), a.contiguous(), h.contiguous()
    (B, T, H), da, db = a.shape, torch.empty_like(a), torch.empty_like(a)
    backward_kernel[B, triton.cdiv(H, 128)](dh, a, h, da, db, T, H, BLOCK=128, num_warps=1)
    return da, db


class Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        h = recurrence(a, b)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        return recurrence_backward(dh, *ctx.saved_tensors)


def recurrence_layer(a, b):
    return Recurrence.apply(a, b)


# %% [reset]
@triton.jit
def reset_kernel(dh, a, h, reset, da, db, T, H, BLOCK: tl.constexpr):
    """One program: BLOCK features of one sequence, from its last step to its first."""
    sequence = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = feature < H
    carry = tl.zeros([BLOCK], tl.float32)
    for back in range(T):
        t = T - 1 - back
        at = (sequence * T + t) * H + feature
        new = tl.load(reset + sequence * T + t)  # one for all features
        g = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32) + carry
        before = tl.load(h + at - H, mask=inside & (t > 0), other=0.0).to(tl.float32)
        # Chosen, not multiplied by zero: the state before may be infinite.
        tl.store(da + at, tl.where(new, 0.0, g * before), mask=inside)
        tl.store(db + at, g, mask=inside)
        carry = tl.where(new, 0.0, tl.load(a + at, mask=inside, other=0.0).to(tl.float32) * g)


def reset_backward(dh, a, h, reset):
    """da and db (B, T, H) of a recurrence that begins anew where reset (B, T) is true."""
    dh, a, h, reset = dh.contiguous(), a.contiguous(), h.contiguous(), reset.contiguous()
    (B, T, H), da, db = a.shape, torch.empty_like(a), torch.empty_like(a)
    reset_kernel[B, triton.cdiv(H, 128)](dh, a, h, reset, da, db, T, H, BLOCK=128, num_warps=1)
    return da, db
