"""Solutions of lesson 7's exercises. Each cell is what you would have written in the notebook's."""

# %%
import torch
import triton
import triton.language as tl
from torch import Tensor


# %% [original]
@triton.jit
def original_grad_kernel(dy, x, weight, rms, dx, dw, N, H: tl.constexpr, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # one lane for each of the N elements
    inside, row, column = idx < N, idx // H, idx % H
    dot = tl.zeros([BLOCK], tl.float32)
    for k in range(H):
        # All elements of a row share one sum, over this row: it begins at the row's first element.
        at = row * H + k
        product = tl.load(dy + at, at < N, other=0.0).to(tl.float32) * tl.load(x + at, at < N, other=0.0)
        dot += product * tl.load(weight + k)
    r = tl.load(rms + row, inside, other=1.0)
    gy = tl.load(dy + idx, inside, other=0.0).to(tl.float32)
    value = tl.load(x + idx, inside, other=0.0).to(tl.float32)
    tl.store(dx + idx, gy * tl.load(weight + column) / r - value * dot / (H * r * r * r), inside)
    # y is weight * (x / rms), so what stands beside the weight is x / rms.
    tl.store(dw + idx, gy * value / r, inside)


def rms_norm_grad(dy: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The gradients of y = weight * x / rms for the upstream gradient dy: that of x, that of weight (H,)."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    N, H = x.numel(), x.shape[-1]
    rms = torch.sqrt(x.float().square().mean(-1) + eps)
    dx, dw = torch.empty_like(x), x.new_empty(N // H, H, dtype=torch.float32)
    original_grad_kernel[(triton.cdiv(N, 1024),)](dy, x, weight, rms, dx, dw, N, H, BLOCK=1024)
    # Every row used the weight once, so its gradient is the sum over rows: in float32, rounded at the end.
    return dx, dw.sum(0).to(weight.dtype)


# %% [recurrence]
@triton.jit
def recurrence_kernel(a, b, h, T, H, BH: tl.constexpr):
    row, channel = tl.program_id(0), tl.program_id(1) * BH + tl.arange(0, BH)
    inside, at, state = channel < H, row * T * H + channel, tl.zeros([BH], tl.float32)
    for _ in range(T):
        # state is float32 and stays so, whatever a and b are: only what is stored is rounded.
        state = tl.load(a + at, inside) * state + tl.load(b + at, inside)
        # Without the mask the last channels would be stored over the first ones of the next step.
        tl.store(h + at, state, inside)
        at += H  # a step has H channels, not BH


def recurrence(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    B, T, H = a.shape
    h = torch.empty_like(a)
    recurrence_kernel[(B, triton.cdiv(H, 128))](a, b, h, T, H, BH=128)
    return h


# %% [reset]
@triton.jit
def reset_kernel(a, b, reset, h, T, H, BH: tl.constexpr):
    row, channel = tl.program_id(0), tl.program_id(1) * BH + tl.arange(0, BH)
    inside, state = channel < H, tl.zeros([BH], tl.float32)
    for t in range(T):
        at = (row * T + t) * H + channel
        decayed = tl.load(a + at, inside) * state
        # Selected after the product: 0 * inf is NaN, so no factor gets rid of what must not matter.
        decayed = tl.where(tl.load(reset + row * T + t), 0.0, decayed)  # reset (B, T) has no channels
        state = decayed + tl.load(b + at, inside)
        tl.store(h + at, state, inside)


def with_reset(a: Tensor, b: Tensor, reset: Tensor) -> Tensor:
    """The recurrence of a and b (B, T, H), begun anew where reset (B, T) is true: h_t = b_t there."""
    a, b, reset = a.contiguous(), b.contiguous(), reset.contiguous()
    B, T, H = a.shape
    h = torch.empty_like(a)
    reset_kernel[(B, triton.cdiv(H, 128))](a, b, reset, h, T, H, BH=128)
    return h
