"""A recurrence with RMSNorm at every step.

A program has one sequence, and each step needs a sum over all features: up to 512 are one warp's, so that the
sum is five shuffles without a barrier. Its loads run ahead into shared memory. For that a row has to fill a
warp, four bytes for each lane, and to begin at an address that is divisible by four, better by sixteen.
Narrow rows, and few sequences at odd addresses, are loaded ahead into registers instead.
"""

# mypy: disable-error-code="assignment, var-annotated"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.common import (
    DeviceLimits,
    cdiv,
    check_eps,
    check_tensor,
    device_limits,
    differentiable,
    empty_contiguous,
    initial_state,
    interpreted,
    needs_grad,
    next_power_of_2,
    offset64,
    operator,
    padded_columns,
    promote,
)
from labkit.kernels.recurrence import check_sequences
from labkit.kernels.rms_norm import stages_that_fit, sum_partials

MAX_WIDTH = 4096
"""The most features: a program holds whole states in registers."""
BYTES_IN_FLIGHT = 48 * 1024
"""Bytes in flight per multiprocessor that saturate memory; measured on an H200, as are the numbers below."""
NARROW_BYTES = 64
"""Rows of so many bytes share a warp."""
MAX_FEATURES = 512
"""The most features of few sequences. Wider ones were not measured."""
LANE_BYTES, LANE_NUMBERS = 8, 4
"""What a lane has of one step and tensor at most: bytes of narrow rows, numbers of wide ones."""
STEPS, GRAD_STEPS = 16, 8
"""Steps that are loaded ahead."""

# ---- kernels with STAGES - 1 steps ahead in shared memory --------------------------------------------------
# a, b and h are (B, T, H). A program has one sequence.


@triton.jit
def rms_recurrence_kernel(
    a, b, weight, h0, h, T, eps, H: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr
):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BH)
    inside = n < H
    w = tl.load(weight + n, inside, other=0.0).to(tl.float32)  # (BH,)
    state = initial_state(h0, row * H + n, inside)
    for t in tl.range(0, T, num_stages=STAGES):
        now = (row * T + t) * H
        gate = tl.load(a + now + n, inside, other=0.0).to(tl.float32)  # (BH,)
        u = gate * state + tl.load(b + now + n, inside, other=0.0).to(tl.float32)
        state = w * u * tl.rsqrt(tl.sum(u * u, 0) / H + eps)  # stays in float32
        tl.store(h + now + n, state, inside)


@triton.jit
def rms_recurrence_grad_kernel(
    dh, a, b, weight, h0, h, da, db, parts, dh0, T, eps,
    H: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Time in reverse. u is computed again: it cannot be had from h where a weight is zero."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BH)
    inside, carry, dw = n < H, tl.zeros([BH], tl.float32), tl.zeros([BH], tl.float32)
    w = tl.load(weight + n, inside, other=0.0).to(tl.float32)  # (BH,)
    before = initial_state(h0, row * H + n, inside)
    for later in tl.range(0, T, num_stages=STAGES):
        t = T - 1 - later
        now = (row * T + t) * H
        gate = tl.load(a + now + n, inside, other=0.0).to(tl.float32)
        last = tl.load(h + now - H + n, inside & (t > 0), other=0.0).to(tl.float32)
        last = tl.where(t > 0, last, before)
        u = gate * last + tl.load(b + now + n, inside, other=0.0).to(tl.float32)
        g = tl.load(dh + now + n, inside, other=0.0).to(tl.float32) + carry
        wg = w * g
        # neither sum waits for the other: the chain of a step has the shuffles of one
        scale = tl.rsqrt(tl.sum(u * u, 0) / H + eps)  # computing it again is cheaper than a load
        along = scale * (tl.sum(wg * u, 0) / H)  # how much of it is along u
        dw += g * (u * scale)
        du = scale * (wg - u * (scale * along))
        tl.store(da + now + n, du * last, inside)
        tl.store(db + now + n, du, inside)
        carry = gate * du
    tl.store(parts + row * H + n, dw, inside)  # (B, H): each sequence's part of the weight's gradient
    if dh0 is not None:
        tl.store(dh0 + row * H + n, carry, inside)


# ---- kernels with U steps ahead in registers ---------------------------------------------------------------
# A block (R, BC) of one step has R = BM narrow sequences, or R times BC columns of one. Loads run into tuples
# of U blocks, as in recurrence.py.


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


@cache
def rms_recurrence_plan(B: int, H: int, itemsize: int, tensors: int, limits: DeviceLimits) -> dict[str, int]:
    """Sizes of a kernel that loads so many tensors (B, T, H) at each step: 2 forward, 4 backward."""
    BH = padded_columns(H, itemsize)
    wanted = cdiv(BYTES_IN_FLIGHT * limits.multiprocessors, B * tensors * H * itemsize)
    wanted = min(24, max(4 if tensors == 2 else 3, wanted))
    stages = min(wanted, stages_that_fit(tensors * BH * itemsize, limits))
    return dict(H=H, BH=BH, STAGES=stages, num_warps=max(1, BH // 512))


@operator(fake=lambda a, b, weight, h0, eps: empty_contiguous(a))
def rms_recurrence_forward(a: Tensor, b: Tensor, weight: Tensor, h0: Tensor | None, eps: float) -> Tensor:
    a, b, weight = a.contiguous(), b.contiguous(), weight.contiguous()
    h0 = None if h0 is None else h0.contiguous()
    (B, T, H), h, limits = a.shape, torch.empty_like(a), device_limits(a.device)
    if h.numel() and ahead_pays(B, H, a.itemsize, limits):
        ahead(a, b, weight, h0, h, eps)
    elif h.numel():
        sizes = rms_recurrence_plan(B, H, a.itemsize, 2, limits)
        rms_recurrence_kernel[(B,)](a, b, weight, h0, h, T, eps, **sizes)
    return h


@operator(fake=lambda dh, *inputs: [empty_contiguous(t) for t in inputs[:4] if t is not None])
def rms_recurrence_backward(
    dh: Tensor, a: Tensor, b: Tensor, weight: Tensor, h0: Tensor | None, h: Tensor, eps: float
) -> list[Tensor]:
    """da, db, dweight, and dh0 if there is an h0."""
    dh, a, b, weight = dh.contiguous(), a.contiguous(), b.contiguous(), weight.contiguous()
    h0 = None if h0 is None else h0.contiguous()
    (B, T, H), da, db = a.shape, torch.empty_like(a), torch.empty_like(b)
    dh0, limits = None if h0 is None else torch.empty_like(h0), device_limits(a.device)
    if a.numel() and ahead_pays(B, H, a.itemsize, limits):
        dweight = sum_partials(ahead_back(dh, a, b, weight, h0, h, da, db, dh0, eps), weight)
    elif a.numel():
        parts = torch.empty(B, H, dtype=torch.float32, device=a.device)
        sizes = rms_recurrence_plan(B, H, a.itemsize, 4, limits)
        rms_recurrence_grad_kernel[(B,)](dh, a, b, weight, h0, h, da, db, parts, dh0, T, eps, **sizes)
        dweight = sum_partials(parts, weight)
    else:
        dweight = torch.zeros_like(weight)
        if dh0 is not None:
            dh0.zero_()
    return [da, db, dweight] if dh0 is None else [da, db, dweight, dh0]


RMSRecurrenceFunction = differentiable(
    rms_recurrence_forward, rms_recurrence_backward, lambda a, b, weight, h0, eps, h: (a, b, weight, h0, h)
)


def rms_recurrence(
    a: Tensor, b: Tensor, weight: Tensor, h0: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """u_t = a_t * h_{t-1} + b_t, h_t = weight * u_t / sqrt(mean(u_t**2) + eps) for t = 0 to T-1.

    Args:
        a, b: (B, T, H), H from 1 to 4096, T * H below 2**31; float32, float16 or bfloat16, any strides, the
            same dtype for both. The mean is over H.
        weight: (H,).
        h0: (B, H), the state before the first step; zeros where it is left out.
        eps: added to the mean square.

    Returns:
        The states h (B, T, H), contiguous, of a's dtype; the running state is float32, and each is rounded
        once. Inside torch.autocast the dtypes may differ: nothing is cast down, and the states have the
        widest.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    In reverse, with s_t = 1 / sqrt(mean(u_t**2) + eps) and g_t = dh_t + a_{t+1} * du_{t+1}:
    du_t = s_t * (weight * g_t - u_t * s_t**2 * mean(weight * g_t * u_t)), da_t = du_t * h_{t-1}, db_t = du_t,
    dh0 = a_0 * du_0, and dweight is the sum over sequences and steps of g_t * u_t * s_t, in a fixed order.
    The backward reads the rounded states. The norm is that of https://arxiv.org/abs/1910.07467.
    """
    check_sequences("a", a, "b", b, h0)
    check_tensor("weight", weight, (a.shape[2],), like=a)
    if not 0 < len(weight) <= MAX_WIDTH:
        raise ValueError(f"weight: has {len(weight)} columns, a program holds 1 to {MAX_WIDTH}")
    check_eps(eps)
    a, b, weight, h0 = promote(a, b, weight, h0)
    call = RMSRecurrenceFunction.apply if needs_grad(a, b, weight, h0) else rms_recurrence_forward
    return call(a, b, weight, h0, eps)
