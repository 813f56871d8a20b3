"""A matrix product and its epilogue: y = activation(x @ weight.T + bias).

The helpers that load, store, split and order tiles serve other products, too.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from labkit.kernels.common import (
    DeviceLimits,
    activate,
    activation_and_derivative,
    autocast,
    cdiv,
    check_tensor,
    device_limits,
    dot,
    needs_grad,
    once_differentiable,
    operator,
)

ACTIVATIONS = ("none", "relu", "gelu_tanh", "silu")

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


# ---- kernels -----------------------------------------------------------------------------------------------


@triton.jit
def linear_kernel(
    x, weight, y, kept, M, N, K, bias, ACT: tl.constexpr, TMA: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y (M, N) = activation(x (M, K) @ weight (N, K).T + bias); z, before the activation, goes to ``kept``.

    With TMA as many programs as fit on the GPU loop over the tiles of y, and ``flatten`` lets the next tile's
    loads begin before this tile's epilogue. Without, each tile has its program.
    """
    FAST: tl.constexpr = (x.dtype if TMA else x.dtype.element_ty) != tl.float32
    rows, cols = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0), flatten=TMA):
        m, n = swizzled_tile(tile, rows, cols, GROUP)
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            a = load_tile(x, m * BM, k, M, K, BM, BK, TMA)  # (BM, BK)
            b = load_tile(weight, n * BN, k, N, K, BN, BK, TMA)  # (BN, BK)
            total = dot(a, b.T, total)
        left, right = split_columns(total, BM, BN)  # (BM, BN / 2) each: stores take half the shared memory
        for half in tl.static_range(2):
            z, first = left if half == 0 else right, n * BN + half * (BN // 2)  # (BM, BN / 2)
            if bias is not None:
                col = first + tl.arange(0, BN // 2)
                z += tl.load(bias + col, col < N, other=0.0).to(tl.float32)[None, :]
            if kept is not None:
                store_tile(kept, m * BM, first, M, N, N, z, BM, BN // 2, TMA)
            store_tile(y, m * BM, first, M, N, N, activate(z, ACT, FAST), BM, BN // 2, TMA)


@triton.jit
def dz_kernel(dy, z, dz, sums, M, N, groups, ACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """dz (M, N) = dy * activation'(z), and for each group of rows the sums of dz: sums (groups, N)."""
    FAST: tl.constexpr = dz.dtype.element_ty != tl.float32
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in tl.range(tl.program_id(1) * ROWS, M, groups * ROWS, num_stages=3):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        at, inside = row * N + col[None, :], (row < M) & (col < N)[None, :]  # (ROWS, COLS)
        before = tl.load(z + at, inside, other=0.0).to(tl.float32)  # the activation
        _, derivative = activation_and_derivative(before, ACT, FAST)
        change = tl.load(dy + at, inside, other=0.0).to(tl.float32) * derivative
        total += change
        tl.store(dz + at, change, inside)
    tl.store(sums + tl.program_id(1) * N + col, tl.sum(total, 0), col < N)


# ---- tile sizes --------------------------------------------------------------------------------------------

KIB = 1024
# BM, BN, BK, warps, stages, programs per multiprocessor, how much slower the tile is (measured on an H200).
# The names say how much shared memory a block may use.
TILES_200_KIB = [(128, 128, 64, 4, 3, 2, 1.0), (64, 128, 64, 4, 4, 2, 1.1), (64, 64, 64, 4, 4, 2, 1.35)]
TILES_200_KIB_DEEP = [(128, 256, 64, 8, 4, 1, 1.0), *TILES_200_KIB[1:]]  # for a large K
TILES_160_KIB = [(128, 128, 64, 8, 3, 1, 1.0), (64, 64, 64, 4, 3, 2, 1.3)]
TILES_SMALL = [(128, 128, 32, 8, 3, 1, 1.0), (64, 64, 32, 4, 3, 2, 1.3)]
TILES_FP32 = [(128, 64, 32, 4, 3, 2, 1.0), (64, 64, 32, 4, 3, 2, 1.2)]
TILES_UNALIGNED = [(64, 64, 32, 8, 2, 2, 1.0)]  # each element needs an address of its own
TILES_INTERPRETED = [(32, 64, 32, 4, 3, 1, 1.0)]


def choose_tile(
    M: int, N: int, K: int, dtype: torch.dtype, aligned: bool, limits: DeviceLimits
) -> tuple[int, ...]:
    """(BM, BN, BK, warps, stages, programs per multiprocessor) for x (M, K) @ weight (N, K).T."""
    shared = limits.shared_bytes // KIB
    if not shared:
        choices = TILES_INTERPRETED
    elif not aligned:
        choices = TILES_UNALIGNED
    elif dtype == torch.float32:
        choices = TILES_FP32 if shared >= 200 else TILES_FP32[1:]
    elif shared >= 200:
        choices = TILES_200_KIB_DEEP if K >= 4096 else TILES_200_KIB
    else:
        choices = TILES_160_KIB if shared >= 160 else TILES_SMALL
    return _cheapest(M, N, tuple(choices), limits.multiprocessors)[:-1]


@functools.lru_cache(maxsize=4096)
def _cheapest(M: int, N: int, choices: tuple[Any, ...], multiprocessors: int) -> tuple[Any, ...]:
    """The tile with which all waves of programs together cover the least area of y."""

    def area(choice: tuple[Any, ...]) -> float:
        BM, BN, *_, programs, slower = choice
        waves = math.ceil(cdiv(M, BM) * cdiv(N, BN) / (programs * multiprocessors))
        return float(waves * BM * BN * programs * slower)

    return min(choices, key=area)


# ---- launches ----------------------------------------------------------------------------------------------


def launch_matmul(
    kernel: Any,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    kept: tuple[Tensor | None, ...],
    act: str,
    *bias: Tensor | None,
    tile: tuple[int, ...] | list[int] | None = None,
) -> None:
    """Launch linear_kernel with weight (N, K), or gate_up_kernel with weight (2, N, K).

    x (M, K) and weight are contiguous. ``kept`` are the kernel's further outputs, or None in their places.
    ``tile`` has the form of ``choose_tile``, which chooses one if it is left out.
    """
    (M, K), N, pair = x.shape, y.shape[1], weight.dim() == 3
    if not y.numel():
        return
    limits = device_limits(x.device)
    starts = [t.data_ptr() for t in (x, weight, y)]
    steps = [stride * t.itemsize for t in (x, weight, y) for stride in t.stride()[:-1]]
    aligned = K > 0 and all(byte % 16 == 0 for byte in starts + steps)
    aligned = aligned and M < 2**31  # TMA counts rows in 32 bits
    tma = aligned and limits.has_tma
    tile = tile or choose_tile(M, weight.numel() // max(K, 1), K, x.dtype, aligned, limits)
    BM, BN, BK, warps, stages, programs = tile

    def operand(t: Tensor | None, *block: int) -> Any:
        return TensorDescriptor.from_tensor(t, block) if tma and t is not None else t

    tiles = cdiv(M, BM) * cdiv(N, BN // 2 if pair else BN)
    kernel[(min(tiles, programs * limits.multiprocessors) if tma else tiles,)](
        operand(x, BM, BK),
        operand(weight, 2, BN // 2, BK) if pair else operand(weight, BN, BK),
        *(operand(out, BM, BN // 2) for out in (y, *kept)),
        *(M, N, K, *bias),
        **dict(ACT=act, TMA=tma, GROUP=8, BM=BM, BN=BN, BK=BK, num_warps=warps, num_stages=stages),
    )


def _like_output(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@operator(fake=_like_output)
def linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, tile: list[int] | None
) -> Tensor:
    """y (M, N) from x (M, K), weight (N, K) and bias (N,)."""
    x, weight, y = x.contiguous(), weight.contiguous(), _like_output(x, weight)
    bias = bias if bias is None else bias.contiguous()
    launch_matmul(linear_kernel, x, weight, y, (None,), act, bias, tile=tile)
    return y


@operator(fake=lambda x, weight, bias, act: (_like_output(x, weight), _like_output(x, weight)))
def linear_training(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> tuple[Tensor, Tensor]:
    """y, and z of which y is the activation: (M, N) each."""
    x, weight, y = x.contiguous(), weight.contiguous(), _like_output(x, weight)
    bias = bias if bias is None else bias.contiguous()
    z = torch.empty_like(y)
    launch_matmul(linear_kernel, x, weight, y, (z,), act, bias)
    return y, z


@operator(fake=lambda dy, z, act, summed: (torch.empty_like(z), z.new_empty(z.shape[1] if summed else 0)))
def linear_dz(dy: Tensor, z: Tensor, act: str, summed: bool) -> tuple[Tensor, Tensor]:
    """dz (M, N), and if ``summed`` its sum over the rows, dbias (N,), added in a fixed order."""
    dy, z = dy.contiguous(), z.contiguous()
    (M, N), dz = z.shape, torch.empty_like(z)
    blocks = cdiv(N, 128)
    groups = max(1, min(cdiv(M, 16), 4 * device_limits(z.device).multiprocessors // max(blocks, 1)))
    sums = torch.empty(groups, N, device=z.device, dtype=torch.float32)
    if z.numel():
        dz_kernel[(blocks, groups)](dy, z, dz, sums, M, N, groups, ACT=act, ROWS=16, COLS=128)
    if not summed:
        return dz, z.new_empty(0)
    return dz, sums.sum(0).to(z.dtype) if z.numel() else z.new_zeros(N)


class LinearActFunction(torch.autograd.Function):
    """``linear_act`` and ``matmul`` of x (M, K) with their gradients, once differentiable.

    z, before the activation, is kept unless there is no activation. cuBLAS computes the gradients' products.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, act: str, tile: list[int] | None
    ) -> Tensor:
        if act == "none":
            y, z = linear_forward(x, weight, bias, act, tile), None
        else:
            y, z = linear_training(x, weight, bias, act)
        ctx.save_for_backward(x, weight, z)
        ctx.act = act
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, z = ctx.saved_tensors
        x_wanted, weight_wanted, bias_wanted, *_ = ctx.needs_input_grad
        if z is None:
            dz, dbias = dy, dy.sum(0) if bias_wanted else None
        else:
            dz, dbias = linear_dz(dy, z, ctx.act, bias_wanted)
        dx = dz @ weight if x_wanted else None  # (M, K)
        dweight = dz.T @ x if weight_wanted else None  # (N, K)
        return dx, dweight, dbias if bias_wanted else None, None, None


def matmul(x: Tensor, weight: Tensor, tile: tuple[int, ...] | None = None) -> Tensor:
    """x @ weight.T.

    Args:
        x: (M, K); float32, float16 or bfloat16, any strides.
        weight: (N, K), of x's dtype and device.
        tile: (BM, BN, BK, warps, stages, programs per multiprocessor); chosen for the sizes if left out.

    Returns:
        (M, N), contiguous, of x's dtype; summed in float32 and rounded once. float32 is multiplied as three
        products of TF32, whose error is that of float32.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    The kernel is a persistent one on tensor descriptors, as in
    https://triton-lang.org/main/getting-started/tutorials/09-persistent-matmul.html.
    """
    check_tensor("x", x, (None, None))
    check_tensor("weight", weight, (*getattr(weight, "shape", ())[:1], x.shape[-1]), like=x)
    x, weight = autocast(x, weight)
    sizes = None if tile is None else list(tile)
    if needs_grad(x, weight):
        return LinearActFunction.apply(x, weight, None, "none", sizes)
    return linear_forward(x, weight, None, "none", sizes)


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "gelu_tanh"
) -> Tensor:
    """activation(x @ weight.T + bias): a Linear layer with its activation in the product's epilogue.

    Args:
        x: (..., K); float32, float16 or bfloat16, any strides.
        weight: (N, K), of x's dtype and device.
        bias: (N,), the same, or None.
        activation: none, relu, silu, which is z sigmoid(z), or gelu_tanh, which is
            z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))).

    Returns:
        (..., N), contiguous, of x's dtype; computed in float32 and rounded once. In 16 bits a GPU computes
        gelu_tanh and silu of z by one special function, off by 2**-12 z at most. Where autograd records the
        call, z = x @ weight.T + bias is kept in x's dtype.

    Raises:
        ValueError: for another shape, dtype, device or activation, naming the argument.

    In reverse, dz = dy * activation'(z), dx = dz @ weight, dweight = dz.T @ x and dbias = sum of dz.
    GELU and its tanh form are those of https://arxiv.org/abs/1606.08415.
    """
    check_tensor("x", x, (..., None))
    check_tensor("weight", weight, (*getattr(weight, "shape", ())[:1], x.shape[-1]), like=x)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), like=x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is none of {', '.join(ACTIVATIONS)}")
    x, weight, bias = autocast(x, weight, bias)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if needs_grad(x, weight, bias):
        y = LinearActFunction.apply(rows, weight, bias, activation, None)
    else:
        y = linear_forward(rows, weight, bias, activation, None)
    return y.view(*x.shape[:-1], weight.shape[0])
