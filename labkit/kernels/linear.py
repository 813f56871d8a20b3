"""A matrix product and its epilogue: y = activation(x @ weight.T + bias).

``load_tile``, ``store_tile``, ``halves``, ``place``, ``activate`` and ``derive`` serve other products, too.
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
    Gpu,
    autocast,
    cdiv,
    check_tensor,
    gpu_of,
    multiply,
    needs_grad,
    once_differentiable,
    operator,
)

ACTIVATIONS = ("none", "relu", "gelu_tanh", "silu")

# ---- activations, in float32 -------------------------------------------------------------------------------

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
GELU_SCALE: tl.constexpr = tl.constexpr(2 * math.sqrt(2 / math.pi))
GELU_CUBE: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def sigmoid(z):
    root = tl.rsqrt(1.0 + tl.exp2(z * -LOG2_E))  # 1 / (1 + e^-z) is this root squared: no division
    return root * root


@triton.jit
def activate(z, ACT: tl.constexpr):
    if ACT == "relu":
        z = tl.maximum(z, 0.0)
    elif ACT == "silu":
        z = z * sigmoid(z)
    elif ACT == "gelu_tanh":  # z/2 (1 + tanh(u)) is z sigmoid(2u)
        z = z * sigmoid(z * GELU_SCALE * (1.0 + z * z * GELU_CUBE))
    return z


@triton.jit
def derive(z, ACT: tl.constexpr):
    """The activation of z and its derivative there."""
    if ACT == "relu":
        value, derivative = tl.maximum(z, 0.0), tl.where(z > 0, 1.0, 0.0)
    elif ACT == "silu":
        s = sigmoid(z)
        value, derivative = z * s, s * (1.0 + z * (1.0 - s))
    elif ACT == "gelu_tanh":
        s = sigmoid(z * GELU_SCALE * (1.0 + z * z * GELU_CUBE))
        value = z * s
        derivative = s + value * (1.0 - s) * GELU_SCALE * (1.0 + 3.0 * z * z * GELU_CUBE)
    else:
        value, derivative = z, tl.full(z.shape, 1.0, tl.float32)
    return value, derivative


# ---- tiles: of a tensor descriptor (TMA), or by pointers and masks -----------------------------------------


@triton.jit
def load_tile(t, row, col, rows, cols, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """Tile (R, C) of a contiguous t (rows, cols), from (row, col) on; zeros beyond its edges."""
    if TMA:
        tile = t.load([row, col])
    else:
        i, j = row + tl.arange(0, R)[:, None], col + tl.arange(0, C)[None, :]
        tile = tl.load(t + i.to(tl.int64) * cols + j, (i < rows) & (j < cols), other=0.0)
    return tile


@triton.jit
def store_tile(t, row, col, rows, cols, stride, tile, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """Tile (R, C) into t (rows, cols), whose rows begin ``stride`` elements apart."""
    if TMA:
        t.store([row, col], tile.to(t.dtype))
    else:
        i, j = row + tl.arange(0, R)[:, None], col + tl.arange(0, C)[None, :]
        tl.store(t + i.to(tl.int64) * stride + j, tile, (i < rows) & (j < cols))


@triton.jit
def halves(tile, R: tl.constexpr, C: tl.constexpr):
    """The left and the right half, (R, C / 2) each, of a tile (R, C)."""
    return tile.reshape(R, 2, C // 2).permute(0, 2, 1).split()


@triton.jit
def place(tile, rows, cols, GROUP: tl.constexpr):
    """(m, n) of a tile by its number: GROUP rows of tiles are worked off column by column.

    What runs together shares its rows of x and of the weight in the L2 cache.
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
    """y (M, N) of x (M, K) and weight (N, K); ``kept``, unless it is None, is what the activation is of.

    As many programs as fit the GPU walk over the tiles of y: with ``flatten`` the loads of the next tile run
    ahead of this one's epilogue. By pointers there is a program for each tile.
    """
    rows, cols = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0), flatten=TMA):
        m, n = place(tile, rows, cols, GROUP)
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            a = load_tile(x, m * BM, k, M, K, BM, BK, TMA)  # (BM, BK)
            b = load_tile(weight, n * BN, k, N, K, BN, BK, TMA)  # (BN, BK)
            total = multiply(a, b.T, total)
        left, right = halves(total, BM, BN)  # half a tile needs half the shared memory on its way out
        for half in tl.static_range(2):
            z, first = left if half == 0 else right, n * BN + half * (BN // 2)  # (BM, BN / 2)
            if bias is not None:
                col = first + tl.arange(0, BN // 2)
                z += tl.load(bias + col, col < N, other=0.0).to(tl.float32)[None, :]
            if kept is not None:
                store_tile(kept, m * BM, first, M, N, N, z, BM, BN // 2, TMA)
            store_tile(y, m * BM, first, M, N, N, activate(z, ACT), BM, BN // 2, TMA)


@triton.jit
def dz_kernel(dy, z, dz, sums, M, N, groups, ACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """dz (M, N) = dy * activation'(z), and the sums of it over this program's rows: sums (groups, N)."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in tl.range(tl.program_id(1) * ROWS, M, groups * ROWS, num_stages=3):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        at, inside = row * N + col[None, :], (row < M) & (col < N)[None, :]  # (ROWS, COLS)
        _, derivative = derive(tl.load(z + at, inside, other=0.0).to(tl.float32), ACT)
        change = tl.load(dy + at, inside, other=0.0).to(tl.float32) * derivative
        total += change
        tl.store(dz + at, change, inside)
    tl.store(sums + tl.program_id(1) * N + col, tl.sum(total, 0), col < N)


# ---- tile sizes --------------------------------------------------------------------------------------------

KIB = 1024
# rows, columns and depth of a tile, warps, stages, programs per multiprocessor, slower by (measured, H200)
LARGE = [(128, 128, 64, 4, 3, 2, 1.0), (64, 128, 64, 4, 4, 2, 1.1), (64, 64, 64, 4, 4, 2, 1.35)]
DEEP = [(128, 256, 64, 8, 4, 1, 1.0), *LARGE[1:]]  # where K is large, the epilogue is short
MIDDLE = [(128, 128, 64, 8, 3, 1, 1.0), (64, 64, 64, 4, 3, 2, 1.3)]
SMALL = [(128, 128, 32, 8, 3, 1, 1.0), (64, 64, 32, 4, 3, 2, 1.3)]
FP32 = [(128, 64, 32, 4, 3, 2, 1.0), (64, 64, 32, 4, 3, 2, 1.2)]
ODD = [(64, 64, 32, 8, 2, 2, 1.0)]  # rows that are not aligned need an address for every element
INTERPRETED = [(32, 64, 32, 4, 3, 1, 1.0)]


def tiling(M: int, N: int, K: int, dtype: torch.dtype, aligned: bool, gpu: Gpu) -> tuple[int, ...]:
    """(BM, BN, BK, warps, stages, programs per multiprocessor) for a product of M by N, K deep."""
    room = gpu.shared_bytes // KIB
    choices = (DEEP if K >= 4096 else LARGE) if room >= 200 else MIDDLE if room >= 160 else SMALL
    if dtype == torch.float32:
        choices = FP32 if room >= 200 else FP32[1:]
    if not aligned:
        choices = ODD
    if not room:
        choices = INTERPRETED
    return _cheapest(M, N, tuple(choices), gpu.multiprocessors)[:-1]


@functools.lru_cache(maxsize=4096)
def _cheapest(M: int, N: int, choices: tuple[Any, ...], multiprocessors: int) -> tuple[Any, ...]:
    """The tile whose waves cover the least area."""

    def area(choice: tuple[Any, ...]) -> float:
        BM, BN, *_, programs, slower = choice
        waves = math.ceil(cdiv(M, BM) * cdiv(N, BN) / (programs * multiprocessors))
        return float(waves * BM * BN * programs * slower)

    return min(choices, key=area)


# ---- launches ----------------------------------------------------------------------------------------------


def launch(
    kernel: Any,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    kept: tuple[Tensor | None, ...],
    act: str,
    *bias: Tensor | None,
    tile: tuple[int, ...] | list[int] | None = None,
) -> None:
    """Run linear_kernel or gate_up_kernel: weight is (N, K) or, for gate and up, (2, N, K).

    x and weight are contiguous. ``tile`` is what ``tiling`` returns, chosen by it when left out.
    """
    (M, K), N, pair = x.shape, y.shape[1], weight.dim() == 3
    if not y.numel():
        return
    gpu = gpu_of(x.device)
    starts = [t.data_ptr() for t in (x, weight, y)]
    steps = [stride * t.itemsize for t in (x, weight, y) for stride in t.stride()[:-1]]
    aligned = K > 0 and all(byte % 16 == 0 for byte in starts + steps)
    tma = aligned and gpu.tile_copies
    tile = tile or tiling(M, weight.numel() // max(K, 1), K, x.dtype, aligned, gpu)
    BM, BN, BK, warps, stages, programs = tile

    def operand(t: Tensor | None, *block: int) -> Any:
        return TensorDescriptor.from_tensor(t, block) if tma and t is not None else t

    tiles = cdiv(M, BM) * cdiv(N, BN // 2 if pair else BN)
    kernel[(min(tiles, programs * gpu.multiprocessors) if tma else tiles,)](
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
    """y (M, N) of x (M, K), weight (N, K) and bias (N,)."""
    x, weight, y = x.contiguous(), weight.contiguous(), _like_output(x, weight)
    bias = bias if bias is None else bias.contiguous()
    launch(linear_kernel, x, weight, y, (None,), act, bias, tile=tile)
    return y


@operator(fake=lambda x, weight, bias, act: (_like_output(x, weight), _like_output(x, weight)))
def linear_training(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> tuple[Tensor, Tensor]:
    """y, and z of which y is the activation: (M, N) each."""
    x, weight, y = x.contiguous(), weight.contiguous(), _like_output(x, weight)
    bias = bias if bias is None else bias.contiguous()
    z = torch.empty_like(y)
    launch(linear_kernel, x, weight, y, (z,), act, bias)
    return y, z


@operator(fake=lambda dy, z, act, summed: (torch.empty_like(z), z.new_empty(z.shape[1] if summed else 0)))
def linear_dz(dy: Tensor, z: Tensor, act: str, summed: bool) -> tuple[Tensor, Tensor]:
    """dz (M, N), and if ``summed`` its sum over the rows, dbias (N,), added in a fixed order."""
    dy, z = dy.contiguous(), z.contiguous()
    (M, N), dz = z.shape, torch.empty_like(z)
    blocks = cdiv(N, 128)
    groups = max(1, min(cdiv(M, 16), 4 * gpu_of(z.device).multiprocessors // max(blocks, 1)))
    sums = torch.empty(groups, N, device=z.device, dtype=torch.float32)
    if z.numel():
        dz_kernel[(blocks, groups)](dy, z, dz, sums, M, N, groups, ACT=act, ROWS=16, COLS=128)
    if not summed:
        return dz, z.new_empty(0)
    return dz, sums.sum(0).to(z.dtype) if z.numel() else z.new_zeros(N)


class LinearAct(torch.autograd.Function):
    """``linear_act`` and ``matmul`` of two dimensions with their gradients, once differentiable.

    z is kept, unless there is no activation. The gradients' two products are cuBLAS's.
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
        tile: (BM, BN, BK, warps, stages, programs per multiprocessor); what ``tiling`` chooses if left out.

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
        return LinearAct.apply(x, weight, None, "none", sizes)
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
        (..., N), contiguous, of x's dtype; computed in float32 and rounded once. For the gradients z, before
        the activation, is kept in x's dtype.

    Raises:
        ValueError: for another shape, dtype, device or activation, naming the argument.

    GELU's form is that of https://arxiv.org/abs/1606.08415.
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
        y = LinearAct.apply(rows, weight, bias, activation, None)
    else:
        y = linear_forward(rows, weight, bias, activation, None)
    return y.view(*x.shape[:-1], weight.shape[0])
