"""Solutions of lesson 4's exercises. Each cell is what you would have written in the notebook's."""

# %%
import labkit as lab

import torch
import triton
import triton.language as tl
from torch import Tensor

device_limits = lab.kernels.common.device_limits


# %% [grouped]
@triton.jit
def grouped_kernel(x, weight, bias, y, R, G, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    # Groups first: programs that run together cover whole rows of x, which lie together in memory.
    group = (tl.program_id(0) % G).to(tl.int64)
    row = (tl.program_id(0) // G * BM + tl.arange(0, BM)).to(tl.int64)[:, None]  # (BM, 1)
    d = tl.arange(0, BD)  # (BD,)
    # The same places in x and in y. Rows of one group are G * D apart; nothing has to move before or after.
    at, inside = row * (G * D) + group * D + d[None, :], (row < R) & (d < D)[None, :]  # (BM, BD)
    a = tl.load(x + at, inside, other=0.0)
    # Zeros in x alone would not do: behind this group's D rows comes the next group's weight, and 0 times
    # what is NaN or infinite there is NaN.
    square = (d < D)[:, None] & (d < D)[None, :]
    w = tl.load(weight + group * (D * D) + d[:, None] * D + d[None, :], square, other=0.0)  # (BD, BD)
    b = tl.load(bias + group * D + d, d < D, other=0.0).to(tl.float32)
    total = tl.dot(a, w, input_precision="tf32x3") + b[None, :]  # float32; the store rounds, once
    tl.store(y + at, total, inside)


def grouped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    lab.no_gradient("grouped", x, weight, bias)
    R, (G, D, _), y = len(x), weight.shape, torch.empty_like(x)
    sizes = dict(D=D, BM=64, BD=max(16, triton.next_power_of_2(D)))
    grouped_kernel[(G * triton.cdiv(R, 64),)](x, weight, bias, y, R, G, **sizes)
    return y


# %% [stays]
@triton.jit
def stays_kernel(x, weight, bias, y, R, G, per, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    group, part = (tl.program_id(0) % G).to(tl.int64), tl.program_id(0) // G
    m, d = tl.arange(0, BM)[:, None], tl.arange(0, BD)
    square = (d < D)[:, None] & (d < D)[None, :]
    # Before the loop: once for all of this program's rows.
    w = tl.load(weight + group * (D * D) + d[:, None] * D + d[None, :], square, other=0.0)
    b = tl.load(bias + group * D + d, d < D, other=0.0).to(tl.float32)
    # The last part may have fewer tiles. The mask of rows would make the others harmless, but not free.
    for tile in range(part * per, tl.minimum(part * per + per, tl.cdiv(R, BM))):
        row = (tile * BM + m).to(tl.int64)
        at, inside = row * (G * D) + group * D + d[None, :], (row < R) & (d < D)[None, :]
        # No load depends on what the loop computes: the next tile can be in flight.
        a = tl.load(x + at, inside, other=0.0)
        total = tl.dot(a, w, input_precision="tf32x3") + b[None, :]
        tl.store(y + at, total, inside)


def stays(x: Tensor, weight: Tensor, bias: Tensor, per: int = 0) -> Tensor:
    lab.no_gradient("stays", x, weight, bias)
    R, (G, D, _) = len(x), weight.shape
    tiles, places = triton.cdiv(R, 64), 2 * device_limits(x.device).multiprocessors
    per, y = per or max(1, triton.cdiv(tiles * G, places)), torch.empty_like(x)
    sizes = dict(D=D, BM=64, BD=max(16, triton.next_power_of_2(D)), num_warps=8 if D > 64 else 4)
    stays_kernel[(G * triton.cdiv(tiles, per),)](x, weight, bias, y, R, G, per, **sizes)
    return y


# %% [packed]
@triton.jit
def packed_kernel(x, weight, bias, y, R, G, D: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr):
    packs = tl.cdiv(G, PACK)
    first = (tl.program_id(0) % packs * PACK).to(tl.int64)
    row = (tl.program_id(0) // packs * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    # To memory, PACK groups are one wide group. The last pack may reach beyond the last group.
    c = tl.arange(0, PACK * D)
    real = first * D + c < G * D
    at, inside = row * (G * D) + first * D + c[None, :], (row < R) & real[None, :]
    a = tl.load(x + at, inside, other=0.0)  # (BM, PACK * D)
    # Row c of all weights below one another, (G * D, D), belongs to column c of x. Its D numbers go to the
    # columns of its own group; elsewhere there is no address worth loading, and the mask gives the zeros.
    k, n = c[:, None], c[None, :]
    own = (k // D == n // D) & real[:, None]
    w = tl.load(weight + (first * D + k) * D + n % D, own, other=0.0)  # (PACK * D, PACK * D)
    b = tl.load(bias + first * D + c, real, other=0.0).to(tl.float32)
    total = tl.dot(a, w, input_precision="tf32x3") + b[None, :]
    tl.store(y + at, total, inside)


def packed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    lab.no_gradient("packed", x, weight, bias)
    R, (G, D, _), y = len(x), weight.shape, torch.empty_like(x)
    if 64 % D:
        raise ValueError(f"weight: groups of {D} do not fill 64 columns")
    grid = (triton.cdiv(G, 64 // D) * triton.cdiv(R, 64),)
    packed_kernel[grid](x, weight, bias, y, R, G, D=D, PACK=64 // D, BM=64)
    return y
