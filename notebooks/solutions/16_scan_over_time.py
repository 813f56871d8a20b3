"""Solutions of lesson 16's tasks. Each cell is what you would have written in the notebook's."""

# %%
import torch
import triton
import triton.language as tl


# %% [block]
@triton.jit
def two_steps(a1, b1, a2, b2):
    """The one step that does first (a1, b1) and then (a2, b2): its a and its b."""
    return a2 * a1, a2 * b1 + b2


@triton.jit
def block_kernel(a, b, h, T, H, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: all steps of BLOCK features of one sequence; T is at most STEPS."""
    sequence = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, STEPS)[:, None]  # (STEPS, 1)
    feature = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]  # (1, BLOCK)
    at = (sequence * T + t) * H + feature  # (STEPS, BLOCK)
    inside = (t < T) & (feature < H)
    gate = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    gate, new = tl.associative_scan((gate, new), axis=0, combine_fn=two_steps)
    tl.store(h + at, new, mask=inside)  # the state before the first step is zero: what is left is b


def block_scan(a, b):
    """h (B, T, H) of up to 128 steps; a and b (B, T, H)."""
    a, b = a.contiguous(), b.contiguous()
    (B, T, H), h = a.shape, torch.empty_like(a)
    block_kernel[B, triton.cdiv(H, 8)](a, b, h, T, H, STEPS=128, BLOCK=8, num_warps=4)
    return h


# %% [scan]
@triton.jit
def two_steps(a1, b1, a2, b2):
    """The one step that does first (a1, b1) and then (a2, b2): its a and its b."""
    return a2 * a1, a2 * b1 + b2


@triton.jit
def scan_kernel(a, b, h, T, H, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: all steps of BLOCK features of one sequence, STEPS of them at a time."""
    sequence = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, STEPS)[:, None]  # (STEPS, 1)
    feature = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]  # (1, BLOCK)
    state = tl.zeros([1, BLOCK], tl.float32)  # before the block
    for first in range(0, T, STEPS):
        t = first + step
        at = (sequence * T + t) * H + feature  # (STEPS, BLOCK)
        inside = (t < T) & (feature < H)
        gate = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
        new = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
        gate, new = tl.associative_scan((gate, new), axis=0, combine_fn=two_steps)
        states = gate * state + new  # from before the block to each of its steps
        tl.store(h + at, states, mask=inside)
        state = tl.sum(tl.where(step == STEPS - 1, states, 0.0), axis=0, keep_dims=True)


def scan(a, b):
    """h (B, T, H) of any number of steps; a and b (B, T, H)."""
    a, b = a.contiguous(), b.contiguous()
    (B, T, H), h = a.shape, torch.empty_like(a)
    scan_kernel[B, triton.cdiv(H, 8)](a, b, h, T, H, STEPS=128, BLOCK=8, num_warps=4)
    return h
