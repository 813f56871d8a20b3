"""Solutions of lesson 11's tasks. Each cell is what you would have written in the notebook's."""

# %%
import torch
import triton
import triton.language as tl


# %% [rows_norm]
@triton.jit
def rows_norm_kernel(x, weight, y, rows, W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: ROWS rows of W numbers."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # (ROWS,)
    column = tl.arange(0, BLOCK)  # (BLOCK,)
    at = row[:, None] * W + column[None, :]  # (ROWS, BLOCK)
    inside = (row < rows)[:, None] & (column < W)[None, :]
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(tile * tile, axis=1) / W + 1e-6)  # (ROWS,)
    w = tl.load(weight + column, mask=column < W, other=0.0).to(tl.float32)  # (BLOCK,)
    tl.store(y + at, tile * scale[:, None] * w[None, :], mask=inside)


def rows_norm(x, weight):
    """weight * x / sqrt(mean(x * x) + 1e-6), the mean over each row; x (rows, W), weight (W,)."""
    x, weight = x.contiguous(), weight.contiguous()
    rows, W = x.shape
    y = torch.empty_like(x)
    BLOCK = triton.next_power_of_2(W)
    ROWS = max(1, 1024 // BLOCK)
    rows_norm_kernel[(triton.cdiv(rows, ROWS),)](x, weight, y, rows, W, ROWS, BLOCK)
    return y


# %% [softmax]
@triton.jit
def softmax_kernel(x, y, W, BLOCK: tl.constexpr):
    """One program: one row of W numbers, in blocks of BLOCK."""
    start = tl.program_id(0).to(tl.int64) * W
    column = tl.arange(0, BLOCK)  # (BLOCK,)
    # The largest number so far begins with one that is finite, so that nothing is inf - inf.
    top = tl.full([], -3.4028234e38, tl.float32)
    total = tl.full([], 0.0, tl.float32)  # the sum of exp(number - top) so far
    for first in range(0, W, BLOCK):
        inside = first + column < W
        value = tl.load(x + start + first + column, mask=inside, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(value, axis=0))
        # The old sum was made with the old maximum.
        total = total * tl.exp(top - new) + tl.sum(tl.exp(value - new), axis=0)
        top = new
    for first in range(0, W, BLOCK):
        inside = first + column < W
        value = tl.load(x + start + first + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + start + first + column, tl.exp(value - top) / total, mask=inside)


def softmax(x):
    """The softmax of each row of x (rows, W)."""
    x = x.contiguous()
    rows, W = x.shape
    y = torch.empty_like(x)
    softmax_kernel[(rows,)](x, y, W, BLOCK=min(1024, triton.next_power_of_2(W)))
    return y
