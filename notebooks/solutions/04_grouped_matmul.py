"""Solutions of lesson 4's exercises. Each cell is what you would have written in the notebook's."""

# %%
import torch
import triton
import triton.language as tl
from torch import Tensor


# %% [floor]
def floor_us(rows, groups, d_in, d_out, itemsize, bandwidth, rate):
    """The least microseconds a device needs: x (rows, groups * d_in), weight (groups, d_in, d_out).

    Every tensor is moved once, `itemsize` bytes a number, at `bandwidth` bytes/s; an operation is a
    multiplication or an addition, `rate` of them a second. The bias does not count.
    """
    # x is read and y is written, a row each for every row; every group's matrix is read once for all rows.
    numbers = rows * groups * (d_in + d_out) + groups * d_in * d_out
    moved = numbers * itemsize / bandwidth
    # Each of a row's groups * d_out results is a sum of d_in products, a multiplication and an addition each.
    # A number of x meets the weights of its own group only: the groups count once, not squared.
    computed = 2 * rows * groups * d_in * d_out / rate
    # Arithmetic and memory work at the same time, so the slower one decides; a second has 1e6 microseconds.
    return 1e6 * max(moved, computed)


# %% [neighbour]
@triton.jit
def neighbour_kernel(x, weight, y, R, G, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    group, rows = tl.program_id(0) % G, tl.program_id(0) // G
    row = (rows * BM + tl.arange(0, BM))[:, None]
    d = tl.arange(0, BD)  # BD: D rounded up to a power of two
    at = row * (G * D) + group * D + d[None, :]
    # The tile's columns from D on are the next group's: not to be read, and above all not to be written.
    inside = (row < R) & (d < D)[None, :]
    a = tl.load(x + at, inside, other=0.0)
    # Zeros in x are not enough: behind this group's D rows comes the next group's matrix, and after the last
    # anything; 0 times what is NaN or infinite there is NaN. The columns are masked so as not to read beyond.
    square = (d < D)[:, None] & (d < D)[None, :]
    w = tl.load(weight + group * (D * D) + d[:, None] * D + d[None, :], square, other=0.0)
    total = tl.dot(a, w, input_precision="ieee")
    # Interpreted, one program follows the other and the neighbour may put right what this one spoilt; on a
    # GPU they run in any order.
    tl.store(y + at, total, inside)


def neighbour(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    R, (G, D, _) = x.shape[0], weight.shape
    y, block = torch.empty_like(x), max(16, triton.next_power_of_2(D))
    neighbour_kernel[(G * triton.cdiv(R, 32),)](x, weight, y, R, G, D, BM=32, BD=block)
    return y


# %% [bias]
@triton.jit
def bias_kernel(x, weight, bias, y, R, G, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    group, rows = tl.program_id(0) % G, tl.program_id(0) // G
    row = (rows * BM + tl.arange(0, BM))[:, None]
    d = tl.arange(0, BD)
    inside = (row < R) & (d < D)[None, :]
    at = row * (G * D) + group * D + d[None, :]
    a = tl.load(x + at, inside, other=0.0)
    w = tl.load(
        weight + group * (D * D) + d[:, None] * D + d[None, :], (d[:, None] < D) & (d[None, :] < D), other=0.0
    )
    total = tl.dot(a, w, input_precision="ieee")
    # Rows of bias are D long, whatever the tile's width, and behind the last one lies anything: a mask.
    b = tl.load(bias + group * D + d, d < D, other=0.0)
    # total is float32 and stays so: b is converted, and the store rounds once.
    total += b.to(tl.float32)[None, :]
    tl.store(y + at, total, inside)


def with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    R, (G, D, _) = x.shape[0], weight.shape
    y, block = torch.empty_like(x), max(16, triton.next_power_of_2(D))
    bias_kernel[(G * triton.cdiv(R, 32),)](x, weight, bias, y, R, G, D, BM=32, BD=block)
    return y
