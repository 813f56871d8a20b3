"""A GRU layer, forward and backward: with resident weights all steps are one kernel, else a launch each."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from labkit.kernels.calls import (
    autocast,
    check_tensor,
    is_traced,
    needs_grad,
    once_differentiable,
    operator,
    retains_graph,
)
from labkit.kernels.common import DeviceLimits, allows_tf32, cdiv, device_limits, next_power_of_2
from labkit.kernels.gru_kernels import (
    gate,
    gate_grad,
    gru_grad_kernel,
    gru_input_kernel,
    gru_kernel,
    load_gates,
    store_gates,
)

# ---- one step per launch, where the matrices are too large; a program has BLOCK of the B * H features ------


@triton.jit
def step_kernel(
    gates, product, reset, state, operand, h, hidden, B, T, t, H, BLOCK: tl.constexpr, FAST: tl.constexpr
):
    """Step t; overwrites state (B, H), in float32, and operand (B, H), the input of the next product."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b, n, inside = i // H, i % H, i // H < B  # B * H may exceed 32 bits
    ir, iz, inn = load_gates(gates + (b * T + t) * 3 * H + n, inside, H)
    hr, hz, hn = load_gates(product + b * 3 * H + n, inside, H)
    hn, last = hn.to(tl.float32), tl.load(state + i, inside, other=0.0)
    ar, az, an, new = gate(ir, iz, inn, hr, hz, hn, last, FAST, gates.dtype.element_ty != tl.float32)
    tl.store(h + (b * T + t) * H + n, new, inside)
    if hidden is not None:
        into = gates + (b * T + t) * 3 * H + n
        store_gates(into, inside, H, ar, az, an)
        tl.store(hidden + (b * T + t) * H + n, hn, inside)
    if reset is not None:
        new = tl.where(tl.load(reset + b * T + t + 1, inside & (t + 1 < T), other=0) != 0, 0.0, new)
    tl.store(state + i, new, inside)
    tl.store(operand + i, new, inside)


@triton.jit
def step_grad_kernel(
    dh, gates, hidden, h0, reset, h, carry, product, grads, last, B, T, t, H, BLOCK: tl.constexpr
):
    """Step t in reverse; carry (B, H), in float32, plus product is its state's gradient from later steps."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b, n, inside = i // H, i % H, i // H < B  # B * H may exceed 32 bits
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
    store_gates(grads + 4 * at - 3 * n, inside, H, dn, dr, dz)
    tl.store(grads + 4 * at - 3 * n + 3 * H, dhn, inside)
    if reset is not None:
        before = tl.where(before - before == 0.0, before, 0.0)
    tl.store(last + at, before, inside)
    tl.store(carry + i, kept, inside)


# ---- launch sizes ------------------------------------------------------------------------------------------


@cache
def gru_plan(B: int, H: int, itemsize: int, limits: DeviceLimits, backward: bool) -> dict[str, int] | None:
    """Sizes of the kernels with all steps, or None where three matrices do not fit on a multiprocessor.

    The matrices pass through shared memory into registers: 96 of them in each thread of BH / 16 warps. So one
    program of 128 features fits on a multiprocessor, or three of 64. BM, the sequences of a program, is the
    least with which all programs run at once, because a step of few sequences is shortest. Tensor cores need
    at least 8; with 32 one round took as long as two with 16. The backward has 8 always: with 16 registers do
    not suffice. Beside the matrices 8 sequences need 2 KB of shared memory, and 16 of them 12. AHEAD hides
    the memory's latency, which is longer than a step, as far as registers allow.
    """
    BH = max(16, next_power_of_2(H))
    beside = limits.shared_bytes - 3 * BH * BH * itemsize
    if limits.shared_bytes:
        if BH * itemsize > 256 or beside < 2 * 1024:
            return None
    elif BH > 32:  # interpreted
        return None
    at_once = limits.multiprocessors * max(1, 192 // BH)
    tight = limits.shared_bytes > 0 and beside < 12 * 1024
    most = 8 if backward or itemsize == 4 or tight else 16
    BM = min(most, max(8, next_power_of_2(cdiv(B, at_once))))
    if backward:  # with 2, only two programs of 64 features fit on a multiprocessor
        ahead = 2 if BH == 128 or cdiv(B, BM) <= 2 * limits.multiprocessors else 1
    else:
        ahead = 2 if BM * BH > 1024 else 4
    ahead = 1 if itemsize == 4 else ahead
    plan = dict(H=H, BH=BH, BM=BM, AHEAD=ahead, num_warps=max(1, BH // 16))
    return plan if backward else plan | dict(PAIRS=itemsize == 2 and H % 2 == 0)


@cache
def input_plan(B: int, width: int, H: int, itemsize: int, limits: DeviceLimits) -> dict[str, int] | None:
    """Sizes of the kernel that multiplies the input, ``width`` numbers a step; None for another path.

    The input's three matrices lie in shared memory, beside those that pass through it into registers. A step
    reads them, however few sequences it has. So where programs of 8 sequences take less than half of the
    multiprocessors, ``gru_plan`` remains, which reads the products from memory. A step of 8 takes less time
    than one of 16: so 16 are for where 8 would take another round. Of 64 features four programs of 8 fit on a
    multiprocessor, or three of 16. Offsets are 32-bit up to 4 H numbers a step.
    """
    plan = gru_plan(B, H, itemsize, limits, False)
    BK = max(16, next_power_of_2(width))
    if plan is None or itemsize != 2 or not 0 < width <= 4 * H or (BH := plan["BH"]) < BK:
        return None
    needed = 3 * BH * (BH + BK) * itemsize + 12 * 1024
    if cdiv(B, 8) < limits.multiprocessors / 2 or (limits.shared_bytes and needed > limits.shared_bytes):
        return None
    rounds8 = cdiv(cdiv(B, 8), limits.multiprocessors * (1 if BH == 128 else 256 // BH))
    rounds16 = cdiv(cdiv(B, 16), limits.multiprocessors * max(1, 192 // BH))
    BM = 8 if rounds8 <= rounds16 else 16
    return dict(K=width, BK=BK, H=H, BH=BH, BM=BM, PAIRS=plan["PAIRS"], num_warps=plan["num_warps"])


# ---- launches ----------------------------------------------------------------------------------------------


def _like_states(x: Tensor, weight_ih: Tensor, weight_hh: Tensor, *others: Any) -> list[Tensor]:
    (B, T, _), H, keep = x.shape, weight_hh.shape[1], others[-1]
    return [x.new_empty(B, T, width) for width in ((H, 3 * H, H) if keep else (H,))]


@operator(fake=_like_states)
def gru_forward(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None, bias_hh: Tensor | None,
    h0: Tensor | None, reset: Tensor | None, keep: bool,
) -> list[Tensor]:  # fmt: skip
    """h (B, T, H); and for the backward, if ``keep``, ar, az, an (B, T, 3 H) and hn (B, T, H)."""
    (B, T, _), H = x.shape, weight_hh.shape[1]
    h, hidden = x.new_empty(B, T, H), x.new_empty(B, T, H) if keep else None
    weight_hh, h0 = weight_hh.contiguous(), None if h0 is None else h0.contiguous()
    reset = None if reset is None else reset.contiguous().view(torch.uint8)
    fast, limits = x.dtype is torch.bfloat16, device_limits(x.device)
    plan = None if keep else input_plan(B, x.shape[2], H, x.itemsize, limits)
    if plan is not None and h.numel():
        bias_ih, bias_hh = (None if bias is None else bias.contiguous() for bias in (bias_ih, bias_hh))
        tensors = x.contiguous(), weight_ih.contiguous(), bias_ih, weight_hh, bias_hh, h0, reset, h
        gru_input_kernel[(cdiv(B, plan["BM"]),)](*tensors, B, T, FAST=fast, **plan)
        return [h]
    gates = functional.linear(x, weight_ih, bias_ih)  # (B, T, 3 H)
    plan = gru_plan(B, H, x.itemsize, limits, False)
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
    return [h] if hidden is None else [h, gates, hidden]


def _like_gradients(h0: Tensor | None, h: Tensor, of_bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, T, H = h.shape
    dh0, sums = h.new_empty(0 if h0 is None else B, H), h.new_empty(4 * H if of_bias else 0)
    return h.new_empty(B, T, 4 * H), torch.empty_like(h), dh0, sums


@operator(fake=lambda dh, gates, hidden, weight_hh, h0, reset, h, of_bias: _like_gradients(h0, h, of_bias))
def gru_backward(
    dh: Tensor, gates: Tensor, hidden: Tensor, weight_hh: Tensor,
    h0: Tensor | None, reset: Tensor | None, h: Tensor, of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of inn, ar, az, hn (B, T, 4 H), the state before each step (B, T, H), and dh0.

    With ``of_bias`` also the sums of those four gradients over all sequences and steps, (4 H,).
    """
    (B, T, H), dh, weight_hh = h.shape, dh.contiguous(), weight_hh.contiguous()
    grads, last, dh0, sums = _like_gradients(h0, h, of_bias)
    wanted, h0 = (None, None) if h0 is None else (dh0, h0.contiguous())
    reset = None if reset is None else reset.contiguous().view(torch.uint8)
    plan = gru_plan(B, H, h.itemsize, device_limits(h.device), True)
    if not h.numel():
        dh0.zero_()
        sums.zero_()
    elif plan is not None:
        programs = cdiv(B, plan["BM"])
        parts = h.new_empty(programs, 4 * H, dtype=torch.float32) if of_bias else None
        gru_grad_kernel[(programs,)](
            dh, gates, hidden, weight_hh, h0, reset, h, grads, last, wanted, parts, B, T, **plan
        )
        sums = sums if parts is None else parts.sum(0).to(h.dtype)
    else:
        carry, product = h.new_zeros(B, H, dtype=torch.float32), h.new_zeros(B, H)
        # For few rows of float32 cuBLAS took 51 us, or 5 if it has a bias to add (16 x 384 x 128, an H200).
        nothing = h.new_zeros(H) if B <= 16 and h.itemsize == 4 else None
        for t in reversed(range(T)):
            step_grad_kernel[(cdiv(B * H, 256),)](
                dh, gates, hidden, h0, reset, h, carry, product, grads, last, B, T, t, H, BLOCK=256
            )
            later = grads[:, t, H:]
            product = later @ weight_hh if nothing is None else torch.addmm(nothing, later, weight_hh)
        dh0.copy_(carry + product) if wanted is not None else None
        if reset is not None:
            dh0.masked_fill_(reset[: len(dh0), :1] != 0, 0.0)
        sums = grads.sum((0, 1)) if of_bias else sums
    return grads, last, dh0, sums


class GRUFunction(torch.autograd.Function):
    """``gru`` with its gradients, once differentiable.

    Kept are, in x's dtype, ar, az, an and hn: 4 B T H numbers that the forward writes and the backward reads,
    beside the states, which are the output. Computing them again from the states would need the input's
    products, 3 B T H numbers, and a further product at each step, with the weights resident twice, as they
    are and transposed. r, z and n themselves, rounded, would leave too little of 1 - z and 1 - n**2.
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
        of_x, of_ih, of_hh, of_bias_ih, of_bias_hh, of_h0, _ = ctx.needs_input_grad  # which gradients
        of_bias = of_bias_ih or of_bias_hh
        grads, last, dh0, sums = gru_backward(dh, gates, hidden, weight_hh, h0, reset, h, of_bias)
        (B, T, H), rows = h.shape, grads.flatten(0, 1)  # (B T, 4 H)
        of_input, of_state = rows[:, : 3 * H], rows[:, H:]  # in the orders n, r, z and r, z, n
        dx = (of_input @ weight_ih.roll(H, 0)).view(B, T, weight_ih.shape[1]) if of_x else None
        dweight_ih = (of_input.T @ x.flatten(0, 1)).roll(-H, 0) if of_ih else None
        dweight_hh = of_state.T @ last.flatten(0, 1) if of_hh else None
        dbias_ih = sums[: 3 * H].roll(-H, 0) if of_bias_ih else None
        dbias_hh = sums[H:] if of_bias_hh else None
        return dx, dweight_ih, dweight_hh, dbias_ih, dbias_hh, dh0 if of_h0 else None, None


# ---- cuDNN, or the kernels ---------------------------------------------------------------------------------


def library_is_fast(x: Tensor, H: int) -> bool:
    """Whether cuDNN is faster: where each step is a launch, which costs the host more than the step the GPU.

    A call that is traced has no cuDNN.
    """
    if not x.is_cuda or is_traced(x) or not x.numel() or not H:
        return False
    return gru_plan(x.shape[0], H, x.itemsize, device_limits(x.device), False) is None


def library_gru(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None, bias_hh: Tensor | None,
    h0: Tensor | None,
) -> Tensor:  # fmt: skip
    """cuDNN's GRU, with its gradients: h (B, T, H), which in memory is (T, B, H)."""
    B, H = x.shape[0], weight_hh.shape[1]
    # cuDNN wants the weights in one piece of memory, in which biases have room in any case. Before it copies
    # others to such a piece by itself, it warns.
    biases = (x.new_zeros(3 * H) if bias is None else bias for bias in (bias_ih, bias_hh))
    weights = [weight_ih, weight_hh, *biases]
    sizes = [weight.numel() for weight in weights]
    pieces = torch.cat([weight.reshape(-1) for weight in weights]).split(sizes)
    weights = [piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True)]
    first = x.new_zeros(1, B, H) if h0 is None else h0.contiguous()[None]
    recorded = needs_grad(x, first, *weights)
    if x.itemsize == 2 or allows_tf32():
        return cudnn_gru(x, first, *weights, recorded=recorded)
    if recorded:
        return Float32GRUFunction.apply(x, first, *weights)
    with without_tf32():
        return cudnn_gru(x, first, *weights, recorded=False)


def cudnn_gru(x: Tensor, first: Tensor, *weights: Tensor, recorded: bool) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):  # it would cast to float16, whatever its dtype is
        h: Tensor = torch.gru(x, first, weights, True, 1, 0.0, recorded, False, True)[0]
    return h


SETTING = Lock()
"""Held while cuDNN's precision is another one than the process's."""


@contextmanager
def without_tf32() -> Iterator[None]:
    """Meanwhile cuDNN's recurrent layers compute in float32; PyTorch's default lets them take TF32."""
    rnn: Any = torch.backends.cudnn.rnn
    with SETTING:
        before, rnn.fp32_precision = rnn.fp32_precision, "ieee"
        try:
            yield
        finally:
            rnn.fp32_precision = before


class Float32GRUFunction(torch.autograd.Function):
    """``cudnn_gru`` without TF32 in both directions: cuDNN asks for its precision in each of them anew."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        leaves = [one.detach().requires_grad_(n) for one, n in zip(inputs, ctx.needs_input_grad, strict=True)]
        with torch.enable_grad(), without_tf32():
            h = cudnn_gru(*leaves, recorded=True)
        ctx.made = leaves, h
        return h.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        (leaves, h), keep = ctx.made, retains_graph()
        with without_tf32():
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(h, wanted, dh, retain_graph=keep))  # else a second call raises
        return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)


# ---- the function ------------------------------------------------------------------------------------------


def check_gru(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None, bias_hh: Tensor | None,
    h0: Tensor | None, reset: Tensor | None,
) -> None:  # fmt: skip
    """ValueError unless these are arguments of ``gru``."""
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
    if 4 * (T + 8) * H >= 2**31:  # offsets are 32-bit, of steps that are loaded ahead, too
        raise ValueError(f"x: a sequence of {T} steps of {H} features has 2**29 numbers or more")


def gru(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None, h0: Tensor | None = None, reset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A GRU layer as nn.GRU computes it. For t = 0 to T-1, with the thirds r, z, n of each weight and bias,

    r = sigmoid(W_ir x_t + b_ir + W_hr h + b_hr), z = sigmoid(W_iz x_t + b_iz + W_hz h + b_hz),
    n = tanh(W_in x_t + b_in + r (W_hn h + b_hn)), h_t = (1 - z) n + z h, where h = h_{t-1}.

    Args:
        x: (B, T, I); float32, float16 or bfloat16, any strides, as all tensors but reset.
        weight_ih, weight_hh: (3 H, I) and (3 H, H), in the order r, z, n; 4 T H below 2**31.
        bias_ih, bias_hh: (3 H,), or None.
        h0: (B, H), the state before the first step; zeros where it is left out.
        reset: (B, T), bool, or None: where it is True, h is zero whatever h_{t-1} is, even infinite or NaN,
            and no gradient flows back past it. An infinite or NaN x still makes the gradient of weight_ih
            NaN, also before a reset, because it is multiplied by a gradient of zero.

    Returns:
        The states (B, T, H), of x's dtype; contiguous, unless cuDNN computes them: then they are (T, B, H) in
        memory. The running state is float32; it is rounded for its product and for the output. The input's
        product is rounded once, or not at all where the kernel makes it: in 16 bits, without gradients, for 4
        sequences or more per multiprocessor, if all six matrices fit on one (at most 128 features of x, and
        no more than H rounded up to a power of two).

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    All steps are one kernel where three matrices H x H, H rounded up to a power of two, fit on a
    multiprocessor: on most GPUs up to 128 features in 16 bits and 64 in float32. (Float32 is multiplied as
    three products of TF32, with float32's error: a single one saves no time.) Beyond, cuDNN computes it, in
    float32 with TF32 only if PyTorch's setting for products allows that. Where there is a reset, or
    torch.compile traces the call, each step is a product, which is rounded, and a kernel: two launches, some
    20 us of the host.

    In reverse, with g_t = dh_t + z_{t+1} g_{t+1} + what comes through the products of step t+1:
    dz = g (h - n) z (1 - z), dn = g (1 - z) (1 - n**2) and dr = dn (W_hn h + b_hn) r (1 - r) are gradients
    before the activations, and r dn is that of W_hn h + b_hn. The gradients of the weights are one product
    each, over all sequences and steps. The cell is that of
    https://arxiv.org/abs/1406.1078 in the form of https://docs.pytorch.org/docs/stable/generated/torch.nn.GRU.html.
    """
    check_gru(x, weight_ih, weight_hh, bias_ih, bias_hh, h0, reset)
    x, weight_ih, weight_hh, bias_ih, bias_hh, h0 = autocast(x, weight_ih, weight_hh, bias_ih, bias_hh, h0)
    if reset is None and library_is_fast(x, weight_hh.shape[1]):
        return library_gru(x, weight_ih, weight_hh, bias_ih, bias_hh, h0)
    if needs_grad(x, weight_ih, weight_hh, bias_ih, bias_hh, h0):
        return GRUFunction.apply(x, weight_ih, weight_hh, bias_ih, bias_hh, h0, reset)
    return gru_forward(x, weight_ih, weight_hh, bias_ih, bias_hh, h0, reset, False)[0]
