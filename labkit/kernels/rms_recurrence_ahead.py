"""rms_recurrence of narrow rows, and of few sequences at odd addresses: loads run ahead into registers.

The loop of recurrence.py loads ahead into shared memory. For that a row has to fill a warp, four bytes for
each lane, and to begin at an address that is divisible by four, better by sixteen.
"""

# mypy: disable-error-code="assignment, var-annotated"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.common import DeviceLimits, cdiv, initial_state, interpreted, next_power_of_2, offset64

NARROW_BYTES = 64
"""Rows of so many bytes share a warp; found by measuring on an H200, as are the numbers below."""
MAX_FEATURES = 512
"""The most features of few sequences. Wider ones were not measured."""
LANE_BYTES, LANE_NUMBERS = 8, 4
"""What a lane has of one step and tensor at most: bytes of narrow rows, numbers of wide ones."""
STEPS, GRAD_STEPS = 16, 8
"""Steps that are loaded ahead."""

# ---- kernels -----------------------------------------------------------------------------------------------
# a, b and h are (B, T, H). A block (R, BC) of one step has R = BM narrow sequences, or R times BC columns of
# one. Loads run U steps ahead, into tuples of U blocks, as in recurrence.py.


@triton.jit
def block_of(B, T, H: tl.constexpr, BM: tl.constexpr, R: tl.constexpr, BC: tl.constexpr):
    """Rows (BM, 1), columns n, (1, BC) or (R, BC), offsets of step 0, and what is inside, (R, BC).

    program_id(1) is 0, which the compiler does not know. If T is divisible by 16, so is the address of every
    16th row, at any H: the compiler would load all rows in the layout that is best for those.
    """
    m = (tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM))[:, None]
    n = tl.arange(0, BC)[None, :]
    if BM == 1:
        n = tl.arange(0, R)[:, None] * BC + n
    return m, n, (m * T + tl.program_id(1)) * H + n, (m < B) & (n < H)


@triton.jit
def load_step(p, at, t, H: tl.constexpr, there):
    """Step t of a block, (R, BC); 0 where nothing is there."""
    return tl.load(p + offset64(t, H) + at, there, other=0.0)


@triton.jit
def load_weight(weight, H: tl.constexpr, n):
    """The weight in the layout of the rows, which are aligned worse: (1, BC) or (R, BC) in float32."""
    return tl.load(weight + tl.program_id(1) * H + n, n < H, other=0.0).to(tl.float32)


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def over_features(x, BM: tl.constexpr):
    """What a lane has of one sequence, added up: (BM, BC)."""
    if BM == 1:
        x = tl.sum(x, 0)[None, :]
    return x


@triton.jit
def ahead_kernel(
    a, b, weight, h0, h, B, T, eps,
    H: tl.constexpr, BM: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    m, n, at, inside = block_of(B, T, H, BM, R, BC)
    w, state = load_weight(weight, H, n), initial_state(h0, m * H + n, inside)  # the state stays in float32
    there, coming_a, coming_b = inside, (), ()
    for u in tl.static_range(U):
        there = inside & (u < T)
        coming_a += (load_step(a, at, u, H, there),)
        coming_b += (load_step(b, at, u, H, there),)
    for first in range(0, T, U):
        now_a, now_b, coming_a, coming_b = coming_a, coming_b, (), ()
        for u in tl.static_range(U):
            t = first + u
            there = inside & (t + U < T)
            coming_a += (load_step(a, at, t + U, H, there),)
            coming_b += (load_step(b, at, t + U, H, there),)
            x = now_a[u].to(tl.float32) * state + now_b[u].to(tl.float32)  # u_t, (R, BC)
            square = tl.sum(over_features(x * x, BM), 1)[:, None]  # (BM, 1)
            state = w * x * tl.rsqrt(square * (1.0 / H) + eps)
            tl.store(h + offset64(t, H) + at, state, inside & (t < T))


@triton.jit
def ahead_grad_kernel(
    dh, a, b, weight, h0, h, da, db, parts, dh0, B, T, eps,
    H: tl.constexpr, BM: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Time in reverse. u is computed again: it cannot be had from h where a weight is zero."""
    m, n, at, inside = block_of(B, T, H, BM, R, BC)
    w, before = load_weight(weight, H, n), initial_state(h0, m * H + n, inside)
    carry, dw = tl.zeros([R, BC], tl.float32), tl.zeros([R, BC], tl.float32)
    there, coming_g, coming_a, coming_b, coming_h = inside, (), (), (), ()
    for u in tl.static_range(U):
        there = inside & (u < T)
        coming_g += (load_step(dh, at, T - 1 - u, H, there),)
        coming_a += (load_step(a, at, T - 1 - u, H, there),)
        coming_b += (load_step(b, at, T - 1 - u, H, there),)
        coming_h += (load_step(h, at, T - 2 - u, H, inside & (u < T - 1)),)
    for first in range(0, T, U):
        now_g, now_a, now_b, now_h = coming_g, coming_a, coming_b, coming_h
        coming_g, coming_a, coming_b, coming_h = (), (), (), ()
        for u in tl.static_range(U):
            t = T - 1 - first - u
            there = inside & (t >= U)
            coming_g += (load_step(dh, at, t - U, H, there),)
            coming_a += (load_step(a, at, t - U, H, there),)
            coming_b += (load_step(b, at, t - U, H, there),)
            coming_h += (load_step(h, at, t - U - 1, H, inside & (t > U)),)
            gate, g = now_a[u].to(tl.float32), now_g[u].to(tl.float32) + carry
            last = now_h[u].to(tl.float32)
            if h0 is not None:
                last = tl.where(t > 0, last, before)
            x = gate * last + now_b[u].to(tl.float32)  # u_t, (R, BC)
            square, along = over_features(x * x, BM), over_features(w * x * g, BM)
            if interpreted():
                square, along = tl.sum(square, 1), tl.sum(along, 1)
            else:  # with several warps both take one exchange between them, not two
                square, along = tl.reduce((square, along), 1, add_both)
            scale = tl.rsqrt(square[:, None] * (1.0 / H) + eps)  # (BM, 1)
            along = scale * scale * (along[:, None] * (1.0 / H))  # how much of it is along u
            du = scale * (w * g - x * along)
            there = inside & (t >= 0)
            tl.store(da + offset64(t, H) + at, du * last, there)
            tl.store(db + offset64(t, H) + at, du, there)
            dw += tl.where(t >= 0, g * (x * scale), 0.0)
            carry = tl.where(t >= 0, gate * du, carry)
    if BM > 1:
        dw = tl.sum(dw, 0)[None, :]
    tl.store(parts + tl.program_id(0).to(tl.int64) * H + n, dw, n < H)  # (programs, H)
    if dh0 is not None:
        tl.store(dh0 + m * H + n, carry, inside)


# ---- launches ----------------------------------------------------------------------------------------------


def ahead_pays(B: int, H: int, itemsize: int, limits: DeviceLimits) -> bool:
    """Whether rows are narrow, or sequences so few that each has a multiprocessor, and at odd addresses."""
    few = limits.multiprocessors >= B and H <= MAX_FEATURES
    return H * itemsize <= NARROW_BYTES or (few and H * itemsize % 16 > 0)


@cache
def ahead_plan(B: int, T: int, H: int, itemsize: int, most: int) -> tuple[int, dict[str, int]]:
    """Programs and sizes; loads run up to ``most`` steps ahead, but no further than there are steps."""
    row = H * itemsize
    vector = min(LANE_BYTES, row & -row) // itemsize  # what a lane can load at once wherever a row begins
    BM, warps = 1, 1
    if row <= NARROW_BYTES:
        BC = next_power_of_2(H)
        BM = max(1, min(32 * vector // BC, next_power_of_2(B)))
    else:
        while vector * cdiv(H, 32 * vector * warps) > LANE_NUMBERS:
            warps *= 2
        BC = 32 * vector * warps
    R = BM * next_power_of_2(cdiv(H, BC))
    steps = min(most, next_power_of_2(T))
    return cdiv(B, BM), dict(H=H, BM=BM, R=R, BC=BC, U=steps, num_warps=warps)


def ahead(a: Tensor, b: Tensor, weight: Tensor, h0: Tensor | None, h: Tensor, eps: float) -> None:
    """Write the states to h. All are contiguous, and none is empty."""
    B, T, H = a.shape
    programs, sizes = ahead_plan(B, T, H, a.itemsize, STEPS)
    ahead_kernel[(programs,)](a, b, weight, h0, h, B, T, eps, **sizes)


def ahead_back(
    dh: Tensor, a: Tensor, b: Tensor, weight: Tensor, h0: Tensor | None, h: Tensor,
    da: Tensor, db: Tensor, dh0: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Write the gradients to da, db and dh0; return the programs' parts of the weight's, (programs, H)."""
    B, T, H = a.shape
    programs, sizes = ahead_plan(B, T, H, a.itemsize, GRAD_STEPS)
    parts = torch.empty(programs, H, dtype=torch.float32, device=a.device)
    ahead_grad_kernel[(programs,)](dh, a, b, weight, h0, h, da, db, parts, dh0, B, T, eps, **sizes)
    return parts
