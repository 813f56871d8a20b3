"""Solutions of lesson 8's exercises. Each cell is what you would have written in the notebook's."""

# %%
import labkit as lab
from labkit.lessons import notebooks

import triton
import triton.language as tl
from torch import Tensor

lesson = notebooks.load("08_gated_recurrent_unit")
dot, tanh, three = lesson.dot, lesson.tanh, lesson.three


# %% [gru]
@triton.jit
def gru_kernel(gates, weight, bias, h, B, T, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr):
    """One program: all T steps of BM sequences, h (B, T, H) from gates (B, T, 3 H)."""
    row, n = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None], tl.arange(0, BH)[None, :]
    inside, square = (row < B) & (n < H), (n < H) & (n.T < H)  # (BM, BH), (BH, BH)
    # `three` of the lesson loads at p, p + apart, p + 2 * apart. Each matrix (in, out): transposed.
    wr, wz, wn = three(weight + n * H + n.T, square, H * H)
    br, bz, bn = three(bias + n, n < H, H)  # (1, BH)
    state = tl.zeros([BM, BH], tl.float32)
    for t in range(T):
        ir, iz, inn = three(gates + (row * T + t) * 3 * H + n, inside, H)
        a = state.to(wr.dtype)  # rounded for the products only: the state itself stays float32
        # dot gives float32, and its sum with 16 bits is float32, too; ir + br alone would be rounded
        r = tl.sigmoid(dot(a, wr) + br + ir)
        z = tl.sigmoid(dot(a, wz) + bz + iz)
        c = tanh(r * (dot(a, wn) + bn) + inn, False)  # r scales the product of h, and its bias
        state = (1.0 - z) * c + z * state
        tl.store(h + (row * T + t) * H + n, state, inside)


def gru(gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    lab.no_gradient("gru", gates, weight, bias)
    gates, weight, bias = gates.contiguous(), weight.contiguous(), bias.contiguous()
    (B, T, _), H = gates.shape, weight.shape[1]
    h, grid = gates.new_empty(B, T, H), (triton.cdiv(B, 16),)
    sizes = dict(H=H, BM=16, BH=max(16, triton.next_power_of_2(H)), num_warps=8, num_stages=1)
    gru_kernel[grid](gates, weight, bias, h, B, T, **sizes)
    return h


# %% [clocks]
def clocks(BM, H):
    """Cycles of one step in bf16: products, weights from shared memory, special functions."""
    # Three products (BM, H) by (H, H): for each of the BM H sums H multiplications and H additions.
    products = 3 * 2 * BM * H * H / 4096
    # All of three matrices, two bytes a number, however few sequences use them.
    weights = 3 * H * H * 2 / 128
    # Two gates and the candidate, each of BM H numbers, two functions each.
    functions = 3 * BM * H * 2 / 16
    return products, weights, functions


# %% [reset]
@triton.jit
def episodes_kernel(gates, weight, bias, reset, h, B, T, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr):
    """As gru_kernel; h is zero before each step where reset (B, T) is true."""
    row, n = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None], tl.arange(0, BH)[None, :]
    inside, square = (row < B) & (n < H), (n < H) & (n.T < H)
    wr, wz, wn = three(weight + n * H + n.T, square, H * H)
    br, bz, bn = three(bias + n, n < H, H)
    state = tl.zeros([BM, BH], tl.float32)
    for t in range(T):
        ir, iz, inn = three(gates + (row * T + t) * 3 * H + n, inside, H)
        begins = tl.load(reset + row * T + t, row < B, other=0)  # (BM, 1): one for all features
        # Before the products and the blend use the old state. A choice, because 0 * NaN is NaN.
        state = tl.where(begins, 0.0, state)
        a = state.to(wr.dtype)
        r = tl.sigmoid(dot(a, wr) + br + ir)
        z = tl.sigmoid(dot(a, wz) + bz + iz)
        c = tanh(r * (dot(a, wn) + bn) + inn, False)
        state = (1.0 - z) * c + z * state
        tl.store(h + (row * T + t) * H + n, state, inside)


def episodes(gates: Tensor, weight: Tensor, bias: Tensor, reset: Tensor) -> Tensor:
    lab.no_gradient("episodes", gates, weight, bias)
    gates, weight, bias, reset = (each.contiguous() for each in (gates, weight, bias, reset))
    (B, T, _), H = gates.shape, weight.shape[1]
    h, grid = gates.new_empty(B, T, H), (triton.cdiv(B, 16),)
    sizes = dict(H=H, BM=16, BH=max(16, triton.next_power_of_2(H)), num_warps=8, num_stages=1)
    episodes_kernel[grid](gates, weight, bias, reset, h, B, T, **sizes)
    return h
