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
from labkit.kernels.recurrence_scan import step, write_grad

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
    more = (
        {"maxnreg": 72} if S == 16 and not back and itemsize == 2 else {}
    )  # so seven programs of 4 warps fit a multiprocessor; it costs two numbers spilled
    return dict(H=H, S=S, BH=BH, USE=cdiv(H, cdiv(H, BH - V)), V=V, num_warps=warps, **more)


# ---- windows -----------------------------------------------------------------------------------------------
# A window has whole 16 bytes, so up to 2 V - 2 numbers of the step behind it, which has more than that. Step
# T - 1 is loaded number by number, apart from all windows: behind the last sequence there is nothing.


@triton.jit
def place(T, zero, H: tl.constexpr, BH: tl.constexpr, USE: tl.constexpr, V: tl.constexpr):
    """Sequence, features (BH,), which of them are the program's, and where its first number is.

    That is ``shift`` numbers, fewer than V, behind ``origin``, a multiple of V.

    zero: 0, which the compiler does not know: so it stores no two features at once. Two would need another
    order of lanes than the gather's, and each row another trip through shared memory.
    """
    widths: tl.constexpr = (H + USE - 1) // USE
    row = (tl.program_id(0) // widths).to(tl.int64)
    first = tl.program_id(0) % widths * USE
    lane = tl.arange(0, BH)
    where = row * T * H + first
    return (
        row,
        first + lane + zero,
        (lane < USE) & (first + lane < H),
        where // V * V,
        (where % V).to(tl.int32),
    )


@triton.jit
def load_window(
    p, t, T, shift, H: tl.constexpr, BH: tl.constexpr, USE: tl.constexpr, V: tl.constexpr, other: tl.constexpr
):
    """The window (S, BH) of steps t (S, 1) before T - 1, ``other`` elsewhere; p: where ``origin`` is."""
    n = tl.arange(0, BH)[None, :]
    there = (t >= 0) & (t < T - 1) & (n // V * V < USE + V - 1)
    return tl.load(p + (shift + t * H) // V * V + n, there, other=other)


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


@triton.constexpr_function
def number_of_bits(most):
    """How many bits number so many, one at least."""
    return max(1, (most - 1).bit_length())


@triton.jit
def halves(tensors):
    """Of each tensor (L, P) the even columns and the odd ones."""
    L: tl.constexpr = tensors[0].shape[0]
    P: tl.constexpr = tensors[0].shape[1]
    out = ()
    for i in tl.static_range(len(tensors)):
        even, odd = tl.split(tl.reshape(tensors[i], (L, P // 2, 2)))
        out += (even, odd)
    return out


@triton.jit
def columns_of(x):
    """The columns (L,) of x (L, P), in order; P is a power of 2, 2 at least."""
    L: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[1]
    parts, ordered = (x,), ()
    for _ in tl.static_range(number_of_bits(P)):
        parts = halves(parts)
    for i in tl.static_range(P):  # its last bit was split off first
        ordered += (tl.reshape(parts[reversed_bits(i, P)], (L,)),)
    return ordered


@triton.jit
def rows_of(window, index, S: tl.constexpr, BH: tl.constexpr):
    """The S rows (BH,) of a window, in order."""
    return columns_of(tl.reshape(tl.gather(tl.reshape(window, (S * BH,)), index, 0), (BH, S)))


# ---- forward -----------------------------------------------------------------------------------------------


@triton.jit
def write_states(
    h, mine, steps, now_a, now_b, state, H: tl.constexpr, S: tl.constexpr, GRU: tl.constexpr
):  # fmt: skip
    for s in tl.static_range(S):
        gate, value = step(now_a[s], now_b[s], GRU, False)
        state = gate * state + value
        tl.store(h + s * H, state, mine & (s < steps))
    return state


@triton.jit(do_not_specialize=["zero"])
def window_kernel(
    a, b, h0, h, T, zero,
    H: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, USE: tl.constexpr, V: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    row, n, mine, origin, shift = place(T, zero, H, BH, USE, V)
    index = window_index(shift, H, S, BH, USE, V)
    state, t = initial_state(h0, row * H + n, mine), tl.arange(0, S)[:, None]
    one: tl.constexpr = 0.0 if GRU else 1.0  # a gate that leaves a state as it is
    start, last = row * T * H + n, row * T * H + (T - 1).to(tl.int64) * H + n
    last_a, last_b = tl.load(a + last, mine, other=0.0), tl.load(b + last, mine, other=0.0)
    a, b, states = a + origin, b + origin, h + start
    coming_a = load_window(a, t, T, shift, H, BH, USE, V, one)
    coming_b = load_window(b, t, T, shift, H, BH, USE, V, 0.0)
    for first in range(0, T - 1, S):
        now_a, now_b = rows_of(coming_a, index, S, BH), rows_of(coming_b, index, S, BH)
        t += S
        coming_a = load_window(a, t, T, shift, H, BH, USE, V, one)
        coming_b = load_window(b, t, T, shift, H, BH, USE, V, 0.0)
        if first + S < T:  # no step needs a mask
            state = write_states(states, mine, S, now_a, now_b, state, H, S, GRU)
        else:
            state = write_states(states, mine, T - 1 - first, now_a, now_b, state, H, S, GRU)
        states += S * H
    gate, value = step(last_a, last_b, GRU, False)
    tl.store(h + last, gate * state + value, mine)


# ---- backward ----------------------------------------------------------------------------------------------


@triton.jit
def write_grads(
    da, db, mine, steps, now, before, carry, H: tl.constexpr, S: tl.constexpr, GRU: tl.constexpr
):  # fmt: skip
    """now: S rows each of a, dh, the states before and b. Where there is no step, gates leave the carry."""
    now_a, now_g, now_h, now_b = now
    for s in tl.static_range(S):
        last = tl.where(s + 1 < steps, now_h[s].to(tl.float32), before)
        carry = write_grad(
            da - s * H, db - s * H, mine & (s < steps), now_a[s], now_g[s], last, now_b[s], carry, GRU
        )
    return carry


@triton.jit
def load_grad_windows(dh, a, b, h, t, T, shift, H: tl.constexpr, BH: tl.constexpr, USE: tl.constexpr,
                      V: tl.constexpr, GRU: tl.constexpr):  # fmt: skip
    """Windows of a, dh, the states before and b, for a GRU alone."""
    one: tl.constexpr = 0.0 if GRU else 1.0  # a gate that leaves what comes back as it is
    gates = load_window(a, t, T, shift, H, BH, USE, V, one)
    g = load_window(dh, t, T, shift, H, BH, USE, V, 0.0)
    states = load_window(h, t - 1, T, shift, H, BH, USE, V, 0.0)
    return gates, g, states, load_window(b, t, T, shift, H, BH, USE, V, 0.0) if GRU else states


@triton.jit(do_not_specialize=["zero"])
def window_grad_kernel(
    dh, a, b, h0, h, da, db, dh0, T, zero,
    H: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, USE: tl.constexpr, V: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    row, n, mine, origin, shift = place(T, zero, H, BH, USE, V)
    index = window_index(shift + (T - 2) * H, -H, S, BH, USE, V)
    before_index = window_index(shift + (T - 3) * H, -H, S, BH, USE, V)
    before, t = initial_state(h0, row * H + n, mine), T - 2 - tl.arange(0, S)[:, None]
    last = row * T * H + (T - 1).to(tl.int64) * H + n
    gate, g = tl.load(a + last, mine, other=0.0), tl.load(dh + last, mine, other=0.0)
    state = tl.load(h + last - H, mine, other=0.0)
    value = tl.load(b + last, mine, other=0.0) if GRU else state
    dh, a, h, b = dh + origin, a + origin, h + origin, b + origin if GRU else None
    coming = load_grad_windows(dh, a, b, h, t, T, shift, H, BH, USE, V, GRU)
    da, db = da + last, db + last
    carry = write_grad(da, db, mine, gate, g, state, value, tl.zeros([BH], tl.float32), GRU)
    da, db = da - H, db - H
    for first in range(0, T - 1, S):
        now_a, now_g = rows_of(coming[0], index, S, BH), rows_of(coming[1], index, S, BH)
        now_h = rows_of(coming[2], before_index, S, BH)
        now_b = now_h
        if GRU:
            now_b = rows_of(coming[3], index, S, BH)
        t -= S
        coming = load_grad_windows(dh, a, b, h, t, T, shift, H, BH, USE, V, GRU)
        now = (now_a, now_g, now_h, now_b)
        if first + S < T - 1:  # no step needs a mask, and each has one before
            carry = write_grads(da, db, mine, S + 1, now, before, carry, H, S, GRU)
        else:
            carry = write_grads(da, db, mine, T - 1 - first, now, before, carry, H, S, GRU)
        da -= S * H
        db -= S * H
    if dh0 is not None:
        tl.store(dh0 + row * H + n, carry, mine)
