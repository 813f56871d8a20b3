"""``linear_kernel`` for Hopper in 16 bits, with warps of different roles, in Gluon, Triton's lower level.

One warp loads, and two warpgroups multiply, in turns: while one stores its tile, the other multiplies.
``linear`` imports this module where it can be used. The interpreter knows no Gluon: tests need the GPU.
"""

import functools
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from labkit.kernels import linear
from labkit.kernels.common import DeviceLimits, activate, cdiv, device_limits
from labkit.kernels.linear import swizzled_tile

# ---- kernel ------------------------------------------------------------------------------------------------
# A tile of y has BN columns, or half as many MORE: shapes here are powers of two, and 192 is a sum of two.
# ``ring``: (xs, ws, us, full, free), for each stage a tile of x (TM, BK), of the weight (BN, BK) and (BN / 2,
# BK), and two mbarriers, completed when the stage is loaded and when it has been read. Step i of a program,
# counted over all its tiles, has stage i % STAGES.


@gluon.jit
def load_tiles(x, weight, more, ring, rows, cols, K, GROUP: gl.constexpr):
    """The warp that loads: it asks for a stage as soon as that has been read, far ahead of the products."""
    xs, ws, us, full, free = ring
    BN: gl.constexpr = ws.shape[1]
    COLS: gl.constexpr = BN if more is None else BN // 2 * 3
    i = 0
    for tile in range(gl.program_id(0), rows * cols, gl.num_programs(0)):
        m, n = swizzled_tile(tile, rows, cols, GROUP)
        for k in range(0, K, xs.shape[2]):
            stage = i % xs.shape[0]
            loaded = full.index(stage)
            mbarrier.wait(free.index(stage), (i // xs.shape[0] & 1) ^ 1)
            mbarrier.expect(loaded, (xs.shape[1] + COLS) * xs.shape[2] * 2)  # bytes
            tma.async_copy_global_to_shared(x, [m * xs.shape[1], k], loaded, xs.index(stage))
            tma.async_copy_global_to_shared(weight, [n * COLS, k], loaded, ws.index(stage))
            if more is not None:
                tma.async_copy_global_to_shared(more, [n * COLS + BN, k], loaded, us.index(stage))
            i += 1


@gluon.jit
def store_result(z, y, staging, bias, row, first, N, ACT: gl.constexpr):
    """activation(z + bias) to y at (row, first); the copy still runs when this returns."""
    if bias is not None:
        col = first + gl.arange(0, z.shape[1], gl.SliceLayout(0, z.type.layout))
        z += gl.load(bias + col, col < N, other=0.0).to(gl.float32)[None, :]
    z = activate(z, ACT, True).to(y.dtype)
    tma.store_wait(0)  # until the copy before has read ``staging``
    staging.store(z)
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(y, [row, first], staging)


@gluon.jit
def multiply_tiles(
    y, bias, turns, ring, rows, cols, N, K, WHO: gl.constexpr, MORE: gl.constexpr, SHARED: gl.constexpr,
    GROUP: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Warpgroup 0 or 1: SHARED tiles' upper or lower BM rows, or every second tile.

    Not SHARED, a warpgroup's products begin when the other's are issued. So the stages are taken in order,
    and no mbarrier is a round behind or ahead of the parity that is waited for.
    """
    xs, ws, us, full, free = ring
    BM: gl.constexpr = y.block_type.shape[0]
    BN: gl.constexpr = ws.shape[1]
    HALF: gl.constexpr = BN // 2
    Z: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    U: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    staging = gl.allocate_shared_memory(y.dtype, [BM, HALF], y.layout)
    steps, programs = gl.cdiv(K, xs.shape[2]), gl.num_programs(0)
    first, i, phase = gl.program_id(0), 0, 1 - WHO
    if not SHARED:
        first, i, programs = first + WHO * programs, WHO * steps, 2 * programs
    for tile in range(first, rows * cols, programs):
        m, n = swizzled_tile(tile, rows, cols, GROUP)
        z, u = gl.zeros([BM, BN], gl.float32, Z), gl.zeros([BM, HALF], gl.float32, U)
        if not SHARED:
            mbarrier.wait(turns.index(WHO), phase)
            phase ^= 1
        for step in range(steps):
            stage = i % xs.shape[0]
            mbarrier.wait(full.index(stage), i // xs.shape[0] & 1)
            a = xs.index(stage).slice(WHO * BM if SHARED else 0, BM)  # (BM, BK)
            z = hopper.warpgroup_mma(a, ws.index(stage).permute((1, 0)), z, is_async=True)
            if MORE:
                u = hopper.warpgroup_mma(a, us.index(stage).permute((1, 0)), u, is_async=True)
                z, u = hopper.warpgroup_mma_wait(2, (z, u))
            else:
                z = hopper.warpgroup_mma_wait(1, (z,))
            mbarrier.arrive(free.index((i + xs.shape[0] - 1) % xs.shape[0]), pred=step > 0)  # step before
            i += 1
        if not SHARED:
            mbarrier.arrive(turns.index(1 - WHO))
        z = hopper.warpgroup_mma_wait(0, (z,))  # all products
        mbarrier.arrive(free.index((i + xs.shape[0] - 1) % xs.shape[0]))
        i += 0 if SHARED else steps  # the other's
        row, col = (m * 2 + WHO if SHARED else m) * BM, n * (BN + HALF if MORE else BN)
        left, right = z.reshape(BM, 2, HALF).permute(0, 2, 1).split()  # to stage less at a time
        store_result(left, y, staging, bias, row, col, N, ACT)
        store_result(right, y, staging, bias, row, col + HALF, N, ACT)
        if MORE:
            store_result(hopper.warpgroup_mma_wait(0, (u,)), y, staging, bias, row, col + BN, N, ACT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def linear_hopper_kernel(
    x, weight, more, y, bias, M, N, K, SHARED: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """y (M, N) = activation(x (M, K) @ weight (N, K).T + bias) by descriptors of tiles, persistent."""
    BN: gl.constexpr = weight.block_type.shape[0]
    BK: gl.constexpr = weight.block_type.shape[1]
    MORE: gl.constexpr = more is not None
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, x.block_type.shape[0], BK], x.layout)
    ws = gl.allocate_shared_memory(x.dtype, [STAGES, BN, BK], weight.layout)
    us = gl.allocate_shared_memory(x.dtype, [STAGES, BN // 2, BK], more.layout) if MORE else ws
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2 if SHARED else 1)
    for who in gl.static_range(2):
        mbarrier.init(turns.index(who), count=1)
    rows, cols = gl.cdiv(M, xs.shape[1]), gl.cdiv(N, BN // 2 * 3 if MORE else BN)
    ring = (xs, ws, us, full, free)
    # The second role has 4 warps of 240 registers a thread, as the first, and the third has 1 of 24.
    gl.warp_specialize([
        (multiply_tiles, (y, bias, turns, ring, rows, cols, N, K, 0, MORE, SHARED, GROUP, ACT)),
        (multiply_tiles, (y, bias, turns, ring, rows, cols, N, K, 1, MORE, SHARED, GROUP, ACT)),
        (load_tiles, (x, weight, more, ring, rows, cols, K, GROUP)),
    ], [4, 1], [240, 24])  # fmt: skip


# ---- tiles and launch --------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """A tile of y, of all or half of the warpgroups."""

    rows: int
    BN: int
    more: bool
    shared: bool


layout = functools.cache(gl.NVMMASharedLayout.get_default_for)  # in shared memory, by block and dtype
BK = 64
RATE = 5.4e6
"""Operations of a multiprocessor's matrix unit in a microsecond, an H200's at its usual clock: a guess."""
TILES = {  # and what share of the rate they reach: a guess, too
    Tile(128, 128, False, False): 1.0, Tile(128, 128, True, False): 0.97, Tile(64, 256, False, False): 0.97,
    Tile(64, 128, True, False): 0.95, Tile(64, 128, False, False): 0.9, Tile(128, 64, False, False): 0.85,
    Tile(128, 64, True, False): 0.85, Tile(64, 64, False, False): 0.7, Tile(128, 256, False, True): 1.0,
    Tile(256, 128, False, True): 1.0, Tile(256, 128, True, True): 0.97, Tile(128, 128, True, True): 0.95,
    Tile(128, 256, True, True): 0.97, Tile(256, 64, True, True): 0.85,
}  # fmt: skip


def tile_time(tile: Tile, M: int, N: int, K: int, limits: DeviceLimits) -> float:
    """Microseconds by the model of ``linear.tile_time``; results are stored meanwhile, unless SHARED."""
    cols, row = tile.BN // 2 * 3 if tile.more else tile.BN, K * 2
    fetched = linear.FETCHED * linear.LINES[0 if row % 128 == 0 else 1 if row % 32 == 0 else 2]
    product = 2 * tile.rows * cols * BK / (RATE * TILES[tile])
    step = max(product, (min(tile.rows, M) + min(cols, N)) * BK * 2 / fetched)
    sums, store = cdiv(K, BK) * step, tile.rows * cols * 2 / linear.STORED
    waves = cdiv(cdiv(M, tile.rows) * cdiv(N, cols), limits.multiprocessors)
    wave = sums + store if tile.shared else max(sums, store)
    return linear.LATENCY + waves * wave + (0.0 if tile.shared else store)


@functools.lru_cache(maxsize=4096)
def choose_tile(M: int, N: int, K: int, limits: DeviceLimits) -> tuple[Tile, float]:
    """The tile that takes the least time, and its microseconds."""
    return min(((tile, tile_time(tile, M, N, K, limits)) for tile in TILES), key=lambda one: one[1])


def launch(x: Tensor, weight: Tensor, y: Tensor, bias: Tensor | None, act: str, tile: Tile) -> None:
    """y (M, N) from x (M, K) and weight (N, K), whose rows begin at multiples of 16 bytes, as y's do."""
    (M, K), N, limits = x.shape, y.shape[1], device_limits(x.device)
    cols, half, BM = tile.BN // 2 * 3 if tile.more else tile.BN, tile.BN // 2, tile.rows // (1 + tile.shared)
    stages = min(8, (limits.shared_bytes - 512 - 2 * BM * half * 2) // ((tile.rows + cols) * BK * 2))

    def operand(t: Tensor, *block: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(t, list(block), layout(block, getattr(gl, str(t.dtype)[6:])))

    linear_hopper_kernel[(min(cdiv(M, tile.rows) * cdiv(N, cols), limits.multiprocessors),)](
        operand(x, tile.rows, BK), operand(weight, tile.BN, BK),
        operand(weight, half, BK) if tile.more else None, operand(y, BM, half), bias, M, N, K,
        SHARED=tile.shared, STAGES=stages, GROUP=8, ACT=act, num_warps=4, maxnreg=168,
    )  # fmt: skip
