"""Solutions of lesson 7's exercises. Each cell is what you would have written in the notebook's."""

# %%
import labkit as lab

import torch
import triton
import triton.language as tl
from torch import Tensor


# %% [recurrence]
@triton.jit
def recurrence_kernel(a, b, h, T, H, BH: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    inside, state = n < H, tl.zeros([BH], tl.float32)
    for t in range(T):
        at = (row * T + t) * H + n  # a step has H features, not BH
        # The state is float32 and stays so, whatever a and b are: only what is stored is rounded.
        state = tl.load(a + at, inside, other=0.0) * state + tl.load(b + at, inside, other=0.0)
        # Without the mask the last features would be stored over the first ones of the next step.
        tl.store(h + at, state, inside)


def recurrence(a: Tensor, b: Tensor) -> Tensor:
    lab.no_gradient("recurrence", a, b)
    (B, T, H), h = a.shape, torch.empty_like(a)
    if h.numel():
        # A warp has 32 lanes, each with 4 features: 16 bytes of float32, the widest load.
        recurrence_kernel[(B, triton.cdiv(H, 128))](a, b, h, T, H, BH=128, num_warps=1)
    return h


# %% [ahead]
@triton.jit
def ahead_kernel(a, b, h, T, H, BH: tl.constexpr, U: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    inside, state, coming_a, coming_b = n < H, tl.zeros([BH], tl.float32), (), ()
    for u in tl.static_range(U):  # before the loop, the first U steps set out
        at = (row * T + u) * H + n
        coming_a += (tl.load(a + at, inside & (u < T), other=0.0),)
        coming_b += (tl.load(b + at, inside & (u < T), other=0.0),)
    for first in range(0, T, U):
        now_a, now_b, coming_a, coming_b = coming_a, coming_b, (), ()
        for u in tl.static_range(U):
            t = first + u
            at, later = (row * T + t) * H + n, (row * T + t + U) * H + n
            # Before this step's store: no load may be moved over a store that could change what it reads.
            coming_a += (tl.load(a + later, inside & (t + U < T), other=0.0),)
            coming_b += (tl.load(b + later, inside & (t + U < T), other=0.0),)
            state = now_a[u] * state + now_b[u]
            tl.store(h + at, state, inside & (t < T))  # T need not be a multiple of U


def ahead(a: Tensor, b: Tensor, steps: int = 8) -> Tensor:
    lab.no_gradient("ahead", a, b)
    (B, T, H), h = a.shape, torch.empty_like(a)
    if h.numel():
        ahead_kernel[(B, triton.cdiv(H, 128))](a, b, h, T, H, BH=128, U=steps, num_warps=1)
    return h


# %% [backward]
@triton.jit
def backward_kernel(dh, a, h, da, db, T, H, BH: tl.constexpr, STAGES: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    inside, carry = n < H, tl.zeros([BH], tl.float32)  # carry: what comes back from step t + 1
    for back in tl.range(0, T, num_stages=STAGES):
        t = T - 1 - back
        at = (row * T + t) * H + n
        g = tl.load(dh + at, inside, other=0.0) + carry
        # Before step 0 the state is zero. Without t > 0 the load would reach into the sequence before.
        last = tl.load(h + at - H, inside & (t > 0), other=0.0)
        tl.store(da + at, g * last, inside)
        tl.store(db + at, g, inside)
        carry = tl.load(a + at, inside, other=0.0) * g  # h_(t-1) went into h_t with the factor a_t


def recurrence_backward(dh: Tensor, a: Tensor, h: Tensor, stages: int = 8) -> tuple[Tensor, Tensor]:
    (B, T, H), da, db = a.shape, torch.empty_like(a), torch.empty_like(a)
    if a.numel():
        grid, sizes = (B, triton.cdiv(H, 128)), dict(BH=128, STAGES=stages, num_warps=1)
        backward_kernel[grid](dh, a, h, da, db, T, H, **sizes)
    return da, db


# %% [reset]
@triton.jit
def reset_kernel(a, b, reset, h, T, H, BH: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    inside, state = n < H, tl.zeros([BH], tl.float32)
    for t in range(T):
        at = (row * T + t) * H + n
        decayed = tl.load(a + at, inside, other=0.0) * state
        # Selected after the product: 0 * inf is NaN, so no factor gets rid of what must not matter.
        decayed = tl.where(tl.load(reset + row * T + t), 0.0, decayed)  # reset (B, T) has no features
        state = decayed + tl.load(b + at, inside, other=0.0)
        tl.store(h + at, state, inside)


def with_reset(a: Tensor, b: Tensor, reset: Tensor) -> Tensor:
    """The recurrence of a and b (B, T, H), begun anew where reset (B, T) is true: h_t = b_t there."""
    lab.no_gradient("with_reset", a, b)
    (B, T, H), h = a.shape, torch.empty_like(a)
    if h.numel():
        reset_kernel[(B, triton.cdiv(H, 128))](a, b, reset, h, T, H, BH=128, num_warps=1)
    return h
