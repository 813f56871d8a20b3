"""Solutions of lesson 3's exercises. Each cell is what you would have written in the notebook's."""

# %%
import labkit as lab
from labkit.lessons import notebooks

import triton
import triton.language as tl
from torch import Tensor

lesson = notebooks.load("03_matrix_product")
tile_place, tile_sums, descriptors = lesson.tile_place, lesson.tile_sums, lesson.descriptors


# %% [product]
@triton.jit
def product_kernel(x, weight, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One program: its tile (BM, BN) of y (M, N) = x (M, K) @ weight (N, K).T."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]  # (BM, 1), of x and of y
    col = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)[:, None]  # (BN, 1), rows of weight
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)[None, :]  # (1, BK)
        # The last tile reaches beyond K. There lies the next row, and after the last row anything. Zeros on
        # one side alone would not do: 0 times the other's garbage is NaN where that is NaN or inf.
        a = tl.load(x + row * K + k, (row < M) & (k < K), other=0.0)  # (BM, BK)
        b = tl.load(weight + col * K + k, (col < N) & (k < K), other=0.0)  # (BN, BK)
        # The sums stay in float32, and in registers, from the first step to the last.
        total = tl.dot(a, b.T, total, input_precision="tf32x3")
    # The rows of weight are the columns of y. The store rounds, once.
    tl.store(y + row * N + col.T, total, (row < M) & (col.T < N))


def product(x: Tensor, weight: Tensor) -> Tensor:
    lab.no_gradient("product", x, weight)
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[0]
    y, grid = x.new_empty(M, N), (triton.cdiv(M, 64), triton.cdiv(N, 64))
    product_kernel[grid](x, weight, y, M, N, K, BM=64, BN=64, BK=32, num_warps=4, num_stages=1)
    return y


# %% [epilogue]
@triton.jit
def linear_gelu_kernel(x, weight, bias, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tile_place(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), 8)
    total = tile_sums(x, weight, m, n, K, BM, BN, BK)  # (BM, BN), float32
    row = (m * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    col = n * BN + tl.arange(0, BN)
    # One bias for each column: (BN,), and as a row of the tile the same for all of its rows.
    z = total + tl.load(bias + col, col < N, other=0.0).to(tl.float32)[None, :]
    # All of this is float32, and happens in registers. The store rounds, once.
    u = 0.7978845608 * (z + 0.044715 * z * z * z)
    tl.store(y + row * N + col[None, :], z * tl.sigmoid(2 * u), (row < M) & (col[None, :] < N))


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    lab.no_gradient("linear_gelu", x, weight, bias)
    (M, K), N, BK = x.shape, weight.shape[0], 128 // x.element_size()
    y, grid = x.new_empty(M, N), (triton.cdiv(M, 128) * triton.cdiv(N, 128),)
    if y.numel():
        x, weight, bias = *descriptors(x, weight), bias.contiguous()
        linear_gelu_kernel[grid](x, weight, bias, y, M, N, K, 128, 128, BK, num_warps=8, num_stages=3)
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
