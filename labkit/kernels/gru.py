"""A GRU layer: all steps in one kernel, the recurrent weights resident, or a product and a kernel a step."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional

from labkit.kernels.common import (
    DeviceLimits,
    autocast,
    cdiv,
    check_tensor,
    device_limits,
    dot,
    interpreted,
    needs_grad,
    next_power_of_2,
    once_differentiable,
    operator,
)

# ---- one step, as formulas; all arguments are tiles of one shape -------------------------------------------


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """One special function where ``FAST``, with an error of 2**-11, half a bfloat16's rounding; or two."""
    if FAST and not interpreted():
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    return y


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    return 0.5 + 0.5 * tanh(0.5 * x, FAST) if FAST and not interpreted() else tl.sigmoid(x)


@triton.jit
def gate(ir, iz, inn, hr, hz, hn, h, FAST: tl.constexpr):
    """What r, z, n are the sigmoid and tanh of, and the next state, from products of input and state h."""
    ar, az = ir.to(tl.float32) + hr, iz.to(tl.float32) + hz
    r, z = sigmoid(ar, FAST), sigmoid(az, FAST)
    an = inn.to(tl.float32) + r * hn
    n = tanh(an, FAST)
    return ar, az, an, n + z * (h - n)


@triton.jit
def gate_grad(g, ar, az, an, hn, h, RESET: tl.constexpr):
    """From the gradient g of the next state: those of inn, of ir and hr, of iz and hz, of hn, and z * g.

    With resets, a step of which no later one knows has a g of zero, whatever it computed: infinities, too.
    """
    r, z, n = tl.sigmoid(ar.to(tl.float32)), tl.sigmoid(az.to(tl.float32)), tanh(an.to(tl.float32), False)
    hn = hn.to(tl.float32)
    dn = g * (1.0 - z) * (1.0 - n * n)
    dr, dz, back = dn * hn * r * (1.0 - r), g * (h - n) * z * (1.0 - z), g * z
    dhn = dn * r
    if RESET:
        none = g == 0.0
        dn, dr, dz = tl.where(none, 0.0, dn), tl.where(none, 0.0, dr), tl.where(none, 0.0, dz)
        dhn, back = tl.where(none, 0.0, dhn), tl.where(none, 0.0, back)
    return dn, dr, dz, dhn, back


# ---- resident kernels: a program has BM sequences, and all three recurrent matrices in registers -----------
# A state is a tile (BH, BM), a column a sequence: so the weights are the left operand of its products, the
# one that tensor cores take from registers. The compiler brings them there at the first product; only because
# that one stands before the loop does it not do so at every step.


@triton.jit
def load_weight(weight, g, row, column, H: tl.constexpr, BH: tl.constexpr):
    """Matrix g of weight (3 H, H), zeros beyond H; rows from BH on are those of the next matrix."""
    inside = (row % BH < H) & (column % BH < H)
    at = ((g + row // BH) * H + row % BH) * H + column
    tile = tl.load(weight + at, inside, other=0.0)
    return tl.where(inside, tile, 0.0)  # what comes from a load at once would go to shared memory


@triton.jit
def load_bias(bias, g, m, H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr):
    """Part g of bias (3 H,) in every column."""
    tile = tl.zeros([BH, BM], tl.float32)
    if bias is not None:
        tile += tl.load(bias + g * H + m, m < H, other=0.0).to(tl.float32)
    return tile


@triton.jit
def initial_state(h0, reset, at, b, inside, B, T, BH: tl.constexpr, BM: tl.constexpr):
    """h0, zeros where there is none, or where the first step is a reset."""
    h = tl.zeros([BH, BM], tl.float32)
    if h0 is not None:
        h += tl.load(h0 + at, inside, other=0.0).to(tl.float32)
    if reset is not None:
        h = tl.where(tl.load(reset + b * T, b < B, other=0) != 0, 0.0, h)
    return h


@triton.jit
def load_gates(p, inside, H: tl.constexpr):
    """Three tiles that lie H apart."""
    first, second = tl.load(p, inside, other=0.0), tl.load(p + H, inside, other=0.0)
    return first, second, tl.load(p + 2 * H, inside, other=0.0)


@triton.jit
def store_four(p, inside, H: tl.constexpr, a, b, c, d):
    tl.store(p, a, inside)
    tl.store(p + H, b, inside)
    tl.store(p + 2 * H, c, inside)
    tl.store(p + 3 * H, d, inside)


@triton.jit
def products(h, wr, wz, wn, br, bz, bn):
    """W h + b for r, z, n; where wz is None, wr is W_r above W_z."""
    a = h.to(wn.dtype)
    if wz is None:
        both = dot(wr, a).reshape(2, bn.shape[0], bn.shape[1])
        hr, hz = both.permute(1, 2, 0).split()
        hr, hz = hr + br, hz + bz
    else:
        hr, hz = dot(wr, a, br), dot(wz, a, bz)
    return hr, hz, dot(wn, a, bn)


# Loads are on their way AHEAD steps before they are used. A step asks for them before all else: what it does
# first with those that have come, a change of layout, has barriers, past which the compiler moves no load.
# AHEAD steps are written out, for to hand a tile on from one name to another would wait for it.


@triton.jit
def gru_kernel(
    gates, weight, bias, h0, reset, h, hidden, B, T,
    H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr, AHEAD: tl.constexpr, STACK: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """States h (B, T, H) from gates (B, T, 3 H), the input's products. Where ``hidden`` (B, T, H) is given,
    it keeps the state's product for n, and what r, z, n are functions of takes the place of the input's
    products in gates. STACK: W_r and W_z are one matrix."""
    b = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[None, :]
    m, k = tl.arange(0, BH)[:, None], tl.arange(0, BH)[None, :]
    inside = (b < B) & (m < H)
    if STACK:
        wr, wz = load_weight(weight, 0, tl.arange(0, 2 * BH)[:, None], k, H, BH), None
    else:
        wr, wz = load_weight(weight, 0, m, k, H, BH), load_weight(weight, 1, m, k, H, BH)
    wn = load_weight(weight, 2, m, k, H, BH)
    br, bz = load_bias(bias, 0, m, H, BH, BM), load_bias(bias, 1, m, H, BH, BM)
    bn = load_bias(bias, 2, m, H, BH, BM)
    state = initial_state(h0, reset, b * H + m, b, inside, B, T, BH, BM)  # stays in float32
    hr, hz, hn = products(state, wr, wz, wn, br, bz, bn)
    into, out = gates + b * T * 3 * H + m, h + b * T * H + m
    prefetched = ()
    for u in tl.static_range(AHEAD):
        prefetched += (load_gates(into + u * 3 * H, inside & (u < T), H),)  # type: ignore[assignment]
    for start in range(0, T, AHEAD):
        arrived, prefetched = prefetched, ()
        for u in tl.static_range(AHEAD):
            t = start + u
            after, now = t + AHEAD, inside & (t < T)
            prefetched += (load_gates(into + after * 3 * H, inside & (after < T), H),)  # type: ignore[assignment]
            if reset is not None:
                again = tl.load(reset + b * T + t + 1, (b < B) & (t + 1 < T), other=0) != 0
            ir, iz, inn = arrived[u]  # type: ignore[var-annotated]
            ar, az, an, state = gate(ir, iz, inn, hr, hz, hn, state, FAST)
            tl.store(out + t * H, state, now)
            if hidden is not None:
                tl.store(into + t * 3 * H, ar, now)
                tl.store(into + t * 3 * H + H, az, now)
                tl.store(into + t * 3 * H + 2 * H, an, now)
                tl.store(hidden + b * T * H + m + t * H, hn, now)
            if reset is not None:
                state = tl.where(again, 0.0, state)  # never multiplied: it may be infinite
            hr, hz, hn = products(state, wr, wz, wn, br, bz, bn)


@triton.jit
def back_products(dr, dz, dhn, wr, wz, wn, zeros, rows):
    """What the state before gets through three products, each from zeros of its own, which the compiler must
    not know to be zeros: it would make one sum of them, and each product would wait for the one before.

    To gather every row from where it is changes nothing but the layout: the sum leaves that of the tensor
    cores, to which all tiles that are loaded and stored would else be brought, at two barriers each.
    """
    total = dot(wr, dr.to(wr.dtype), zeros) + dot(wz, dz.to(wr.dtype), zeros)
    return tl.gather(total + dot(wn, dhn.to(wr.dtype), zeros), rows, 0)


@triton.jit
def load_kept(dh, gates, hidden, h, t, T, inside, H: tl.constexpr):
    """What step t's gradient needs: the output's gradient, ar, az, an, hn, the state before."""
    now = inside & (t >= 0) & (t < T)
    ar, az, an = load_gates(gates + t * 3 * H, now, H)
    g, hn = tl.load(dh + t * H, now, other=0.0), tl.load(hidden + t * H, now, other=0.0)
    return g, ar, az, an, hn, tl.load(h + (t - 1) * H, now & (t > 0), other=0.0)


@triton.jit
def gru_grad_kernel(
    dh, gates, hidden, weight, h0, reset, h, grads, last, dh0, B, T,
    H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Time in reverse. grads (B, T, 4 H) takes the gradients of the input's n, of r, of z, of the state's n,
    last (B, T, H) the state before each step, as the weight's gradient wants it."""
    b = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[None, :]
    m, k = tl.arange(0, BH)[:, None], tl.arange(0, BH)[None, :]
    wr, wz = load_weight(weight, 0, k, m, H, BH), load_weight(weight, 1, k, m, H, BH)  # transposed
    wn = load_weight(weight, 2, k, m, H, BH)
    m = tl.max_contiguous(tl.arange(0, BH), max(1, BH // 32))[:, None]  # a column is one warp's, as in gather
    inside, rows = (b < B) & (m < H), m + tl.zeros([BH, BM], tl.int32)
    zeros = tl.zeros([BH, BM], tl.float32) + tl.minimum(T, 0)
    carry = back_products(zeros, zeros, zeros, wr, wz, wn, zeros, rows)  # of later steps
    first = initial_state(h0, None, b * H + m, b, inside, B, T, BH, BM)
    at = b * T * H + m
    dh, hidden, h, last = dh + at, hidden + at, h + at, last + at
    gates, grads = gates + b * T * 3 * H + m, grads + b * T * 4 * H + m
    end = tl.cdiv(T, AHEAD) * AHEAD - 1  # steps from T on have gradients of zero
    prefetched = ()
    for u in tl.static_range(AHEAD):
        prefetched += (load_kept(dh, gates, hidden, h, end - u, T, inside, H),)  # type: ignore[assignment]
    for start in range(0, T, AHEAD):
        arrived, prefetched = prefetched, ()
        for u in tl.static_range(AHEAD):
            t = end - start - u
            now = inside & (t < T)
            prefetched += (load_kept(dh, gates, hidden, h, t - AHEAD, T, inside, H),)  # type: ignore[assignment]
            if reset is not None:
                begins = tl.load(reset + b * T + t, (b < B) & (t < T), other=0) != 0
            g, ar, az, an, hn, before = arrived[u]  # type: ignore[var-annotated]
            before = before.to(tl.float32)
            if h0 is not None:
                before = tl.where(t > 0, before, first)
            if reset is not None:
                before = tl.where(begins, 0.0, before)
            g = g.to(tl.float32) + carry
            dn, dr, dz, dhn, kept = gate_grad(g, ar, az, an, hn, before, reset is not None)
            store_four(grads + t * 4 * H, now, H, dn, dr, dz, dhn)
            if reset is not None:  # zero times infinity would spoil the weight's gradient
                before = tl.where(before - before == 0.0, before, 0.0)
            tl.store(last + t * H, before, now)
            carry = kept + back_products(dr, dz, dhn, wr, wz, wn, zeros, rows)
            if reset is not None:
                carry = tl.where(begins, 0.0, carry)
    if dh0 is not None:
        tl.store(dh0 + b * H + m, carry, inside)


# ---- where the matrices are too large: one step a launch, a program has some of the B * H features ---------


@triton.jit
def step_kernel(
    gates, product, reset, state, operand, h, hidden, B, T, t, H, BLOCK: tl.constexpr, FAST: tl.constexpr
):
    """state (B, H) in float32 and operand (B, H), which is multiplied next, are replaced."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b, n, inside = i // H, i % H, i < B * H
    ir, iz, inn = load_gates(gates + (b * T + t) * 3 * H + n, inside, H)
    hr, hz, hn = load_gates(product + b * 3 * H + n, inside, H)
    hn = hn.to(tl.float32)
    ar, az, an, new = gate(ir, iz, inn, hr, hz, hn, tl.load(state + i, inside, other=0.0), FAST)
    tl.store(h + (b * T + t) * H + n, new, inside)
    if hidden is not None:
        into = gates + (b * T + t) * 3 * H + n
        tl.store(into, ar, inside)
        tl.store(into + H, az, inside)
        tl.store(into + 2 * H, an, inside)
        tl.store(hidden + (b * T + t) * H + n, hn, inside)
    if reset is not None:
        new = tl.where(tl.load(reset + b * T + t + 1, inside & (t + 1 < T), other=0) != 0, 0.0, new)
    tl.store(state + i, new, inside)
    tl.store(operand + i, new, inside)


@triton.jit
def step_grad_kernel(
    dh, gates, hidden, h0, reset, h, carry, product, grads, last, B, T, t, H, BLOCK: tl.constexpr
):
    """carry (B, H) in float32 is what the state after this step gets from later ones, without product."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b, n, inside = i // H, i % H, i < B * H
    at = (b * T + t) * H + n
    g = tl.load(carry + i, inside, other=0.0) + tl.load(product + i, inside, other=0.0).to(tl.float32)
    before = tl.load(h + at - H, inside & (t > 0), other=0.0).to(tl.float32)
    if h0 is not None:
        before += tl.load(h0 + i, inside & (t == 0), other=0.0).to(tl.float32)
    if reset is not None:
        follows = inside & (t + 1 < T)
        g = tl.where(tl.load(reset + b * T + t + 1, follows, other=0) != 0, 0.0, g)
        before = tl.where(tl.load(reset + b * T + t, inside, other=0) != 0, 0.0, before)
    g += tl.load(dh + at, inside, other=0.0).to(tl.float32)
    ar, az, an = load_gates(gates + 3 * at - 2 * n, inside, H)
    hn = tl.load(hidden + at, inside, other=0.0)
    dn, dr, dz, dhn, kept = gate_grad(g, ar, az, an, hn, before, reset is not None)
    store_four(grads + 4 * at - 3 * n, inside, H, dn, dr, dz, dhn)
    if reset is not None:
        before = tl.where(before - before == 0.0, before, 0.0)
    tl.store(last + at, before, inside)
    tl.store(carry + i, kept, inside)


# ---- plan --------------------------------------------------------------------------------------------------


@cache
def gru_plan(B: int, H: int, itemsize: int, limits: DeviceLimits, backward: bool) -> dict[str, int] | None:
    """Sizes of the resident kernels; None where three matrices do not fit a multiprocessor.

    They pass through its shared memory on their way to registers, of which they take 96 in each thread of
    BH / 16 warps: so one program of 128 features fits a multiprocessor, or three of 64. A program has as few
    sequences as let all programs run at once, at least 8, a tensor core's least: then a step is shortest. In
    the backward it has 8 always; with 16, two rounds become one of twice the time. Loads go two steps ahead
    where registers allow. On an H100, with 128 features, to multiply by W_r and W_z as one matrix, one step
    ahead, was faster than that for 8 sequences, and slower for 16; with 32 only one step ahead fits.
    """
    BH = max(16, next_power_of_2(H))
    if limits.shared_bytes:
        if BH * itemsize > 256 or 3 * BH * BH * itemsize + 12 * 1024 > limits.shared_bytes:
            return None
    elif BH > 32:  # interpreted
        return None
    at_once = limits.multiprocessors * max(1, 192 // BH)
    most = 8 if backward or itemsize == 4 else 32
    BM = min(most, max(8, next_power_of_2(cdiv(B, at_once))))
    stack = not backward and BH == 128 and BM != 16
    ahead = 1 if stack or itemsize == 4 or BM == 32 else 2
    plan = dict(H=H, BH=BH, BM=BM, AHEAD=ahead, num_warps=max(1, BH // 16))
    return plan if backward else plan | dict(STACK=stack)


# ---- launches ----------------------------------------------------------------------------------------------


def _like_states(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, keep = *x.shape[:2], weight_hh.shape[1], others[-1]
    kept = ((B, T, 3 * H), (B, T, H)) if keep else ((0,), (0,))
    return x.new_empty(B, T, H), x.new_empty(kept[0]), x.new_empty(kept[1])


@operator(fake=_like_states)
def gru_forward(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None, bias_hh: Tensor | None,
    h0: Tensor | None, reset: Tensor | None, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """h (B, T, H), and where ``keep``, for the backward, what r, z, n are functions of (B, T, 3 H) and the
    state's product for n (B, T, H)."""
    (B, T, _), H = x.shape, weight_hh.shape[1]
    gates = functional.linear(x, weight_ih, bias_ih)  # (B, T, 3 H), of all steps in one product
    h, hidden = x.new_empty(B, T, H), x.new_empty(B, T, H) if keep else None
    weight_hh, h0 = weight_hh.contiguous(), None if h0 is None else h0.contiguous()
    reset = None if reset is None else reset.contiguous().view(torch.uint8)
    fast, plan = x.dtype is torch.bfloat16, gru_plan(B, H, x.itemsize, device_limits(x.device), False)
    if not h.numel():
        pass
    elif plan is not None:
        bias_hh = None if bias_hh is None else bias_hh.contiguous()
        grid = (cdiv(B, plan["BM"]),)
        gru_kernel[grid](gates, weight_hh, bias_hh, h0, reset, h, hidden, B, T, FAST=fast, **plan)
    else:
        state, grid = x.new_zeros(B, H, dtype=torch.float32), (cdiv(B * H, 256),)
        if h0 is not None:
            state += h0
        if reset is not None:
            state.masked_fill_(reset[:, :1] != 0, 0.0)
        operand = state.to(x.dtype)
        for t in range(T):
            product = functional.linear(operand, weight_hh, bias_hh)  # (B, 3 H)
            step_kernel[grid](
                gates, product, reset, state, operand, h, hidden, B, T, t, H, BLOCK=256, FAST=fast
            )
    return (h, x.new_empty(0), x.new_empty(0)) if hidden is None else (h, gates, hidden)


def _like_gradients(
    dh: Tensor, gates: Tensor, hidden: Tensor, weight_hh: Tensor,
    h0: Tensor | None, reset: Tensor | None, h: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    B, T, H = h.shape
    return h.new_empty(B, T, 4 * H), torch.empty_like(h), h.new_empty(0 if h0 is None else B, H)


@operator(fake=_like_gradients)
def gru_backward(
    dh: Tensor, gates: Tensor, hidden: Tensor, weight_hh: Tensor,
    h0: Tensor | None, reset: Tensor | None, h: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """grads (B, T, 4 H) and last (B, T, H) as ``gru_grad_kernel`` writes them, and dh0."""
    (B, T, H), dh, weight_hh = h.shape, dh.contiguous(), weight_hh.contiguous()
    grads, last, dh0 = _like_gradients(dh, gates, hidden, weight_hh, h0, reset, h)
    wanted, h0 = (None, None) if h0 is None else (dh0, h0.contiguous())
    reset = None if reset is None else reset.contiguous().view(torch.uint8)
    plan = gru_plan(B, H, h.itemsize, device_limits(h.device), True)
    if not h.numel():
        dh0.zero_()
    elif plan is not None:
        grid = (cdiv(B, plan["BM"]),)
        gru_grad_kernel[grid](dh, gates, hidden, weight_hh, h0, reset, h, grads, last, wanted, B, T, **plan)
    else:
        carry, product = h.new_zeros(B, H, dtype=torch.float32), h.new_zeros(B, H)
        for t in reversed(range(T)):
            step_grad_kernel[(cdiv(B * H, 256),)](
                dh, gates, hidden, h0, reset, h, carry, product, grads, last, B, T, t, H, BLOCK=256
            )
            product = grads[:, t, H:] @ weight_hh
        dh0.copy_(carry + product) if wanted is not None else None
        if reset is not None:
            dh0.masked_fill_(reset[: len(dh0), :1] != 0, 0.0)
    return grads, last, dh0


class GRUFunction(torch.autograd.Function):
    """``gru`` with its gradients, once differentiable.

    Kept are what r, z and n are the sigmoid and tanh of, and the state's product for n, in x's dtype, beside
    the states, which are the output: 4 B T H numbers that the forward writes and the backward reads. To
    compute them anew from the states would need the input's products, which are 3 B T H, and the state's once
    more: another product a step, for which weights would have to be resident twice, as they are and
    transposed. Of r, z and n themselves, rounded, little would be left of 1 - z or 1 - n**2 close to 1.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, weight_ih, weight_hh, _, _, h0, reset = inputs
        h, gates, hidden = gru_forward(*inputs, True)
        of_weight = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if of_weight else None, weight_ih, weight_hh, h0, reset, h, gates, hidden)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_ih, weight_hh, h0, reset, h, gates, hidden = ctx.saved_tensors
        of_x, of_ih, of_hh, of_bias_ih, of_bias_hh, of_h0, _ = ctx.needs_input_grad
        grads, last, dh0 = gru_backward(dh, gates, hidden, weight_hh, h0, reset, h)
        (B, T, H), rows = h.shape, grads.flatten(0, 1)  # (B T, 4 H)
        of_input, of_state = rows[:, : 3 * H], rows[:, H:]  # in the orders n, r, z and r, z, n
        dx = (of_input @ weight_ih.roll(H, 0)).view(B, T, weight_ih.shape[1]) if of_x else None
        dweight_ih = (of_input.T @ x.flatten(0, 1)).roll(-H, 0) if of_ih else None
        dweight_hh = of_state.T @ last.flatten(0, 1) if of_hh else None
        dbias_ih = dbias_hh = None
        if of_bias_ih or of_bias_hh:
            sums = rows.sum(0)  # (4 H,), summed in float32
            dbias_ih = sums[: 3 * H].roll(-H, 0) if of_bias_ih else None
            dbias_hh = sums[H:] if of_bias_hh else None
        return dx, dweight_ih, dweight_hh, dbias_ih, dbias_hh, dh0 if of_h0 else None, None


# ---- the function and the module ---------------------------------------------------------------------------


def gru(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None, h0: Tensor | None = None, reset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A GRU layer as nn.GRU computes it: for t = 0 to T-1, with (W_r, W_z, W_n) the thirds of a weight,

    r = sigmoid(W_ir x_t + b_ir + W_hr h + b_hr), z = sigmoid(W_iz x_t + b_iz + W_hz h + b_hz),
    n = tanh(W_in x_t + b_in + r (W_hn h + b_hn)), h_t = (1 - z) n + z h, where h = h_{t-1}.

    Args:
        x: (B, T, I); float32, float16 or bfloat16, any strides, as everything but reset.
        weight_ih, weight_hh: (3 H, I) and (3 H, H), in the order r, z, n; 4 T H below 2**31.
        bias_ih, bias_hh: (3 H,), or None.
        h0: (B, H), the state before the first step; zeros where it is left out.
        reset: (B, T), bool: where it is True, h is zero, whatever h_{t-1} was: where that is infinite or nan,
            states and gradients after it are as if it were not. An x that is infinite or nan, before a reset
            or not, still spoils the gradient of weight_ih, which multiplies it by a gradient of zero.

    Returns:
        The states (B, T, H), contiguous, of x's dtype. The running state is float32; it is rounded for its
        product and for the output, the input's product once.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    One kernel has all steps where three matrices H x H, widened to a power of two, fit a multiprocessor: up
    to 128 features of 16 bits and 64 of float32 on most GPUs. Beyond, each step is a product and a kernel,
    and the product is rounded.

    In reverse, with g_t = dh_t + z_{t+1} g_{t+1} + what comes through the products of step t+1:
    dz = g (h - n) z (1 - z), dn = g (1 - z) (1 - n**2), dr = dn (W_hn h + b_hn) r (1 - r) before the
    activations, and the gradient of W_hn h + b_hn is r dn. The gradients of weights are a product each, over
    all sequences and steps; at a reset h is zero there, and what was before gets none. The cell is that of
    https://arxiv.org/abs/1406.1078 in the form of https://docs.pytorch.org/docs/stable/generated/torch.nn.GRU.html.
    """
    check_tensor("x", x, (None, None, None))
    check_tensor("weight_hh", weight_hh, (None, None), like=x)
    (B, T, width), H = x.shape, weight_hh.shape[1]
    check_tensor("weight_hh", weight_hh, (3 * H, H), like=x)
    check_tensor("weight_ih", weight_ih, (3 * H, width), like=x)
    for name, bias in (("bias_ih", bias_ih), ("bias_hh", bias_hh)):
        if bias is not None:
            check_tensor(name, bias, (3 * H,), like=x)
    if h0 is not None:
        check_tensor("h0", h0, (B, H), like=x)
    form = torch.bool, (B, T), x.device
    if reset is not None and (
        not isinstance(reset, Tensor) or (reset.dtype, reset.shape, reset.device) != form
    ):
        raise ValueError(f"reset: should be a tensor of bool, ({B}, {T}), on {x.device}")
    if 4 * (T + 8) * H >= 2**31:  # steps are counted in 32 bits, those that are asked for beyond the end, too
        raise ValueError(f"x: a sequence of {T} steps of {H} features has 2**29 numbers or more")
    x, weight_ih, weight_hh, bias_ih, bias_hh, h0 = autocast(x, weight_ih, weight_hh, bias_ih, bias_hh, h0)
    if needs_grad(x, weight_ih, weight_hh, bias_ih, bias_hh, h0):
        return GRUFunction.apply(x, weight_ih, weight_hh, bias_ih, bias_hh, h0, reset)
    return gru_forward(x, weight_ih, weight_hh, bias_ih, bias_hh, h0, reset, False)[0]


class GRU(nn.Module):
    """nn.GRU of one layer and one direction, with its state_dict; the batch comes first unless told.

    Args:
        input_size, hidden_size: I and H.
        bias: whether there are bias_ih and bias_hh.
        batch_first: whether x is (B, T, I), as it is by default here and is not with nn.GRU, or (T, B, I),
            which is copied.
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, batch_first: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.batch_first = input_size, hidden_size, batch_first
        bound = hidden_size**-0.5 if hidden_size else 0.0

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, **options).uniform_(-bound, bound))

        self.weight_ih_l0 = drawn(3 * hidden_size, input_size)
        self.weight_hh_l0 = drawn(3 * hidden_size, hidden_size)
        self.bias_ih_l0 = drawn(3 * hidden_size) if bias else None
        self.bias_hh_l0 = drawn(3 * hidden_size) if bias else None

    def extra_repr(self) -> str:
        bias = self.bias_ih_l0 is not None
        return f"{self.input_size}, {self.hidden_size}, bias={bias}, batch_first={self.batch_first}"

    def forward(
        self, x: Tensor, h0: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The states (B, T, H), and the last one (1, B, H); h0 is (1, B, H), reset (B, T), as in ``gru``.

        With batch_first=False x, reset and the states have T first.
        """
        if h0 is not None:
            check_tensor("h0", h0, (1, None, self.hidden_size))
        if not self.batch_first:
            check_tensor("x", x, (None, None, None))
            x, reset = x.transpose(0, 1), reset if reset is None else reset.transpose(0, 1)
        first = None if h0 is None else h0[0]
        weights = self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0
        h = gru(x, *weights, first, reset)
        if h.shape[1]:
            end = h[:, -1][None]
        else:
            end = h.new_zeros(1, h.shape[0], h.shape[2]) if h0 is None else h0.to(h.dtype)
        return h if self.batch_first else h.transpose(0, 1), end
