"""Recurrences along time: h_t = a_t * h_{t-1} + b_t, the minimal GRU, and one with RMSNorm at every step."""

# mypy: disable-error-code="assignment, var-annotated"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.common import (
    DeviceLimits,
    autocast,
    cdiv,
    check_tensor,
    device_limits,
    differentiable,
    empty_contiguous,
    initial_state,
    needs_grad,
    next_power_of_2,
    operator,
    padded_columns,
)
from labkit.kernels.recurrence_scan import scan, scan_back, scan_pays
from labkit.kernels.rms_norm import check_width, stages_that_fit, sum_partials
from labkit.kernels.rms_recurrence_ahead import ahead, ahead_back, ahead_pays

MAX_WIDTH = 4096
"""The most features of rms_recurrence: a program holds whole states in registers."""
BYTES_IN_FLIGHT = 48 * 1024
"""Bytes in flight per multiprocessor that saturate memory; found by measuring on an H200."""

# ---- arguments ---------------------------------------------------------------------------------------------


def check_sequences(first: str, a: Tensor, second: str, b: Tensor, h0: Tensor | None) -> None:
    """Raise a ValueError that names the argument unless a and b are (B, T, H) and h0 is (B, H) or None."""
    check_tensor(first, a, (None, None, None))
    check_tensor(second, b, tuple(a.shape), like=a)
    if a.shape[1] * a.shape[2] >= 2**31 - 32:  # offsets are 32-bit, of steps up to 24 ahead, too
        raise ValueError(f"{first}: a sequence of {a.shape[1]} x {a.shape[2]} has 2**31 numbers or nearly so")
    if h0 is not None:
        check_tensor("h0", h0, (a.shape[0], a.shape[2]), like=a)


# ---- linear_recurrence and min_gru: kernels ----------------------------------------------------------------
# a, b and h are (B, T, H). A program goes through BH features of one sequence step by step; few or narrow
# sequences are scanned instead (recurrence_scan.py).
# Loads run U steps ahead, into tuples of U blocks (BH,). A step begins with the loads for the step U further
# on, before its own store, because a compiler may not move a load over a store.


@triton.jit
def load_step(p, t, T, H: tl.constexpr, n):
    """Columns n of the sequence p at step t, (BH,); 0 outside of its T steps and H columns."""
    return tl.load(p + t * H + n, (n < H) & (t >= 0) & (t < T), other=0.0)


@triton.jit
def states_kernel(a, b, h0, h, T, H: tl.constexpr, BH: tl.constexpr, U: tl.constexpr, GRU: tl.constexpr):
    blocks: tl.constexpr = (H + BH - 1) // BH
    row, n = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0) % blocks * BH + tl.arange(0, BH)
    start, state = row * T * H, initial_state(h0, row * H + n, n < H)  # the state (BH,) stays in float32
    coming_a, coming_b = (), ()
    for u in tl.static_range(U):
        coming_a += (load_step(a + start, u, T, H, n),)
        coming_b += (load_step(b + start, u, T, H, n),)
    for first in range(0, T, U):
        now_a, now_b, coming_a, coming_b = coming_a, coming_b, (), ()
        for u in tl.static_range(U):
            t = first + u
            coming_a += (load_step(a + start, t + U, T, H, n),)  # U steps ahead, before this step's store
            coming_b += (load_step(b + start, t + U, T, H, n),)
            gate, value = now_a[u].to(tl.float32), now_b[u].to(tl.float32)
            state = (1.0 - gate) * state + gate * value if GRU else gate * state + value
            tl.store(h + start + t * H + n, state, (n < H) & (t < T))


@triton.jit
def states_grad_kernel(
    dh, a, b, h0, h, da, db, dh0, T,
    H: tl.constexpr, BH: tl.constexpr, U: tl.constexpr, GRU: tl.constexpr,
):  # fmt: skip
    """Time in reverse: g_t = dh_t + a_{t+1} g_{t+1}, with 1 - a for a GRU, which alone reads b."""
    blocks: tl.constexpr = (H + BH - 1) // BH
    row, n = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0) % blocks * BH + tl.arange(0, BH)
    start, carry = row * T * H, tl.zeros([BH], tl.float32)  # carry: what comes back from step t+1
    before = initial_state(h0, row * H + n, n < H)
    coming_g, coming_a, coming_b, coming_h = (), (), (), ()
    for u in tl.static_range(U):
        coming_g += (load_step(dh + start, T - 1 - u, T, H, n),)
        coming_a += (load_step(a + start, T - 1 - u, T, H, n),)
        coming_h += (load_step(h + start, T - 2 - u, T, H, n),)
        if GRU:
            coming_b += (load_step(b + start, T - 1 - u, T, H, n),)
    for first in range(0, T, U):
        now_g, now_a, now_b, now_h = coming_g, coming_a, coming_b, coming_h
        coming_g, coming_a, coming_b, coming_h = (), (), (), ()
        for u in tl.static_range(U):
            t = T - 1 - first - u
            there = (n < H) & (t >= 0)
            coming_g += (load_step(dh + start, t - U, T, H, n),)
            coming_a += (load_step(a + start, t - U, T, H, n),)
            coming_h += (load_step(h + start, t - U - 1, T, H, n),)
            gate, g = now_a[u].to(tl.float32), now_g[u].to(tl.float32) + carry
            last = tl.where(t > 0, now_h[u].to(tl.float32), before)
            if GRU:
                coming_b += (load_step(b + start, t - U, T, H, n),)
                tl.store(da + start + t * H + n, g * (now_b[u].to(tl.float32) - last), there)
                tl.store(db + start + t * H + n, g * gate, there)
            else:
                tl.store(da + start + t * H + n, g * last, there)
                tl.store(db + start + t * H + n, g, there)
            carry = tl.where(t >= 0, (1.0 - gate if GRU else gate) * g, carry)
    if dh0 is not None:
        tl.store(dh0 + row * H + n, carry, n < H)


# ---- linear_recurrence and min_gru: launches; sizes were found by measuring on an H200 ---------------------


@cache
def recurrence_plan(
    B: int, T: int, H: int, itemsize: int, most: int, row_bytes: int = 512
) -> tuple[tuple[int], dict[str, int]]:
    """Grid and sizes for programs of ``row_bytes`` of a step at most.

    Loads run up to ``most`` steps ahead, but no further than there are steps.
    """
    BH = min(row_bytes // itemsize, padded_columns(H, itemsize))
    steps = min(most, next_power_of_2(T))
    warps = 2 if itemsize == 4 and BH > 64 else 1  # eight or sixteen bytes a lane
    return (B * cdiv(H, BH),), dict(H=H, BH=BH, U=steps, num_warps=warps)


@operator(fake=lambda a, b, h0, gru: empty_contiguous(a))
def recurrence_forward(a: Tensor, b: Tensor, h0: Tensor | None, gru: bool) -> Tensor:
    a, b, h0 = a.contiguous(), b.contiguous(), None if h0 is None else h0.contiguous()
    (B, T, H), h = a.shape, torch.empty_like(a)
    if h.numel() and scan_pays(B, T, H, a.itemsize, 2 * 16, device_limits(a.device)):
        scan(a, b, h0, h, gru)
    elif h.numel():
        row_bytes = 128 if H * a.itemsize % 4 else 512  # each number of an odd row takes a register
        grid, sizes = recurrence_plan(B, T, H, a.itemsize, 16, row_bytes)
        states_kernel[grid](a, b, h0, h, T, GRU=gru, **sizes)
    return h


@operator(fake=lambda dh, a, b, h0, h, gru: [empty_contiguous(t) for t in (a, a, h0) if t is not None])
def recurrence_backward(
    dh: Tensor, a: Tensor, b: Tensor | None, h0: Tensor | None, h: Tensor, gru: bool
) -> list[Tensor]:
    """da, db, and dh0 if there is an h0; b is None unless ``gru``."""
    dh, a = dh.contiguous(), a.contiguous()
    b, h0 = (None if t is None else t.contiguous() for t in (b, h0))
    (B, T, H), da, db = a.shape, torch.empty_like(a), torch.empty_like(a)
    dh0 = None if h0 is None else torch.empty_like(h0)
    if a.numel() and scan_pays(B, T, H, a.itemsize, (3 + gru) * 8, device_limits(a.device)):
        scan_back(dh, a, b, h0, h, da, db, dh0, gru)
    elif a.numel():
        row_bytes = 256 if H * a.itemsize % 16 else 512
        grid, sizes = recurrence_plan(B, T, H, a.itemsize, 8, row_bytes)
        states_grad_kernel[grid](dh, a, b, h0, h, da, db, dh0, T, GRU=gru, **sizes)
    elif dh0 is not None:
        dh0.zero_()  # without steps no kernel is launched
    return [da, db] if dh0 is None else [da, db, dh0]


RecurrenceFunction = differentiable(
    recurrence_forward, recurrence_backward, lambda a, b, h0, gru, h: (a, b if gru else None, h0, h)
)


def linear_recurrence(a: Tensor, b: Tensor, h0: Tensor | None = None) -> Tensor:
    """h_t = a_t * h_{t-1} + b_t for t = 0 to T-1, feature by feature.

    Args:
        a, b: (B, T, H), T * H below 2**31; float32, float16 or bfloat16, any strides, the same for both.
        h0: (B, H), the state before the first step; zeros where it is left out.

    Returns:
        The states h (B, T, H), contiguous, of a's dtype; the running state is float32, and each is rounded
        once.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    In reverse, g_t = dh_t + a_{t+1} * g_{t+1}: da_t = g_t * h_{t-1}, db_t = g_t, dh0 = a_0 * g_0. Cells of
    this form are collected in https://arxiv.org/abs/2410.01201.
    """
    check_sequences("a", a, "b", b, h0)
    a, b, h0 = autocast(a, b, h0)
    call = RecurrenceFunction.apply if needs_grad(a, b, h0) else recurrence_forward
    return call(a, b, h0, False)


def min_gru(z: Tensor, candidate: Tensor, h0: Tensor | None = None) -> Tensor:
    """h_t = (1 - z_t) * h_{t-1} + z_t * candidate_t for t = 0 to T-1, feature by feature.

    Args:
        z, candidate: (B, T, H), T * H below 2**31; float32, float16 or bfloat16, any strides, the same for
            both. z is meant to lie between 0 and 1.
        h0: (B, H), the state before the first step; zeros where it is left out.

    Returns:
        The states h (B, T, H), contiguous, of z's dtype; the running state is float32, and each is rounded
        once.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    In reverse, g_t = dh_t + (1 - z_{t+1}) * g_{t+1}: dz_t = g_t * (candidate_t - h_{t-1}), dcandidate_t =
    g_t * z_t, dh0 = (1 - z_0) * g_0. The cell is minGRU of https://arxiv.org/abs/2410.01201.
    """
    check_sequences("z", z, "candidate", candidate, h0)
    z, candidate, h0 = autocast(z, candidate, h0)
    call = RecurrenceFunction.apply if needs_grad(z, candidate, h0) else recurrence_forward
    return call(z, candidate, h0, True)


# ---- rms_recurrence: kernels -------------------------------------------------------------------------------
# a, b and h are (B, T, H). A program has one sequence.
# Each step needs a sum over all features. Up to 512 features are one warp's, so that the sum is five shuffles
# without a barrier. STAGES - 1 steps are loaded ahead, into shared memory. Narrow rows, and few sequences at
# odd addresses, are loaded ahead into registers instead (rms_recurrence_ahead.py).


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


# ---- rms_recurrence: launches ------------------------------------------------------------------------------


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
        once.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    In reverse, with s_t = 1 / sqrt(mean(u_t**2) + eps) and g_t = dh_t + a_{t+1} * du_{t+1}:
    du_t = s_t * (weight * g_t - u_t * s_t**2 * mean(weight * g_t * u_t)), da_t = du_t * h_{t-1}, db_t = du_t,
    dh0 = a_0 * du_0, and dweight is the sum over sequences and steps of g_t * u_t * s_t, in a fixed order.
    The backward reads the rounded states. The norm is that of https://arxiv.org/abs/1910.07467.
    """
    check_sequences("a", a, "b", b, h0)
    check_tensor("weight", weight, (a.shape[2],), like=a)
    check_width(weight, MAX_WIDTH)
    a, b, weight, h0 = autocast(a, b, weight, h0)
    call = RMSRecurrenceFunction.apply if needs_grad(a, b, weight, h0) else rms_recurrence_forward
    return call(a, b, weight, h0, eps)
