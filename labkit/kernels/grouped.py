"""y[..., g] = x[..., g] @ weight[g] + bias[g]: many small Linear layers side by side, in one kernel."""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.kernels.calls import autocast, check_tensor, is_traced, needs_grad, once_differentiable, operator
from labkit.kernels.common import (
    DeviceLimits,
    allows_tf32,
    cdiv,
    descriptor,
    device_limits,
    empty_contiguous,
    float32_precision,
    next_power_of_2,
)
from labkit.kernels.grouped_kernels import (
    backward_kernel,
    forward_kernel,
    single_tile_kernel,
    sum_kernel,
    wide_kernel,
)

# ---- tile sizes, and how tiles are shared out --------------------------------------------------------------


class Tiling(NamedTuple):
    """Tile sizes of a kernel, measured on an H200; smaller ones for GPUs with less shared memory."""

    pack: int
    """Groups per program."""
    rows: int
    """Rows of a tile."""
    cols: int
    """Columns of the weight that a program keeps."""
    warps: int
    stages: int
    resident: int
    """Programs per multiprocessor."""
    tiles: int = 0
    """The most tiles per program; 0 for as many as balance the programs."""
    tma: bool = False
    """Whether x is loaded by tensor descriptors."""
    store: bool = False
    """Whether y is stored by tensor descriptors."""
    interleaved: bool = False
    """Whether a program's tiles lie apart from each other, not one after the other."""
    depth: int = 0
    """Rows of dW in a program of the backward, whose columns are ``cols``."""


def block_width(width: int) -> int:
    """Width of a block for so many columns: a power of two, at least 16 as tl.dot asks."""
    return max(16, next_power_of_2(width))


@functools.cache
def forward_tiling(d_in: int, d_out: int, itemsize: int, tma: bool, limits: DeviceLimits) -> Tiling | None:
    """Sizes of forward_kernel for groups of d_in to d_out; None where a group's weight is too large for it.

    ``tma`` says whether tensor descriptors can load x.
    """
    widest, fp32, shared = block_width(max(d_in, d_out)), itemsize == 4, limits.shared_bytes // 1024
    cols = min(block_width(d_out), 64 if fp32 else 128)
    if not shared:  # interpreted: small tiles
        if {d_in, d_out} <= {16, 32}:
            return Tiling(4, 32, 4 * d_out, 4, 1, 1)
        return Tiling(1, 32, cols, 4, 1, 1) if widest <= 64 else None
    if {d_in, d_out} <= {16, 32} and widest * itemsize <= 64:
        small = widest == 16 and not fp32
        return Tiling(4, 64 if small else 32, 4 * d_out, 4, 1, 5, 2 * small, store=True, interleaved=True)
    narrow = not (tma or fp32) and min(block_width(d_in), block_width(d_out)) <= 32
    if widest <= 32:
        return Tiling(1, 32 if narrow else 64, cols, 4, 1, 8)
    if tma and shared >= 160 and widest <= 128:
        if widest == 64 and not fp32:
            return Tiling(1, 64, cols, 4, 3, 5, tiles=1 if d_in == d_out == 64 else 4, tma=True, store=True)
        if d_in == 128:
            return Tiling(1, 64, cols, 4 if fp32 else 8, 2 if fp32 else 3, 2, tiles=13, tma=True)
        return Tiling(1, 64, cols, 4, 3, 2, tma=True, store=widest == 64)
    if tma and shared >= 200 and widest <= 256 and not fp32:
        return Tiling(1, 64, cols, 8, 4, 1, tma=True)
    if widest == 64:
        return Tiling(1, 32, cols, 4, 1, 5) if narrow else Tiling(1, 64, cols, 4, 1, 4)
    if widest == 128 and not fp32:
        return Tiling(1, 64, cols, 8, 1, 2)
    if block_width(d_in) <= 128 and shared >= 200 and fp32:
        return Tiling(1, 64, cols, 8, 1, 1)
    if widest <= 256 and not fp32:
        four = shared >= 160 and 16 < block_width(d_in) <= 128  # warps
        return Tiling(1, 64, cols if shared >= 160 else 64, 4 if four else 8, 1, 4 if four else 2)
    return None


@functools.cache
def backward_tiling(d_in: int, d_out: int, itemsize: int, limits: DeviceLimits) -> Tiling:
    """Sizes of backward_kernel, whose program keeps ``depth`` x ``cols`` of dW; ``store`` means dX."""
    down, across = block_width(d_in), block_width(d_out)
    widest, fp32, shared = max(down, across), itemsize == 4, limits.shared_bytes // 1024

    def tiling(
        pack: int, rows: int, side: int, warps: int, stages: int, resident: int, **uses: bool
    ) -> Tiling:
        """Of squares, or the whole of dW where it is smaller."""
        depth, cols = (min(block_width(pack * d), side) for d in (d_in, d_out))
        return Tiling(pack, rows, cols, warps, stages, resident, depth=depth, **uses)

    if not shared:
        return tiling(2 if {d_in, d_out} <= {16, 32} else 1, 32, 64, 4, 1, 1)
    if {d_in, d_out} <= {16, 32} and (fp32 or widest == 16):
        return tiling(4, 32, 128, 4, 1, 3) if fp32 else tiling(4, 64, 64, 4, 3, 2, tma=True, store=True)
    if widest <= 32 or (widest == 64 and (not fp32 or shared >= 200)):
        return tiling(1, 64, 64, 4, 1 if fp32 else 3, 4, tma=widest == 32, store=True)
    if fp32 or shared < 200:  # in squares of 64 or 32, and dX apart
        side = 64 if shared >= 200 or not fp32 else 32
        return tiling(1, side, side, 4, 1 if fp32 else 2, 2)
    if down * across <= 128 * 128 and widest <= 256:  # dW as a whole, dX with it
        if down <= 64 and down * across <= 64 * 64:
            return tiling(1, 64, 256, 4, 3, 3, store=True)
        narrow = down + across <= 192
        return tiling(1, 64, 256, 8, 3 if narrow else 4, 2 if narrow else 1, tma=True, store=True)
    return tiling(1, 64, 128, 8, 4, 1, tma=True, store=True)


@functools.cache
def balance_tiles(tiles: int, abreast: int, places: int, lead: int) -> int:
    """Tiles per program with which the last program ends soonest.

    Args:
        tiles: tiles of rows.
        abreast: programs for each part of the rows, side by side along the columns.
        places: programs that run at once on the GPU.
        lead: cost of starting a program, in tiles.

    For 64 tiles, 100 groups and 264 places: 4 parts of 16 tiles are two waves, the second half empty. In
    parts of 26, 26 and 12 tiles, the short programs begin where long ones end.
    """

    def end(per: int) -> int:
        parts, rest = divmod(tiles, per)
        waves, more = divmod(abreast * parts, places)
        ends = Counter({waves * (per + lead): places - more, (waves + 1) * (per + lead): more})
        left = abreast if rest else 0
        while left:  # programs of the last, shorter part begin where others end
            soonest = min(+ends)
            begun = min(left, ends[soonest])
            ends[soonest] -= begun
            ends[soonest + rest + lead] += begun
            left -= begun
        return max(+ends)

    fewest = cdiv(tiles, 256)  # sum_kernel adds at most 256 parts
    return min(range(min(tiles, fewest + 512), fewest - 1, -1), key=end)


# ---- launches: x, y and their gradients are (B, T, C) views ------------------------------------------------


def aligned(t: Tensor, limits: DeviceLimits) -> bool:
    """Whether TMA can copy tiles of t (1, rows, columns)."""
    begins = t.data_ptr() % 16 == 0 and t.stride(1) * t.itemsize % 16 == 0
    return limits.has_tma and t.shape[0] == 1 and t.stride(2) == 1 and begins and t.shape[1] < 2**31


def needs_64_bits(widest: int, strides: Iterable[int]) -> bool:
    """Whether offsets within a tile, of indices below 256 or ``widest``, may exceed 32 bits."""
    return 2 * max(256, widest) * max(strides) >= 2**31


def row_unit(t: Tensor, width: int) -> int:
    """The most elements, at most 16 bytes, at whose multiples groups of a width begin; 1 for columns."""
    sequences = t.stride(0) if t.shape[0] > 1 else 0
    return math.gcd(16 // t.itemsize, t.stride(1), sequences, width) if t.stride(2) == 1 else 1


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Write y (B, T, G * d_out) from x (B, T, G * d_in); any strides."""
    (B, T, _), (G, d_in, d_out), limits = x.shape, weight.shape, device_limits(x.device)
    if not x.numel() or not y.numel():
        y.zero_()
        if bias is not None:
            y += bias.flatten()
        return
    unit = 16 // x.itemsize  # a descriptor begins at a multiple of 16 bytes: up to unit - 1 columns early
    tma = aligned(x, limits) and d_in + unit - math.gcd(d_in, unit) <= block_width(d_in)
    tiling = forward_tiling(d_in, d_out, x.itemsize, tma, limits)
    strides = *x.stride(), *weight.stride(), *(bias.stride() if bias is not None else (0, 0)), *y.stride()
    if tiling is None:
        BM, BN, BK, warps = (128, 64, 32, 4) if x.itemsize == 4 else (128, 128, 64, 8)
        if limits.shared_bytes < 200 * 1024:
            BM, BK, warps = 64, 32, 4
        grid = (cdiv(d_out, BN) * G * B * cdiv(T, BM),)
        blocks = dict(BM=BM, BK=BK, BN=BN, num_warps=warps, num_stages=3)
        wide_kernel[grid](
            x, weight, bias, y, B, T, G, *strides, d_in, d_out, PRECISION=float32_precision(), **blocks
        )
        return
    pack, BM, BN, warps, stages, resident, per, tma, store, interleaved, _ = tiling
    BK, packs, tiles = block_width(pack * d_in), cdiv(G, pack), B * cdiv(T, BM)
    spans = x.stride(1), y.stride(1), *strides[2:8], *strides[10:]
    large = needs_64_bits(256, spans)  # a tile lies in one sequence
    if tma and per == 1 and d_in == BK and d_out == BN and not large and aligned(y, limits):
        sizes = dict(D_IN=d_in, D_OUT=d_out, PRECISION=float32_precision(), BM=BM, num_warps=warps)
        x_tiles, y_tiles = descriptor(x, True, BM, BK), descriptor(y, True, BM, BN)
        single_tile_kernel[(G * tiles,)](x_tiles, weight, bias, y_tiles, T, G, *strides[3:8], **sizes)
        return
    abreast = packs * cdiv(pack * d_out, BN)
    per = min(per or tiles, balance_tiles(tiles, abreast, resident * limits.multiprocessors, 2))
    parts = cdiv(tiles, per)
    if interleaved:  # else the last part has what is left
        per = cdiv(tiles, parts)
    part_stride, tile_stride = (1, parts) if interleaved else (per, 1)
    # No stores by descriptors where a second pass by pointers may follow: they may still be under way then.
    store = store and (not tma or d_in == BK) and aligned(y, limits) and pack * d_out == BN and G % pack == 0
    seen = weight.flatten(0, 1)[None] if weight.is_contiguous() else weight
    whole = tma and d_in == BK and d_out % BN == 0 and aligned(seen, limits)
    forward_kernel[(abreast * parts,)](
        x, descriptor(x, tma, BM, BK), weight, descriptor(seen, True, BK, BN) if whole else None,
        bias, y, descriptor(y, store, BM, BN), B, T, G, per, part_stride, tile_stride, *strides,
        D_IN=d_in, D_OUT=d_out, PRECISION=float32_precision(), PACK=pack, FLAT=B == 1, LARGE=large,
        TMA=tma, STORE=store, AHEAD=not tma and stages == 1, UNIT=row_unit(x, d_in), UY=row_unit(y, d_out),
        BM=BM, BK=BK, BN=BN, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def launch_backward(dy: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None, dw: Tensor, db: Tensor) -> None:
    """Write dw, db, and dx unless it is None."""
    (B, T, _), (G, d_in, d_out), limits = x.shape, weight.shape, device_limits(x.device)
    tiling = backward_tiling(d_in, d_out, x.itemsize, limits)
    pack, BM, BN, warps, stages, resident, _, tma, store, _, BK = tiling
    down, slices = cdiv(pack * d_in, BK), cdiv(pack * d_out, BN)
    packs, tiles, whole = cdiv(G, pack), B * cdiv(T, BM), down * slices == 1
    size = G * (d_in + 1) * d_out
    per = balance_tiles(tiles, packs * down * slices, resident * limits.multiprocessors, 7)
    P = cdiv(tiles, per)
    parts = torch.empty(P, size, dtype=torch.float32, device=x.device)
    filled = dx if whole else None
    exact = whole and pack * d_in == BK and G % pack == 0
    tma = tma and exact and pack * d_out == BN and aligned(x, limits) and aligned(dy, limits)
    store = store and exact and filled is not None and aligned(filled, limits)
    sx, sg, sw, sd = x.stride(), dy.stride(), weight.stride(), filled.stride() if filled is not None else ()
    spans = sx[1:] + sg[1:] + (sw + sd[1:] if sd else ()) + (d_out,)  # the last: rows of dW in `parts`
    backward_kernel[(packs * down * slices * P,)](
        x, descriptor(x, tma, BM, BK), dy, descriptor(dy, tma, BM, BN), weight,
        filled, descriptor(filled, store, BM, BK), parts, B, T, G, per, *sx, *sg, *sw, *(sd or (0, 0, 0)),
        D_IN=d_in, D_OUT=d_out, PRECISION=float32_precision(), PACK=pack, FLAT=B == 1,
        LARGE=needs_64_bits(max(d_in, d_out, BM), spans), TMA=tma, STORE=store,
        UNIT=math.gcd(row_unit(x, d_in), row_unit(dy, d_out)),
        UY=row_unit(filled, d_in) if filled is not None else 1,
        KEEP=min(BM, max(1, 256 * warps // BN)), BM=BM, BK=BK, BN=BN, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    PARTS = next_power_of_2(P)
    BLOCK = max(32, min(512, 8192 // PARTS))
    blocks = dict(LARGE=size + BLOCK > 2**31, PARTS=PARTS, BLOCK=BLOCK)
    sum_kernel[(cdiv(size, BLOCK),)](parts, dw, db, P, size, d_in, d_out, **blocks)
    if filled is None and dx is not None:  # a forward pass with the weight transposed
        launch_forward(dy, weight.transpose(1, 2), None, dx)


# ---- operators: x is (B, T, C), or (B, C, T) with ``columns`` ----------------------------------------------


def as_rows(columns: bool, *tensors: Tensor) -> list[Tensor]:
    """(B, T, C) views of the tensors, or (1, B * T, C) views where the strides of all allow it."""
    seen = [t.transpose(1, 2) if columns else t for t in tensors]
    if all(t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1) for t in seen):
        seen = [t.flatten(0, 1)[None] for t in seen]
    return seen


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, columns: bool) -> Tensor:
    B, first, last = x.shape
    width = weight.shape[0] * weight.shape[2]
    return x.new_empty(B, width, last) if columns else x.new_empty(B, first, width)


@operator(fake=_output)
def grouped_linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, columns: bool) -> Tensor:
    y = _output(x, weight, bias, columns)
    x, seen = as_rows(columns, x, y)
    launch_forward(x, weight, bias, seen)
    return y


def _gradients(x: Tensor, weight: Tensor, with_dx: bool) -> tuple[Tensor, Tensor, Tensor]:
    dx = empty_contiguous(x) if with_dx else x.new_empty(0)
    return dx, weight.new_empty(weight.shape), weight.new_empty(weight.shape[0], weight.shape[2])


@operator(fake=lambda dy, x, weight, columns, with_dx: _gradients(x, weight, with_dx))
def grouped_linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, columns: bool, with_dx: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias."""
    dx, dw, db = _gradients(x, weight, with_dx)
    if not dy.numel() or not x.numel():
        sums = dy.sum((0, 2) if columns else (0, 1), dtype=torch.float32)
        return dx.zero_(), dw.zero_(), sums.view(db.shape).to(db.dtype)
    dy, x, *filled = as_rows(columns, dy, x, *([dx] if with_dx else ()))
    launch_backward(dy, x, weight, filled[0] if with_dx else None, dw, db)
    return dx, dw, db


def library_is_fast(d_in: int, d_out: int, dtype: torch.dtype) -> bool:
    """Whether cuBLAS's batched product, and a pass to put y in order, are faster, as measured on an H200.

    In float32 they are for groups too wide for a program to keep the weight, whose rows are no multiples of
    64 bytes: wide_kernel then loads number by number. And where TF32 is allowed, with which a product of very
    wide groups takes hardly longer than its bytes.
    """
    if dtype is not torch.float32:
        return False
    very_wide, odd = max(d_in, d_out) > 256, (d_in | d_out) % 16 != 0
    return (odd and (very_wide or min(d_in, d_out) > 128)) or (very_wide and allows_tf32())


def library_grouped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``grouped_linear`` of x (R, G * d_in) by one batched product, with PyTorch's gradients."""
    G, d_in, d_out = weight.shape
    groups = x.view(len(x), G, d_in).transpose(0, 1)  # (G, R, d_in)
    y = groups @ weight if bias is None else torch.baddbmm(bias[:, None], groups, weight)
    return y.transpose(0, 1).reshape(len(x), G * d_out)


class GroupedLinearFunction(torch.autograd.Function):
    """``grouped_linear`` with its gradients, once differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, columns: bool) -> Tensor:
        x_is_read = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]  # dx alone does not need x
        ctx.save_for_backward(x if x_is_read else None, weight)
        ctx.columns = columns
        return grouped_linear_forward(x, weight, bias, columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        if x is None:
            return grouped_linear_forward(dy, weight.transpose(1, 2), None, ctx.columns), None, None, None
        dx, dw, db = grouped_linear_backward(dy, x, weight, ctx.columns, of_x)
        return dx if of_x else None, dw if of_weight else None, db if of_bias else None, None


# ---- the function ------------------------------------------------------------------------------------------


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y[..., g, :] = x[..., g, :] @ weight[g] + bias[g] for G groups of features that lie side by side.

    Args:
        x: (..., G * D_in); float32, float16 or bfloat16. Any strides, without a copy unless more than two
            leading dimensions cannot be merged.
        weight: (G, D_in, D_out), of x's dtype and device; any strides.
        bias: (G, D_out), or None.

    Returns:
        (..., G * D_out), of x's dtype; summed in float32 and rounded once. Its memory has x's order. For x
        in (B, C, T) memory, seen as (B, T, C), it is (B, C, T), too, unless cuBLAS computes it.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    cuBLAS's batched product computes it in float32 for groups of more than 128 features, if these are no
    multiples of 16, and of more than 256, if PyTorch's setting allows TF32. In reverse, dx = dy @
    weight[g].T, dweight[g] = x.T @ dy and dbias[g] = sum of dy, the last two added in a fixed order. The
    many small layers are those of https://discuss.pytorch.org/t/160141.
    """
    check_tensor("weight", weight, (None, None, None))
    G, d_in, d_out = weight.shape
    if G * max(d_in, d_out) >= 2**31:
        raise ValueError(f"weight: has {G} groups of {d_in} to {d_out}, and a row of 2**31 features or more")
    check_tensor("x", x, (..., G * d_in), like=weight)
    if bias is not None:
        check_tensor("bias", bias, (G, d_out), like=weight)
    x, weight, bias = autocast(x, weight, bias)
    if not is_traced(x) and library_is_fast(d_in, d_out, x.dtype):
        y = library_grouped(x.reshape(math.prod(x.shape[:-1]), G * d_in), weight, bias)
        return y.view(*x.shape[:-1], G * d_out)
    *outer, inner = x.shape[:-1] or (1,)
    rows = x.reshape(math.prod(outer), inner, G * d_in)
    columns = rows.stride(2) != 1 and rows.stride(1) == 1
    if columns:
        rows = rows.transpose(1, 2)
    call = GroupedLinearFunction.apply if needs_grad(rows, weight, bias) else grouped_linear_forward
    y = call(rows, weight, bias, columns)
    if columns:
        y = y.transpose(1, 2)
    return y.reshape(*x.shape[:-1], G * d_out)
