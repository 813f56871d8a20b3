"""The Triton kernels of ``gru.py``: all steps of a GRU in one kernel, or one step per launch.

The formulas are those of ``gru.gru``. gates (B, T, 3 H) are the products of the input, in the order r, z, n.
Sigmoid is applied to ar and az, tanh to an, and hn is W_hn h + b_hn.
"""

# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl

from labkit.kernels.common import dot, interpreted, tanh

# ---- the formulas of one step; all arguments are tiles of one shape ----------------------------------------


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    return 0.5 + 0.5 * tanh(0.5 * x, FAST) if FAST and not interpreted() else tl.sigmoid(x)


@triton.jit
def gate(ir, iz, inn, hr, hz, hn, h, FAST: tl.constexpr):
    """ar, az, an and the next state, from the products of the input and of the state h, and from h."""
    ar, az = ir.to(tl.float32) + hr, iz.to(tl.float32) + hz
    r, z = sigmoid(ar, FAST), sigmoid(az, FAST)
    an = inn.to(tl.float32) + r * hn
    n = tanh(an, FAST)
    return ar, az, an, n + z * (h - n)


@triton.jit
def gate_grad(g, ar, az, an, hn, h, RESET: tl.constexpr):
    """From the gradient g of the next state: the gradients of inn, ir and hr, iz and hz, hn; and z * g.

    With RESET all are zero where g is zero, even if the step computed infinities: a reset follows it.
    """
    r, z, n = tl.sigmoid(ar.to(tl.float32)), tl.sigmoid(az.to(tl.float32)), tanh(an.to(tl.float32), False)
    hn = hn.to(tl.float32)
    dn = g * (1.0 - z) * (1.0 - n * n)
    dr, dz, back = dn * hn * r * (1.0 - r), g * (h - n) * z * (1.0 - z), g * z
    dhn = dn * r
    if RESET:
        none = g == 0.0
        dn, dr, dz = tl.where(none, 0.0, dn), tl.where(none, 0.0, dr), tl.where(none, 0.0, dz)
        dhn, back = tl.where(none, 0.0, dhn), tl.where(none, 0.0, back)
    return dn, dr, dz, dhn, back


# ---- all steps in one kernel -------------------------------------------------------------------------------
# A program has BM sequences, and the three recurrent matrices in registers. A state is a tile (BH, BM), a
# column per sequence, so that the weights are the left operand of the products, which tensor cores can take
# from registers. The compiler moves them there at the first product, which therefore stands before the loop:
# else they would be moved at every step.


@triton.jit
def load_weight(weight, g, row, column, H: tl.constexpr, BH: tl.constexpr):
    """Matrix g of weight (3 H, H), zero beyond H; rows from BH on are the next matrix's."""
    inside = (row % BH < H) & (column % BH < H)
    at = ((g + row // BH) * H + row % BH) * H + column
    tile = tl.load(weight + at, inside, other=0.0)
    return tl.where(inside, tile, 0.0)  # a bare load would be kept in shared memory


@triton.jit
def load_bias(bias, g, m, H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr):
    """Part g of bias (3 H,) in every column: (BH, BM)."""
    tile = tl.zeros([BH, BM], tl.float32)
    if bias is not None:
        tile += tl.load(bias + g * H + m, m < H, other=0.0).to(tl.float32)
    return tile


@triton.jit
def initial_state(h0, reset, at, b, inside, B, T, BH: tl.constexpr, BM: tl.constexpr):
    """h0 as (BH, BM); zeros without h0, and where the first step is a reset."""
    h = tl.zeros([BH, BM], tl.float32)
    if h0 is not None:
        h += tl.load(h0 + at, inside, other=0.0).to(tl.float32)
    if reset is not None:
        h = tl.where(tl.load(reset + b * T, b < B, other=0) != 0, 0.0, h)
    return h


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
def products(h, wr, wz, wn, br, bz, bn):
    """W h + b for r, z, n, (BH, BM) each; where wz is None, wr is W_r above W_z."""
    a = h.to(wn.dtype)
    if wz is None:
        both = dot(wr, a).reshape(2, bn.shape[0], bn.shape[1])
        hr, hz = both.permute(1, 2, 0).split()
        hr, hz = hr + br, hz + bz
    else:
        hr, hz = dot(wr, a, br), dot(wz, a, bz)
    return hr, hz, dot(wn, a, bn)


# Loads run AHEAD steps before their use. They come first in a step: what follows, a change of the loaded
# tiles' layout, has barriers, and the compiler moves no load across one. AHEAD steps are unrolled, because a
# loop that passes a tile from one variable to another waits for it.


@triton.jit
def gru_kernel(
    gates, weight, bias, h0, reset, h, hidden, B, T,
    H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr, AHEAD: tl.constexpr, STACK: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """States h (B, T, H) from gates (B, T, 3 H).

    If ``hidden`` (B, T, H) is given, hn is stored there, and ar, az, an overwrite gates, for the backward.
    With STACK W_r and W_z are multiplied as one matrix.
    """
    b = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[None, :]
    m, k = tl.arange(0, BH)[:, None], tl.arange(0, BH)[None, :]
    inside = (b < B) & (m < H)
    if STACK:
        wr, wz = load_weight(weight, 0, tl.arange(0, 2 * BH)[:, None], k, H, BH), None
    else:
        wr, wz = load_weight(weight, 0, m, k, H, BH), load_weight(weight, 1, m, k, H, BH)
    wn = load_weight(weight, 2, m, k, H, BH)
    br, bz = load_bias(bias, 0, m, H, BH, BM), load_bias(bias, 1, m, H, BH, BM)
    bn = load_bias(bias, 2, m, H, BH, BM)
    state = initial_state(h0, reset, b * H + m, b, inside, B, T, BH, BM)  # (BH, BM), in float32
    hr, hz, hn = products(state, wr, wz, wn, br, bz, bn)
    into, out = gates + b * T * 3 * H + m, h + b * T * H + m
    prefetched = ()
    for u in tl.static_range(AHEAD):
        prefetched += (load_gates(into + u * 3 * H, inside & (u < T), H),)
    for start in range(0, T, AHEAD):
        arrived, prefetched = prefetched, ()
        for u in tl.static_range(AHEAD):
            t = start + u
            after, now = t + AHEAD, inside & (t < T)
            prefetched += (load_gates(into + after * 3 * H, inside & (after < T), H),)
            if reset is not None:
                again = tl.load(reset + b * T + t + 1, (b < B) & (t + 1 < T), other=0) != 0
            ir, iz, inn = arrived[u]
            ar, az, an, state = gate(ir, iz, inn, hr, hz, hn, state, FAST)
            tl.store(out + t * H, state, now)
            if hidden is not None:
                store_gates(into + t * 3 * H, now, H, ar, az, an)
                tl.store(hidden + b * T * H + m + t * H, hn, now)
            if reset is not None:
                state = tl.where(again, 0.0, state)  # not a product with 0: the state may be infinite
            hr, hz, hn = products(state, wr, wz, wn, br, bz, bn)


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
def gru_grad_kernel(
    dh, gates, hidden, weight, h0, reset, h, grads, last, dh0, B, T,
    H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Time in reverse.

    Stores in grads (B, T, 4 H) the gradients of inn, ar, az and hn, and in last (B, T, H) the state before
    each step, for the gradient of the weight.
    """
    b = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[None, :]
    m, k = tl.arange(0, BH)[:, None], tl.arange(0, BH)[None, :]
    wr, wz = load_weight(weight, 0, k, m, H, BH), load_weight(weight, 1, k, m, H, BH)  # transposed
    wn = load_weight(weight, 2, k, m, H, BH)
    m = tl.max_contiguous(tl.arange(0, BH), max(1, BH // 32))[:, None]  # a warp has whole columns
    inside, rows = (b < B) & (m < H), m + tl.zeros([BH, BM], tl.int32)
    zeros = tl.zeros([BH, BM], tl.float32) + tl.minimum(T, 0)
    carry = back_products(zeros, zeros, zeros, wr, wz, wn, zeros, rows)  # (BH, BM): gradient from later steps
    first = initial_state(h0, None, b * H + m, b, inside, B, T, BH, BM)
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


# ---- one step per launch, where the matrices are too large; a program has BLOCK of the B * H features ------


@triton.jit
def step_kernel(
    gates, product, reset, state, operand, h, hidden, B, T, t, H, BLOCK: tl.constexpr, FAST: tl.constexpr
):
    """Step t; overwrites state (B, H), in float32, and operand (B, H), the input of the next product."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b, n, inside = i // H, i % H, i < B * H
    ir, iz, inn = load_gates(gates + (b * T + t) * 3 * H + n, inside, H)
    hr, hz, hn = load_gates(product + b * 3 * H + n, inside, H)
    hn = hn.to(tl.float32)
    ar, az, an, new = gate(ir, iz, inn, hr, hz, hn, tl.load(state + i, inside, other=0.0), FAST)
    tl.store(h + (b * T + t) * H + n, new, inside)
    if hidden is not None:
        into = gates + (b * T + t) * 3 * H + n
        store_gates(into, inside, H, ar, az, an)
        tl.store(hidden + (b * T + t) * H + n, hn, inside)
    if reset is not None:
        new = tl.where(tl.load(reset + b * T + t + 1, inside & (t + 1 < T), other=0) != 0, 0.0, new)
    tl.store(state + i, new, inside)
    tl.store(operand + i, new, inside)


@triton.jit
def step_grad_kernel(
    dh, gates, hidden, h0, reset, h, carry, product, grads, last, B, T, t, H, BLOCK: tl.constexpr
):
    """Step t in reverse; carry (B, H), in float32, plus product is its state's gradient from later steps."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b, n, inside = i // H, i % H, i < B * H
    at = (b * T + t) * H + n
    g = tl.load(carry + i, inside, other=0.0) + tl.load(product + i, inside, other=0.0).to(tl.float32)
    before = tl.load(h + at - H, inside & (t > 0), other=0.0).to(tl.float32)
    if h0 is not None:
        before += tl.load(h0 + i, inside & (t == 0), other=0.0).to(tl.float32)
    if reset is not None:
        follows = inside & (t + 1 < T)
        g = tl.where(tl.load(reset + b * T + t + 1, follows, other=0) != 0, 0.0, g)
        before = tl.where(tl.load(reset + b * T + t, inside, other=0) != 0, 0.0, before)
    g += tl.load(dh + at, inside, other=0.0).to(tl.float32)
    ar, az, an = load_gates(gates + 3 * at - 2 * n, inside, H)
    hn = tl.load(hidden + at, inside, other=0.0)
    dn, dr, dz, dhn, kept = gate_grad(g, ar, az, an, hn, before, reset is not None)
    store_gates(grads + 4 * at - 3 * n, inside, H, dn, dr, dz)
    tl.store(grads + 4 * at - 3 * n + 3 * H, dhn, inside)
    if reset is not None:
        before = tl.where(before - before == 0.0, before, 0.0)
    tl.store(last + at, before, inside)
    tl.store(carry + i, kept, inside)
