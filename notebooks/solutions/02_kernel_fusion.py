"""Solutions of lesson 2's exercises. Each cell is what you would have written in the notebook's."""

# %%
import triton
import triton.language as tl
from torch import Tensor


# %% [ragged]
@triton.jit
def ragged_kernel(x, weight, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        # The last tile reaches beyond K. There lies the next row, and after the last row anything.
        # Zeros on one side alone would not do: 0 times the other's garbage is NaN where that is NaN or inf.
        a_mask = (row[:, None] < M) & (k[None, :] < K)
        b_mask = (col[:, None] < N) & (k[None, :] < K)
        # `other` is what a masked place holds: without it that's undefined, and the dot product sums it.
        a = tl.load(x + row[:, None] * K + k[None, :], a_mask, other=0.0)
        b = tl.load(weight + col[:, None] * K + k[None, :], b_mask, other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    tl.store(y + row[:, None] * N + col[None, :], acc, (row[:, None] < M) & (col[None, :] < N))


def ragged(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[0]
    y, grid = x.new_empty(M, N), (triton.cdiv(M, 32), triton.cdiv(N, 32))
    ragged_kernel[grid](x, weight, y, M, N, K, BM=32, BN=32, BK=32)
    return y


# %% [swiglu]
@triton.jit
def swiglu_kernel(x, w_gate_up, y, M, H, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    both = tl.arange(0, 2 * BN)  # gate, up, gate, up, ...: two for each hidden column
    unit = tl.program_id(1) * BN + both // 2
    source = (both % 2) * H + unit  # row of w_gate_up seen as (2 * H, K)
    acc = tl.zeros([BM, 2 * BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a_mask = (row[:, None] < M) & (k[None, :] < K)
        b_mask = (unit[:, None] < H) & (k[None, :] < K)
        a = tl.load(x + row[:, None] * K + k[None, :], a_mask, other=0.0)
        b = tl.load(w_gate_up + source[:, None] * K + k[None, :], b_mask, other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    gate, up = acc.reshape(BM, BN, 2).split()
    # The accumulator is float32, and so is all of this: the store rounds, once.
    # exp(-gate) may overflow to infinity, and gate / infinity is the zero that it should be. With
    # exp(gate) above and below the line a large gate would give infinity / infinity, which is NaN.
    value = gate / (1 + tl.exp(-gate)) * up
    tl.store(y + row[:, None] * H + col[None, :], value, (row[:, None] < M) & (col[None, :] < H))


def swiglu(x: Tensor, w_gate_up: Tensor) -> Tensor:
    x, w_gate_up = x.contiguous(), w_gate_up.contiguous()
    (M, K), H = x.shape, w_gate_up.shape[1]
    y, grid = x.new_empty(M, H), (triton.cdiv(M, 32), triton.cdiv(H, 32))
    swiglu_kernel[grid](x, w_gate_up, y, M, H, K, BM=32, BN=32, BK=32)
    return y


# %% [pays]
def speedup(rows, d, h, rate, bandwidth):
    """How many times faster gate and up are with GELU and product fused into them, in bfloat16.

    x (rows, d) by two weights (h, d); `rate` of a matmul in FLOP/s, `bandwidth` in bytes/s.
    """
    # Each of the 2 h columns of a row is a sum of d products: a multiplication and an addition each.
    arithmetic = 2 * rows * d * (2 * h) / rate
    # Once across memory, two bytes an element: x and both weights in, then gate and up out.
    inputs, hidden = 2 * (rows * d + 2 * h * d), 2 * rows * h
    # Arithmetic and memory work at the same time, so the slower one decides.
    gemm = max(arithmetic, (inputs + 2 * hidden) / bandwidth)
    # Two tensors in, one out. Its few operations an element are nothing beside that.
    pointwise = 3 * hidden / bandwidth
    fused = max(arithmetic, (inputs + hidden) / bandwidth)
    return (gemm + pointwise) / fused
