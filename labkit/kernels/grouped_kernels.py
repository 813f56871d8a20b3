"""The Triton kernels of ``grouped.py``: G small Linears side by side, forward and backward.

x is (B, T, G * D_IN), y is (B, T, G * D_OUT), both in any strides. With ``FLAT`` B and T are one axis; in
(B, C, T) memory they cannot be, because the stride of B is no multiple of that of T. A tile is BM rows of one
sequence. Tiles are numbered through all sequences.

Strides count elements and are named s, the tensor's letter, the axis: ``sxb``, ``sxt``, ``sxc`` are x's along
B, T and the features; ``swg``, ``swi``, ``swo`` are the weight's along group, in and out.
"""

import triton
import triton.language as tl

from labkit.kernels.common import count_tiles, dot, offset64, opaque

# ---- parts of kernels --------------------------------------------------------------------------------------


@triton.jit
def whole(offset, UNIT: tl.constexpr):
    """The offset, rounded down to a multiple of UNIT: so the compiler knows that it is one."""
    return offset // UNIT * UNIT


@triton.jit
def tiles_of(part, part_stride, per, tile_stride, B, T, BM: tl.constexpr, FLAT: tl.constexpr):
    """How many tiles a sequence has; and of all tiles this part's first one, and the one behind its last."""
    across = count_tiles(T, BM)
    tiles = across if FLAT else B * across
    first = part * part_stride
    last = tl.minimum(first + per * tile_stride, tiles)
    return across, first.to(last.dtype), last  # 64-bit where T is


@triton.jit
def tile_row(tile, across, BM: tl.constexpr, FLAT: tl.constexpr):
    """A tile's first row in its sequence, which has ``across`` tiles."""
    return tile * BM if FLAT else tile % across * BM


@triton.jit
def tile_start(tile, column, across, outer, stride, BM: tl.constexpr, FLAT: tl.constexpr):
    """Offset of a tile's first row at a column, which is an offset, too."""
    start = column + offset64(tile_row(tile, across, BM, FLAT), stride)
    return start if FLAT else start + offset64(tile // across, outer)


@triton.jit
def load_rows(
    x, at, columns, tile, last, column, across, T, outer, stride,
    BM: tl.constexpr, FLAT: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The tile (BM, columns) with this number, zeros beyond its rows; it begins at a multiple of UNIT."""
    row = tile_row(tile, across, BM, FLAT) + tl.arange(0, BM)
    inside = ((row < T) & (tile < last))[:, None] & columns[None, :]
    start = tile_start(tile, column, across, outer, stride, BM, FLAT)
    return tl.load(x + whole(start, UNIT) + at, inside, other=0.0)


@triton.jit
def store_rows(
    y, y_tiles, block, at, columns, m, tile, index, column, across, T, outer, stride,
    BM: tl.constexpr, FLAT: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Store a block (BM, columns) as the tile with this number, whose rows are m from its first one on.

    Its first column has this index, and is at the offset ``column``. With STORE the descriptor stores it.
    """
    if STORE:
        y_tiles.store([tile * BM, index], block.to(y.dtype.element_ty))
    else:
        rows = tile_row(tile, across, BM, FLAT) + m < T
        to = tile_start(tile, column, across, outer, stride, BM, FLAT)
        tl.store(y + to + at, block, rows[:, None] & columns[None, :])


@triton.jit
def share(blocks, packs, PACK: tl.constexpr):
    """Which of the blocks, from which group on, and which part of the rows this program has.

    Programs are numbered along the blocks of columns first, then along packs of groups, then along parts of
    the rows: programs that run at the same time are neighbours in memory.
    """
    each = tl.program_id(0) // blocks
    return tl.program_id(0) % blocks, each % packs * PACK, each // packs


@triton.jit
def split_groups(block, PACK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """(ROWS, PACK * D) to (PACK, ROWS, D), the operand of a batch of products."""
    if PACK > 1:
        block = tl.permute(tl.reshape(block, [ROWS, PACK, D]), [1, 0, 2])
    return block


@triton.jit
def merge_groups(block, PACK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """(PACK, ROWS, D) to (ROWS, PACK * D)."""
    if PACK > 1:
        block = tl.reshape(tl.permute(block, [1, 0, 2]), [ROWS, PACK * D])
    return block


@triton.jit
def transpose_groups(block, PACK: tl.constexpr):
    """The transpose of each group's block."""
    return tl.permute(block, [0, 2, 1]) if PACK > 1 else block.T


@triton.jit
def multiply(
    a, w, b, PACK: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, D_NEW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """a (BM, PACK * D) by the groups' weights, and b added to each row: (BM, PACK * D_NEW), in float32."""
    each = dot(split_groups(a, PACK, BM, D), w, None, PRECISION)
    total = merge_groups(each, PACK, BM, D_NEW)
    if b is not None:
        total += b[None, :]
    return total


@triton.jit
def load_weight(
    weight, group, G, k, n, swg, swi, swo, D_IN: tl.constexpr, D_OUT: tl.constexpr, PACK: tl.constexpr
):
    """A group's weight at rows k and columns n: (BK, BN). For PACK groups the whole: (PACK, D_IN, D_OUT)."""
    if PACK > 1:  # all in k's type, which is 64-bit where the strides need it
        g = tl.arange(0, PACK)[:, None, None].to(k.dtype)
        k, n = tl.arange(0, D_IN)[None, :, None].to(k.dtype), tl.arange(0, D_OUT)[None, None, :].to(k.dtype)
        at, inside = g * swg + k * swi + n * swo, group + g < G
    else:
        k, n = k[:, None], n[None, :]
        at, inside = k * swi + n * swo, (k >= 0) & (k < D_IN) & (n >= 0) & (n < D_OUT)
    return tl.load(weight + offset64(group, swg) + at, inside, other=0.0)


@triton.jit
def within(k, group, G, D: tl.constexpr, PACK: tl.constexpr):
    """Whether column k from the first of PACK groups on, of D each, is one of theirs."""
    inside = (k >= 0) & (k < PACK * D)
    if PACK > 1:  # the last pack may have fewer groups
        inside = inside & (group * D + k < G * D)
    return inside


@triton.jit
def load_bias(bias, group, n, inside, sbg, sbo, D_OUT: tl.constexpr):
    """The bias at columns n from the group on, in float32."""
    at = bias + offset64(group, sbg) + (n // D_OUT * sbg + n % D_OUT * sbo)
    return tl.load(at, inside, other=0.0).to(tl.float32)


# ---- forward -----------------------------------------------------------------------------------------------


@triton.jit
def single_tile_kernel(
    x_tiles, weight, bias, y_tiles, T, G,
    swg: tl.constexpr, swi: tl.constexpr, swo: tl.constexpr, sbg: tl.constexpr, sbo: tl.constexpr,
    D_IN: tl.constexpr, D_OUT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One tile of rows and one group per program, x and y by descriptors; the fastest for groups of 64."""
    group, tile = tl.program_id(0) % G, tl.program_id(0) // G
    k, n = tl.arange(0, D_IN), tl.arange(0, D_OUT)
    w = load_weight(weight, group, G, k, n, swg, swi, swo, D_IN, D_OUT, 1)  # (D_IN, D_OUT)
    if bias is not None:
        b = tl.load(bias + offset64(group, sbg) + n * sbo).to(tl.float32)
    a = x_tiles.load([tile * BM, group * D_IN])  # (BM, D_IN)
    # The condition is always true. It makes Triton 3.6 and 3.7 store the weight in shared memory after x has
    # arrived, so that both loads run at once. Without it they wait for the weight before x is loaded.
    w = tl.where(tile * BM < T, w, 0.0)
    total = dot(a, w, None, PRECISION)  # (BM, D_OUT)
    if bias is not None:
        total += b[None, :]
    y_tiles.store([tile * BM, group * D_OUT], total.to(a.dtype))


@triton.jit
def columns_before(column, weight):
    """How far before this column a descriptor's tile begins, which it does at a multiple of 16 bytes."""
    return column % (128 // weight.dtype.element_ty.primitive_bitwidth)


@triton.jit
def nan_unless_finite(total, BM: tl.constexpr, BN: tl.constexpr):
    """(BM,): NaN for a row with a number that is not finite, else 0."""
    # Two short sums are faster than a long one.
    return tl.sum(tl.sum(tl.reshape(total * 0.0, [BM, BN // 8, 8]), 1), 1)


@triton.jit
def multiply_again(
    suspect, x, w, b, y, first, last, tile_stride, m, k, n, has_k, has_n, x_column, y_column, T,
    sxt, sxc, syt, syc, PRECISION: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute the tiles from first to last again by pointers, unless ``suspect`` is zero.

    The columns of the group before were multiplied by zeros of w, which gives NaN where they are not finite.
    Here they are masked out.
    """
    if tl.sum(suspect) != 0.0:
        for tile in tl.range(first, last, tile_stride, num_stages=1):
            row = tile * BM + m
            x_tile = x + x_column + offset64(row, sxt)[:, None]
            y_tile = y + y_column + offset64(row, syt)[:, None]
            rows = (row < T)[:, None]
            a = tl.load(x_tile + k[None, :] * sxc, rows & has_k[None, :], other=0.0)
            total = dot(a, w, None, PRECISION)
            if b is not None:
                total += b[None, :]
            tl.store(y_tile + n[None, :] * syc, total, rows & has_n[None, :])


@triton.jit
def forward_kernel(
    x, x_tiles, weight, w_tiles, bias, y, y_tiles, B, T, G, per, part_stride, tile_stride,
    sxb, sxt, sxc, swg: tl.constexpr, swi: tl.constexpr, swo: tl.constexpr,
    sbg: tl.constexpr, sbo: tl.constexpr, syb, syt, syc,
    D_IN: tl.constexpr, D_OUT: tl.constexpr, PRECISION: tl.constexpr, PACK: tl.constexpr, FLAT: tl.constexpr,
    LARGE: tl.constexpr, TMA: tl.constexpr, STORE: tl.constexpr, AHEAD: tl.constexpr,
    UNIT: tl.constexpr, UY: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program keeps (BK, BN) of a group's weight, or the weights of PACK groups, and loops over tiles of x.

    Part i of the rows begins at tile i * ``part_stride`` and has ``per`` tiles, ``tile_stride`` apart. With
    TMA descriptors load x, and the compiler's pipeline loads ahead. With AHEAD the next tile comes to
    registers while this one is multiplied. With STORE descriptors store y. With LARGE offsets within a tile
    are 64-bit. Groups begin at multiples of UNIT elements in x, and of UY in y.
    """
    slice_, group, part = share(tl.cdiv(PACK * D_OUT, BN), tl.cdiv(G, PACK), PACK)
    across, first, last = tiles_of(part, part_stride, per, tile_stride, B, T, BM, FLAT)
    x_column, y_column = offset64(group * D_IN, sxc), offset64(group * D_OUT, syc)
    # These are columns of the group before: at k < 0, where w is zero.
    shift = columns_before(group * D_IN, weight) if TMA else 0
    m, k, n = tl.arange(0, BM), tl.arange(0, BK), slice_ * BN + tl.arange(0, BN)
    if LARGE:
        m, k, n = m.to(tl.int64), k.to(tl.int64), n.to(tl.int64)
    x_at = m[:, None] * whole(sxt, UNIT) + k[None, :] * sxc  # (BM, BK)
    syt = whole(syt, UY)
    y_at = m[:, None] * syt + n[None, :] * syc  # (BM, BN)
    k -= shift
    has_k, has_n = within(k, group, G, D_IN, PACK), within(n, group, G, D_OUT, PACK)
    if AHEAD:  # the first tile, before the weight
        ahead = load_rows(x, x_at, has_k, first, last, x_column, across, T, sxb, sxt, BM, FLAT, UNIT)
    if w_tiles is not None:
        w = w_tiles.load([group * D_IN, slice_ * BN])  # (BK, BN)
    else:
        w = load_weight(weight, group, G, k, n, swg, swi, swo, D_IN, D_OUT, PACK)
    b = None if bias is None else load_bias(bias, group, n, has_n, sbg, sbo, D_OUT)  # (BN,)
    suspect = tl.zeros([BM], tl.float32)  # (BM,): zero unless something in a row is not finite

    for tile in tl.range(first, last, tile_stride):
        if TMA:
            a = x_tiles.load([tile * BM, group * D_IN - shift])  # (BM, BK)
        elif AHEAD:
            a, coming = ahead, tile + tile_stride
            ahead = load_rows(x, x_at, has_k, coming, last, x_column, across, T, sxb, sxt, BM, FLAT, UNIT)
        else:
            a = load_rows(x, x_at, has_k, tile, last, x_column, across, T, sxb, sxt, BM, FLAT, UNIT)
        total = multiply(a, w, b, PACK, BM, D_IN, D_OUT, PRECISION)  # (BM, BN)
        if TMA and D_IN != BK:
            suspect += nan_unless_finite(total, BM, BN)
        store_rows(
            y, y_tiles, total, y_at, has_n, m, tile, group * D_OUT, y_column, across, T, syb, syt,
            BM, FLAT, STORE,
        )  # fmt: skip

    if TMA and D_IN != BK:
        multiply_again(
            suspect, x, w, b, y, first, last, tile_stride, m, k, n, has_k, has_n, x_column, y_column, T,
            sxt, sxc, syt, syc, PRECISION, BM,
        )  # fmt: skip


@triton.jit
def wide_kernel(
    x, weight, bias, y, B, T, G, sxb, sxt, sxc, swg, swi, swo, sbg, sbo, syb, syt, syc,
    D_IN, D_OUT, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """For weights that are too large to keep: a tile (BM, BN) of one group's product, BK at a time."""
    slices, across = count_tiles(D_OUT, BN), count_tiles(T, BM)
    slice_, group = tl.program_id(0) % slices, tl.program_id(0) // slices % G
    tile = tl.program_id(0) // slices // G
    m, n = tile % across * BM + tl.arange(0, BM), slice_ * BN + tl.arange(0, BN)
    rows, cols = (m < T)[:, None], (n < D_OUT)[None, :]
    x_group = x + offset64(tile // across, sxb) + offset64(group * D_IN, sxc)
    x_group += offset64(m[:, None], sxt)  # (BM, 1)
    w_group = weight + offset64(group, swg) + offset64(n[None, :], swo)  # (1, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, D_IN, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x_group + offset64(k[None, :], sxc), rows & (k < D_IN)[None, :], other=0.0)  # (BM, BK)
        w = tl.load(w_group + offset64(k[:, None], swi), cols & (k < D_IN)[:, None], other=0.0)  # (BK, BN)
        total = dot(a, w, total, PRECISION)
    if bias is not None:
        b_group = bias + offset64(group, sbg)
        total += tl.load(b_group + offset64(n, sbo), n < D_OUT, other=0.0).to(tl.float32)[None, :]
    y_group = y + offset64(tile // across, syb) + offset64(group * D_OUT, syc) + offset64(m[:, None], syt)
    tl.store(y_group + offset64(n[None, :], syc), total, rows & cols)


# ---- backward ----------------------------------------------------------------------------------------------


@triton.jit
def store_sums(
    parts, dw, db, part, group, G, k, n, has_k, has_n, has_db,
    D_IN: tl.constexpr, D_OUT: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Store the sums over a part of the rows in parts (P, G, D_IN + 1, D_OUT): dw at rows k and columns n,
    and, where the program has it, the sum of db's rows behind dW."""
    parts += (offset64(part, G) + group) * ((D_IN + 1) * D_OUT)
    if PACK > 1:
        p, q = tl.arange(0, PACK)[:, None, None], tl.arange(0, D_IN)[None, :, None]
        at = p * ((D_IN + 1) * D_OUT) + q * D_OUT + tl.arange(0, D_OUT)[None, None, :]
        tl.store(parts + at, dw, group + p < G)
    else:
        tl.store(parts + k[:, None] * D_OUT + n[None, :], dw, has_k[:, None] & has_n[None, :])
    at = n // D_OUT * ((D_IN + 1) * D_OUT) + D_IN * D_OUT + n % D_OUT  # db is a row behind dW
    tl.store(parts + at, tl.sum(db, 0), has_n & has_db)


@triton.jit
def backward_kernel(
    x, x_tiles, dy, dy_tiles, weight, dx, dx_tiles, parts, B, T, G, per,
    sxb, sxt, sxc, sgb, sgt, sgc, swg: tl.constexpr, swi: tl.constexpr, swo: tl.constexpr, sdb, sdt, sdc,
    D_IN: tl.constexpr, D_OUT: tl.constexpr, PRECISION: tl.constexpr,
    PACK: tl.constexpr, FLAT: tl.constexpr, LARGE: tl.constexpr,
    TMA: tl.constexpr, STORE: tl.constexpr, UNIT: tl.constexpr, UY: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program keeps (BK, BN) of a group's dW in registers and loops over its rows of x and dY.

    Where that is all of the group's dW, the program computes dX, too. The sums over its rows go to ``parts``
    (P, G, D_IN + 1, D_OUT), db behind dW; ``sum_kernel`` adds them up. Groups begin at multiples of UNIT
    elements in x and dY, and of UY in dX.
    """
    down = tl.cdiv(PACK * D_IN, BK)
    block, group, part = share(down * tl.cdiv(PACK * D_OUT, BN), tl.cdiv(G, PACK), PACK)
    across, first, last = tiles_of(part, per, per, 1, B, T, BM, FLAT)
    x_column = offset64(group * D_IN, sxc) + offset64(block % down * BK, sxc)
    g_column = offset64(group * D_OUT, sgc) + offset64(block // down * BN, sgc)
    m, k, n = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BN)
    if LARGE:
        m, k, n = m.to(tl.int64), k.to(tl.int64), n.to(tl.int64)
    x_at = m[:, None] * whole(sxt, UNIT) + k[None, :] * sxc  # (BM, BK)
    g_at = m[:, None] * whole(sgt, UNIT) + n[None, :] * sgc  # (BM, BN)
    k += block % down * BK
    n += block // down * BN
    has_k, has_n = within(k, group, G, D_IN, PACK), within(n, group, G, D_OUT, PACK)
    if dx is not None:  # one program holds all of dW
        w = load_weight(weight, group, G, n, k, swg, swo, swi, D_OUT, D_IN, PACK)  # transposed
        sdt = whole(sdt, UY)
        d_column = offset64(group * D_IN, sdc)
        dx_at = m[:, None] * sdt + k[None, :] * sdc  # (BM, BK)
    dw = tl.zeros([PACK, D_IN, D_OUT] if PACK > 1 else [BK, BN], tl.float32)
    db = tl.zeros([KEEP, BN], tl.float32)  # KEEP separate sums, so that threads add without exchanges

    for tile in tl.range(first, last):
        if TMA:
            g, a = dy_tiles.load([tile * BM, group * D_OUT]), x_tiles.load([tile * BM, group * D_IN])
        else:
            g = load_rows(dy, g_at, has_n, tile, last, g_column, across, T, sgb, sgt, BM, FLAT, UNIT)
            a = load_rows(x, x_at, has_k, tile, last, x_column, across, T, sxb, sxt, BM, FLAT, UNIT)
        # Triton lets the product into dw run on, and loads another tile of dY over that which it still reads:
        # a tile that other instructions read as well has one place less. So in each turn something waits:
        # dX, whose product comes second for that reason, or where there is none the opaque instruction.
        a_transposed = transpose_groups(split_groups(a, PACK, BM, D_IN), PACK)
        dw = dot(a_transposed, split_groups(g, PACK, BM, D_OUT), dw, PRECISION)
        db += tl.sum(tl.reshape(g, [BM // KEEP, KEEP, BN]).to(tl.float32), 0)
        if dx is None:
            dw = opaque(dw)
        else:
            change = multiply(g, w, None, PACK, BM, D_OUT, D_IN, PRECISION)  # (BM, BK)
            store_rows(
                dx, dx_tiles, change, dx_at, has_k, m, tile, group * D_IN, d_column, across, T, sdb, sdt,
                BM, FLAT, STORE,
            )  # fmt: skip

    store_sums(parts, dw, db, part, group, G, k, n, has_k, has_n, block % down == 0, D_IN, D_OUT, PACK)


@triton.jit
def sum_kernel(
    parts, dw, db, P, size, D_IN: tl.constexpr, D_OUT: tl.constexpr,
    LARGE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up parts (P, size), size = G * (D_IN + 1) * D_OUT, over P in a fixed order: dW and db.

    Atomic additions would save this kernel, but their order, and so the rounding, changes from run to run.
    """
    pid = tl.program_id(0).to(tl.int64) if LARGE else tl.program_id(0)  # LARGE: a weight of 2**31 elements
    at, part = pid * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTS)[:, None]
    total = tl.sum(
        tl.load(parts + offset64(part, size) + at[None, :], (part < P) & (at < size)[None, :], other=0.0), 0
    )
    group, inside = at // ((D_IN + 1) * D_OUT), at % ((D_IN + 1) * D_OUT)
    of_weight = inside < D_IN * D_OUT
    tl.store(dw + at - group * D_OUT, total, of_weight & (at < size))
    tl.store(db + group * D_OUT + inside - D_IN * D_OUT, total, (of_weight == 0) & (at < size))
