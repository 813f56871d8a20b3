"""A matrix product and its epilogue: y = activation(x @ weight.T + bias).

The helpers that load, store, split and order tiles serve other products, too.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.common import (
    DeviceLimits,
    activate,
    activation_grad,
    aligned_rows,
    autocast,
    cdiv,
    check_tensor,
    count_tiles,
    descriptor,
    device_limits,
    dot,
    interpreted,
    needs_grad,
    next_power_of_2,
    offset64,
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
def tile_sum(
    x, weight, row, col, first, last, M, N, K, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The tile (BM, BN) at (row, col) of x (M, K) @ weight (N, K).T, over columns first to last of K."""
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(first, last, BK):
        a = load_tile(x, row, k, M, K, BM, BK, TMA)  # (BM, BK)
        b = load_tile(weight, col, k, N, K, BN, BK, TMA)  # (BN, BK)
        total = dot(a, b.T, total)
    return total


@triton.jit(do_not_specialize=["M", "K", "whole", "split"])
def linear_kernel(
    x, weight, y, kept, M, N, K, parts, whole, split, bias, ACT: tl.constexpr, TMA: tl.constexpr,
    STORE: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y (M, N) = activation(x (M, K) @ weight (N, K).T + bias); z, before the activation, goes to ``kept``.

    With TMA as many programs as fit on the GPU loop over the tiles of y, and ``flatten`` lets the next tile's
    loads begin before this tile's epilogue. Without, each tile has its program. Descriptors STORE y, or not.
    With ``parts`` (split, tiles, BM, BN) only the first ``whole`` tiles are made so. Of the others ``split``
    programs each sum a part of K, and ``sum_parts_kernel`` adds up the parts.
    """
    FAST: tl.constexpr = (x.dtype if TMA else x.dtype.element_ty) != tl.float32
    UNIT: tl.constexpr = 8 if FAST else 4
    K = K // UNIT * UNIT  # changes nothing; the compiler learns that rows begin at multiples of 16 bytes
    rows, cols = count_tiles(M, BM), count_tiles(N, BN)
    if parts is not None and TMA and not interpreted():
        tl.extra.cuda.gdc_launch_dependents()  # sum_parts_kernel starts, and waits for the parts
    for tile in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=TMA):
        m, n = swizzled_tile(tile, rows, cols, GROUP)
        total = tile_sum(x, weight, m * BM, n * BN, 0, K, M, N, K, TMA, BM, BN, BK)
        left, right = split_columns(total, BM, BN)  # (BM, BN / 2) each: stores take half the shared memory
        for half in tl.static_range(2):
            z, first = left if half == 0 else right, n * BN + half * (BN // 2)  # (BM, BN / 2)
            if bias is not None:
                col = first + tl.arange(0, BN // 2)
                z += tl.load(bias + col, col < N, other=0.0).to(tl.float32)[None, :]
            if kept is not None:
                store_tile(kept, m * BM, first, M, N, N, z, BM, BN // 2, STORE)
            store_tile(y, m * BM, first, M, N, N, activate(z, ACT, FAST), BM, BN // 2, STORE)
    if parts is not None:
        rest, steps = rows * cols - whole, tl.cdiv(tl.cdiv(K, BK), split) * BK
        for unit in tl.range(tl.program_id(0), rest * split, tl.num_programs(0)):
            m, n = swizzled_tile(whole + unit % rest, rows, cols, GROUP)
            first = unit // rest * steps
            last = min(first + steps, K)
            total = tile_sum(x, weight, m * BM, n * BN, first, last, M, N, K, TMA, BM, BN, BK)
            at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            tl.store(parts + offset64(unit, BM * BN) + at, total)


@triton.jit(do_not_specialize=["M", "whole", "split"])
def sum_parts_kernel(
    parts, bias, y, kept, M, N, whole, split, ACT: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The tiles of y that linear_kernel left in parts: their sum in a fixed order, bias, activation.

    A program has ROWS rows of a tile.
    """
    rows, cols = count_tiles(M, BM), count_tiles(N, BN)
    rest, slices = rows * cols - whole, BM // ROWS
    tile, down = tl.program_id(0) // slices, tl.program_id(0) % slices * ROWS + tl.arange(0, ROWS)[:, None]
    m, n = swizzled_tile(whole + tile, rows, cols, GROUP)
    across = tl.arange(0, BN)[None, :]
    row, col = (m * BM + down).to(tl.int64), n * BN + across  # (ROWS, 1), (1, BN)
    inside = (row < M) & (col < N)
    z = tl.zeros([ROWS, BN], tl.float32)
    if EARLY and not interpreted():
        tl.extra.cuda.gdc_wait()  # for the parts
    for part in tl.static_range(PARTS):
        its = parts + offset64(part * rest + tile, BM * BN) + down * BN + across
        z += tl.load(its, inside & (part < split), other=0.0)
    if bias is not None:
        z += tl.load(bias + col, col < N, other=0.0).to(tl.float32)
    if kept is not None:
        tl.store(kept + row * N + col, z, inside)
    tl.store(y + row * N + col, activate(z, ACT, y.dtype.element_ty != tl.float32), inside)


@triton.jit
def dz_kernel(dy, z, dz, sums, M, N, groups, ACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """dz (M, N) = dy * activation'(z), and for each group of rows the sums of dz: sums (groups, N)."""
    FAST: tl.constexpr = dz.dtype.element_ty != tl.float32
    col = (tl.program_id(0) + 0 * N) * COLS + tl.arange(0, COLS)  # 64-bit where N is
    total = tl.zeros([ROWS, COLS], tl.float32)
    for tile in tl.range(tl.program_id(1), count_tiles(M, ROWS), groups, num_stages=3):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        at, inside = row * N + col[None, :], (row < M) & (col < N)[None, :]  # (ROWS, COLS)
        before = tl.load(z + at, inside, other=0.0).to(tl.float32)  # the activation
        change = activation_grad(before, tl.load(dy + at, inside, other=0.0).to(tl.float32), ACT, FAST)
        total += change
        tl.store(dz + at, change, inside)
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
    split: int = 1
    """Programs that share the sum over K of a tile."""
    shared: int = 0
    """How many tiles, the last ones, are shared so."""


KIB = 1024
# Tiles, and what share of the rates below they reach. The names say how much shared memory a block may use.
TILES_200_KIB = {
    Tile(128, 256, 64, 8, 3, 1): 1.03, Tile(256, 128, 64, 8, 4, 1): 0.99, Tile(128, 128, 64, 4, 3, 2): 0.99,
    Tile(128, 128, 64, 8, 4, 1): 0.9, Tile(64, 256, 64, 4, 4, 1): 0.9, Tile(256, 64, 64, 4, 4, 1): 0.66,
    Tile(64, 128, 64, 4, 4, 2): 0.75, Tile(128, 64, 64, 4, 4, 2): 0.81, Tile(64, 128, 128, 4, 4, 1): 0.74,
    Tile(64, 64, 64, 4, 4, 3): 0.43, Tile(64, 64, 128, 4, 3, 2): 0.43, Tile(64, 32, 128, 4, 3, 3): 0.23,
}  # fmt: skip
TILES_160_KIB = {Tile(128, 128, 64, 8, 3, 1): 1.0, Tile(64, 64, 64, 4, 3, 2): 0.8}
TILES_SMALL = {Tile(128, 128, 32, 8, 3, 1): 1.0, Tile(64, 64, 32, 4, 3, 2): 0.8}
TILES_FP32 = {Tile(128, 64, 32, 4, 3, 2): 1.0, Tile(64, 64, 32, 4, 3, 2): 0.85}
TILES_INTERPRETED = {Tile(32, 64, 32, 4, 3, 1): 1.0}

# Of one multiprocessor of an H200, in a microsecond:
FLOPS = {2: 5.0e6, 4: 0.7e6}
"""Operations on the matrix unit, by the bytes of a number; float32 as three products of TF32."""
FETCHED = 88e3
"""Bytes from the L2 cache."""
LINES: tuple[float, ...] = 1.0, 1.0, 0.71
"""What is left of that where rows begin at multiples of 128 bytes, of 32, of 16: lines read in part."""
LATENCY = 1.36
"""Microseconds until a tile that was asked for is there."""
STORED = 31e3
"""Bytes of results that are converted and stored."""
SECOND_KERNEL = 5.0
"""Microseconds of the kernel that adds up the parts of sums."""


def tile_time(tile: Tile, share: float, M: int, N: int, K: int, itemsize: int, multiprocessors: int) -> float:
    """Microseconds of a product of x (M, K) and weight (N, K), as a model of the H200 has them.

    A wave is what runs at the same time. A program's step takes as long as the matrix unit or the L2 cache,
    which the programs of a multiprocessor share, or as its loads are late with ``stages`` on their way.
    """
    BM, BN, BK, _, stages, programs, split, shared = tile
    places = programs * multiprocessors
    row = K * itemsize
    fetched = FETCHED * LINES[0 if row % 128 == 0 else 1 if row % 32 == 0 else 2]
    product = 2 * BM * BN * BK / (FLOPS[itemsize] * share)
    fetch = (min(BM, M) + min(BN, N)) * BK * itemsize / fetched

    def wave(abreast: int, steps: int, size: int) -> float:
        """Of so many programs on each multiprocessor, whose results have so many bytes a number."""
        step = max(abreast * product, abreast * fetch, LATENCY / (stages - 1))
        return steps * step + LATENCY + abreast * BM * BN * size / STORED

    def waves(tiles: int, steps: int, size: int) -> float:
        full, rest = divmod(tiles, places)
        time = full * wave(programs, steps, size)
        return time + (wave(cdiv(rest, multiprocessors), steps, size) if rest else 0.0)

    tiles, steps = cdiv(M, BM) * cdiv(N, BN), cdiv(K, BK)
    time = waves(tiles - shared, steps, itemsize)
    if shared:
        time += waves(shared * split, cdiv(steps, split), 4)
        time += SECOND_KERNEL + 2 * 4 * split * shared * BM * BN / (fetched * multiprocessors)
    return time


@functools.lru_cache(maxsize=4096)
def choose_tile(
    M: int, N: int, K: int, itemsize: int, splits: bool, store: bool, limits: DeviceLimits
) -> Tile:
    """The tile for x (M, K) @ weight (N, K).T that takes the least time.

    ``splits``: K may be split, too. ``store``: descriptors store the result. Where they do not, each number
    is stored by itself, and a thread has registers for the addresses of 64 of them.
    """
    shared = limits.shared_bytes // KIB
    if not shared:
        choices = TILES_INTERPRETED
    elif itemsize == 4:
        choices = TILES_FP32
    else:
        choices = TILES_200_KIB if shared >= 200 else TILES_160_KIB if shared >= 160 else TILES_SMALL
    best, least = Tile(0, 0, 0, 0, 0, 0), math.inf
    for tile, share in choices.items():
        if itemsize == 4 and 0 < shared < 200 and tile.BM > 64:
            continue  # too large for these
        if not store and 64 * 32 * tile.warps < tile.BM * tile.BN:
            continue
        for way in ways_to_share(tile, M, N, K, limits) if splits else (tile,):
            time = tile_time(way, share, M, N, K, itemsize, limits.multiprocessors)
            if time < least:
                best, least = way, time
    return best


def ways_to_share(tile: Tile, M: int, N: int, K: int, limits: DeviceLimits) -> list[Tile]:
    """The tile without a split of K, and those that fill the last, incomplete wave of programs.

    Each program of a split takes four steps or more.
    """
    places, tiles = tile.programs * limits.multiprocessors, cdiv(M, tile.BM) * cdiv(N, tile.BN)
    rest = tiles % places
    most = min(places // max(rest, 1), K // (4 * tile.BK), 16)
    splits = [n for n in (2, 3, 4, 6, 8, 12, 16) if rest and n <= most]
    return [tile, *(tile._replace(split=n, shared=rest) for n in splits)]


# ---- launches ----------------------------------------------------------------------------------------------


def launch_matmul(
    kernel: Any, x: Tensor, weight: Tensor, y: Tensor, kept: tuple[Tensor | None, ...], act: str,
    *bias: Tensor | None, tile: list[int] | None = None,
) -> None:  # fmt: skip
    """Launch linear_kernel with weight (N, K), or gate_up_kernel with weight (2, N, K).

    ``kept`` are the kernel's further outputs, or None in their places. ``tile`` has the form of ``Tile``;
    if it is left out, ``choose_tile`` chooses one.
    """
    if not y.numel():
        return
    x, weight = aligned_rows(x, weight)
    (M, K), N, pair, limits = x.shape, y.shape[1], weight.dim() == 3, device_limits(x.device)
    tma = limits.has_tma and M < 2**31  # TMA counts rows in 32 bits
    store = tma and N * y.itemsize % 16 == 0
    rows = weight.shape[0] * N if pair else N
    chosen = Tile(*tile) if tile else choose_tile(M, rows, K, x.itemsize, not pair, store or not tma, limits)
    BM, BN, BK, warps, stages, programs, split, shared = chosen
    tiles = cdiv(M, BM) * cdiv(N, BN // 2 if pair else BN)
    shared = min(shared, tiles)
    whole, blocks = tiles - shared, dict(ACT=act, GROUP=8, BM=BM, BN=BN)
    parts = x.new_empty(split * shared, BM, BN, dtype=torch.float32) if shared else None
    units, places = max(whole, split * shared), programs * limits.multiprocessors
    kernel[(min(units, places) if tma else units,)](
        descriptor(x, tma, BM, BK), descriptor(weight, tma, *((2, BN // 2, BK) if pair else (BN, BK))),
        *(descriptor(out, store, BM, BN // 2) for out in (y, *kept)),
        *((M, N, K) if pair else (M, N, K, parts, whole, split, *bias)),
        **blocks, TMA=tma, STORE=store, BK=BK, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts is not None:
        ROWS = max(1, 1024 // BN)
        grid = (shared * (BM // ROWS),)
        sizes = dict(PARTS=next_power_of_2(split), ROWS=ROWS, EARLY=tma)
        sizes |= dict(launch_pdl=True) if tma else {}
        sum_parts_kernel[grid](parts, *bias, y, *kept, M, N, whole, split, **blocks, **sizes)


def _outputs(x: Tensor, weight: Tensor, *_: Any, keep: bool) -> list[Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0]) for _ in range(1 + keep)]


@operator(fake=lambda *inputs: _outputs(*inputs[:-1], keep=inputs[-1]))
def linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, tile: list[int] | None, keep: bool
) -> list[Tensor]:
    """y (M, N) from x (M, K), weight (N, K), bias (N,); and to ``keep`` z, of which y is the activation."""
    y, *z = _outputs(x, weight, keep=keep)
    bias = bias if bias is None else bias.contiguous()
    launch_matmul(linear_kernel, x, weight, y, (z[0] if keep else None,), act, bias, tile=tile)
    return [y, *z]


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

    z, before the activation, is kept, or for relu, whose gradient y says as well, only y; and nothing where
    there is no activation. cuBLAS computes the gradients' products.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, act: str, tile: list[int] | None
    ) -> Tensor:
        y, *z = linear_forward(x, weight, bias, act, tile, act not in ("none", "relu"))
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
        dx = dz @ weight if x_wanted else None  # (M, K)
        dweight = dz.T @ x if weight_wanted else None  # (N, K)
        return dx, dweight, dbias if bias_wanted else None, None, None


def matmul(x: Tensor, weight: Tensor, tile: tuple[int, ...] | None = None) -> Tensor:
    """x @ weight.T.

    Args:
        x: (M, K); float32, float16 or bfloat16, any strides.
        weight: (N, K), of x's dtype and device.
        tile: (BM, BN, BK, warps, stages, programs per multiprocessor), and if the sums over K of the last
            tiles are split, in how many parts, and how many tiles; chosen for the sizes if left out.

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
    if tile is not None and (len(tile) not in (6, 8) or not all(isinstance(n, int) and n >= 0 for n in tile)):
        raise ValueError(f"tile: is {tile!r}, should be 6 or 8 ints")
    sizes = None if tile is None else list(tile)
    if needs_grad(x, weight):
        return LinearActFunction.apply(x, weight, None, "none", sizes)
    return linear_forward(x, weight, None, "none", sizes, False)[0]


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
        (..., N), contiguous, of x's dtype; computed in float32 and rounded once. In 16 bits a GPU computes
        gelu_tanh and silu of z by one special function, off by 2**-12 z at most. Where autograd records the
        call, z = x @ weight.T + bias is kept in x's dtype, but not for relu.

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
        y = linear_forward(rows, weight, bias, activation, None, False)[0]
    return y.view(*x.shape[:-1], weight.shape[0])
