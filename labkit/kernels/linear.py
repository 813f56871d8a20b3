"""A matrix product: y = x @ weight.T.

cuBLAS computes it wherever it is at least as fast: in 16 bits unless rows of the result begin anywhere (N is
no multiple of 8), in float32 where there are few tiles. The kernel here computes the rest. Its helpers that
load, store, split and order tiles serve other products, too.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from labkit.kernels.calls import autocast, check_tensor, is_traced, needs_grad, once_differentiable, operator
from labkit.kernels.common import (
    DeviceLimits,
    aligned_rows,
    allows_tf32,
    cdiv,
    count_tiles,
    descriptor,
    device_limits,
    dot,
    float32_precision,
)

# ---- tiles by tensor descriptors (TMA), or by pointers and masks -------------------------------------------


@triton.jit
def load_tile(t, row, col, rows, cols, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """The tile (R, C) at (row, col) of a contiguous t (rows, cols); zeros beyond its edges."""
    if TMA:
        tile = t.load([row, col])
    else:
        i, j = row + tl.arange(0, R)[:, None], col + tl.arange(0, C)[None, :]
        tile = tl.load(t + i.to(tl.int64) * cols + j, (i < rows) & (j < cols), other=0.0)
    return tile


@triton.jit
def store_tile(t, row, col, rows, cols, stride, tile, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """Store a tile (R, C) at (row, col) of t (rows, cols), whose rows begin ``stride`` elements apart."""
    if TMA:
        t.store([row, col], tile.to(t.dtype))
    else:
        i, j = row + tl.arange(0, R)[:, None], col + tl.arange(0, C)[None, :]
        tl.store(t + i.to(tl.int64) * stride + j, tile, (i < rows) & (j < cols))


@triton.jit
def split_columns(tile, R: tl.constexpr, C: tl.constexpr):
    """The left and the right half, (R, C / 2) each, of a tile (R, C)."""
    return tile.reshape(R, 2, C // 2).permute(0, 2, 1).split()


@triton.jit
def swizzled_tile(tile, rows, cols, GROUP: tl.constexpr):
    """Row m and column n of the tile with this number: GROUP rows of tiles are taken column by column.

    Programs that run at the same time then share rows of x and of the weight in the L2 cache.
    """
    group = tile // (GROUP * cols)
    height = min(rows - group * GROUP, GROUP)
    within = tile % (GROUP * cols)
    return group * GROUP + within % height, within // height


# ---- the kernel --------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M", "K"])
def linear_kernel(
    x, weight, y, M, N, K, PRECISION: tl.constexpr, TMA: tl.constexpr, STORE: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y (M, N) = x (M, K) @ weight (N, K).T.

    With TMA as many programs as fit on the GPU loop over the tiles of y, and ``flatten`` lets the next tile's
    loads begin before this tile is stored. Without, each tile has its program. Descriptors STORE y, or not.
    """
    UNIT: tl.constexpr = 4 if (x.dtype if TMA else x.dtype.element_ty) == tl.float32 else 8
    K = K // UNIT * UNIT  # changes nothing; the compiler learns that rows begin at multiples of 16 bytes
    rows, cols = count_tiles(M, BM), count_tiles(N, BN)
    for tile in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0), flatten=TMA):
        m, n = swizzled_tile(tile, rows, cols, GROUP)
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            a = load_tile(x, m * BM, k, M, K, BM, BK, TMA)  # (BM, BK)
            b = load_tile(weight, n * BN, k, N, K, BN, BK, TMA)  # (BN, BK)
            total = dot(a, b.T, total, PRECISION)
        left, right = split_columns(total, BM, BN)  # (BM, BN / 2) each: stores take half the shared memory
        store_tile(y, m * BM, n * BN, M, N, N, left, BM, BN // 2, STORE)
        store_tile(y, m * BM, n * BN + BN // 2, M, N, N, right, BM, BN // 2, STORE)


# ---- tile sizes --------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """How a product is cut up."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int
    programs: int
    """Programs per multiprocessor."""


KIB = 1024
# Tiles, and how fast each computes beside the largest, where all multiprocessors are busy (measured on an
# H200): each byte that a large tile loads serves more numbers. The names say how much shared memory a block
# may use.
TILES_200_KIB = {
    Tile(128, 256, 64, 8, 3, 1): 1.0, Tile(128, 128, 64, 4, 3, 2): 0.97, Tile(128, 128, 64, 8, 4, 1): 0.9,
    Tile(64, 128, 64, 4, 4, 2): 0.75, Tile(64, 64, 64, 4, 4, 3): 0.45,
}  # fmt: skip
TILES_160_KIB = {Tile(128, 128, 64, 8, 3, 1): 1.0, Tile(64, 64, 64, 4, 3, 2): 0.8}
TILES_SMALL = {Tile(128, 128, 32, 8, 3, 1): 1.0, Tile(64, 64, 32, 4, 3, 2): 0.8}
TILES_FP32 = {Tile(128, 64, 32, 4, 3, 2): 1.0, Tile(64, 64, 32, 4, 3, 2): 0.85}
TILES_INTERPRETED = {Tile(32, 64, 32, 4, 3, 1): 1.0}


@cache
def choose_tile(M: int, N: int, itemsize: int, store: bool, limits: DeviceLimits) -> Tile:
    """The tile for results (M, N) with which the multiprocessor that has most to do has the least.

    ``store``: descriptors store the result. Where they do not, each number is stored by itself, and a thread
    has registers for the addresses of 64 of them.
    """
    shared = limits.shared_bytes // KIB
    if not shared:
        choices = TILES_INTERPRETED
    elif itemsize == 4:
        choices = TILES_FP32
    else:
        choices = TILES_200_KIB if shared >= 200 else TILES_160_KIB if shared >= 160 else TILES_SMALL
    fitting = [
        tile for tile in choices
        if (store or 64 * 32 * tile.warps >= tile.BM * tile.BN)
        and (itemsize < 4 or not 0 < shared < 200 or tile.BM <= 64)
    ]  # fmt: skip

    def busiest(tile: Tile) -> float:
        tiles = cdiv(M, tile.BM) * cdiv(N, tile.BN)
        return cdiv(tiles, limits.multiprocessors) * tile.BM * tile.BN / choices[tile]

    return min(fitting, key=busiest)


# ---- cuBLAS, or the kernel ---------------------------------------------------------------------------------


def library_is_fast(M: int, N: int, dtype: torch.dtype, limits: DeviceLimits) -> bool:
    """Whether cuBLAS computes results (M, N) at least as fast as linear_kernel, measured on an H200.

    In 16 bits it does where rows of y begin at multiples of 16 bytes, else it takes 2 to 4 times as long. In
    float32, unless it may use TF32, it computes without the tensor cores, on which linear_kernel makes three
    products of TF32: up to 1.7 times as fast, once every multiprocessor has two tiles.
    """
    if dtype is torch.float32:
        tiles = M * N / (128 * 64)
        return tiles < 2 * limits.multiprocessors or allows_tf32()
    return N % 8 == 0


def library_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T by cuBLAS. In 16 bits rows that begin anywhere are first copied to where it is fast."""
    if x.itemsize == 2 and x.shape[1] % 8:
        x, weight = aligned_rows(x, weight)
    return functional.linear(x, weight)


# ---- launches ----------------------------------------------------------------------------------------------


def launch_product(kernel: Any, x: Tensor, weight: Tensor, outputs: tuple[Any, ...]) -> None:
    """Launch linear_kernel with weight (N, K), or gate_up_kernel with weight (2, N, K).

    ``outputs`` are y (M, N), and others of that shape, or None.
    """
    y = outputs[0]
    if not y.numel():
        return
    x, weight = aligned_rows(x, weight)
    (M, K), N, pair, limits = x.shape, y.shape[1], weight.dim() == 3, device_limits(x.device)
    tma = limits.has_tma and M < 2**31  # TMA counts rows in 32 bits
    store = tma and N * y.itemsize % 16 == 0
    BM, BN, BK, warps, stages, programs = choose_tile(M, (1 + pair) * N, x.itemsize, store or not tma, limits)
    tiles = cdiv(M, BM) * cdiv(N, BN // 2 if pair else BN)
    kernel[(min(tiles, programs * limits.multiprocessors) if tma else tiles,)](
        descriptor(x, tma, BM, BK), descriptor(weight, tma, *((2, BN // 2, BK) if pair else (BN, BK))),
        *(descriptor(out, store, BM, BN // 2) for out in outputs), M, N, K,
        PRECISION=float32_precision(), TMA=tma, STORE=store, GROUP=8, BM=BM, BN=BN, BK=BK,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


@operator(fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
def linear_forward(x: Tensor, weight: Tensor) -> Tensor:
    """y (M, N) from x (M, K) and weight (N, K)."""
    M, N = x.shape[0], weight.shape[0]
    if M * N and library_is_fast(M, N, x.dtype, device_limits(x.device)):
        return library_linear(x, weight)
    y = x.new_empty(M, N)
    launch_product(linear_kernel, x, weight, (y,))
    return y


class MatmulFunction(torch.autograd.Function):
    """``matmul`` with its gradients, once differentiable. cuBLAS computes their products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear_forward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return dy @ weight if of_x else None, dy.T @ x if of_weight else None


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T.

    Args:
        x: (M, K); float32, float16 or bfloat16, any strides.
        weight: (N, K), of x's dtype and device.

    Returns:
        (M, N), contiguous, of x's dtype; summed in float32 and rounded once, unless PyTorch's
        ``allow_bf16_reduced_precision_reduction`` lets cuBLAS add up parts of a sum in 16 bits.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    cuBLAS computes it, but for 16 bits where N is no multiple of 8, and for large products in float32, unless
    ``torch.set_float32_matmul_precision`` allows TF32. Those are a kernel that multiplies float32 as three
    products of TF32, whose error is that of float32. It is a persistent one on tensor descriptors, as in
    https://triton-lang.org/main/getting-started/tutorials/09-persistent-matmul.html.
    """
    check_tensor("x", x, (None, None))
    check_tensor("weight", weight, (*getattr(weight, "shape", ())[:1], x.shape[1]), like=x)
    x, weight = autocast(x, weight)
    recorded = needs_grad(x, weight)
    copied = x.itemsize == 2 and x.shape[1] % 8 != 0  # by a kernel, which autograd does not see
    direct = x.numel() and not is_traced(x) and not (recorded and copied)
    if direct and library_is_fast(x.shape[0], weight.shape[0], x.dtype, device_limits(x.device)):
        return library_linear(x, weight)
    return MatmulFunction.apply(x, weight) if recorded else linear_forward(x, weight)
