"""The Triton kernels of ``gru.py``: all steps of a GRU in one kernel.

The formulas are those of ``gru.gru``. gates (B, T, 3 H) are the products of the input, in the order r, z, n.
Sigmoid is applied to ar and az, tanh to an, and hn is W_hn h + b_hn.
"""

# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl

from labkit.kernels.common import (
    TANH_0,
    TANH_1,
    TANH_2,
    TANH_3,
    TANH_BOUND,
    dot,
    initial_state,
    interpreted,
    opaque,
    tanh,
)

# ---- the formulas of one step; all arguments are tiles of one shape ----------------------------------------


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """In float32, off by some 1e-7, by two special functions, or with FAST by one, off by 2**-12 at most."""
    if interpreted():
        y = tl.sigmoid(x)
    elif FAST:
        y = 0.5 + 0.5 * tanh(0.5 * x, True)
    else:  # tl.sigmoid divides, and takes care of numbers that 1 + e^-x cannot be
        y = tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, e; }",
            "=f,f", [x], tl.float32, True, 1,
        )  # fmt: skip
    return y


@triton.jit
def tanh_of_sigmoid(x, double):
    """tanh of x, off by a few 1e-7 of itself, from ``double``, the sigmoid of 2 x."""
    z = x * x
    small = x + x * (z * (TANH_0 + z * (TANH_1 + z * (TANH_2 + z * TANH_3))))
    return tl.where(tl.abs(x) < TANH_BOUND, small, 2.0 * double - 1.0)


@triton.jit
def candidate(x, FAST: tl.constexpr, HALF: tl.constexpr):
    """tanh, off by a few 1e-7 of itself, with HALF, for 16-bit numbers, of 1, or with FAST by 2**-11."""
    if FAST:
        y = tanh(x, True)
    elif HALF:
        y = 2.0 * sigmoid(2.0 * x, False) - 1.0
    else:
        y = tanh_of_sigmoid(x, sigmoid(2.0 * x, False))
    return y


@triton.jit
def gate(ir, iz, inn, hr, hz, hn, h, FAST: tl.constexpr, HALF: tl.constexpr):
    """ar, az, an and the next state, from the products of the input and of the state h, and from h.

    Without ir and iz, hr and hz are the sums of both products. FAST and HALF are those of ``candidate``.
    """
    ar, az = hr, hz
    if ir is not None:
        ar, az = ir.to(tl.float32) + hr, iz.to(tl.float32) + hz
    r, z = sigmoid(ar, FAST), sigmoid(az, FAST)
    an = inn.to(tl.float32) + r * hn
    n = candidate(an, FAST, HALF)
    return ar, az, an, n + z * (h - n)


@triton.jit
def gate_grad(g, ar, az, an, hn, h, RESET: tl.constexpr):
    """From the gradient g of the next state: the gradients of inn, ir and hr, iz and hz, hn; and z * g.

    With RESET all are zero where g is zero, even if the step computed infinities: a reset follows it.
    """
    r, z = sigmoid(ar.to(tl.float32), False), sigmoid(az.to(tl.float32), False)
    n, hn = candidate(an.to(tl.float32), False, an.dtype != tl.float32), hn.to(tl.float32)
    dn = g * (1.0 - z) * (1.0 - n * n)
    dr, dz, back = dn * hn * r * (1.0 - r), g * (h - n) * z * (1.0 - z), g * z
    dhn = dn * r
    if RESET:
        none = g == 0.0
        dn, dr, dz = tl.where(none, 0.0, dn), tl.where(none, 0.0, dr), tl.where(none, 0.0, dz)
        dhn, back = tl.where(none, 0.0, dhn), tl.where(none, 0.0, back)
    return dn, dr, dz, dhn, back


# ---- tiles -------------------------------------------------------------------------------------------------
# A state is a tile (BH, BM), a column per sequence, so that the weights are the left operand of the products,
# which tensor cores can take from registers. Tiles are loaded and stored in the layout in which tensor cores
# give them. tl.load and tl.store would choose layouts of their own, and each tile would pass through shared
# memory, with two barriers; PTX has no layout of its own. There a thread has rows 16 w + g and 16 w + 8 + g.
# With PAIRS, for 16 bits and an even H, these are features 16 w + 2 g and the next one, a word of memory.


@triton.jit
def feature(row, PAIRS: tl.constexpr):
    """The feature in this row of a tile."""
    return row // 16 * 16 + row % 8 * 2 + row // 8 % 2 if PAIRS else row


@triton.jit
def first_features(BH: tl.constexpr, PAIRS: tl.constexpr):
    """All features, or with PAIRS the first one of each word: (BH, 1) or (BH / 2, 1)."""
    return 2 * tl.arange(0, BH // 2)[:, None] if PAIRS else tl.arange(0, BH)[:, None]


@triton.jit
def fetch(p, mask, PAIRS: tl.constexpr):
    """The bits of (BH, BM), or with PAIRS words (BH / 2, BM); zero beyond the mask."""
    bits: tl.constexpr = p.dtype.element_ty.primitive_bitwidth
    if interpreted():
        word = tl.load(p, mask, other=0.0).to(tl.int16 if bits == 16 else tl.int32, bitcast=True)
        if PAIRS:
            high = tl.load(p + 1, mask, other=0.0).to(tl.int16, bitcast=True)
            word = (high.to(tl.int32) << 16) | (word.to(tl.int32) & 65535)
    elif bits == 32 or PAIRS:
        word = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
            "=r,l,r", [p.to(tl.int64), mask.to(tl.int32)], tl.int32, True, 1,
        )  # fmt: skip
    else:
        word = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b16 $0, 0; @p ld.global.b16 $0, [$1]; }",
            "=h,l,r", [p.to(tl.int64), mask.to(tl.int32)], tl.int16, True, 1,
        )  # fmt: skip
    return word


@triton.jit
def expand(word, dtype: tl.constexpr, BH: tl.constexpr, PAIRS: tl.constexpr):
    """What ``fetch`` has loaded, as float32 (BH, BM)."""
    if PAIRS:
        low = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        halves = tl.join(low, high).reshape(BH // 16, 8, word.shape[1], 2)
        tile = halves.permute(0, 3, 1, 2).reshape(BH, word.shape[1])
    else:
        tile = word.to(dtype, bitcast=True).to(tl.float32)
    return tile


@triton.jit
def put(p, tile, mask, PAIRS: tl.constexpr):
    """Store a tile (BH, BM) of float32, rounded, where ``fetch`` would load it."""
    dtype: tl.constexpr = p.dtype.element_ty
    if PAIRS:
        halves = tile.reshape(tile.shape[0] // 16, 2, 8, tile.shape[1]).permute(0, 2, 3, 1)
        low, high = halves.reshape(tile.shape[0] // 2, tile.shape[1], 2).split()
        if interpreted():
            tl.store(p, low, mask)
            tl.store(p + 1, high, mask)
        else:
            kind: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
            tl.inline_asm_elementwise(
                "{ .reg .pred p; .reg .b32 w; setp.ne.b32 p, $4, 0; cvt.rn." + kind + ".f32 w, $3, $2;"
                " @p st.global.b32 [$1], w; mov.b32 $0, 0; }",
                "=r,l,f,f,r", [p.to(tl.int64), low, high, mask.to(tl.int32)], tl.int32, False, 1,
            )  # fmt: skip
    elif interpreted():
        tl.store(p, tile, mask)
    elif dtype == tl.float32:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r", [p.to(tl.int64), tile, mask.to(tl.int32)], tl.int32, False, 1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b16 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,h,r", [p.to(tl.int64), tile.to(dtype).to(tl.int16, bitcast=True), mask.to(tl.int32)],
            tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def fetch_gates(p, mask, H: tl.constexpr, PAIRS: tl.constexpr):
    """Three tiles whose columns lie H apart in memory."""
    return fetch(p, mask, PAIRS), fetch(p + H, mask, PAIRS), fetch(p + 2 * H, mask, PAIRS)


@triton.jit
def put_gates(p, mask, H: tl.constexpr, a, b, c, PAIRS: tl.constexpr):
    put(p, a, mask, PAIRS)
    put(p + H, b, mask, PAIRS)
    put(p + 2 * H, c, mask, PAIRS)


@triton.jit
def rows_of(g, BH: tl.constexpr, PAIRS: tl.constexpr, COUNT: tl.constexpr):
    """Matrix and feature of each row of COUNT matrices, from g on, one above the other: (COUNT BH, 1)."""
    row = tl.arange(0, COUNT * BH)[:, None]
    if COUNT > 1:
        g, row = g + row // BH, row % BH
    return g, feature(row, PAIRS)


@triton.jit
def load_weight(
    weight, g, H: tl.constexpr, BH: tl.constexpr, PAIRS: tl.constexpr, TRANSPOSED: tl.constexpr = False,
    COUNT: tl.constexpr = 1,
):  # fmt: skip
    """Matrix g of weight (3 H, H), (BH, BH), zero beyond H; with PAIRS in the order of ``feature``.

    With COUNT as many matrices, one above the other: (COUNT BH, BH).
    """
    if TRANSPOSED:
        row, column = tl.arange(0, BH)[None, :], tl.arange(0, BH)[:, None]
    else:
        g, row = rows_of(g, BH, PAIRS, COUNT)
        column = tl.arange(0, BH)[None, :]
    inside = (row < H) & (column < H)
    tile = tl.load(weight + (g * H + row) * H + column, inside, other=0.0)
    tile = tl.where(inside, tile, 0.0)  # a bare load would be kept in shared memory
    if PAIRS:  # columns are neighbours in memory, and so permuted once they are loaded
        tile = tile.reshape(COUNT * BH, BH // 16, 8, 2).permute(0, 1, 3, 2).reshape(COUNT * BH, BH)
    return tile


@triton.jit
def load_bias(bias, g, m, H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr):
    """Features m of part g of bias (3 H,), in every column: (BH, BM)."""
    tile = tl.zeros([BH, BM], tl.float32)
    if bias is not None:
        tile += tl.load(bias + g * H + m, m < H, other=0.0).to(tl.float32)
    return tile


@triton.jit
def first_state(h0, reset, at, b, inside, B, T):
    """h0 as (BH, BM); zeros without h0, and where the first step is a reset."""
    h = initial_state(h0, at, inside)
    if reset is not None:
        h = tl.where(tl.load(reset + b * T, b < B, other=0) != 0, 0.0, h)
    return h


# ---- all steps in one kernel -------------------------------------------------------------------------------
# A program has BM sequences, and the three recurrent matrices in registers. The compiler moves them there at
# the first product, which therefore stands before the loop: else they would be moved at every step.


@triton.jit
def products(h, wr, wz, wn, br, bz, bn):
    """W h + b for r, z, n: (BH, BM) each."""
    a = opaque(h).to(wn.dtype)
    return dot(wr, a, br), dot(wz, a, bz), dot(wn, a, bn)


# Loads run AHEAD steps before their use. AHEAD steps are unrolled, because a loop that passes a tile from one
# variable to another waits for it.


@triton.jit
def gru_kernel(
    gates, weight, bias, h0, reset, h, hidden, B, T,
    H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """States h (B, T, H) from gates (B, T, 3 H).

    If ``hidden`` (B, T, H) is given, hn is stored there, and ar, az, an overwrite gates, for the backward.
    """
    dtype: tl.constexpr = gates.dtype.element_ty
    b = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[None, :]
    m, i = feature(tl.arange(0, BH)[:, None], PAIRS), first_features(BH, PAIRS)
    wr, wz = load_weight(weight, 0, H, BH, PAIRS), load_weight(weight, 1, H, BH, PAIRS)
    wn = load_weight(weight, 2, H, BH, PAIRS)
    br, bz = load_bias(bias, 0, m, H, BH, BM), load_bias(bias, 1, m, H, BH, BM)
    bn = load_bias(bias, 2, m, H, BH, BM)
    state = first_state(h0, reset, b * H + m, b, (b < B) & (m < H), B, T)  # (BH, BM), in float32
    hr, hz, hn = products(state, wr, wz, wn, br, bz, bn)
    inside = (b < B) & (i < H)
    into, out = gates + b * T * 3 * H + i, h + b * T * H + i
    prefetched = ()
    for u in tl.static_range(AHEAD):
        prefetched += (fetch_gates(into + u * 3 * H, inside & (u < T), H, PAIRS),)
    for start in range(0, T, AHEAD):
        arrived, prefetched = prefetched, ()
        for u in tl.static_range(AHEAD):
            t = start + u
            after, now = t + AHEAD, inside & (t < T)
            prefetched += (fetch_gates(into + after * 3 * H, inside & (after < T), H, PAIRS),)
            if reset is not None:
                again = tl.load(reset + b * T + t + 1, (b < B) & (t + 1 < T), other=0) != 0
            ir, iz, inn = arrived[u]
            ir, iz = expand(ir, dtype, BH, PAIRS), expand(iz, dtype, BH, PAIRS)
            inn = expand(inn, dtype, BH, PAIRS)
            ar, az, an, state = gate(ir, iz, inn, hr, hz, hn, state, FAST, dtype != tl.float32)
            put(out + t * H, state, now, PAIRS)
            if hidden is not None:
                put_gates(into + t * 3 * H, now, H, ar, az, an, PAIRS)
                put(hidden + b * T * H + i + t * H, hn, now, PAIRS)
            if reset is not None:
                state = tl.where(again, 0.0, state)  # not a product with 0: the state may be infinite
            hr, hz, hn = products(state, wr, wz, wn, br, bz, bn)


# ---- the same, with the products of the input in the kernel ------------------------------------------------
# The matrices of r and z lie one above the other, as one product: the compiler waits for each product.


@triton.jit
def load_input_weight(
    weight, g, K: tl.constexpr, BK: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, PAIRS: tl.constexpr,
    COUNT: tl.constexpr = 1,
):  # fmt: skip
    """COUNT matrices of weight (3 H, K), from g on: (COUNT BH, BK), zero beyond, rows as in ``load_weight``.

    A bare load: the compiler keeps it in shared memory, from where the tensor cores take it.
    """
    g, row = rows_of(g, BH, PAIRS, COUNT)
    column = tl.arange(0, BK)[None, :]
    return tl.load(weight + (g * H + row) * K + column, (row < H) & (column < K), other=0.0)


@triton.jit
def halves(tile):
    """The upper and the lower half of the rows of a tile."""
    return tile.reshape(2, tile.shape[0] // 2, tile.shape[1]).permute(1, 2, 0).split()


@triton.jit
def both_steps(tile):
    """The tiles of two steps, which lie side by side.

    Opaque, as ptxas would otherwise sum the products of the state in a part of these registers, and then runs
    all products of the kernel one by one.
    """
    tile = opaque(tile).reshape(tile.shape[0], 2, tile.shape[1] // 2)
    return tile.permute(0, 2, 1).split()


@triton.jit
def input_products(x, u_rz, un, b_rz, b_in):
    """U x + b of two steps, whose x lie side by side: for r and z, and for n, a tuple of tiles each."""
    return both_steps(dot(u_rz, x, b_rz)), both_steps(dot(un, x, b_in))


@triton.jit
def gru_input_kernel(
    x, weight_ih, bias_ih, weight, bias, h0, reset, h, B, T,
    K: tl.constexpr, BK: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr,
    PAIRS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """States h (B, T, H) from the input x (B, T, K), whose products are summed with those of the state.

    The input's weights stay in shared memory, the recurrent ones in registers. The products of two steps'
    inputs are one product, which reads the weights once; its x is loaded two steps before. More steps ahead
    do not fit into registers. For r and z only the sum of both products and biases is needed.
    """
    COLUMNS: tl.constexpr = 2 * BM
    b = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[None, :]
    m, i, k = feature(tl.arange(0, BH)[:, None], PAIRS), first_features(BH, PAIRS), tl.arange(0, BK)[:, None]
    w_rz, wn = load_weight(weight, 0, H, BH, PAIRS, COUNT=2), load_weight(weight, 2, H, BH, PAIRS)
    g, rows = rows_of(0, BH, PAIRS, 2)
    b_rz = load_bias(bias, g, rows, H, 2 * BH, COLUMNS) + load_bias(bias_ih, g, rows, H, 2 * BH, COLUMNS)
    bn, b_in = load_bias(bias, 2, m, H, BH, BM), load_bias(bias_ih, 2, m, H, BH, COLUMNS)
    state = first_state(h0, reset, b * H + m, b, (b < B) & (m < H), B, T)  # (BH, BM), in float32
    u_rz = load_input_weight(weight_ih, 0, K, BK, H, BH, PAIRS, 2)
    un = load_input_weight(weight_ih, 2, K, BK, H, BH, PAIRS)
    inside, out = (b < B) & (i < H), h + b * T * H + i
    c = tl.arange(0, COLUMNS)[None, :]  # the columns of x's tile: BM sequences a step
    s, v = tl.program_id(0).to(tl.int64) * BM + c % BM, c // BM
    into, present = x + (s * T + v) * K + k, (s < B) & (k < K)
    arrived, a = tl.load(into, present & (v < T), other=0.0), opaque(state).to(wn.dtype)
    sums, inns = input_products(arrived, u_rz, un, b_rz, b_in)
    rz, hn = dot(w_rz, a, sums[0]), dot(wn, a, bn)
    prefetched = tl.load(into + 2 * K, present & (v + 2 < T), other=0.0)
    for start in range(0, T, 2):
        arrived, after = prefetched, start + 4
        prefetched = tl.load(into + after * K, present & (v + after < T), other=0.0)
        for u in tl.static_range(2):
            t = start + u
            now = inside & (t < T)
            if reset is not None:
                again = tl.load(reset + b * T + t + 1, (b < B) & (t + 1 < T), other=0) != 0
            ar, az = halves(rz)
            _, _, _, state = gate(None, None, inns[u], ar, az, hn, state, FAST, True)
            put(out + t * H, state, now, PAIRS)
            if reset is not None:
                state = tl.where(again, 0.0, state)  # not a product with 0: the state may be infinite
            # Before x's product, so that its tile and x's do not share an address in shared memory: of two
            # layouts at one address ptxas 12.8 mixes up the descriptors.
            a = opaque(state).to(wn.dtype)
            if u == 0:
                rz = dot(w_rz, a, sums[1])
            else:
                sums, inns = input_products(arrived, u_rz, un, b_rz, b_in)
                rz = dot(w_rz, a, sums[0])
            hn = dot(wn, a, bn)


@triton.jit
def load_gates(p, inside, H: tl.constexpr):
    """Three tiles whose columns lie H apart in memory."""
    first, second = tl.load(p, inside, other=0.0), tl.load(p + H, inside, other=0.0)
    return first, second, tl.load(p + 2 * H, inside, other=0.0)


@triton.jit
def store_gates(p, inside, H: tl.constexpr, a, b, c):
    tl.store(p, a, inside)
    tl.store(p + H, b, inside)
    tl.store(p + 2 * H, c, inside)


@triton.jit
def back_products(dr, dz, dhn, wr, wz, wn, zeros, rows):
    """The gradient of the state before a step, (BH, BM), through its three products.

    Each product is added to zeros that the compiler does not know to be zeros: else it would make one sum of
    the three, in which each product waits for the one before. The gather leaves every row where it is. It
    changes the layout of the sum from the tensor cores' to that of the loads and stores; otherwise all loaded
    and stored tiles would be converted, with two barriers each.
    """
    total = dot(wr, dr.to(wr.dtype), zeros) + dot(wz, dz.to(wr.dtype), zeros)
    return tl.gather(total + dot(wn, dhn.to(wr.dtype), zeros), rows, 0)


@triton.jit
def load_kept(dh, gates, hidden, h, t, T, inside, H: tl.constexpr):
    """What the gradient of step t needs: dh, ar, az, an, hn, and the state before the step."""
    now = inside & (t >= 0) & (t < T)
    ar, az, an = load_gates(gates + t * 3 * H, now, H)
    g, hn = tl.load(dh + t * H, now, other=0.0), tl.load(hidden + t * H, now, other=0.0)
    return g, ar, az, an, hn, tl.load(h + (t - 1) * H, now & (t > 0), other=0.0)


@triton.jit
def store_sums(sums, tiles, H: tl.constexpr, BH: tl.constexpr):
    """Store the sums of four tiles' columns as this program's parts of sums (programs, 4 H)."""
    m = tl.arange(0, BH)
    for g in tl.static_range(4):
        tl.store(sums + (tl.program_id(0).to(tl.int64) * 4 + g) * H + m, tl.sum(tiles[g], 1), m < H)


@triton.jit
def gru_grad_kernel(
    dh, gates, hidden, weight, h0, reset, h, grads, last, dh0, sums, B, T,
    H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Time in reverse.

    Stores in grads (B, T, 4 H) the gradients of inn, ar, az and hn, and in last (B, T, H) the state before
    each step, for the gradient of the weight; and if ``sums`` (programs, 4 H) is given, for those of the
    biases, the sums of grads over this program's sequences and all steps. Most tiles are only loaded and
    stored here, and so all have the layout of loads and stores.
    """
    b = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[None, :]
    wr, wz = load_weight(weight, 0, H, BH, False, True), load_weight(weight, 1, H, BH, False, True)
    wn = load_weight(weight, 2, H, BH, False, True)
    m = tl.max_contiguous(tl.arange(0, BH), max(1, BH // 32))[:, None]  # a warp has whole columns
    inside, rows = (b < B) & (m < H), m + tl.zeros([BH, BM], tl.int32)
    zeros = tl.zeros([BH, BM], tl.float32) + tl.minimum(T, 0)
    carry = back_products(zeros, zeros, zeros, wr, wz, wn, zeros, rows)  # (BH, BM): gradient from later steps
    first = initial_state(h0, b * H + m, inside)
    if sums is not None:
        sum_n, sum_r, sum_z, sum_hn = carry, carry, carry, carry  # zeros
    at = b * T * H + m
    dh, hidden, h, last = dh + at, hidden + at, h + at, last + at
    gates, grads = gates + b * T * 3 * H + m, grads + b * T * 4 * H + m
    end = tl.cdiv(T, AHEAD) * AHEAD - 1  # steps from T on have gradients of zero
    prefetched = ()
    for u in tl.static_range(AHEAD):
        prefetched += (load_kept(dh, gates, hidden, h, end - u, T, inside, H),)
    for start in range(0, T, AHEAD):
        arrived, prefetched = prefetched, ()
        for u in tl.static_range(AHEAD):
            t = end - start - u
            now = inside & (t < T)
            prefetched += (load_kept(dh, gates, hidden, h, t - AHEAD, T, inside, H),)
            if reset is not None:
                begins = tl.load(reset + b * T + t, (b < B) & (t < T), other=0) != 0
            g, ar, az, an, hn, before = arrived[u]
            before = before.to(tl.float32)
            if h0 is not None:
                before = tl.where(t > 0, before, first)
            if reset is not None:
                before = tl.where(begins, 0.0, before)
            g = g.to(tl.float32) + carry
            dn, dr, dz, dhn, kept = gate_grad(g, ar, az, an, hn, before, reset is not None)
            if sums is not None:
                sum_n, sum_r, sum_z, sum_hn = sum_n + dn, sum_r + dr, sum_z + dz, sum_hn + dhn
            store_gates(grads + t * 4 * H, now, H, dn, dr, dz)
            tl.store(grads + t * 4 * H + 3 * H, dhn, now)
            if reset is not None:  # in the weight's gradient, 0 times infinity would be NaN
                before = tl.where(before - before == 0.0, before, 0.0)
            tl.store(last + t * H, before, now)
            carry = kept + back_products(dr, dz, dhn, wr, wz, wn, zeros, rows)
            if reset is not None:
                carry = tl.where(begins, 0.0, carry)
    if dh0 is not None:
        tl.store(dh0 + b * H + m, carry, inside)
    if sums is not None:
        store_sums(sums, (sum_n, sum_r, sum_z, sum_hn), H, BH)
