"""A recurrence with RMSNorm at every step.

A program has one sequence, and each step needs a sum over all features: up to 512 are one warp's, so that the
sum is five shuffles without a barrier. Its loads run ahead into shared memory. For that each row has to begin
at an address that is divisible by four, better by sixteen. Rows of less than 128 bytes leave lanes idle.
"""

# mypy: disable-error-code="assignment, var-annotated"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.calls import (
    check_eps,
    check_sequences,
    check_tensor,
    differentiable,
    needs_grad,
    operator,
    promote,
)
from labkit.kernels.common import (
    DeviceLimits,
    cdiv,
    device_limits,
    empty_contiguous,
    initial_state,
    padded_columns,
)
from labkit.kernels.rms_norm import stages_that_fit, sum_partials

MAX_WIDTH = 4096
"""The most features: a program holds whole states in registers."""
BYTES_IN_FLIGHT = 48 * 1024
"""Bytes in flight per multiprocessor that saturate memory; measured on an H200."""

# ---- kernels, with STAGES - 1 steps ahead in shared memory -------------------------------------------------
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


# ---- launches ----------------------------------------------------------------------------------------------


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
    (B, T, H), h = a.shape, torch.empty_like(a)
    if h.numel():
        sizes = rms_recurrence_plan(B, H, a.itemsize, 2, device_limits(a.device))
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
    dh0 = None if h0 is None else torch.empty_like(h0)
    if a.numel():
        parts = torch.empty(B, H, dtype=torch.float32, device=a.device)
        sizes = rms_recurrence_plan(B, H, a.itemsize, 4, device_limits(a.device))
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
