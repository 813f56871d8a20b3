"""Solutions of lesson 6's exercises. Each cell is what you would have written in the notebook's."""

# %%
import labkit as lab

import torch
import triton
import triton.language as tl
from torch import Tensor


# %% [row_norm]
@triton.jit
def row_norm_kernel(x, weight, y, H: tl.constexpr, BH: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BH)  # (BH,): the lanes share the columns
    # What masked places hold is added up, too: so they hold 0.
    value = tl.load(x + row * H + n, mask=n < H, other=0.0).to(tl.float32)
    w = tl.load(weight + n, mask=n < H, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / H + 1e-6)  # one number, which every lane has
    # The row is still in registers, and is not loaded again.
    tl.store(y + row * H + n, value * scale * w, mask=n < H)


def row_norm(x: Tensor, weight: Tensor, warps: int = 4) -> Tensor:
    """weight * x / sqrt(mean(x * x) + 1e-6) for each row of x (..., H), contiguous; weight (H,)."""
    lab.no_gradient("row_norm", x, weight)
    y, H = torch.empty_like(x), x.shape[-1]
    sizes = dict(H=H, BH=triton.next_power_of_2(H), num_warps=warps)
    row_norm_kernel[(x.numel() // H,)](x, weight, y, **sizes)
    return y


# %% [original]
@triton.jit
def original_grad_kernel(dy, x, weight, rms, dx, dw, N, H: tl.constexpr, BLOCK: tl.constexpr):
    idx = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # one place for each of the N elements
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


# %% [backward]
@triton.jit
def backward_kernel(dy, x, weight, dx, parts, rows, H: tl.constexpr, BH: tl.constexpr):
    n, dw = tl.arange(0, BH), tl.zeros([BH], tl.float32)  # (BH,)
    w = tl.load(weight + n, mask=n < H, other=0.0).to(tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * H + n
        value = tl.load(x + at, mask=n < H, other=0.0).to(tl.float32)
        g = tl.load(dy + at, mask=n < H, other=0.0).to(tl.float32)
        # Both sums need nothing but this row, and it is in registers.
        scale = tl.rsqrt(tl.sum(value * value, 0) / H + 1e-6)
        u = value * scale
        tl.store(dx + at, scale * (g * w - u * (tl.sum(g * w * u, 0) / H)), mask=n < H)
        dw += g * u  # column by column: no lane needs another
    tl.store(parts + tl.program_id(0).to(tl.int64) * H + n, dw, mask=n < H)


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, programs: int = 2048) -> tuple[Tensor, Tensor]:
    """dx (..., H) and the weight's gradient (H,), from dy and x (..., H), contiguous, and weight (H,)."""
    H, rows = x.shape[-1], x.numel() // x.shape[-1]
    dx, parts = torch.empty_like(x), x.new_empty(min(programs, rows), H, dtype=torch.float32)
    sizes = dict(H=H, BH=triton.next_power_of_2(H))
    backward_kernel[(len(parts),)](dy, x, weight, dx, parts, rows, **sizes)
    return dx, parts.sum(0).to(weight.dtype)
