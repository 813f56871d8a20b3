"""The Triton kernels of ``grouped.py``: G small Linears side by side, forward and backward.

Data is (B, T, C), C = G * D_IN features in and G * D_OUT out, in any strides. B and T stay two axes: in
(B, C, T) memory the step from one sequence to the next is no whole number of steps in T. With ``FLAT`` they
are one axis. A tile is BM rows of one sequence, and tiles are counted through all sequences.

Strides are called s, the tensor's letter and the axis, and count elements: ``sxb``, ``sxt``, ``sxc`` are
those of x along B, T and the features; ``swg``, ``swi``, ``swo`` those of the weight along group, in and out.
"""

import triton
import triton.language as tl

from labkit.kernels.common import far, multiply

# ---- parts of kernels --------------------------------------------------------------------------------------


@triton.jit
def start_of(tile, across, outer, stride, BM: tl.constexpr, FLAT: tl.constexpr):
    """Where a tile's first row begins; ``across`` tiles lie in each sequence."""
    return far(tile * BM, stride) if FLAT else far(tile // across, outer) + far(tile % across * BM, stride)


@triton.jit
def apart(block, PACK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """(ROWS, PACK * D), groups side by side, as (PACK, ROWS, D): a batch of products."""
    if PACK > 1:
        block = tl.permute(tl.reshape(block, [ROWS, PACK, D]), [1, 0, 2])
    return block


@triton.jit
def together(block, PACK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """(PACK, ROWS, D) as (ROWS, PACK * D)."""
    if PACK > 1:
        block = tl.reshape(tl.permute(block, [1, 0, 2]), [ROWS, PACK * D])
    return block


@triton.jit
def turned(block, PACK: tl.constexpr):
    """The transpose, of each group's block for itself."""
    return tl.permute(block, [0, 2, 1]) if PACK > 1 else block.T


@triton.jit
def load_weight(
    weight, group, G, k, n, swg, swi, swo, D_IN: tl.constexpr, D_OUT: tl.constexpr, PACK: tl.constexpr
):
    """A group's weight at rows k and columns n, (BK, BN); of PACK groups all of it, (PACK, D_IN, D_OUT)."""
    if PACK > 1:  # in k's type: 64 bits where the strides ask for them
        g = tl.arange(0, PACK)[:, None, None].to(k.dtype)
        k, n = tl.arange(0, D_IN)[None, :, None].to(k.dtype), tl.arange(0, D_OUT)[None, None, :].to(k.dtype)
        at, inside = g * swg + k * swi + n * swo, group + g < G
    else:
        k, n = k[:, None], n[None, :]
        at, inside = k * swi + n * swo, (k >= 0) & (k < D_IN) & (n < D_OUT)
    return tl.load(weight + far(group, swg) + at, inside, other=0.0)


# ---- forward -----------------------------------------------------------------------------------------------


@triton.jit
def once_kernel(
    x_tiles, weight, bias, y_tiles, T, G,
    swg: tl.constexpr, swi: tl.constexpr, swo: tl.constexpr, sbg: tl.constexpr, sbo: tl.constexpr,
    D_IN: tl.constexpr, D_OUT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One tile of rows and one group a program, x and y by descriptors: for groups of 64 the fastest."""
    group, tile = tl.program_id(0) % G, tl.program_id(0) // G
    k, n = tl.arange(0, D_IN), tl.arange(0, D_OUT)
    w = load_weight(weight, group, G, k, n, swg, swi, swo, D_IN, D_OUT, 1)  # (D_IN, D_OUT)
    if bias is not None:
        b = tl.load(bias + far(group, sbg) + n * sbo).to(tl.float32)
    a = x_tiles.load([tile * BM, group * D_IN])  # (BM, D_IN)
    # Always true. It makes Triton 3.6 and 3.7 store the weight in shared memory after x has come, so both are
    # on their way at once; else they wait for the weight right behind its load, before asking for x.
    w = tl.where(tile * BM < T, w, 0.0)
    total = multiply(a, w)  # (BM, D_OUT)
    if bias is not None:
        total += b[None, :]
    y_tiles.store([tile * BM, group * D_OUT], total.to(a.dtype))


@triton.jit
def forward_kernel(
    x, x_tiles, weight, w_tiles, bias, y, y_tiles, B, T, G, per, hop, step,
    sxb, sxt, sxc, swg: tl.constexpr, swi: tl.constexpr, swo: tl.constexpr,
    sbg: tl.constexpr, sbo: tl.constexpr, syb, syt, syc,
    D_IN: tl.constexpr, D_OUT: tl.constexpr, PACK: tl.constexpr, FLAT: tl.constexpr,
    LARGE: tl.constexpr, TMA: tl.constexpr, STORE: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program keeps (BK, BN) of a group's weight, or the weights of PACK groups, while tiles of x pass.

    Part i of the rows begins at tile i * ``hop`` and has ``per`` tiles, ``step`` apart. With TMA x comes by
    descriptors, and the compiler's pipeline loads ahead; without, ``ahead`` is the next tile, on its way
    while this one is multiplied. With STORE y goes by descriptors. LARGE: addresses within a tile need 64
    bits.
    """
    # Programs count slices of the columns first, then packs of groups, then parts of the rows: neighbours in
    # time are neighbours in memory.
    slices, packs = tl.cdiv(PACK * D_OUT, BN), tl.cdiv(G, PACK)
    slice_, group = tl.program_id(0) % slices, tl.program_id(0) // slices % packs * PACK
    across = tl.cdiv(T, BM)
    tiles = across if FLAT else B * across
    first = tl.program_id(0) // slices // packs * hop
    last = tl.minimum(first + per * step, tiles)
    first = first.to(last.dtype)  # 64 bits where T has them

    # A descriptor starts at multiples of 16 bytes: so many of the neighbour's numbers come along, at k < 0,
    # where w is zero.
    shift = group * D_IN % (128 // weight.dtype.element_ty.primitive_bitwidth) if TMA else 0
    m, k, n = tl.arange(0, BM), tl.arange(0, BK) - shift, slice_ * BN + tl.arange(0, BN)
    if LARGE:
        m, k, n = m.to(tl.int64), k.to(tl.int64), n.to(tl.int64)
    has_k = (k >= 0) & (k < PACK * D_IN) & (group * D_IN + k < G * D_IN)
    has_n = (n < PACK * D_OUT) & (group * D_OUT + n < G * D_OUT)
    x, y = x + far(group * D_IN, sxc), y + far(group * D_OUT, syc)
    y_at = y + (m[:, None] * syt + n[None, :] * syc)  # (BM, BN)
    if not TMA:  # the first tile, before the weight
        x_at = m[:, None] * sxt + k[None, :] * sxc  # (BM, BK)
        here = ((m + (first * BM if FLAT else first % across * BM) < T) & (first < last))[:, None]
        start = start_of(first, across, sxb, sxt, BM, FLAT)
        ahead = tl.load(x + start + x_at, here & has_k[None, :], other=0.0)
    if w_tiles is not None:
        w = w_tiles.load([group * D_IN, slice_ * BN])  # (BK, BN)
    else:
        w = load_weight(weight, group, G, k, n, swg, swi, swo, D_IN, D_OUT, PACK)
    if bias is not None:
        b_group = bias + far(group, sbg) + (n // D_OUT * sbg + n % D_OUT * sbo)
        b = tl.load(b_group, has_n, other=0.0).to(tl.float32)  # (BN,)
    suspect = tl.zeros([BM], tl.float32)  # each row's sum of zeros, unless something is not finite

    for tile in tl.range(first, last, step):
        rows = (m + (tile * BM if FLAT else tile % across * BM) < T)[:, None]
        if TMA:
            a = x_tiles.load([tile * BM, group * D_IN - shift])  # (BM, BK)
        else:
            a, coming = ahead, tile + step
            there = ((m + (coming * BM if FLAT else coming % across * BM) < T) & (coming < last))[:, None]
            from_ = start_of(coming, across, sxb, sxt, BM, FLAT)
            ahead = tl.load(x + from_ + x_at, there & has_k[None, :], other=0.0)
        total = together(multiply(apart(a, PACK, BM, D_IN), w), PACK, BM, D_OUT)  # (BM, BN)
        if bias is not None:
            total += b[None, :]
        if TMA and D_IN != BK:
            # 0, or NaN if anything in it is not finite; in two steps, whose additions need not wait so long
            suspect += tl.sum(tl.sum(tl.reshape(total * 0.0, [BM, BN // 8, 8]), 1), 1)
        if STORE:
            y_tiles.store([tile * BM, group * D_OUT], total.to(y.dtype.element_ty))
        else:
            to = start_of(tile, across, syb, syt, BM, FLAT)
            tl.store(y_at + to, total, rows & has_n[None, :])

    # A neighbour's number times a zero of w is 0, but a NaN or an infinity gives NaN: then these tiles are
    # done again, with the neighbours masked out.
    if TMA and D_IN != BK:  # noqa: SIM102 (the outer one is the compiler's)
        if tl.sum(suspect) != 0.0:
            for tile in tl.range(first, last, step, num_stages=1):
                row = tile * BM + m
                x_tile, y_tile = x + far(row, sxt)[:, None], y + far(row, syt)[:, None]
                rows = (row < T)[:, None]
                a = tl.load(x_tile + k[None, :] * sxc, rows & has_k[None, :], other=0.0)
                total = multiply(a, w)
                if bias is not None:
                    total += b[None, :]
                tl.store(y_tile + n[None, :] * syc, total, rows & has_n[None, :])


@triton.jit
def wide_kernel(
    x, weight, bias, y, B, T, G, sxb, sxt, sxc, swg, swi, swo, sbg, sbo, syb, syt, syc,
    D_IN, D_OUT, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A group's weight is too large to stay: a product in tiles, for every group."""
    slices, across = tl.cdiv(D_OUT, BN), tl.cdiv(T, BM)
    slice_, group = tl.program_id(0) % slices, tl.program_id(0) // slices % G
    tile = tl.program_id(0) // slices // G
    m, n = tile % across * BM + tl.arange(0, BM), slice_ * BN + tl.arange(0, BN)
    rows, cols = (m < T)[:, None], (n < D_OUT)[None, :]
    x_group = x + far(tile // across, sxb) + far(group * D_IN, sxc) + far(m[:, None], sxt)  # (BM, 1)
    w_group = weight + far(group, swg) + far(n[None, :], swo)  # (1, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, D_IN, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x_group + far(k[None, :], sxc), rows & (k < D_IN)[None, :], other=0.0)  # (BM, BK)
        w = tl.load(w_group + far(k[:, None], swi), cols & (k < D_IN)[:, None], other=0.0)  # (BK, BN)
        total = multiply(a, w, total)
    if bias is not None:
        total += tl.load(bias + far(group, sbg) + n * sbo, n < D_OUT, other=0.0).to(tl.float32)[None, :]
    y_group = y + far(tile // across, syb) + far(group * D_OUT, syc) + far(m[:, None], syt)
    tl.store(y_group + far(n[None, :], syc), total, rows & cols)


# ---- backward ----------------------------------------------------------------------------------------------


@triton.jit
def backward_kernel(
    x, x_tiles, dy, dy_tiles, weight, dx, dx_tiles, parts, B, T, G, per,
    sxb, sxt, sxc, sgb, sgt, sgc, swg: tl.constexpr, swi: tl.constexpr, swo: tl.constexpr, sdb, sdt, sdc,
    D_IN: tl.constexpr, D_OUT: tl.constexpr, PACK: tl.constexpr, FLAT: tl.constexpr, LARGE: tl.constexpr,
    TMA: tl.constexpr, STORE: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program keeps (BK, BN) of a group's dW in registers while its rows of x and dY pass, each read once.

    Where that is all of the group's dW, it makes dX and db as well. Its sums over its rows go to ``parts``
    (P, G, D_IN + 1, D_OUT), for ``sum_kernel`` to add.
    """
    down, slices, packs = tl.cdiv(PACK * D_IN, BK), tl.cdiv(PACK * D_OUT, BN), tl.cdiv(G, PACK)
    block, part = tl.program_id(0) % (down * slices), tl.program_id(0) // (down * slices) // packs
    group = tl.program_id(0) // (down * slices) % packs * PACK
    across = tl.cdiv(T, BM)
    tiles = across if FLAT else B * across
    m, k = tl.arange(0, BM), block % down * BK + tl.arange(0, BK)
    n = block // down * BN + tl.arange(0, BN)
    if LARGE:
        m, k, n = m.to(tl.int64), k.to(tl.int64), n.to(tl.int64)
    has_k = (k < PACK * D_IN) & (group * D_IN + k < G * D_IN)
    has_n = (n < PACK * D_OUT) & (group * D_OUT + n < G * D_OUT)
    x, x_at = x + far(group * D_IN, sxc), m[:, None] * sxt + k[None, :] * sxc  # (BM, BK)
    dy, g_at = dy + far(group * D_OUT, sgc), m[:, None] * sgt + n[None, :] * sgc  # (BM, BN)
    if dx is not None:  # one program holds all of dW
        w = load_weight(weight, group, G, n, k, swg, swo, swi, D_OUT, D_IN, PACK)  # transposed
        dx, dx_at = dx + far(group * D_IN, sdc), m[:, None] * sdt + k[None, :] * sdc
    dw = tl.zeros([PACK, D_IN, D_OUT] if PACK > 1 else [BK, BN], tl.float32)
    db = tl.zeros([KEEP, BN], tl.float32)  # rows kept apart, so that threads add without asking each other

    for tile in tl.range(part * per, tl.minimum(part * per + per, tiles)):
        rows = (m + (tile * BM if FLAT else tile % across * BM) < T)[:, None]
        if TMA:
            g, a = dy_tiles.load([tile * BM, group * D_OUT]), x_tiles.load([tile * BM, group * D_IN])
        else:
            g = tl.load(
                dy + start_of(tile, across, sgb, sgt, BM, FLAT) + g_at, rows & has_n[None, :], other=0.0
            )
            a = tl.load(
                x + start_of(tile, across, sxb, sxt, BM, FLAT) + x_at, rows & has_k[None, :], other=0.0
            )
        # dW first. Triton 3.6 and 3.7 let the product into dw run on; were it the second, the next tile of dY
        # could be loaded over the one that it still reads. So the wait for the second product ends both.
        dw = multiply(turned(apart(a, PACK, BM, D_IN), PACK), apart(g, PACK, BM, D_OUT), dw)
        if dx is not None:
            db += tl.sum(tl.reshape(g, [BM // KEEP, KEEP, BN]).to(tl.float32), 0)
            change = together(multiply(apart(g, PACK, BM, D_OUT), w), PACK, BM, D_IN)  # (BM, BK)
            if STORE:
                dx_tiles.store([tile * BM, group * D_IN], change.to(dx.dtype.element_ty))
            else:
                to = start_of(tile, across, sdb, sdt, BM, FLAT)
                tl.store(dx + to + dx_at, change, rows & has_k[None, :])

    parts += far(part * G + group, (D_IN + 1) * D_OUT)
    if PACK > 1:
        p, q = tl.arange(0, PACK)[:, None, None], tl.arange(0, D_IN)[None, :, None]
        at = p * ((D_IN + 1) * D_OUT) + q * D_OUT + tl.arange(0, D_OUT)[None, None, :]
        tl.store(parts + at, dw, group + p < G)
    else:
        tl.store(parts + k[:, None] * D_OUT + n[None, :], dw, has_k[:, None] & has_n[None, :])
    if dx is not None:  # db is one more row
        at = n // D_OUT * ((D_IN + 1) * D_OUT) + D_IN * D_OUT + n % D_OUT
        tl.store(parts + at, tl.sum(db, 0), has_n)


@triton.jit
def sum_kernel(
    parts, dw, db, P, size, D_IN: tl.constexpr, D_OUT: tl.constexpr,
    LARGE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums parts (P, size), size = G * (D_IN + 1) * D_OUT, over P in a fixed order: dW and db.

    Atomic additions would save this kernel, and come in any order: two runs would differ.
    """
    pid = tl.program_id(0).to(tl.int64) if LARGE else tl.program_id(0)  # 2**31 numbers of weight, and more
    at, part = pid * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTS)[:, None]
    total = tl.sum(
        tl.load(parts + far(part, size) + at[None, :], (part < P) & (at < size)[None, :], other=0.0), 0
    )
    group, inside = at // ((D_IN + 1) * D_OUT), at % ((D_IN + 1) * D_OUT)
    of_weight = inside < D_IN * D_OUT
    tl.store(dw + at - group * D_OUT, total, of_weight & (at < size))
    tl.store(db + group * D_OUT + inside - D_IN * D_OUT, total, (of_weight == 0) & (at < size))
