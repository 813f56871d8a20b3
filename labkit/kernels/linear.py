"""A matrix product and its epilogue: y = activation(x @ weight.T + bias).

cuBLAS computes it wherever it is at least as fast: in 16 bits unless rows of the result begin anywhere (N is
no multiple of 8), in float32 where there are few tiles. The kernel here computes the rest. Its helpers that
load, store, split and order tiles serve other products, too.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from labkit.kernels.common import (
    DeviceLimits,
    activate,
    activation_grad,
    aligned_rows,
    allows_tf32,
    autocast,
    cdiv,
    check_tensor,
    count_tiles,
    descriptor,
    device_limits,
    dot,
    float32_precision,
    is_traced,
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


@triton.jit(do_not_specialize=["M", "K"])
def linear_kernel(
    x, weight, bias, y, kept, M, N, K, ACT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    STORE: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y (M, N) = activation(x (M, K) @ weight (N, K).T + bias); z, before the activation, goes to ``kept``.

    With TMA as many programs as fit on the GPU loop over the tiles of y, and ``flatten`` lets the next tile's
    loads begin before this tile's epilogue. Without, each tile has its program. Descriptors STORE y, or not.
    """
    FAST: tl.constexpr = (x.dtype if TMA else x.dtype.element_ty) != tl.float32
    UNIT: tl.constexpr = 8 if FAST else 4
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
        for half in tl.static_range(2):
            z, first = left if half == 0 else right, n * BN + half * (BN // 2)  # (BM, BN / 2)
            if bias is not None:
                col = first + tl.arange(0, BN // 2)
                z += tl.load(bias + col, col < N, other=0.0).to(tl.float32)[None, :]
            if kept is not None:
                store_tile(kept, m * BM, first, M, N, N, z, BM, BN // 2, STORE)
            store_tile(y, m * BM, first, M, N, N, activate(z, ACT, FAST), BM, BN // 2, STORE)


@triton.jit
def dz_kernel(
    dy, z, dz, sums, M, units, chunks, groups, UNIT: tl.constexpr, CHUNK: tl.constexpr, ACT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dz = dy * activation'(z), and for each group of rows the sums of dz: sums (groups, N).

    dy and z are (M, N), and N is units * UNIT; dz has chunks * CHUNK columns, those behind N with zeros. So
    the compiler knows how wide loads and stores may be, also where N is a multiple of 8 and not of 16.
    """
    FAST: tl.constexpr = dz.dtype.element_ty != tl.float32
    N, step = tl.cast(units, tl.int64) * UNIT, tl.cast(chunks, tl.int64) * CHUNK
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)  # (COLS,)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for tile in tl.range(tl.program_id(1), count_tiles(M, ROWS), groups, num_stages=3):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        at, inside = row * N + col[None, :], (row < M) & (col < N)[None, :]  # (ROWS, COLS)
        before = tl.load(z + at, inside, other=0.0).to(tl.float32)  # the activation
        change = activation_grad(before, tl.load(dy + at, inside, other=0.0).to(tl.float32), ACT, FAST)
        total += change
        tl.store(dz + row * step + col[None, :], change, (row < M) & (col < step)[None, :])
    tl.store(sums + tl.program_id(1) * N + col, tl.sum(total, 0), col < N)


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


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """activation(x @ weight.T + bias) by cuBLAS, with its relu and gelu_tanh on a GPU (unless K is 0).

    In 16 bits rows of x and weight that begin anywhere are first copied to where cuBLAS is fast.
    """
    if x.itemsize == 2 and x.shape[1] % 8:
        x, weight = aligned_rows(x, weight)
    if act in ("relu", "gelu_tanh") and x.is_cuda and x.shape[1]:
        shift = x.new_zeros(weight.shape[0]) if bias is None else bias
        return torch._addmm_activation(shift, x, weight.T, use_gelu=act == "gelu_tanh")
    return activated(functional.linear(x, weight, bias), act)


def activated(z: Tensor, act: str) -> Tensor:
    """PyTorch's activation of z."""
    if act == "gelu_tanh":
        return functional.gelu(z, approximate="tanh")
    return z if act == "none" else torch.relu(z) if act == "relu" else functional.silu(z)


# ---- launches ----------------------------------------------------------------------------------------------


def launch_product(
    kernel: Any, x: Tensor, weight: Tensor, inputs: tuple[Tensor | None, ...],
    outputs: tuple[Tensor | None, ...], act: str,
) -> None:  # fmt: skip
    """Launch linear_kernel with weight (N, K), or gate_up_kernel with weight (2, N, K).

    ``inputs`` are its further inputs, and ``outputs`` y (M, N) and others of that shape, or None.
    """
    y = outputs[0]
    if y is None or not y.numel():
        return
    x, weight = aligned_rows(x, weight)
    (M, K), N, pair, limits = x.shape, y.shape[1], weight.dim() == 3, device_limits(x.device)
    tma = limits.has_tma and M < 2**31  # TMA counts rows in 32 bits
    store = tma and N * y.itemsize % 16 == 0
    BM, BN, BK, warps, stages, programs = choose_tile(M, (1 + pair) * N, x.itemsize, store or not tma, limits)
    tiles = cdiv(M, BM) * cdiv(N, BN // 2 if pair else BN)
    kernel[(min(tiles, programs * limits.multiprocessors) if tma else tiles,)](
        descriptor(x, tma, BM, BK), descriptor(weight, tma, *((2, BN // 2, BK) if pair else (BN, BK))),
        *inputs, *(descriptor(out, store, BM, BN // 2) for out in outputs), M, N, K,
        ACT=act, PRECISION=float32_precision(), TMA=tma, STORE=store, GROUP=8, BM=BM, BN=BN, BK=BK,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _outputs(x: Tensor, weight: Tensor, *_: Any, keep: bool) -> list[Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0]) for _ in range(1 + keep)]


@operator(fake=lambda *inputs: _outputs(*inputs[:-1], keep=inputs[-1]))
def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, keep: bool) -> list[Tensor]:
    """y (M, N) from x (M, K), weight (N, K), bias (N,); and to ``keep`` z, of which y is the activation."""
    M, N = x.shape[0], weight.shape[0]
    if not M * N or not library_is_fast(M, N, x.dtype, device_limits(x.device)):
        y, *z = outputs = _outputs(x, weight, keep=keep)
        bias = bias if bias is None else bias.contiguous()
        launch_product(linear_kernel, x, weight, (bias,), (y, z[0] if keep else None), act)
        return outputs
    if not keep:
        return [library_linear(x, weight, bias, act)]
    before = library_linear(x, weight, bias, "none")
    return [activated(before, act), before]


def _empty_rows(z: Tensor) -> Tensor:
    """(M, N rounded up to 16 bytes) for z (M, N): cuBLAS is fast with rows that begin at such multiples."""
    chunk = 16 // z.itemsize
    return z.new_empty(z.shape[0], chunk * ((z.shape[1] + chunk - 1) // chunk))


@operator(fake=lambda dy, z, act, summed: (_empty_rows(z), z.new_empty(z.shape[1] if summed else 0)))
def linear_dz(dy: Tensor, z: Tensor, act: str, summed: bool) -> tuple[Tensor, Tensor]:
    """dz (M, N rounded up to 16 bytes), with zeros behind its N columns, for dy and z (M, N).

    And if ``summed`` its sum over the rows, dbias (N,), added in a fixed order.
    """
    dy, z = dy.contiguous(), z.contiguous()
    (M, N), dz, chunk = z.shape, _empty_rows(z), 16 // z.itemsize
    unit = math.gcd(N, chunk)
    blocks = cdiv(N, 128)
    groups = max(1, min(cdiv(M, 16), 4 * device_limits(z.device).multiprocessors // max(blocks, 1)))
    sums = torch.empty(groups, N, device=z.device, dtype=torch.float32)
    if z.numel():
        dz_kernel[(blocks, groups)](
            dy, z, dz, sums, M, N // unit, cdiv(N, chunk), groups, UNIT=unit, CHUNK=chunk, ACT=act, ROWS=16,
            COLS=128,
        )  # fmt: skip
    if not summed:
        return dz, z.new_empty(0)
    return dz, sums.sum(0).to(z.dtype) if z.numel() else z.new_zeros(N)


class LinearActFunction(torch.autograd.Function):
    """``linear_act`` and ``matmul`` of x (M, K) with their gradients, once differentiable.

    z, before the activation, is kept, or for relu, whose gradient y says as well, only y; and nothing where
    there is no activation. cuBLAS computes the gradients' products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
        y, *z = linear_forward(x, weight, bias, act, act not in ("none", "relu"))
        ctx.save_for_backward(x, weight, *([y] if act == "relu" else z))
        ctx.act = act
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *z = ctx.saved_tensors
        x_wanted, weight_wanted, bias_wanted, *_ = ctx.needs_input_grad
        if z:
            dz, dbias = linear_dz(dy, *z, ctx.act, bias_wanted)
        else:
            dz, dbias = dy, dy.sum(0) if bias_wanted else None
        N = weight.shape[0]
        dweight = dz[:, :N].T @ x if weight_wanted else None  # (N, K)
        if dz.shape[1] > N and x_wanted:  # cuBLAS takes several times as long for an N that is odd
            weight = functional.pad(weight, (0, 0, 0, dz.shape[1] - N))
        dx = dz @ weight if x_wanted else None  # (M, K)
        return dx, dweight, dbias if bias_wanted else None, None


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
    return _linear(x, weight, None, "none")


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "gelu_tanh"
) -> Tensor:
    """activation(x @ weight.T + bias): a Linear layer with its activation in the product's epilogue.

    Args:
        x: (..., K); float32, float16 or bfloat16, any strides.
        weight: (N, K), of x's dtype and device.
        bias: (N,), the same, or None.
        activation: none, relu, of which NaN is NaN, silu, which is z sigmoid(z), or gelu_tanh, which is
            z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))).

    Returns:
        (..., N), contiguous, of x's dtype; computed in float32. z = x @ weight.T + bias is rounded before a
        silu, and before a gelu_tanh whose call autograd records: z is then kept. In 16 bits a GPU computes
        gelu_tanh and silu of z by one special function, off by 2**-12 z at most.

    Raises:
        ValueError: for another shape, dtype, device or activation, naming the argument.

    What computes the product is said at ``matmul``; cuBLASLt's own epilogue has relu and gelu_tanh. In
    reverse, dz = dy * activation'(z) and dbias, its sum, are one kernel, and cuBLAS computes dx = dz @ weight
    and dweight = dz.T @ x. GELU and its tanh form are those of https://arxiv.org/abs/1606.08415.
    """
    check_tensor("x", x, (..., None))
    check_tensor("weight", weight, (*getattr(weight, "shape", ())[:1], x.shape[-1]), like=x)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), like=x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is none of {', '.join(ACTIVATIONS)}")
    x, weight, bias = autocast(x, weight, bias)
    return _linear(x, weight, bias, activation)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """``linear_act`` of what was checked: a call of the library, or an operator with its own gradient."""
    K, N = x.shape[-1], weight.shape[0]
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), K)
    recorded = needs_grad(x, weight, bias)
    if rows.numel() and not is_traced(x) and library_is_fast(len(rows), N, x.dtype, device_limits(x.device)):
        if act == "none" and (K % 8 == 0 or x.itemsize == 4):
            return functional.linear(x, weight, bias)
        if not recorded:
            y = library_linear(rows, weight, bias, act)
            return y if x.dim() == 2 else y.view(*x.shape[:-1], N)
    if recorded:
        y = LinearActFunction.apply(rows, weight, bias, act)
    else:
        y = linear_forward(rows, weight, bias, act, False)[0]
    return y.view(*x.shape[:-1], N)
