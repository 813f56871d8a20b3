"""u_t = a_t * h_{t-1} + b_t, h_t = weight * u_t / rms(u_t): a recurrence with RMSNorm at every step."""

from functools import cache
from typing import Any

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
    needs_grad,
    once_differentiable,
    operator,
    padded_columns,
)
from labkit.kernels.recurrence import check_sequences, load_initial_state
from labkit.kernels.rms_norm import check_width, stages_that_fit, sum_partials

MAX_WIDTH = 4096
"""The most columns: a program holds whole states in registers."""
BYTES_IN_FLIGHT = 48 * 1024
"""Bytes in flight per multiprocessor that saturate memory; found by measuring on an H200."""

# ---- kernels: a, b and h are (B, T, H); a program has one sequence -----------------------------------------
# Each step needs a sum over all features. Up to 512 features are one warp's, so that the sum is five shuffles
# without a barrier. STAGES - 1 steps are loaded ahead, into shared memory.


@triton.jit
def rms_recurrence_kernel(
    a, b, weight, h0, h, T, eps, H: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr
):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BH)
    inside = n < H
    w, state = (
        tl.load(weight + n, inside, other=0.0).to(tl.float32),
        load_initial_state(h0, row * H + n, inside, BH),
    )
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
    before = load_initial_state(h0, row * H + n, inside, BH)
    for back in tl.range(0, T, num_stages=STAGES):
        t = T - 1 - back
        now = (row * T + t) * H
        gate = tl.load(a + now + n, inside, other=0.0).to(tl.float32)
        last = tl.load(h + now - H + n, inside & (t > 0), other=0.0).to(tl.float32)
        last = tl.where(t > 0, last, before)
        u = gate * last + tl.load(b + now + n, inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(u * u, 0) / H + eps)  # computing it again is cheaper than a load
        unit = u * scale
        g = tl.load(dh + now + n, inside, other=0.0).to(tl.float32) + carry
        dw += g * unit
        g *= w
        du = scale * (g - unit * (tl.sum(g * unit, 0) / H))
        tl.store(da + now + n, du * last, inside)
        tl.store(db + now + n, du, inside)
        carry = gate * du
    tl.store(parts + row * H + n, dw, inside)  # (B, H): each sequence's part of the weight's gradient
    if dh0 is not None:
        tl.store(dh0 + row * H + n, carry, inside)


# ---- launch sizes ------------------------------------------------------------------------------------------


def prefetch_stages(B: int, step_bytes: int, program_bytes: int, least: int, limits: DeviceLimits) -> int:
    """Pipeline stages with which B programs have BYTES_IN_FLIGHT, as far as shared memory goes.

    ``step_bytes`` are those of a step of all sequences, ``program_bytes`` of a stage in shared memory.
    """
    wanted = cdiv(BYTES_IN_FLIGHT * limits.multiprocessors, B * step_bytes)
    return min(max(least, wanted), 24, stages_that_fit(program_bytes, limits))


@cache
def rms_recurrence_plan(B: int, H: int, itemsize: int, tensors: int, limits: DeviceLimits) -> dict[str, int]:
    """Sizes of a kernel that loads so many tensors (B, T, H) at each step: 2 forward, 4 backward."""
    BH = padded_columns(H, itemsize)
    least = 4 if tensors == 2 else 3
    ahead = prefetch_stages(B, tensors * H * itemsize, tensors * BH * itemsize, least, limits)
    return dict(H=H, BH=BH, STAGES=ahead, num_warps=max(1, BH // 512))


# ---- launches ----------------------------------------------------------------------------------------------


@operator(fake=lambda a, b, weight, h0, eps: empty_contiguous(a))
def rms_recurrence_forward(a: Tensor, b: Tensor, weight: Tensor, h0: Tensor | None, eps: float) -> Tensor:
    a, b, weight = a.contiguous(), b.contiguous(), weight.contiguous()
    h0 = None if h0 is None else h0.contiguous()
    (B, T, H), h = a.shape, torch.empty_like(a)
    if h.numel():
        sizes = rms_recurrence_plan(B, H, a.itemsize, 2, device_limits(a.device))
        rms_recurrence_kernel[(B,)](a, b, weight, h0, h, T, eps, **sizes)
    return h


def _like_inputs(
    dh: Tensor, a: Tensor, b: Tensor, weight: Tensor, h0: Tensor | None, h: Tensor, eps: float
) -> list[Tensor]:
    inputs = (a, b, weight) if h0 is None else (a, b, weight, h0)
    return [empty_contiguous(t) for t in inputs]


@operator(fake=_like_inputs)
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


class RMSRecurrenceFunction(torch.autograd.Function):
    """``rms_recurrence`` with its gradients, once differentiable; the backward reads the returned states."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weight: Tensor, h0: Tensor | None, eps: float) -> Tensor:
        h = rms_recurrence_forward(a, b, weight, h0, eps)
        ctx.save_for_backward(a, b, weight, h0, h)
        ctx.eps = eps
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        da, db, dweight, *dh0 = rms_recurrence_backward(dh, *ctx.saved_tensors, ctx.eps)
        return da, db, dweight, dh0[0] if dh0 else None, None


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
    if needs_grad(a, b, weight, h0):
        return RMSRecurrenceFunction.apply(a, b, weight, h0, eps)
    return rms_recurrence_forward(a, b, weight, h0, eps)
