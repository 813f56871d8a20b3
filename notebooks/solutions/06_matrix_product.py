"""Solutions of lesson 6's tasks. Each cell is what you would have written in the notebook's."""

# %%
import labkit as lab

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


# %% [product]
@triton.jit
def product_kernel(x, weight, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One program: a tile of BM x BN of y = x @ weight.T."""
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)  # (BM,); 64 bits, because m * K may be large
    n = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)  # (BN,)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)  # (BK,): the columns of x and of W in this step
        in_x = (m < M)[:, None] & (k < K)[None, :]
        in_w = (n < N)[:, None] & (k < K)[None, :]
        # Both tiles need zeros beyond K. Zeros on one side would not do: 0 times NaN is NaN.
        a = tl.load(x + m[:, None] * K + k[None, :], mask=in_x, other=0.0)  # (BM, BK)
        b = tl.load(weight + n[:, None] * K + k[None, :], mask=in_w, other=0.0)  # (BN, BK)
        total = tl.dot(a, b.T, total, input_precision="tf32x3")
    tl.store(y + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


def product(x, weight, BM=64, BN=64, BK=32, num_stages=1):  # what a stage is comes later
    """x @ weight.T: x (M, K), weight (N, K)."""
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[0]
    y = x.new_empty(M, N)
    tiles = triton.cdiv(M, BM), triton.cdiv(N, BN)
    product_kernel[tiles](x, weight, y, M, N, K, BM, BN, BK, num_stages=num_stages)
    return y


# %%
def launch_described(kernel, x, weight):
    """A kernel with tiles of 128 x 128, for which x (M, K) and weight (N, K) are descriptors."""
    (M, K), N = x.shape, weight.shape[0]
    BK = 128 // x.element_size()  # rows of a tile have 128 bytes, which this unit likes best
    y = x.new_empty(M, N)
    if y.numel():
        # They are copied, if their rows don't begin at multiples of 16 bytes.
        x, weight = lab.kernels.common.aligned_rows(x, weight)
        x, weight = (TensorDescriptor.from_tensor(each, [128, BK]) for each in (x, weight))
        tiles = triton.cdiv(M, 128), triton.cdiv(N, 128)
        kernel[tiles](x, weight, y, M, N, K, 128, 128, BK, num_stages=3)
    return y


# %% [described]
@triton.jit
def described_kernel(x, weight, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One program: a tile of BM x BN of y; x gives tiles of (BM, BK), weight tiles of (BN, BK)."""
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)  # (BM,)
    n = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)  # (BN,)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        a = x.load([tl.program_id(0) * BM, start])  # (BM, BK)
        b = weight.load([tl.program_id(1) * BN, start])  # (BN, BK)
        total = tl.dot(a, b.T, total, input_precision="tf32x3")
    tl.store(y + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


def described(x, weight):
    """x @ weight.T: x (M, K), weight (N, K)."""
    return launch_described(described_kernel, x, weight)
