"""The gated MLP (gelu(x Wg.T) * (x Wu.T)) Wd.T: gate, up, GELU and their product are one kernel.

They are one forward, and one backward.
"""

import math
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
from labkit.kernels.common import (
    DeviceLimits,
    allows_tf32,
    cdiv,
    count_tiles,
    device_limits,
    dot,
    gelu,
    gelu_and_derivative,
    next_power_of_2,
    offset64,
)
from labkit.kernels.linear import (
    launch_product,
    library_is_fast,
    library_linear,
    load_tile,
    split_columns,
    store_tile,
    swizzled_tile,
)

OPERATIONS_A_BYTE = {2: 160, 4: 10}
"""By size of a number: how many operations of cuBLAS's product take as long as a byte of memory, on an H200.
In float32 it does not use the tensor cores."""
FLOAT32_GAIN = 1.7
"""How many times as fast as that our product in float32 is."""

# ---- geglu_mlp: kernels ------------------------------------------------------------------------------------
# weight (2, H, K) is gate's and up's. Where the products are kept, they lie side by side: (M, 2, H).


@triton.jit(do_not_specialize=["M", "K"])
def gate_up_kernel(
    x, weight, hidden, kept_gate, kept_up, M, H, K, PRECISION: tl.constexpr,
    TMA: tl.constexpr, STORE: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """hidden (M, H) = gelu(gate) * up; gate and up themselves are stored unless ``kept_gate`` is None.

    BN / 2 rows of either weight make one tile of BN rows for one product: gate and up of the same columns
    meet in one program, and the tile keeps its full size.
    """
    FAST: tl.constexpr = (x.dtype if TMA else x.dtype.element_ty) != tl.float32
    UNIT: tl.constexpr = 8 if FAST else 4
    K = K // UNIT * UNIT  # changes nothing; the compiler learns that rows begin at multiples of 16 bytes
    rows, cols = count_tiles(M, BM), count_tiles(H, BN // 2)
    for tile in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0), flatten=TMA):
        m, n = swizzled_tile(tile, rows, cols, GROUP)
        row, unit = m * BM, n * (BN // 2)
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            a = load_tile(x, row, k, M, K, BM, BK, TMA)  # (BM, BK)
            if TMA:
                b = weight.load([0, unit, k])  # (2, BN / 2, BK)
            else:
                side, j = tl.arange(0, 2)[:, None, None], k + tl.arange(0, BK)[None, None, :]
                i = unit + tl.arange(0, BN // 2)[None, :, None]
                b = tl.load(weight + (offset64(side, H) + i) * K + j, (i < H) & (j < K), other=0.0)
            total = dot(a, b.reshape(BN, BK).T, total, PRECISION)
        gate, up = split_columns(total, BM, BN)  # (BM, BN / 2) each
        if kept_gate is not None:
            stride = offset64(2, H)
            store_tile(kept_gate, row, unit, M, H, stride, gate, BM, BN // 2, STORE)
            store_tile(kept_up, row, unit, M, H, stride, up, BM, BN // 2, STORE)
        store_tile(hidden, row, unit, M, H, H, gelu(gate, FAST) * up, BM, BN // 2, STORE)


@triton.jit
def gated_kernel(kept, hidden, H, BLOCK: tl.constexpr):
    """hidden (M, H) = gelu(gate) * up, which are kept (M, 2, H)."""
    row, col = tl.program_id(0).to(tl.int64) * H, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < H
    gate = tl.load(kept + 2 * row + col, inside).to(tl.float32)
    up = tl.load(kept + 2 * row + H + col, inside).to(tl.float32)
    tl.store(hidden + row + col, gelu(gate, hidden.dtype.element_ty != tl.float32) * up, inside)


@triton.jit
def gate_up_grad_kernel(dhidden, kept, dkept, H, BLOCK: tl.constexpr):
    """dkept (M, 2, H), which may be ``kept`` itself; dhidden (M, H) is overwritten with hidden."""
    row, col = tl.program_id(0).to(tl.int64) * H, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < H
    gate = tl.load(kept + 2 * row + col, inside).to(tl.float32)
    up = tl.load(kept + 2 * row + H + col, inside).to(tl.float32)
    change = tl.load(dhidden + row + col, inside).to(tl.float32)
    value, derivative = gelu_and_derivative(gate, dkept.dtype.element_ty != tl.float32)
    tl.store(dhidden + row + col, value * up, inside)
    tl.store(dkept + 2 * row + col, derivative * up * change, inside)
    tl.store(dkept + 2 * row + H + col, value * change, inside)


# ---- geglu_mlp: launches -----------------------------------------------------------------------------------


def library_is_faster(M: int, H: int, K: int, keep: bool, dtype: torch.dtype, limits: DeviceLimits) -> bool:
    """Whether cuBLAS's product of both weights, and a pass over its result, are faster than one kernel.

    The one kernel does not load gate and up again, nor store them unless they are kept: 4 M H numbers, or
    2 M H. Beside the 4 M H K operations of the product that is a share of its time. It wastes another share
    where its tiles do not fill their last wave of multiprocessors. cuBLAS fills it: it cuts K up. At 120
    sizes in bfloat16 on an H200 the slower way was taken 5 times, and cuBLAS's, where taken, was up to 2.2
    times as fast.
    """
    single = dtype is torch.float32
    if not limits.shared_bytes or not (single or library_is_fast(M, 2 * H, dtype, limits)):
        return False
    tiles, places = cdiv(M, 128) * cdiv(2 * H, 64 if single else 256), limits.multiprocessors
    saved = (2 if keep else 4) * dtype.itemsize * OPERATIONS_A_BYTE[dtype.itemsize] / (4 * K)
    gain = FLOAT32_GAIN if single and not allows_tf32() else 1.0
    return cdiv(tiles, places) * places / tiles > gain * (1 + saved)


def gated(kept: Tensor, hidden: Tensor) -> None:
    """Write gelu(gate) * up to hidden (M, H), from kept (M, 2, H)."""
    M, _, H = kept.shape
    block = min(1024, next_power_of_2(H))
    gated_kernel[(M, cdiv(H, block))](kept, hidden, H, BLOCK=block)


def _outputs(x: Tensor, w_gate_up: Tensor, keep: bool) -> list[Tensor]:
    M, H = x.shape[0], w_gate_up.shape[1]
    return [x.new_empty(*shape) for shape in ((M, H), (M, 2, H))[: 1 + keep]]


@operator(fake=_outputs)
def gate_up_forward(x: Tensor, w_gate_up: Tensor, keep: bool) -> list[Tensor]:
    """hidden (M, H); and to ``keep`` gate and up before the activation: (M, 2, H)."""
    (M, K), H = x.shape, w_gate_up.shape[1]
    if x.numel() and H and library_is_faster(M, H, K, keep, x.dtype, device_limits(x.device)):
        both = library_linear(x, w_gate_up.flatten(0, 1)).view(M, 2, H)
        hidden = x.new_empty(M, H)
        gated(both, hidden)
        return [hidden, both] if keep else [hidden]
    hidden, *kept = _outputs(x, w_gate_up, keep)
    sides = kept[0].unbind(1) if keep else (None, None)
    launch_product(gate_up_kernel, x, w_gate_up, (hidden, *sides))
    return [hidden, *kept]


@operator(
    fake=lambda dy, w_down, kept, _: (kept.new_empty(kept.shape[0], kept.shape[2]), torch.empty_like(kept))
)
def gate_up_backward(dy: Tensor, w_down: Tensor, kept: Tensor, overwrite_kept: bool) -> tuple[Tensor, Tensor]:
    """hidden (M, H), computed again, and the gradients of gate and up (M, 2, H), from dy (M, d).

    With ``overwrite_kept`` the gradients are written to ``kept``, which nobody may need any more. That is for
    eager calls only: an operator that is traced may not write to its inputs.
    """
    hidden, kept = dy @ w_down, kept.contiguous()  # hidden is dhidden until the kernel overwrites it
    M, _, H = kept.shape
    dkept = kept if overwrite_kept else torch.empty_like(kept)
    block = min(1024, next_power_of_2(H))
    if kept.numel():
        gate_up_grad_kernel[(M, cdiv(H, block))](hidden, kept, dkept, H, BLOCK=block)
    if overwrite_kept:
        torch.autograd.graph.increment_version(kept)  # another backward that saved it raises an error
    return hidden, dkept


class GeGLUFunction(torch.autograd.Function):
    """``geglu_mlp`` of x (M, d) with its gradients, once differentiable.

    Gate and up are kept, (M, 2, h). A plain ``.backward()`` overwrites them with their gradients. With
    ``retain_graph=True``, and under torch.compile, the gradients are a new tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        hidden, kept = gate_up_forward(x, w_gate_up, True)
        ctx.save_for_backward(x, w_gate_up, w_down, kept)
        return functional.linear(hidden, w_down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w_gate_up, w_down, kept = ctx.saved_tensors
        x_wanted, pair_wanted, down_wanted = ctx.needs_input_grad
        overwrite_kept = not is_traced(kept) and not retains_graph()
        dy = dy.contiguous()
        hidden, dkept = gate_up_backward(dy, w_down, kept, overwrite_kept)
        d_down = dy.T @ hidden if down_wanted else None  # (d, h)
        del hidden  # the next products can have its memory
        dkept = dkept.flatten(1)  # (M, 2 h)
        dx = dkept @ w_gate_up.flatten(0, 1) if x_wanted else None  # (M, d)
        d_gate_up = (dkept.T @ x).view_as(w_gate_up) if pair_wanted else None  # (2, h, d)
        return dx, d_gate_up, d_down


# ---- the functions -----------------------------------------------------------------------------------------


def geglu_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """(gelu(x Wg.T) * (x Wu.T)) Wd.T, GELU in its tanh form.

    Args:
        x: (..., d); float32, float16 or bfloat16, any strides.
        w_gate_up: (2, h, d), gate first, of x's dtype and device.
        w_down: (d, h), the same.

    Returns:
        (..., d), contiguous, of x's dtype. The gated product, (..., h), is rounded on the way. In 16 bits a
        GPU computes gelu(z) by one special function, off by 2**-12 z at most. Where autograd records the
        call, gate and up are kept, rounded; they are rounded, too, where cuBLAS computes them.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    The layer is GEGLU of https://arxiv.org/abs/2002.05202. cuBLAS computes the down product, the four
    products of the backward, and gate and up where few tiles leave multiprocessors without work.
    """
    check_tensor("x", x, (..., None))
    check_tensor("w_gate_up", w_gate_up, (2, None, x.shape[-1]), like=x)
    check_tensor("w_down", w_down, (x.shape[-1], w_gate_up.shape[1]), like=x)
    x, w_gate_up, w_down = autocast(x, w_gate_up, w_down)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if needs_grad(x, w_gate_up, w_down):
        y = GeGLUFunction.apply(rows, w_gate_up, w_down)
    else:
        y = functional.linear(gate_up_forward(rows, w_gate_up, False)[0], w_down)
    return y.view(x.shape)


def fused_gate_up(x: Tensor, w_gate_up: Tensor, keep: bool = False) -> tuple[Tensor, Tensor | None]:
    """gelu(x Wg.T) * (x Wu.T) without gradients; with ``keep`` gate and up themselves, too.

    Args:
        x: (M, d); float32, float16 or bfloat16, any strides.
        w_gate_up: (2, h, d), gate first, of x's dtype and device.

    Returns:
        The result (M, h), and gate and up (M, 2, h) or None; contiguous, of x's dtype. Each is rounded once,
        but where cuBLAS computes gate and up, the result is that of rounded ones.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.
        RuntimeError: if autograd would have to record the call.
    """
    check_tensor("x", x, (None, None))
    check_tensor("w_gate_up", w_gate_up, (2, None, x.shape[-1]), like=x)
    if needs_grad(x, w_gate_up):
        raise RuntimeError("fused_gate_up has no backward: call it under torch.no_grad(), or use geglu_mlp")
    x, w_gate_up = autocast(x, w_gate_up)
    hidden, *kept = gate_up_forward(x, w_gate_up, keep)
    return hidden, kept[0] if keep else None
