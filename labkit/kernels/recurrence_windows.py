"""linear_recurrence and min_gru for rows that begin anywhere: a loop over time, in windows of many steps.

A load of 16 bytes begins at a multiple of 16 bytes, and a row of H numbers need not: then a loop loads number
by number, each into a register of its own, and too few are on their way. So a program loads S steps at a
time, each from the multiple of 16 bytes before it on: a window (S, BH), a register of which holds two numbers
of 16 bits. When it has come, it goes through shared memory (``tl.gather`` in one dimension, where the axis
spans several warps), and S rows come back, each at its place. The next window is on its way meanwhile.

Stores are of single numbers: they wait for nothing, so they may be many.
"""

# mypy: disable-error-code="assignment, var-annotated"

from functools import cache

import triton
import triton.language as tl

from labkit.kernels.common import cdiv, initial_state, next_power_of_2

FEWEST_STEPS = 16
"""Shorter sequences are over before a second window is on its way."""


@cache
def window_plan(
    B: int, T: int, H: int, itemsize: int, multiprocessors: int, back: bool
) -> dict[str, int] | None:
    """Sizes for programs of USE features of one sequence each; None where a scan or a plain loop is faster.

    A plain loop is for rows of whole 16 bytes, a scan for few programs and for rows that fill no two warps.
    Many programs have rows of 512 bytes, so that few sectors of memory belong to two of them. Fewer have more
    steps in a window, as many as let them all fit their multiprocessor at once. All bounds were measured on
    an H200.
    """
    V = 16 // itemsize
    if H % V == 0 or T < FEWEST_STEPS or H + V <= 32:
        return None
    BH = min(16 * V, next_power_of_2(H + V))
    each = B * cdiv(H, BH - V) * BH / (16 * V) / multiprocessors  # rows of 256 bytes
    least = (4 if back else 2) if itemsize == 2 else (3 if back else 5)
    if each < least:
        return None
    idle = [cdiv(H, n - V) * n - H for n in (BH, 32 * V)]  # lanes that have no feature
    if each >= (5 if back else 7) and idle[1] <= idle[0] + H:
        BH, S, warps = 32 * V, 8, 2
    elif back:
        S, warps = 4 * itemsize, 2
    else:
        S, warps = 32 if each <= 4 else 16, BH // 32
    return dict(H=H, S=S, BH=BH, USE=cdiv(H, cdiv(H, BH - V)), V=V, num_warps=warps)


# ---- windows -----------------------------------------------------------------------------------------------


@triton.jit
def place(T, zero, H: tl.constexpr, BH: tl.constexpr, USE: tl.constexpr, V: tl.constexpr):
    """Sequence, features (BH,), which of them are the program's, and where its first number is.

    That is ``shift`` numbers, fewer than V, behind ``origin``, a multiple of V; ``end`` is where the sequence
    ends, from ``origin`` on.

    zero: 0, which the compiler does not know: so it stores no two features at once. Two would need another
    order of lanes than the gather's, and each row another trip through shared memory.
    """
    widths: tl.constexpr = (H + USE - 1) // USE
    row = (tl.program_id(0) // widths).to(tl.int64)
    first = tl.program_id(0) % widths * USE
    lane = tl.arange(0, BH)
    where = row * T * H + first
    shift = (where % V).to(tl.int32)
    mine = (lane < USE) & (first + lane < H)
    return row, first + lane + zero, mine, where // V * V, shift, shift + T * H - first


@triton.jit
def load_window(
    p, t, T, shift, end, H: tl.constexpr, BH: tl.constexpr, USE: tl.constexpr, V: tl.constexpr,
    other: tl.constexpr,
):  # fmt: skip
    """The window (S, BH) of steps t (S, 1), ``other`` where there is no step; V numbers are loaded or none.

    p: where the program's ``origin`` is. Up to V - 1 numbers behind the last sequence are loaded, and not
    used: they are within the 16 bytes of its last number, if the tensor begins at a multiple of 16 bytes.
    """
    n = tl.arange(0, BH)[None, :] // V * V
    start = (shift + t * H) // V * V
    there = (t >= 0) & (t < T) & (start + n < end) & (n < USE + V - 1)
    return tl.load(p + start + tl.arange(0, BH)[None, :], there, other=other)


@triton.jit
def window_index(shift, H: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, USE: tl.constexpr,
                 V: tl.constexpr):  # fmt: skip
    """Where feature n of step s is in a window, (BH * S,).

    shift: of step 0, and each step is H further on. S * H is a multiple of V, so all windows have the same.
    """
    n, s = tl.minimum(tl.arange(0, BH), USE - 1)[:, None], tl.arange(0, S)[None, :]
    # one sum of two axes: if it costs more, each row that was gathered goes through shared memory again
    return tl.reshape(n + (s * BH + ((shift + s * H) & (V - 1))), (BH * S,))


@triton.constexpr_function
def reversed_bits(number, below):
    """The bits of ``number`` in reverse order, as many as ``below``, a power of 2, leaves it."""
    return int(f"{below + number:b}"[:0:-1], 2)


@triton.jit
def halves(tensors):
    """Of each tensor what is at 0 and what is at 1 of its last axis."""
    out = ()
    for i in tl.static_range(len(tensors)):
        first, second = tl.split(tensors[i])
        out += (first, second)
    return out


@triton.jit
def rows_of(window, index, S: tl.constexpr, BH: tl.constexpr):
    """The S rows (BH,) of a window, in order."""
    x = tl.gather(tl.reshape(window, (S * BH,)), index, 0)
    if S == 8:
        rows = halves(halves(halves((tl.reshape(x, (BH, 2, 2, 2)),))))
    elif S == 16:
        rows = halves(halves(halves(halves((tl.reshape(x, (BH, 2, 2, 2, 2)),)))))
    else:
        rows = halves(halves(halves(halves(halves((tl.reshape(x, (BH, 2, 2, 2, 2, 2)),))))))
    ordered = ()
    for s in tl.static_range(S):  # the last bit of a step was split off first
        ordered += (rows[reversed_bits(s, S)],)
    return ordered


# ---- forward -----------------------------------------------------------------------------------------------


@triton.jit
def write_states(
    h, mine, t, T, now_a, now_b, state, H: tl.constexpr, S: tl.constexpr, GRU: tl.constexpr
):  # fmt: skip
    for s in tl.static_range(S):
        gate, value = now_a[s].to(tl.float32), now_b[s].to(tl.float32)
        state = (1.0 - gate) * state + gate * value if GRU else gate * state + value
        tl.store(h + s * H, state, mine & (t + s < T))
    return state


@triton.jit(do_not_specialize=["zero"])
def window_kernel(
    a, b, h0, h, T, zero,
    H: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, USE: tl.constexpr, V: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    row, n, mine, origin, shift, end = place(T, zero, H, BH, USE, V)
    index = window_index(shift, H, S, BH, USE, V)
    state, t = initial_state(h0, row * H + n, mine), tl.arange(0, S)[:, None]
    a, b, h = a + origin, b + origin, h + row * T * H + n
    coming_a = load_window(a, t, T, shift, end, H, BH, USE, V, 0.0)
    coming_b = load_window(b, t, T, shift, end, H, BH, USE, V, 0.0)
    for first in range(0, T, S):
        now_a, now_b = rows_of(coming_a, index, S, BH), rows_of(coming_b, index, S, BH)
        t += S
        coming_a = load_window(a, t, T, shift, end, H, BH, USE, V, 0.0)
        coming_b = load_window(b, t, T, shift, end, H, BH, USE, V, 0.0)
        if first + S <= T:  # no step needs a mask
            state = write_states(h, mine, 0, S, now_a, now_b, state, H, S, GRU)
        else:
            state = write_states(h, mine, first, T, now_a, now_b, state, H, S, GRU)
        h += S * H


# ---- backward ----------------------------------------------------------------------------------------------


@triton.jit
def write_grads(
    da, db, mine, t, T, now, before, carry, H: tl.constexpr, S: tl.constexpr, GRU: tl.constexpr
):  # fmt: skip
    """t counts from the end; now: S rows each of a, of dh, of the states before and of b, for a GRU alone."""
    now_a, now_g, now_h, now_b = now
    for s in tl.static_range(S):
        there = mine & (t + s < T)
        gate, g = now_a[s].to(tl.float32), now_g[s].to(tl.float32) + carry
        last = tl.where(t + s + 1 < T, now_h[s].to(tl.float32), before)
        if GRU:
            tl.store(da - s * H, g * (now_b[s].to(tl.float32) - last), there)
            tl.store(db - s * H, g * gate, there)
            gate = 1.0 - gate
        else:
            tl.store(da - s * H, g * last, there)
            tl.store(db - s * H, g, there)
        carry = gate * g  # where there is no step, the gate is one and g what came back
    return carry


@triton.jit(do_not_specialize=["zero"])
def window_grad_kernel(
    dh, a, b, h0, h, da, db, dh0, T, zero,
    H: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, USE: tl.constexpr, V: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    row, n, mine, origin, shift, end = place(T, zero, H, BH, USE, V)
    index = window_index(shift + (T - 1) * H, -H, S, BH, USE, V)
    before_index = window_index(shift + (T - 2) * H, -H, S, BH, USE, V)
    before, carry = initial_state(h0, row * H + n, mine), tl.zeros([BH], tl.float32)
    one: tl.constexpr = 0.0 if GRU else 1.0  # a gate that leaves what comes back as it is
    t, last = T - 1 - tl.arange(0, S)[:, None], row * T * H + (T - 1).to(tl.int64) * H + n
    dh, a, h, da, db = dh + origin, a + origin, h + origin, da + last, db + last
    coming_a = load_window(a, t, T, shift, end, H, BH, USE, V, one)
    coming_g = load_window(dh, t, T, shift, end, H, BH, USE, V, 0.0)
    coming_h = load_window(h, t - 1, T, shift, end, H, BH, USE, V, 0.0)
    coming_b = coming_h
    if GRU:
        coming_b = load_window(b + origin, t, T, shift, end, H, BH, USE, V, 0.0)
    for first in range(0, T, S):
        now_a, now_g = rows_of(coming_a, index, S, BH), rows_of(coming_g, index, S, BH)
        now_h = rows_of(coming_h, before_index, S, BH)
        now_b = now_h
        if GRU:
            now_b = rows_of(coming_b, index, S, BH)
        t -= S
        coming_a = load_window(a, t, T, shift, end, H, BH, USE, V, one)
        coming_g = load_window(dh, t, T, shift, end, H, BH, USE, V, 0.0)
        coming_h = load_window(h, t - 1, T, shift, end, H, BH, USE, V, 0.0)
        coming_b = coming_h
        if GRU:
            coming_b = load_window(b + origin, t, T, shift, end, H, BH, USE, V, 0.0)
        now = (now_a, now_g, now_h, now_b)
        if first + S < T:  # no step needs a mask, and each has one before
            carry = write_grads(da, db, mine, 0, S + 1, now, before, carry, H, S, GRU)
        else:
            carry = write_grads(da, db, mine, first, T, now, before, carry, H, S, GRU)
        da -= S * H
        db -= S * H
    if dh0 is not None:
        tl.store(dh0 + row * H + n, carry, mine)
