"""A small gated network in three kernels, for lesson 9.

``gated_heads`` has all layers before the loop over time, ``gated_cell`` the loop and its two recurrences,
``mlp_outputs`` all layers behind it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from labkit.kernels.common import (
    activate,
    autocast,
    cdiv,
    check_tensor,
    descriptor,
    device_limits,
    differentiable,
    dot,
    empty_contiguous,
    needs_grad,
    next_power_of_2,
    offset64,
    operator,
    promote,
)
from labkit.kernels.grouped import block_width, grouped_linear
from labkit.kernels.linear import load_tile, store_tile
from labkit.kernels.mlp import geglu_mlp
from labkit.kernels.rms_norm import MAX_WIDTH as MAX_NORM_WIDTH
from labkit.kernels.rms_norm import rms_norm, sum_partials
from labkit.kernels.rms_recurrence import rms_recurrence_plan

EPS = 1e-6
MAX_WIDTH = 128
"""The most features of a fused layer: two tiles of whole rows fit on a multiprocessor."""
MAX_GROUP = 64
"""The most features of a group of gated_heads: a program holds three matrices of so many rows."""

# ---- the cell ----------------------------------------------------------------------------------------------


@triton.jit
def cell_kernel(
    gates, gain, kept, result, T, eps,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """s_t += z (candidate - s), u_t = (1 - z) r + s, r_t = gain u_t / rms(u_t); one sequence per program."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BH)
    inside, at = n < H, n // D * 2 * D + n % D  # (BH,): offset of a logit; its candidate is D further on
    w = tl.load(gain + n, inside, other=0.0).to(tl.float32)
    s, r = tl.zeros([BH], tl.float32), tl.zeros([BH], tl.float32)
    for t in tl.range(0, T, num_stages=STAGES):
        now = (row * T + t) * H
        z = tl.sigmoid(tl.load(gates + 2 * now + at, inside, other=0.0).to(tl.float32))
        candidate = tl.load(gates + 2 * now + D + at, inside, other=0.0).to(tl.float32)
        s += z * (candidate - s)
        u = r - z * r + s
        r = w * u * tl.rsqrt(tl.sum(u * u, 0) / H + eps)
        tl.store(result + now + n, r, inside)
        if kept is not None:
            tl.store(kept + now + n, s, inside)


@triton.jit
def cell_grad_kernel(
    dr, gates, gain, result, kept, dgates, parts, T, eps,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Time in reverse: ds and carry are the gradients of s_t and r_t from later steps."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BH)
    inside, at = n < H, n // D * 2 * D + n % D  # (BH,)
    w = tl.load(gain + n, inside, other=0.0).to(tl.float32)
    ds, carry, dw = tl.zeros([BH], tl.float32), tl.zeros([BH], tl.float32), tl.zeros([BH], tl.float32)
    for back in tl.range(0, T, num_stages=STAGES):
        t = T - 1 - back
        now, earlier = (row * T + t) * H, inside & (t > 0)
        z = tl.sigmoid(tl.load(gates + 2 * now + at, inside, other=0.0).to(tl.float32))
        candidate = tl.load(gates + 2 * now + D + at, inside, other=0.0).to(tl.float32)
        last_r = tl.load(result + now - H + n, earlier, other=0.0).to(tl.float32)
        last_s = tl.load(kept + now - H + n, earlier, other=0.0).to(tl.float32)
        g = tl.load(dr + now + n, inside, other=0.0).to(tl.float32) + carry
        u = last_r - z * last_r + last_s + z * (candidate - last_s)
        scale = tl.rsqrt(tl.sum(u * u, 0) / H + eps)
        unit = u * scale
        dw += g * unit
        g *= w
        du = scale * (g - unit * (tl.sum(g * unit, 0) / H))
        ds += du  # the gradient of s_t: through u_t, and through s_{t+1}
        dz = ds * (candidate - last_s) - du * last_r
        tl.store(dgates + 2 * now + at, dz * z * (1 - z), inside)
        tl.store(dgates + 2 * now + D + at, ds * z, inside)
        carry = du - z * du
        ds -= z * ds
    tl.store(parts + row * H + n, dw, inside)


def _like_states(gates: Tensor, gain: Tensor, groups: int, keep: bool) -> list[Tensor]:
    return [gates.new_empty(*gates.shape[:2], gain.shape[0]) for _ in range(1 + keep)]


@operator(fake=_like_states)
def gated_cell_forward(gates: Tensor, gain: Tensor, groups: int, keep: bool) -> list[Tensor]:
    """The result; and to ``keep`` the states s: (B, T, H) each."""
    gates, gain, (B, T, _), H = gates.contiguous(), gain.contiguous(), gates.shape, len(gain)
    result, *states = _like_states(gates, gain, groups, keep)
    if result.numel():
        sizes = rms_recurrence_plan(B, H, gates.itemsize, 2, device_limits(gates.device))
        kept = states[0] if keep else None
        cell_kernel[(B,)](gates, gain, kept, result, T, EPS, D=H // groups, **sizes)
    return [result, *states]


@operator(fake=lambda dr, gates, gain, *_: (empty_contiguous(gates), empty_contiguous(gain)))
def gated_cell_backward(
    dr: Tensor, gates: Tensor, gain: Tensor, result: Tensor, states: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    """dgates and dgain."""
    dr, gates, gain = dr.contiguous(), gates.contiguous(), gain.contiguous()
    (B, T, H), dgates = dr.shape, torch.empty_like(gates)
    if not dr.numel():
        return dgates, torch.zeros_like(gain)
    parts = torch.empty(B, H, dtype=torch.float32, device=dr.device)  # dgain of each sequence
    sizes = rms_recurrence_plan(B, H, dr.itemsize, 5, device_limits(dr.device))
    cell_grad_kernel[(B,)](dr, gates, gain, result, states, dgates, parts, T, EPS, D=H // groups, **sizes)
    return dgates, sum_partials(parts, gain)


GatedCellFunction = differentiable(
    lambda *inputs: gated_cell_forward(*inputs, True),
    gated_cell_backward,
    lambda gates, gain, groups, result, s: (gates, gain, result, s),
)


def gated_cell(gates: Tensor, gain: Tensor, groups: int) -> Tensor:
    """Two recurrences with the same gates, the second with RMSNorm at every step.

    s_t = (1 - z_t) s_{t-1} + z_t candidate_t with z = sigmoid(logit), u_t = (1 - z_t) r_{t-1} + s_t, and the
    result r_t = gain * u_t / sqrt(mean(u_t**2) + 1e-6), from s_0 = r_0 = 0.

    Args:
        gates: (B, T, 2 H), for each group its logits, then its candidates; float32, float16 or bfloat16, any
            strides.
        gain: (H,), H up to 4096 and a multiple of groups.
        groups: number of groups of features.

    Returns:
        (B, T, H), contiguous, of the dtype of gates and gain. Inside torch.autocast the two may differ:
        nothing is cast down, and the result has the wider one. States are float32 within the loop. Where
        autograd records the call, s is kept in the dtype of the result.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    In reverse, with v_t = u_t / rms(u_t), g_t = dr_t + (1 - z_{t+1}) du_{t+1} and w = gain:
    du_t = (w g_t - v_t mean(w g_t v_t)) / rms(u_t), ds_t = du_t + (1 - z_{t+1}) ds_{t+1},
    dcandidate_t = z_t ds_t, dlogit_t = z_t (1 - z_t) (ds_t (candidate_t - s_{t-1}) - du_t r_{t-1}), and dgain
    is the sum over sequences and steps of g_t v_t, in a fixed order. The backward reads the rounded states.
    The first recurrence is the minimal GRU of https://arxiv.org/abs/2410.01201, the norm that of
    https://arxiv.org/abs/1910.07467.
    """
    check_tensor("gain", gain, (None,))
    if not 0 < len(gain) <= 4096:
        raise ValueError(f"gain: has {len(gain)} features, a program holds 1 to 4096")
    if not isinstance(groups, int) or groups < 1 or len(gain) % groups:
        raise ValueError(
            f"groups: {groups!r}, should be an int that divides the {len(gain)} features of gain"
        )
    check_tensor("gates", gates, (None, None, 2 * len(gain)), like=gain)
    if gates.shape[1] * gates.shape[2] >= 2**31:  # steps are counted in 32 bits
        raise ValueError(
            f"gates: a sequence of {gates.shape[1]} x {gates.shape[2]} has 2**31 numbers or more"
        )
    gates, gain = promote(gates, gain)
    if needs_grad(gates, gain):
        return GatedCellFunction.apply(gates, gain, groups)
    return gated_cell_forward(gates, gain, groups, False)[0]


# ---- the layers before and behind the cell -----------------------------------------------------------------


@triton.jit
def gates_kernel(
    x, w_in, b_in, gain, w_gates, b_gates, gates, R, eps,
    G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grouped linear, RMSNorm, grouped linear in tiles (BG, BM, BD): one tl.dot is a product per group."""
    g, m = tl.arange(0, BG)[:, None, None], tl.arange(0, BM)[None, :, None]
    d, n = tl.arange(0, BD), tl.arange(0, BN)[None, None, :]
    k, d = d[None, :, None], d[None, None, :]
    at, features, both = g * D + d, (g < G) & (d < D), (g < G) & (n < 2 * D)
    first = tl.load(w_in + (g * D + k) * D + d, features & (k < D), other=0.0)
    second = tl.load(w_gates + (g * D + k) * (2 * D) + n, both & (k < D), other=0.0)
    b_first = tl.load(b_in + at, features, other=0.0).to(tl.float32)
    b_second = tl.load(b_gates + g * (2 * D) + n, both, other=0.0).to(tl.float32)
    w = tl.load(gain + at, features, other=0.0).to(tl.float32)
    tiles = (R - 1) // BM + 1  # R + BM - 1 may exceed 32 bits where R does not
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):  # the weights stay in the program
        row = offset64(tile, BM) + m
        a = tl.load(x + row * (G * D) + at, features & (row < R), other=0.0)
        h = dot(a, first) + b_first
        h *= w * tl.rsqrt(tl.sum(tl.sum(h * h, 2), 0) / (G * D) + eps)[None, :, None]
        h = dot(h.to(a.dtype), second) + b_second
        tl.store(gates + row * (2 * G * D) + g * (2 * D) + n, h, both & (row < R))


@triton.jit
def outputs_kernel(
    states, w_gate_up, w_down, w_out, bias, y, R, H, INNER, OUT, TMA: tl.constexpr,
    BM: tl.constexpr, BH: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """y = (r + GeGLU(r)) w_out.T + bias; a program keeps BM rows and loops over INNER, BI at a time."""
    row, o = (tl.program_id(0) + 0 * R) * BM, tl.arange(0, BO)  # row is 64-bit where R is
    r = load_tile(states, row, 0, R, H, BM, BH, TMA)
    total = tl.zeros([BM, BH], tl.float32)
    for i in range(0, INNER, BI):
        gate = load_tile(w_gate_up, i, 0, 2 * INNER, H, BI, BH, TMA)
        up = load_tile(w_gate_up, INNER + i, 0, 2 * INNER, H, BI, BH, TMA)
        gate, up = dot(r, gate.T), dot(r, up.T)
        hidden = (activate(gate, "gelu_tanh") * up).to(r.dtype)
        down = load_tile(w_down, 0, i, H, INNER, BH, BI, TMA)  # zero beyond INNER
        total = dot(hidden, down.T, total)
    w = load_tile(w_out, 0, 0, OUT, H, BO, BH, TMA)
    total = dot((r.to(tl.float32) + total).to(r.dtype), w.T)
    total += tl.load(bias + o, o < OUT, other=0.0).to(tl.float32)[None, :]
    store_tile(y, row, 0, R, OUT, OUT, total, BM, BO, False)


def _run_separately(width: int, *tensors: Tensor) -> bool:
    """Whether each layer runs by itself: for gradients, in float32, and for rows too wide to fuse."""
    return needs_grad(*tensors) or width > MAX_WIDTH or tensors[0].dtype == torch.float32


def _like_gates(x: Tensor, *weights: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weights[-1].numel())  # b_gates is (G, 2 D)


@operator(fake=_like_gates)
def gated_heads_forward(
    x: Tensor, w_in: Tensor, b_in: Tensor, gain: Tensor, w_gates: Tensor, b_gates: Tensor
) -> Tensor:
    given = [t.contiguous() for t in (x, w_in, b_in, gain, w_gates, b_gates)]
    gates, (G, D), R = _like_gates(*given), b_in.shape, math.prod(x.shape[:-1])
    if gates.numel():
        programs = min(cdiv(R, 32), 4 * device_limits(x.device).multiprocessors)
        BG, BD = next_power_of_2(G), block_width(D)
        gates_kernel[(programs,)](
            *given, gates, R, EPS, G, D, BM=32, BG=BG, BD=BD, BN=block_width(2 * D), num_stages=3
        )
    return gates


def gated_heads(
    x: Tensor, w_in: Tensor, b_in: Tensor, gain: Tensor, w_gates: Tensor, b_gates: Tensor
) -> Tensor:
    """Grouped linear, RMSNorm with eps 1e-6, grouped linear.

    Args:
        x: (..., G D), G D from 1 to 8192; float32, float16 or bfloat16, any strides.
        w_in, b_in: (G, D, D) and (G, D), a Linear for each of G groups of D features.
        gain: (G D,), the norm's weight.
        w_gates, b_gates: (G, D, 2 D) and (G, 2 D).

    Returns:
        (..., 2 G D), contiguous. One kernel in half precision, without gradients, up to 128 features and 64
        in a group; else grouped_linear, rms_norm and grouped_linear. Sums are float32, and the inputs of the
        second product are rounded.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.
    """
    check_tensor("w_in", w_in, (None, None, None))
    G, D, _ = w_in.shape
    check_tensor("w_in", w_in, (G, D, D))
    check_tensor("b_in", b_in, (G, D), like=w_in)
    check_tensor("gain", gain, (G * D,), like=w_in)
    check_tensor("w_gates", w_gates, (G, D, 2 * D), like=w_in)
    check_tensor("b_gates", b_gates, (G, 2 * D), like=w_in)
    check_tensor("x", x, (..., G * D), like=w_in)
    if not 0 < G * D <= MAX_NORM_WIDTH:
        raise ValueError(f"gain: has {G * D} features, a norm takes 1 to {MAX_NORM_WIDTH}")
    x, w_in, b_in, gain, w_gates, b_gates = autocast(x, w_in, b_in, gain, w_gates, b_gates)
    widest = next_power_of_2(G) * block_width(D)
    if D > MAX_GROUP or _run_separately(widest, x, w_in, b_in, gain, w_gates, b_gates):
        normed = rms_norm(grouped_linear(x, w_in, b_in), gain)
        return grouped_linear(normed, w_gates, b_gates)
    return gated_heads_forward(x, w_in, b_in, gain, w_gates, b_gates)


def _like_outputs(states: Tensor, *weights: Tensor) -> Tensor:
    return states.new_empty(*states.shape[:-1], weights[-1].shape[0])


@operator(fake=_like_outputs)
def mlp_outputs_forward(
    states: Tensor, w_gate_up: Tensor, w_down: Tensor, w_out: Tensor, bias: Tensor
) -> Tensor:
    y = _like_outputs(states, w_gate_up, w_down, w_out, bias)
    if not y.numel():
        return y
    rows = states.reshape(-1, states.shape[-1])
    tensors = [t.contiguous() for t in (rows, w_gate_up.flatten(0, 1), w_down, w_out)]
    (R, H), INNER, OUT, limits = rows.shape, w_down.shape[1], len(bias), device_limits(states.device)
    starts = [byte for t in tensors for byte in (t.data_ptr(), t.stride(0) * t.itemsize)]
    aligned = all(byte % 16 == 0 for byte in starts)
    tma = aligned and limits.has_tma and R < 2**31  # TMA counts rows in 32 bits
    roomy = aligned and limits.shared_bytes >= 160 * 1024
    BM, BI, BH, BO = 64, 64 if roomy else 32, block_width(H), block_width(OUT)
    blocks = (BM, BH), (BI, BH), (BH, BI), (BO, BH)
    given = [descriptor(t, tma, *block) for t, block in zip(tensors, blocks, strict=True)]
    sizes = dict(TMA=tma, BM=BM, BH=BH, BI=BI, BO=BO, num_warps=4 if roomy else 8, num_stages=2)
    outputs_kernel[(cdiv(R, BM),)](*given, bias.contiguous(), y, R, H, INNER, OUT, **sizes)
    return y


def mlp_outputs(states: Tensor, w_gate_up: Tensor, w_down: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
    """(r + GeGLU(r)) w_out.T + b_out: an output head over an MLP beside a residual.

    Args:
        states: r, (..., H); float32, float16 or bfloat16, any strides.
        w_gate_up: (2, I, H), gate first.
        w_down: (H, I).
        w_out, b_out: (O, H) and (O,).

    Returns:
        (..., O), contiguous. One kernel in half precision, without gradients and up to 128 features and
        outputs; else geglu_mlp, the sum and F.linear. Sums are float32, and the inputs of each product are
        rounded.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    GeGLU is (gelu(r Wg.T) * (r Wu.T)) w_down.T of https://arxiv.org/abs/2002.05202.
    """
    check_tensor("states", states, (..., None))
    H = states.shape[-1]
    check_tensor("w_gate_up", w_gate_up, (2, None, H), like=states)
    check_tensor("w_down", w_down, (H, w_gate_up.shape[1]), like=states)
    check_tensor("w_out", w_out, (None, H), like=states)
    check_tensor("b_out", b_out, (len(w_out),), like=states)
    states, w_gate_up, w_down, w_out, b_out = autocast(states, w_gate_up, w_down, w_out, b_out)
    widest = max(H, len(w_out))
    if _run_separately(widest, states, w_gate_up, w_down, w_out, b_out) or not w_down.numel():
        return F.linear(states + geglu_mlp(states, w_gate_up, w_down), w_out, b_out)
    return mlp_outputs_forward(states, w_gate_up, w_down, w_out, b_out)
