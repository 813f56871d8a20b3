"""linear_recurrence and min_gru for few or narrow sequences: a scan over time, in one pass that looks back.

Two steps make one: with h2 = a2 h1 + b2 and h1 = a1 h0 + b1 it is h2 = (a2 a1) h0 + (a2 b1 + b2). A tile
has a block of L segments of S steps each. Each lane goes through its own segment, a scan combines the
segments, and with the state before the block each lane goes through its segment again. So a whole tile is in
flight where a loop has a few steps.

Where there are enough sequences a program goes through all blocks of one, and loads the next while it
computes one. Else each program has a block, and must know the state before it.

The state before a block comes from the programs before it. Each writes at once what its block does to any
state, its (A, B) with h = A h0 + B. W blocks are a group; the last of a group writes its state too. A
program combines the blocks before it in its group, in their order, with the state before the group: so a
sequence waits once for each group, and the result does not depend on who was first. It waits for earlier
tickets only, and a ticket is taken by a program that runs already, so it cannot wait for ever; interpreted,
programs run in that order.

Products of gates overflow where states need not, and cancel; and a huge first state may keep states finite
where sums of inputs are not. So a block with a gate beyond [-1, 1], or NaN, or with a B that is not finite is
walked step by step from its true state, as the loop does it. It says so with an A of NaN and writes its
state, as the last of a group does. This is as right as the loop, and no faster.
"""

# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl

from labkit.kernels.common import initial_state

WARPS = 4
"""Of a program that waits for others."""
LANES: tl.constexpr = tl.constexpr(32 * WARPS)

# ---- words of 64 bits that other programs wait for ---------------------------------------------------------
# A word holds the bits of A and B, or of a state and zero, and is never -1, all ones: A is a number or the
# usual NaN. So -1 says that it was not written yet, and a word needs no flag and no order of memory beside
# it.


@triton.jit
def pack(low, high):
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    return low.to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def unpack(word):
    low = word.to(tl.int32).to(tl.float32, bitcast=True)
    return low, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def wait_for(words, number, MOST: tl.constexpr):
    """The first ``number`` of MOST words, once they are written, and zeros beyond: (MOST,).

    Each lane of the program has places of its own, if only empty ones. If lanes of a warp shared a word they
    might read it at different times: some would leave the loop, and the others wait for them in ``tl.max``
    for ever.
    """
    at = tl.arange(0, MOST if MOST > LANES else LANES)
    word = tl.load(words + at, at < number, other=0, volatile=True)
    while tl.max((word == -1).to(tl.int32)) == 1:
        word = tl.load(words + at, at < number, other=0, volatile=True)
    if MOST < LANES:
        word = tl.sum(tl.reshape(word, (LANES // MOST, MOST)), 0)
    return word


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
def place(words, B, T, H: tl.constexpr, R: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BH: tl.constexpr,
          W: tl.constexpr):  # fmt: skip
    """Chain (a sequence's BH features), block, rows (R, 1, 1), first steps (1, L, 1), features (1, 1, BH).

    And which lanes load and which store, (R, 1, BH). The last chain begins early enough to have BH features:
    so no load needs a mask, and it stores what the one before does not.
    """
    widths: tl.constexpr = (H + BH - 1) // BH
    if W == 0:
        chain, block = tl.program_id(0), 0
    else:
        ticket, chains = (tl.atomic_add(words, 1, sem="relaxed") + 1).to(tl.int32), B * widths  # R is 1
        chain, block = ticket % chains, ticket // chains
    row = (chain // widths * R + tl.arange(0, R)).to(tl.int64)[:, None, None]
    t = (block * (L * S) + tl.arange(0, L) * S)[None, :, None]
    start = chain % widths * BH
    n = (tl.minimum(start, H - BH if H > BH else 0) + tl.arange(0, BH))[None, None, :]
    inside = tl.full([R, 1, BH], True, tl.int1)
    if R > 1:
        inside &= row < B
    if H < BH:
        inside &= n < H
    mine = inside
    if H > BH and H % BH != 0:
        mine &= n >= start
    return chain, block, row, t, n, inside, mine


@triton.jit
def state_before_block(states, sums, first, block, BH: tl.constexpr, W: tl.constexpr):
    """The state before a block, (1, 1, BH); ``first`` is that before all blocks.

    states, sums: where the chain has its states and its (A, B), words (blocks, BH) each.
    """
    known = block - 1  # whose state is waited for: where each block is a group, that of the one before
    A, B = tl.full([BH], 1.0, tl.float32), tl.zeros([BH], tl.float32)
    if W > 1:
        start = block // W * W
        A, B = unpack(tl.reshape(wait_for(sums + start * BH, (block - start) * BH, W * BH), (W, BH)))
        j = tl.arange(0, W)[:, None]
        walked = tl.max(tl.where(A != A, j, -1))  # the last one that was walked, or -1
        A, B = tl.where((j > walked) & (start + j < block), A, 1.0), tl.where(j > walked, B, 0.0)
        A, B = tl.associative_scan((A, B), 0, two_blocks)
        A, B = tl.sum(tl.where(j == W - 1, A, 0.0), 0), tl.sum(tl.where(j == W - 1, B, 0.0), 0)
        known = start + walked  # its state is written; that before the group if none was walked
    state, _ = unpack(wait_for(states + known * BH, tl.where(known >= 0, BH, 0), BH))
    state = tl.where(known >= 0, state, tl.reshape(first, (BH,)))
    return (A * state + B)[None, None, :]


@triton.jit
def load_steps(p, at, inside, t, T, full, stride: tl.constexpr, S: tl.constexpr, other: tl.constexpr):
    """S tiles: ``at`` is where step t is, and the next one a stride further on; ``other`` from step T on.

    full: no lane has a step from T on, so that no load needs a mask for it.
    """
    if full:
        steps = ()
        for s in tl.static_range(S):
            steps += (tl.load(p + at + s * stride, inside, other=other),)
    else:
        steps = ()
        for s in tl.static_range(S):
            steps += (tl.load(p + at + s * stride, inside & (t + s < T), other=other),)
    return steps


@triton.jit
def in_inputs(at, number, H: tl.constexpr, STRIDE: tl.constexpr):
    """Where in a and b, whose rows begin STRIDE apart, row ``number`` has what is ``at`` in the others."""
    if STRIDE == H:
        return at
    else:
        return at + number.to(tl.int64) * (STRIDE - H)


@triton.jit
def load_both(a, b, at, number, inside, t, T, full, H: tl.constexpr, STRIDE: tl.constexpr, S: tl.constexpr):
    """S tiles of a and of b; zeros from step T on. number: that of the row of step t."""
    source = in_inputs(at, number, H, STRIDE)
    now_a = load_steps(a, source, inside, t, T, full, STRIDE, S, 0.0)
    return now_a, load_steps(b, source, inside, t, T, full, STRIDE, S, 0.0)


@triton.jit
def last_segment(x, L: tl.constexpr):
    """Of a tile (R, L, BH) what belongs to its last segment, (R, 1, BH)."""
    segment = tl.arange(0, L)[None, :, None]
    return tl.sum(tl.where(segment == L - 1, x, 0.0), 1, keep_dims=True)


@triton.jit
def run_steps(run, now_a, now_b, S: tl.constexpr, GRU: tl.constexpr, BACK: tl.constexpr):
    """(A, B) of steps and of S more, and the largest gate of all of them, in absolute value, or NaN.

    run: the same of the steps without the S more.
    """
    A, B, largest = run
    for s in tl.static_range(S):
        gate, value = step(now_a[s], now_b[s], GRU, BACK)
        A, B = A * gate, gate * B + value
        largest = tl.maximum(largest, tl.abs(gate), propagate_nan=tl.PropagateNan.ALL)
    return A, B, largest


@triton.jit
def states_before_segments(words, first, run, chain, block, blocks, chains, W: tl.constexpr):
    """The state before the block, (R, 1, BH), before each segment, (R, L, BH), and whether it must be walked.

    first: the state before all blocks, (R, 1, BH); run: what ``run_steps`` found of each segment.
    """
    A, B, largest = run
    R: tl.constexpr = A.shape[0]
    L: tl.constexpr = A.shape[1]
    BH: tl.constexpr = A.shape[2]
    A = tl.where(largest <= 1.0, A, float("nan"))
    one, zero = tl.full([R, L, BH], 1.0, tl.float32), tl.zeros([R, L, BH], tl.float32)
    A, B, C, D = tl.associative_scan((A, B, one, zero), 1, two_runs)
    A = tl.where(tl.abs(B) < float("inf"), A, float("nan"))
    walks = tl.max((A != A).to(tl.int32)) == 1
    if W > 0:  # there are several blocks, and R is 1
        segment, n = tl.arange(0, L)[None, :, None], tl.arange(0, BH)[None, None, :]
        sums = words + 1 + chain.to(tl.int64) * blocks * BH  # (chains, blocks, BH), then as many states
        states = sums + chains.to(tl.int64) * blocks * BH
        last, at = (segment == L - 1) & (n >= 0) & (block + 1 < blocks), block * BH + n + segment * 0
        if W > 1:
            tl.atomic_xchg(sums + at, pack(A, B), mask=last, sem="relaxed")
        first = state_before_block(states, sums, first, block, BH, W)
        if (block % W == W - 1) & (walks == 0):
            tl.atomic_xchg(states + at, pack(A * first + B, zero), mask=last, sem="relaxed")
    return first, C * first + D, walks


@triton.jit
def tell_walked(words, state, chain, block, blocks, chains, BH: tl.constexpr):
    """Write the state (1, 1, BH) after a block that was walked."""
    n = tl.arange(0, BH)[None, None, :]
    states = words + 1 + (chains + chain).to(tl.int64) * blocks * BH
    told = pack(state, tl.zeros([1, 1, BH], tl.float32))
    tl.atomic_xchg(states + block * BH + n, told, mask=(n >= 0) & (block + 1 < blocks), sem="relaxed")


# ---- forward -----------------------------------------------------------------------------------------------


@triton.jit
def write_states(
    h, at, inside, t, T, full: tl.constexpr, H: tl.constexpr, now_a, now_b, state,
    S: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    """Write the states of S steps from step t on, which is ``at``, and return the last."""
    for s in tl.static_range(S):
        gate, value = step(now_a[s], now_b[s], GRU, False)
        state = gate * state + value
        tl.store(h + at + s * H, state, inside if full else inside & (t + s < T))
    return state


@triton.jit
def walk(
    a, b, h, row, n, inside, block, long, T, H: tl.constexpr, STRIDE: tl.constexpr, state,
    S: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    """Write the states (R, 1, BH) of a block, ``long`` steps, one by one, and return the last."""
    for u in range(block * long, tl.minimum(block * long + long, T), S):
        at = (row * T + u) * H + n
        now_a, now_b = load_both(a, b, at, row * T + u, inside, u, T, False, H, STRIDE, S)
        state = write_states(h, at, inside, u, T, False, H, now_a, now_b, state, S, GRU)
    return state


@triton.jit
def scan_kernel(
    a, b, h0, h, words, B, T, blocks,
    H: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr, L: tl.constexpr, S: tl.constexpr,
    BH: tl.constexpr, W: tl.constexpr, U: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    chain, block, row, t, n, inside, mine = place(words, B, T, H, R, L, S, BH, W)
    at = row * T * H + t.to(tl.int64) * H + n  # (R, L, BH)
    one, zero = tl.full([R, L, BH], 1.0, tl.float32), tl.zeros([R, L, BH], tl.float32)
    state = initial_state(h0, row * H + n, inside)
    chains = B * ((H + BH - 1) // BH)
    if W == 0:  # a program has a whole chain, and loads the next block before it computes one
        now_a, now_b = load_both(a, b, at, row * T + t, inside, t, T, False, H, STRIDE, S)
        for block in range(0, blocks):
            soon, later = t + L * S, at + L * S * H
            number = row * T + soon
            next_a, next_b = load_both(a, b, later, number, inside, soon, T, False, H, STRIDE, S)
            run = run_steps((one, zero, zero), now_a, now_b, S, GRU, False)
            _, before, walks = states_before_segments(words, state, run, chain, block, blocks, chains, W)
            if walks:
                state = walk(a, b, h, row, n, mine, block, L * S, T, H, STRIDE, state, S, GRU)
            else:
                after = write_states(h, at, mine, t, T, False, H, now_a, now_b, before, S, GRU)
                state = last_segment(after, L)
            now_a, now_b, t, at = next_a, next_b, soon, later
    else:
        full = (block + 1) * (L * S) <= T
        run = (one, zero, zero)
        for s in range(0, S, U):
            here, u = at + s * H, t + s
            now_a, now_b = load_both(a, b, here, row * T + u, inside, u, T, full, H, STRIDE, U)
            run = run_steps(run, now_a, now_b, U, GRU, False)
        state, before, walks = states_before_segments(words, state, run, chain, block, blocks, chains, W)
        if walks:
            state = walk(a, b, h, row, n, mine, block, L * S, T, H, STRIDE, state, U, GRU)
            tell_walked(words, state, chain, block, blocks, chains, BH)
        else:
            for s in range(0, S, U):  # loaded again: they need not stay in registers
                here, u = at + s * H, t + s
                now_a, now_b = load_both(a, b, here, row * T + u, inside, u, T, full, H, STRIDE, U)
                if full:
                    before = write_states(h, here, mine, u, T, True, H, now_a, now_b, before, U, GRU)
                else:
                    before = write_states(h, here, mine, u, T, False, H, now_a, now_b, before, U, GRU)


# ---- backward ----------------------------------------------------------------------------------------------
# What step t gives back, c_t = gate_t (dh_t + c_{t+1}), is a recurrence in reverse: t counts from the end.
# Beyond the first step a gate of 1 leaves it as it is.


@triton.jit
def load_back(
    dh, a, h, b, at, row, inside, t, T, full,
    H: tl.constexpr, STRIDE: tl.constexpr, S: tl.constexpr, GRU: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """S tiles each of a, of dh, of the states before and of b, which a GRU alone reads; ``at`` is step t.

    SOME: of a and dh alone.
    """
    source = in_inputs(at, row * T + T - 1 - t, H, STRIDE)
    now_a = load_steps(a, source, inside, t, T, full, -STRIDE, S, 0.0 if GRU else 1.0)
    now_g = load_steps(dh, at, inside, t, T, full, -H, S, 0.0)
    now_h, now_b = now_g, now_g
    if not SOME:
        now_h = load_steps(h, at - H, inside, t, T - 1, full, -H, S, 0.0)
        if GRU:
            now_b = load_steps(b, source, inside, t, T, full, -STRIDE, S, 0.0)
    return now_a, now_g, now_h, now_b


@triton.jit
def write_grads(
    da, db, at, inside, t, T, full: tl.constexpr, H: tl.constexpr, now, before, carry,
    S: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    """Write the gradients of S steps, and return what the last gives back.

    now: S tiles each of a, of dh, of the states before and of b, which a GRU alone reads.
    """
    now_a, now_g, now_h, now_b = now
    for s in tl.static_range(S):
        there, last = inside if full else inside & (t + s < T), now_h[s].to(tl.float32)
        if not full:
            last = tl.where(t + s < T - 1, last, before)
        to_a, to_b = da + (at - s * H), db + (at - s * H)
        gate, g = now_a[s].to(tl.float32), now_g[s].to(tl.float32) + carry
        if GRU:
            grad_a, grad_b, carry = g * (now_b[s].to(tl.float32) - last), g * gate, (1.0 - gate) * g
        else:
            grad_a, grad_b, carry = g * last, g, gate * g
        tl.store(to_a, grad_a, there)
        tl.store(to_b, grad_b, there)
    return carry


@triton.jit
def walk_back(
    dh, a, b, h, da, db, row, n, inside, block, long, T, H: tl.constexpr, STRIDE: tl.constexpr, before, carry,
    S: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    """The same of a block, ``long`` steps, one by one."""
    for u in range(block * long, tl.minimum(block * long + long, T), S):
        at = (row * T + T - 1 - u) * H + n
        now = load_back(dh, a, h, b, at, row, inside, u, T, False, H, STRIDE, S, GRU, False)
        carry = write_grads(da, db, at, inside, u, T, False, H, now, before, carry, S, GRU)
    return carry


@triton.jit
def scan_grad_kernel(
    dh, a, b, h0, h, da, db, dh0, words, B, T, blocks,
    H: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr, L: tl.constexpr, S: tl.constexpr,
    BH: tl.constexpr, W: tl.constexpr, U: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    chain, block, row, t, n, inside, mine = place(words, B, T, H, R, L, S, BH, W)
    at = row * T * H + (T - 1 - t).to(tl.int64) * H + n  # (R, L, BH)
    one, zero = tl.full([R, L, BH], 1.0, tl.float32), tl.zeros([R, L, BH], tl.float32)
    carry = tl.zeros([R, 1, BH], tl.float32)
    chains = B * ((H + BH - 1) // BH)
    before = initial_state(h0, row * H + n, inside)
    if W == 0:
        now = load_back(dh, a, h, b, at, row, inside, t, T, False, H, STRIDE, S, GRU, False)
        for block in range(0, blocks):
            soon, later = t + L * S, at - L * S * H
            coming = load_back(dh, a, h, b, later, row, inside, soon, T, False, H, STRIDE, S, GRU, False)
            run = run_steps((one, zero, zero), now[0], now[1], S, GRU, True)
            _, carries, walks = states_before_segments(words, carry, run, chain, block, blocks, chains, W)
            if walks:
                carry = walk_back(
                    dh, a, b, h, da, db, row, n, mine, block, L * S, T, H, STRIDE, before, carry, S, GRU
                )
            else:
                after = write_grads(da, db, at, mine, t, T, False, H, now, before, carries, S, GRU)
                carry = last_segment(after, L)
            now, t, at = coming, soon, later
    else:
        full = (block + 1) * (L * S) < T  # and not the first step, which has no step before
        run = (one, zero, zero)
        for s in range(0, S, U):
            here, u = at - s * H, t + s
            now = load_back(dh, a, h, b, here, row, inside, u, T, full, H, STRIDE, U, GRU, True)
            run = run_steps(run, now[0], now[1], U, GRU, True)
        carry, carries, walks = states_before_segments(words, carry, run, chain, block, blocks, chains, W)
        if walks:
            carry = walk_back(
                dh, a, b, h, da, db, row, n, mine, block, L * S, T, H, STRIDE, before, carry, U, GRU
            )
            tell_walked(words, carry, chain, block, blocks, chains, BH)
        else:
            for s in range(0, S, U):
                here, u = at - s * H, t + s
                now = load_back(dh, a, h, b, here, row, inside, u, T, full, H, STRIDE, U, GRU, False)
                if full:
                    carries = write_grads(da, db, here, mine, u, T, True, H, now, before, carries, U, GRU)
                else:
                    carries = write_grads(da, db, here, mine, u, T, False, H, now, before, carries, U, GRU)
            if full == 0:
                carry = last_segment(carries, L)
    if dh0 is not None:
        tl.store(dh0 + row * H + n, carry, mine & ((block + 1 == blocks) | (W == 0)))
