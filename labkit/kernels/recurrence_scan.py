"""linear_recurrence and min_gru for few or narrow sequences: a scan over time.

Two steps make one: with h2 = a2 h1 + b2 and h1 = a1 h0 + b1 it is h2 = (a2 a1) h0 + (a2 b1 + b2). A tile
has a block of L segments of S steps each. Each lane goes through its own segment, a scan combines the
segments, and with the state before the block each lane goes through its segment again. So a whole tile is in
flight where a loop has a few steps. A program goes through all blocks of a sequence, and loads the next while
it computes one.

Where a GPU holds more programs than there are sequences, each is cut into P parts, and three kernels run. The
first reads gates and inputs, and leaves what each part does to any state, its (A, B) with h = A h0 + B. The
second combines them to the state before each part. The third scans each part as a sequence of its own. So a
and b are read twice, and 5 tensors move where 3 have to. But no program waits for another: it cannot hang,
and the result does not depend on who was first.

Products of gates overflow where states need not, and cancel: so a block with a gate beyond [-1, 1], or NaN,
is walked step by step from its true state, as the loop does it. A part with such a gate has an A of NaN, and
the second kernel walks it, too. This is as right as the loop, and no faster.
"""

# mypy: disable-error-code="assignment, var-annotated"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.common import DeviceLimits, cdiv, device_limits, next_power_of_2

WARPS, TILE = 4, 512
"""A program's warps, and the most segments times features of its tile: four for each lane. These and the
plan's numbers were found by measuring on an H200."""
STEPS_WORTH_IT = 64
"""A loop of fewer steps is over before a scan has begun."""
LOOP_BYTES = 30 * 1024
"""Bytes in flight per multiprocessor with which a loop that holds them in registers is at memory's speed."""
PARTS_EACH, MOST_PARTS = 8, 1024
"""Parts for each multiprocessor that few sequences are cut into, and the most of one sequence."""
CARRIES = 4096
"""Parts times features of a program that combines parts, at most."""

# ---- parts of both kernels: tiles are (R, L, BH), R sequences, L segments, BH features ---------------------


@triton.jit
def two_blocks(a1, b1, a2, b2):
    return a2 * a1, a2 * b1 + b2


@triton.jit
def two_runs(a1, b1, c1, d1, a2, b2, c2, d2):
    """(A, B) of all segments of a run, and (C, D) of all but its last, what is before that one."""
    return a2 * a1, a2 * b1 + b2, c2 * a1, c2 * b1 + d2


@triton.jit
def step(first, second, GRU: tl.constexpr, BACK: tl.constexpr):
    """Gate and input of a step in float32: of a and b, backward of a and dh."""
    gate, value = first.to(tl.float32), second.to(tl.float32)
    if GRU and not BACK:
        value *= gate
    if GRU:
        gate = 1.0 - gate
    if BACK:
        value *= gate
    return gate, value


@triton.jit
def place(B, T, P, steps, H: tl.constexpr, R: tl.constexpr, L: tl.constexpr, S: tl.constexpr,
          BH: tl.constexpr):  # fmt: skip
    """Parts (R, 1, 1), steps (1, L, 1), first step, end, features (1, 1, BH), and which of them there are.

    R is 1 where a sequence has several parts, of ``steps`` each: then all numbers of a tile are one part's.
    """
    widths: tl.constexpr = (H + BH - 1) // BH
    first = tl.program_id(0) // widths * R
    part = (first + tl.arange(0, R)).to(tl.int64)[:, None, None]
    begin = first % P * steps  # 0 where P is 1
    t = (begin + tl.arange(0, L) * S)[None, :, None]
    n = (tl.program_id(0) % widths * BH + tl.arange(0, BH))[None, None, :]
    return part, t, begin, tl.minimum(begin + steps, T), n, (part < B * P) & (n < H)


@triton.jit
def load_steps(p, at, inside, t, T, stride: tl.constexpr, S: tl.constexpr, other: tl.constexpr):
    """S tiles: ``at`` is where step t is, and the next one a stride further on; ``other`` from step T on."""
    steps = ()
    for s in tl.static_range(S):
        steps += (tl.load(p + at + s * stride, inside & (t + s < T), other=other),)
    return steps


@triton.jit
def last_segment(x, L: tl.constexpr):
    """Of a tile (R, L, BH) what belongs to its last segment, (R, 1, BH)."""
    segment = tl.arange(0, L)[None, :, None]
    return tl.sum(tl.where(segment == L - 1, x, 0.0), 1, keep_dims=True)


@triton.jit
def sums_of_segments(now_a, now_b, S: tl.constexpr, GRU: tl.constexpr, BACK: tl.constexpr):
    """(A, B) of each segment, and 1 where a gate is beyond [-1, 1] or NaN, (R, L, BH), from S tiles."""
    A, B = step(now_a[0], now_b[0], GRU, BACK)
    largest = tl.abs(A)
    for s in tl.static_range(1, S):
        gate, value = step(now_a[s], now_b[s], GRU, BACK)
        A, B = A * gate, gate * B + value
        largest = tl.maximum(largest, tl.abs(gate), propagate_nan=tl.PropagateNan.ALL)
    return A, B, (largest <= 1.0).to(tl.int32) ^ 1


@triton.jit
def states_before_segments(
    first, now_a, now_b, R: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BH: tl.constexpr,
    GRU: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """The state before each segment, (R, L, BH), and whether the block must be walked.

    first: the state before the block, (R, 1, BH); now_a, now_b: S tiles (R, L, BH).
    """
    A, B, walks = sums_of_segments(now_a, now_b, S, GRU, BACK)
    one, zero = tl.full([R, L, BH], 1.0, tl.float32), tl.zeros([R, L, BH], tl.float32)
    _, _, C, D = tl.associative_scan((A, B, one, zero), 1, two_runs)
    return C * first + D, tl.max(walks) == 1


# ---- parts: what each does to any state, and the state before it -------------------------------------------
# In reverse (BACK) b is dh, and t counts from the end.


@triton.jit
def sums_kernel(
    a, b, sums, B, T, P, steps,
    H: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, GRU: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """(A, B) of each part: sums (2, B * P, H), float32."""
    part, t, begin, end, n, inside = place(B, T, P, steps, H, 1, L, S, BH)
    A, B_sum = tl.full([1, 1, BH], 1.0, tl.float32), tl.zeros([1, 1, BH], tl.float32)
    walks = tl.zeros([1, 1, BH], tl.int32)
    for _ in range(begin, end, L * S):
        at = part // P * T * H + (T - 1 - t if BACK else t).to(tl.int64) * H + n
        now_a = load_steps(a, at, inside, t, end, -H if BACK else H, S, 0.0 if GRU else 1.0)
        now_b = load_steps(b, at, inside, t, end, -H if BACK else H, S, 0.0)
        of_a, of_b, beyond = sums_of_segments(now_a, now_b, S, GRU, BACK)
        of_a, of_b = tl.associative_scan((of_a, of_b), 1, two_blocks)
        of_a, of_b = last_segment(of_a, L), last_segment(of_b, L)
        A, B_sum, t = of_a * A, of_a * B_sum + of_b, t + L * S
        walks = walks | tl.max(beyond, 1, keep_dims=True)
    tl.store(sums + part * H + n, tl.where(walks == 1, float("nan"), A), inside)
    tl.store(sums + (part + B * P) * H + n, B_sum, inside)


@triton.jit
def carries_kernel(
    sums, a, b, h0, carries, T, P, steps,
    H: tl.constexpr, PARTS: tl.constexpr, F: tl.constexpr, GRU: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """The state before each part: carries (B, P, H), float32. A program has F features of one sequence."""
    row, p = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)[:, None]
    n = tl.program_id(1) * F + tl.arange(0, F)[None, :]
    state = tl.zeros([1, F], tl.float32)
    if h0 is not None:
        state += tl.load(h0 + row * H + n, n < H, other=0.0).to(tl.float32)
    all_a, all_b = sums + row * P * H, sums + (row + tl.num_programs(0)) * P * H
    carries += row * P * H
    inside = (p < P) & (n < H)
    A = tl.load(all_a + p * H + n, inside, other=1.0)  # (PARTS, F)
    B = tl.load(all_b + p * H + n, inside, other=0.0)
    if tl.max((A != A).to(tl.int32)) == 0:
        A, B = tl.associative_scan((A, B), 0, two_blocks)
        tl.store(carries + n, state, n < H)
        tl.store(carries + (p + 1) * H + n, A * state + B, (p + 1 < P) & (n < H))
    else:  # from part to part, and those with such a gate step by step
        for part in range(0, P):
            tl.store(carries + part * H + n, state, n < H)
            of_a = tl.load(all_a + part * H + n, n < H, other=1.0)
            after, walked = of_a * state + tl.load(all_b + part * H + n, n < H, other=0.0), state
            if tl.max((of_a != of_a).to(tl.int32)) == 1:
                for t in range(part * steps, tl.minimum((part + 1) * steps, T)):
                    at = (row * T + (T - 1 - t if BACK else t)) * H + n
                    now_a, now_b = tl.load(a + at, n < H, other=0.0), tl.load(b + at, n < H, other=0.0)
                    gate, value = step(now_a, now_b, GRU, BACK)
                    walked = gate * walked + value
            state = tl.where(of_a != of_a, walked, after)


# ---- forward -----------------------------------------------------------------------------------------------


@triton.jit
def write_states(
    h, at, inside, t, T, H: tl.constexpr, now_a, now_b, state, S: tl.constexpr, GRU: tl.constexpr
):
    """Write the states of S steps from step t on, which is ``at``, and return the last."""
    for s in tl.static_range(S):
        gate, value = step(now_a[s], now_b[s], GRU, False)
        state = gate * state + value
        tl.store(h + at + s * H, state, inside & (t + s < T))
    return state


@triton.jit
def walk(a, b, h, at, t, inside, end, H: tl.constexpr, state, L: tl.constexpr, S: tl.constexpr,
         GRU: tl.constexpr):  # fmt: skip
    """Write the states (R, 1, BH) of L segments from step t on, which is ``at``, in turn; return the last."""
    for _ in range(0, L):
        now_a = load_steps(a, at, inside, t, end, H, S, 0.0)
        now_b = load_steps(b, at, inside, t, end, H, S, 0.0)
        state = write_states(h, at, inside, t, end, H, now_a, now_b, state, S, GRU)
        at, t = at + S * H, t + S
    return state


@triton.jit
def scan_kernel(
    a, b, before, h, B, T, P, steps,
    H: tl.constexpr, R: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BH: tl.constexpr,
    GRU: tl.constexpr,
):  # fmt: skip
    """h of each part from the state before it, ``before`` (B * P, H), or from zeros."""
    part, t, begin, end, n, inside = place(B, T, P, steps, H, R, L, S, BH)
    at = part // P * T * H + t.to(tl.int64) * H + n  # (R, L, BH)
    first = part // P * T * H + begin.to(tl.int64) * H + n  # (R, 1, BH)
    now_a = load_steps(a, at, inside, t, end, H, S, 0.0)
    now_b = load_steps(b, at, inside, t, end, H, S, 0.0)
    state = tl.zeros([R, 1, BH], tl.float32)
    if before is not None:
        state += tl.load(before + part * H + n, inside, other=0.0).to(tl.float32)
    for start in range(begin, end, L * S):  # loads the next block before it computes one
        soon, later = t + L * S, at + L * S * H
        next_a = load_steps(a, later, inside, soon, end, H, S, 0.0)
        next_b = load_steps(b, later, inside, soon, end, H, S, 0.0)
        states, walks = states_before_segments(state, now_a, now_b, R, L, S, BH, GRU, False)
        if walks:
            state = walk(a, b, h, first, start, inside, end, H, state, L, S, GRU)
        else:
            state = last_segment(write_states(h, at, inside, t, end, H, now_a, now_b, states, S, GRU), L)
        now_a, now_b, t, at, first = next_a, next_b, soon, later, first + L * S * H


# ---- backward ----------------------------------------------------------------------------------------------
# What step t gives back, c_t = gate_t (dh_t + c_{t+1}), is a recurrence in reverse: t counts from the end.
# Beyond the first step a gate of 1 leaves it as it is.


@triton.jit
def load_inputs(h, b, at, inside, t, T, H: tl.constexpr, S: tl.constexpr, GRU: tl.constexpr):
    """The states before S steps, and their b, which a GRU alone reads."""
    now_h = load_steps(h, at - H, inside, t, T - 1, -H, S, 0.0)
    now_b = now_h
    if GRU:
        now_b = load_steps(b, at, inside, t, T, -H, S, 0.0)
    return now_h, now_b


@triton.jit
def write_grads(
    da, db, at, inside, t, end, T, H: tl.constexpr, now_a, now_g, now_h, now_b, h0, carry,
    S: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    """Write the gradients of S steps, and return what the last gives back; a GRU alone has now_b."""
    for s in tl.static_range(S):
        there = inside & (t + s < end)
        gate, g = now_a[s].to(tl.float32), now_g[s].to(tl.float32) + carry
        last = tl.where(t + s < T - 1, now_h[s].to(tl.float32), h0)
        if GRU:
            tl.store(da + at - s * H, g * (now_b[s].to(tl.float32) - last), there)
            tl.store(db + at - s * H, g * gate, there)
            gate = 1.0 - gate
        else:
            tl.store(da + at - s * H, g * last, there)
            tl.store(db + at - s * H, g, there)
        carry = gate * g
    return carry


@triton.jit
def walk_back(
    dh, a, b, h, da, db, at, t, inside, end, T, H: tl.constexpr, h0, carry,
    L: tl.constexpr, S: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    """The same of L segments from step t on, in turn."""
    for _ in range(0, L):
        now_a = load_steps(a, at, inside, t, end, -H, S, 0.0 if GRU else 1.0)
        now_g = load_steps(dh, at, inside, t, end, -H, S, 0.0)
        now_h, now_b = load_inputs(h, b, at, inside, t, T, H, S, GRU)
        carry = write_grads(da, db, at, inside, t, end, T, H, now_a, now_g, now_h, now_b, h0, carry, S, GRU)
        at, t = at - S * H, t + S
    return carry


@triton.jit
def scan_grad_kernel(
    dh, a, b, h0, h, before, da, db, dh0, B, T, P, steps,
    H: tl.constexpr, R: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BH: tl.constexpr,
    GRU: tl.constexpr,
):  # fmt: skip
    """Gradients of each part from what the part behind it gives back, ``before`` (B * P, H), or zeros."""
    part, t, begin, end, n, inside = place(B, T, P, steps, H, R, L, S, BH)
    row = part // P
    at = row * T * H + (T - 1 - t).to(tl.int64) * H + n  # (R, L, BH)
    first = row * T * H + (T - 1 - begin).to(tl.int64) * H + n  # (R, 1, BH)
    now_a = load_steps(a, at, inside, t, end, -H, S, 0.0 if GRU else 1.0)
    now_g = load_steps(dh, at, inside, t, end, -H, S, 0.0)
    now_h, now_b = load_inputs(h, b, at, inside, t, T, H, S, GRU)
    carry, initial = tl.zeros([R, 1, BH], tl.float32), tl.zeros([R, 1, BH], tl.float32)
    if before is not None:
        carry += tl.load(before + part * H + n, inside, other=0.0)
    if h0 is not None:
        initial += tl.load(h0 + row * H + n, inside, other=0.0).to(tl.float32)
    for start in range(begin, end, L * S):
        soon, later = t + L * S, at - L * S * H
        next_h, next_b = load_inputs(h, b, later, inside, soon, T, H, S, GRU)
        next_a = load_steps(a, later, inside, soon, end, -H, S, 0.0 if GRU else 1.0)
        next_g = load_steps(dh, later, inside, soon, end, -H, S, 0.0)
        carries, walks = states_before_segments(carry, now_a, now_g, R, L, S, BH, GRU, True)
        if walks:
            carry = walk_back(dh, a, b, h, da, db, first, start, inside, end, T, H, initial, carry, L, S, GRU)
        else:
            after = write_grads(
                da, db, at, inside, t, end, T, H, now_a, now_g, now_h, now_b, initial, carries, S, GRU
            )
            carry = last_segment(after, L)
        now_a, now_g, now_h, now_b, t, at = next_a, next_g, next_h, next_b, soon, later
        first -= L * S * H
    if dh0 is not None:
        tl.store(dh0 + row * H + n, carry, inside & (part % P == P - 1))


# ---- launches ----------------------------------------------------------------------------------------------


@cache
def scan_pays(B: int, T: int, H: int, itemsize: int, loop_steps: int, limits: DeviceLimits) -> bool:
    """Whether a loop that loads so many steps ahead, of all its tensors together, leaves memory idle.

    It does with few sequences, which have too few bytes in so many steps, with narrow ones, which leave most
    lanes of a warp idle, and with rows that no wide load can take.
    """
    if not STEPS_WORTH_IT <= T < 2**31 - 2**14:  # the last block's steps are counted in 32 bits
        return False
    few = B * H * itemsize * loop_steps < LOOP_BYTES * limits.multiprocessors
    return few or H * itemsize < 32 or H * itemsize % (16 if itemsize == 4 else 4) != 0


@cache
def scan_plan(
    B: int, T: int, H: int, itemsize: int, limits: DeviceLimits, back: bool, gru: bool
) -> tuple[int, int, int, dict[str, int]]:
    """Programs, parts of a sequence, their steps, and sizes. A row of a tile has 128 bytes.

    A chain is a sequence's BH features. With one for each multiprocessor and more, a program goes through
    its chain, and tiles are small, so that two fit the registers; larger ones pay off for many and long
    chains. Fewer chains are cut into parts of whole blocks.
    """
    BH, S, tile, parts = min(128 // itemsize, next_power_of_2(H)), 8, TILE // 2, 1
    multiprocessors = limits.multiprocessors
    chains = B * cdiv(H, BH)
    if chains >= multiprocessors:
        if itemsize == 2 and H % 2 and chains < 2 * multiprocessors:
            BH = min(BH, 32)  # more chains
        many = B * cdiv(H, BH) >= (3 if back else 8) * multiprocessors
        if T >= 256 and many and (itemsize == 4 or back) and not (back and gru):
            tile = TILE
    else:
        parts = min(MOST_PARTS, cdiv(PARTS_EACH * multiprocessors, chains))
    L = min(tile // BH, max(2, next_power_of_2(cdiv(T, S))))
    steps = T if parts == 1 else cdiv(cdiv(T, parts), L * S) * L * S
    parts = cdiv(T, steps)
    R = tile // (BH * L) if parts == 1 else 1
    sizes = dict(H=H, R=R, L=L, S=S, BH=BH, num_warps=WARPS)
    return cdiv(B * parts, R) * cdiv(H, BH), parts, steps, sizes


def states_before_parts(
    a: Tensor, b: Tensor, h0: Tensor | None, parts: int, steps: int, BH: int, gru: bool, back: bool
) -> Tensor | None:
    """The state before each part, (B * parts, H) in float32; with one part h0."""
    if parts == 1:
        return h0
    B, T, H = a.shape
    sums, carries = (torch.empty(n, B * parts, H, dtype=torch.float32, device=a.device) for n in (2, 1))
    sizes = dict(L=min(TILE // BH, next_power_of_2(cdiv(steps, 8))), S=8, BH=BH, num_warps=WARPS)
    kind, PARTS = dict(H=H, GRU=gru, BACK=back), next_power_of_2(parts)
    sums_kernel[(B * parts * cdiv(H, BH),)](a, b, sums, B, T, parts, steps, **sizes, **kind)
    F = min(CARRIES // PARTS, next_power_of_2(H))
    grid, sizes = (B, cdiv(H, F)), dict(PARTS=PARTS, F=F, num_warps=8)
    carries_kernel[grid](sums, a, b, h0, carries, T, parts, steps, **sizes, **kind)
    return carries


def scan(a: Tensor, b: Tensor, h0: Tensor | None, h: Tensor, gru: bool) -> None:
    """Write the states h (B, T, H); all tensors are contiguous."""
    B, T, H = a.shape
    limits = device_limits(a.device)
    programs, parts, steps, sizes = scan_plan(B, T, H, a.itemsize, limits, False, gru)
    before = states_before_parts(a, b, h0, parts, steps, sizes["BH"], gru, False)
    scan_kernel[(programs,)](a, b, before, h, B, T, parts, steps, GRU=gru, **sizes)


def scan_back(
    dh: Tensor, a: Tensor, b: Tensor | None, h0: Tensor | None, h: Tensor,
    da: Tensor, db: Tensor, dh0: Tensor | None, gru: bool,
) -> None:  # fmt: skip
    """Write the gradients da, db (B, T, H) and, if there is one, dh0 (B, H); all tensors are contiguous."""
    B, T, H = a.shape
    limits = device_limits(a.device)
    programs, parts, steps, sizes = scan_plan(B, T, H, a.itemsize, limits, True, gru)
    before = states_before_parts(a, dh, None, parts, steps, sizes["BH"], gru, True)
    scan_grad_kernel[(programs,)](dh, a, b, h0, h, before, da, db, dh0, B, T, parts, steps, GRU=gru, **sizes)
