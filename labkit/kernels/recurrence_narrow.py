"""linear_recurrence and min_gru for narrow rows, unless sequences are few: each lane has steps of its own.

T rows of H numbers are T * H numbers one after the other, and h[i] = a[i] h[i - H] + b[i]. So a lane takes
the K = S * H numbers of S steps by loads of 16 bytes, straight into its registers, and a row may begin
anywhere among them. A lane's number i is of slot i % H: a slot is a feature, which one depends on where in a
row the lanes begin. As in recurrence_scan.py each lane goes through its steps, a scan combines the lanes, and
each goes through its steps again from its true state. Stores go through shared memory, so that neighbouring
lanes write what is side by side: 16 bytes alone would fill half a sector.

A sequence may begin and end within 16 bytes, of which the rest is another's or nobody's. Those few numbers
are walked through step by step, and so is a block with a gate beyond [-1, 1], since products may overflow.
An infinite state may become NaN in a block whose product of gates underflows, as in recurrence_scan.py.
"""

# mypy: disable-error-code="assignment, var-annotated"

import math
from functools import cache

import triton
import triton.language as tl

from labkit.kernels.common import cdiv, initial_state
from labkit.kernels.recurrence_scan import step, step_back, two_blocks, write_grad
from labkit.kernels.recurrence_windows import columns_of, number_of_bits

MOST_NUMBERS = 56
"""Of a lane and a tensor: with more, registers do not suffice, nor the cache for lines that lanes share."""


@cache
def narrow_plan(
    B: int, T: int, H: int, itemsize: int, multiprocessors: int, back: bool
) -> dict[str, int] | None:
    """Sizes for a program a sequence; None where a scan or a loop is faster. Found by measuring on an H200.

    A lane has 48 numbers of 2 bytes forward, else 24, or as many as make whole steps and whole 16 bytes. With
    few sequences a program has more warps, as long as each has something to do; of many slots what warps then
    tell each other costs too much. With very few sequences a scan has more programs. A sequence is longer
    than half a block, so that there are whole 16 bytes in it.
    """
    V = 16 // itemsize
    least = V // math.gcd(V, H)  # steps of whole 16 bytes
    numbers = 24 if back or itemsize == 4 else 48
    S = max(1, round(numbers / (H * least))) * least
    each = B / multiprocessors
    warps = 4 if each < 2 else 2 if each < 3 else 1
    if back and each < 1 and T >= 2 * 32 * 8 * S:
        warps = 8
    most = 8 if warps > 1 else 12 if itemsize == 2 else 10
    if each < 3 / 8 or most < H or S * H > MOST_NUMBERS:
        return None
    block = S * 32 * warps
    idle = cdiv(T, block) * block - T  # steps that no lane of the last block has
    if idle > 2 / 3 * T or T * H >= 2**31 - 2**16:  # offsets are 32-bit
        return None
    return dict(H=H, S=S, L=32 * warps, V=V, num_warps=warps)


# ---- numbers of lanes: tuples of K or of H tensors (L,) ----------------------------------------------------


@triton.jit
def joined(tensors):
    half: tl.constexpr = len(tensors) // 2
    out = ()
    for i in tl.static_range(half):
        out += (tl.join(tensors[i], tensors[i + half]),)
    return out


@triton.jit
def side_by_side(tensors):
    """Tensors stacked along new last axes of 2, the highest bit of their number first.

    The last is repeated until there are as many as a power of 2.
    """
    BITS: tl.constexpr = number_of_bits(len(tensors))
    out = ()
    for i in tl.static_range(2**BITS):
        out += (tensors[min(i, len(tensors) - 1)],)
    for _ in tl.static_range(BITS):
        out = joined(out)
    return out[0]


@triton.jit
def slot_by_slot(numbers, H: tl.constexpr, BACK: tl.constexpr):
    """Step u of slot s as number s * S + u; with BACK, step 0 is the last."""
    S: tl.constexpr = len(numbers) // H
    out = ()
    for i in tl.static_range(S * H):
        out += (numbers[(S - 1 - i % S if BACK else i % S) * H + i // S],)
    return out


@triton.jit
def step_by_step(numbers, H: tl.constexpr, BACK: tl.constexpr):
    """The reverse of ``slot_by_slot``."""
    S: tl.constexpr = len(numbers) // H
    out = ()
    for i in tl.static_range(S * H):
        out += (numbers[i % H * S + (S - 1 - i // H if BACK else i // H)],)
    return out


@triton.jit
def load_granules(p, at, low, high, other: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """K / V tensors (L, V): number i from ``at`` (L, 1) on, ``other`` unless low <= i < high.

    All three are multiples of V, so V numbers are loaded or none.
    """
    out = ()
    for j in tl.static_range(K // V):
        i = at + j * V
        out += (tl.load(p + i + tl.arange(0, V)[None, :], (i >= low) & (i < high), other=other),)
    return out


@triton.jit
def numbers_of(granules, at: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BACK: tl.constexpr):
    """K numbers (L,) of granules (L, V), from number ``at`` on, slot by slot."""
    out, mine = (), ()
    for j in tl.static_range(len(granules)):
        out += columns_of(granules[j])
    for i in tl.static_range(K):
        mine += (out[at + i],)
    return slot_by_slot(mine, H, BACK)


@triton.jit
def store_numbers(p, numbers, first, stride: tl.constexpr, high, V: tl.constexpr):
    """Store the K numbers of lane l at first + l * stride, those of 0 <= i < high. All are multiples of V.

    high: 0 for a block that is walked, which stores nothing here; stride: -K where lane 0 has the last steps.
    """
    n: tl.constexpr = len(numbers) // V
    P: tl.constexpr = 2 ** number_of_bits(n)
    L: tl.constexpr = numbers[0].shape[0]
    granules = ()
    for j in tl.static_range(n):
        granule = ()
        for v in tl.static_range(V):
            granule += (numbers[j * V + v],)
        granules += (tl.reshape(side_by_side(granule), (L, V)),)
    x = tl.permute(tl.reshape(side_by_side(granules), (L, V, P)), (0, 2, 1))
    g = tl.arange(0, L * P)[:, None]  # in this order neighbouring lanes have what is beside each other
    i = first + g // P * stride + g % P * V
    there = (g % P < n) & (i >= 0) & (i < high)
    tl.store(p + i + tl.arange(0, V)[None, :], tl.reshape(x, (L * P, V)), there)


# ---- slots: (HP,), or (L, HP) with one row for each lane ---------------------------------------------------


@triton.jit
def turned(x, by, H: tl.constexpr):
    """The first H of x (HP,) rotated: number (n + by) % H becomes number n."""
    return tl.gather(x, (tl.arange(0, x.shape[0]) + by) % H, 0)


@triton.jit
def for_each_lane(x, L: tl.constexpr):
    return tl.broadcast_to(x[None, :], (L, x.shape[0]))


@triton.jit
def of_one_lane(x):
    return tl.sum(tl.where(tl.arange(0, x.shape[0])[:, None] == 0, x, 0.0), 0)


@triton.jit
def states_of_lanes(first, second, state, H: tl.constexpr, GRU: tl.constexpr, BACK: tl.constexpr):
    """The state before each lane's steps and after all, (L, HP) both, and whether the block must be walked.

    first, second: K numbers each, slot by slot; state: (L, HP), before all, the same for each lane.
    """
    S: tl.constexpr = len(first) // H
    L: tl.constexpr = state.shape[0]
    HP: tl.constexpr = state.shape[1]
    gates, values, largest = (), (), tl.zeros([L], tl.float32)
    for s in tl.static_range(H):
        A, B = tl.full([L], 1.0, tl.float32), tl.zeros([L], tl.float32)
        for u in tl.static_range(S):
            gate, value = step(first[s * S + u], second[s * S + u], GRU, BACK)
            A, B = A * gate, gate * B + value
            largest = tl.maximum(largest, tl.abs(gate), propagate_nan=tl.PropagateNan.ALL)
        gates += (A,)
        values += (B,)
    A, B = tl.reshape(side_by_side(gates), (L, HP)), tl.reshape(side_by_side(values), (L, HP))
    A, B = tl.associative_scan((A, B), 0, two_blocks)
    after, lane = A * state + B, tl.arange(0, L)[:, None] + tl.zeros([L, HP], tl.int32)
    before = tl.where(lane == 0, state, tl.gather(after, tl.maximum(lane - 1, 0), 0))
    walks = tl.max((largest <= 1.0).to(tl.int32) ^ 1) == 1  # also for NaN
    return before, tl.gather(after, lane * 0 + (L - 1), 0), walks


@triton.jit
def place(T, H: tl.constexpr, V: tl.constexpr):
    """Sequence, origin, head, high and tail. A number i is counted from ``origin`` on, a multiple of V.

    The sequence has ``head`` numbers before origin, fewer than V, then ``high``, a multiple of V, then
    ``tail``, fewer than V.
    """
    row = tl.program_id(0).to(tl.int64)
    start, end = row * T * H, (row + 1) * T * H
    origin = (start + V - 1) // V * V
    return (
        row,
        origin,
        (origin - start).to(tl.int32),
        (end // V * V - origin).to(tl.int32),
        (end % V).to(tl.int32),
    )


# ---- forward -----------------------------------------------------------------------------------------------


@triton.jit
def walk(a, b, h, state, first, end, H: tl.constexpr, GRU: tl.constexpr):
    """Write the states of numbers first <= i < end, H at a time.

    state: (HP,); its number n is of numbers first + n, first + n + H and so on. Returns their last states.
    """
    n = tl.arange(0, state.shape[0])
    for i in range(first, end, H):
        there = (n < H) & (i + n < end)
        now_a, now_b = tl.load(a + i + n, there, other=0.0), tl.load(b + i + n, there, other=0.0)
        gate, value = step(now_a, now_b, GRU, False)
        state = tl.where(there, gate * state + value, state)
        tl.store(h + i + n, state, there)
    return state


@triton.jit
def load_both(a, b, at, high, K: tl.constexpr, V: tl.constexpr, GRU: tl.constexpr):
    gates = load_granules(a, at, 0, high, 0.0 if GRU else 1.0, K, V)  # beyond the end a state stays as it is
    return gates, load_granules(b, at, 0, high, 0.0, K, V)


@triton.jit
def narrow_kernel(
    a, b, h0, h, T,
    H: tl.constexpr, S: tl.constexpr, L: tl.constexpr, V: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = S * H
    HP: tl.constexpr = 2 ** number_of_bits(H)
    row, origin, head, high, tail = place(T, H, V)
    n, lane = tl.arange(0, HP), tl.arange(0, L)[:, None]
    a, b, h = a + origin, b + origin, h + origin
    state = walk(a, b, h, initial_state(h0, row * H + n, n < H), -head, 0, H, GRU)
    state = for_each_lane(turned(state, head, H), L)
    coming_a, coming_b = load_both(a, b, lane * K, high, K, V, GRU)
    for first in range(0, high, L * K):
        now_a, now_b = numbers_of(coming_a, 0, K, H, False), numbers_of(coming_b, 0, K, H, False)
        coming_a, coming_b = load_both(a, b, first + (L + lane) * K, high, K, V, GRU)
        before, after, walks = states_of_lanes(now_a, now_b, state, H, GRU, False)
        states, before = (), columns_of(before)
        for s in tl.static_range(H):
            x = before[s]
            for u in tl.static_range(S):
                gate, value = step(now_a[s * S + u], now_b[s * S + u], GRU, False)
                x = gate * x + value
                states += (x.to(h.dtype.element_ty),)
        store_numbers(h, step_by_step(states, H, False), first, K, tl.where(walks, 0, high), V)
        if walks:
            end = tl.minimum(first + L * K, high)
            after = for_each_lane(walk(a, b, h, of_one_lane(state), first, end, H, GRU), L)
        state = after
    walk(a, b, h, turned(of_one_lane(state), high, H), high, high + tail, H, GRU)


# ---- backward ----------------------------------------------------------------------------------------------
# What a step gives back, c_t = gate_t (dh_t + c_{t+1}), is a recurrence in reverse: lane 0 has the last
# steps, and a lane's step 0 is its last.


@triton.jit
def walk_back(
    dh, a, b, h0, h, da, db, carry, end, first, head, H: tl.constexpr, GRU: tl.constexpr
):  # fmt: skip
    """Write the gradients of numbers first <= i < end, from the end, H at a time.

    carry: (HP,); its number n is of numbers end - H + n, end - 2 H + n and so on. Returns what the last give
    back. h0: where the sequence's is, the states before numbers i < H - head.
    """
    n = tl.arange(0, carry.shape[0])
    for done in range(0, end - first, H):
        i = end - H - done + n
        there, begins = (n < H) & (i >= first), i < H - head
        last = tl.load(h + i - H, there & (i >= H - head), other=0.0)
        if h0 is not None:
            last += tl.load(h0 + i + head, there & begins, other=0.0)
        value = last
        if GRU:
            value = tl.load(b + i, there, other=0.0)
        gate, g = tl.load(a + i, there, other=0.0), tl.load(dh + i, there, other=0.0)
        back = write_grad(da + i, db + i, there, gate, g, last, value, carry, GRU)
        carry = tl.where(there, back, carry)
    return carry


@triton.jit
def load_all(
    dh, a, b, h, at, head, high, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GRU: tl.constexpr
):  # fmt: skip
    """Granules of a, dh, h and, for a GRU alone, b; those of h begin H numbers earlier, or a few more."""
    BEFORE: tl.constexpr = (H + V - 1) // V * V
    # with a head there are V numbers before origin: the head, and others of which no use is made
    gates = load_granules(a, at, 0, high, 0.0 if GRU else 1.0, K, V)
    g = load_granules(dh, at, 0, high, 0.0, K, V)
    states = load_granules(h, at - BEFORE, tl.where(head > 0, -V, 0), high, 0.0, K + BEFORE, V)
    values = g
    if GRU:
        values = load_granules(b, at, 0, high, 0.0, K, V)
    return gates, g, states, values


@triton.jit
def narrow_grad_kernel(
    dh, a, b, h0, h, da, db, dh0, T,
    H: tl.constexpr, S: tl.constexpr, L: tl.constexpr, V: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = S * H
    HP: tl.constexpr = 2 ** number_of_bits(H)
    BEFORE: tl.constexpr = (H + V - 1) // V * V
    row, origin, head, high, tail = place(T, H, V)
    n, lane = tl.arange(0, HP), tl.arange(0, L)[:, None]
    dh, a, h, da, db = dh + origin, a + origin, h + origin, da + origin, db + origin
    b, h0 = b + origin if GRU else None, None if h0 is None else h0 + row * H
    carry = tl.zeros([HP], tl.float32)
    carry = walk_back(dh, a, b, h0, h, da, db, carry, high + tail, high, head, H, GRU)
    # it was of end - H + n, and becomes of high - H + n: by -tail, or high + head, since H divides T * H
    carry = for_each_lane(turned(carry, high + head, H), L)
    begin = columns_of(for_each_lane(initial_state(h0, (high + head + n) % H, n < H), L))
    coming = load_all(dh, a, b, h, high - (lane + 1) * K, head, high, H, K, V, GRU)
    for done in range(0, high, L * K):
        end = high - done
        at = end - (lane + 1) * K
        now_a, now_g = numbers_of(coming[0], 0, K, H, True), numbers_of(coming[1], 0, K, H, True)
        now_h, now_b = numbers_of(coming[2], BEFORE - H, K, H, True), numbers_of(coming[3], 0, K, H, True)
        coming = load_all(dh, a, b, h, at - L * K, head, high, H, K, V, GRU)
        before, after, walks = states_of_lanes(now_a, now_g, carry, H, GRU, True)
        grads_a, grads_b, before, begins = (), (), columns_of(before), H - head - tl.reshape(at, (L,))
        for s in tl.static_range(H):
            c = before[s]
            for u in tl.static_range(S):
                last = tl.where((S - 1 - u) * H + s < begins, begin[s], now_h[s * S + u].to(tl.float32))
                grad_a, grad_b, c = step_back(
                    now_a[s * S + u], now_g[s * S + u], last, now_b[s * S + u], c, GRU
                )
                grads_a += (grad_a.to(da.dtype.element_ty),)
                grads_b += (grad_b.to(da.dtype.element_ty),)
        below = tl.where(walks, 0, high)
        store_numbers(da, step_by_step(grads_a, H, True), end - K, -K, below, V)
        store_numbers(db, step_by_step(grads_b, H, True), end - K, -K, below, V)
        if walks:
            first = tl.maximum(end - L * K, 0)
            walked = walk_back(dh, a, b, h0, h, da, db, of_one_lane(carry), end, first, head, H, GRU)
            after = for_each_lane(walked, L)
        carry = after
    carry = turned(of_one_lane(carry), H - high % H, H)  # of number n - H
    carry = walk_back(dh, a, b, h0, h, da, db, carry, 0, -head, head, H, GRU)
    if dh0 is not None:
        tl.store(dh0 + row * H + (n + head) % H, carry, n < H)
