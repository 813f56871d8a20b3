"""MLPs in few kernels: one with a gate, and stacks of Linear, RMSNorm and GELU.

``geglu_mlp`` is (gelu(x Wg.T) * (x Wu.T)) Wd.T: gate, up, GELU and their product are one kernel, forward and
backward. ``fused_mlp`` is block after block while a program's rows stay on chip; it has no backward.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional

from labkit.kernels.common import (
    DeviceLimits,
    activate,
    activation_and_derivative,
    autocast,
    cdiv,
    check_tensor,
    count_tiles,
    device_limits,
    dot,
    empty_contiguous,
    gelu_gate,
    is_traced,
    needs_grad,
    next_power_of_2,
    no_gradient,
    offset64,
    once_differentiable,
    operator,
    retains_graph,
)
from labkit.kernels.linear import launch_product, load_tile, split_columns, store_tile, swizzled_tile
from labkit.kernels.rms_norm import inverse_rms

# ---- geglu_mlp: kernels ------------------------------------------------------------------------------------
# weight (2, H, K) is gate's and up's. Where the products are kept, they lie side by side: (M, 2, H).


@triton.jit(do_not_specialize=["M", "K"])
def gate_up_kernel(
    x, weight, hidden, kept_gate, kept_up, M, H, K, ACT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, STORE: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """hidden (M, H) = act(gate) * up; gate and up themselves are stored unless ``kept_gate`` is None.

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
        store_tile(hidden, row, unit, M, H, H, activate(gate, ACT, FAST) * up, BM, BN // 2, STORE)


@triton.jit
def gate_up_grad_kernel(dhidden, kept, dkept, H, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """dkept (M, 2, H), which may be ``kept`` itself; dhidden (M, H) is overwritten with hidden."""
    row, col = tl.program_id(0).to(tl.int64) * H, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < H
    gate = tl.load(kept + 2 * row + col, inside).to(tl.float32)
    up = tl.load(kept + 2 * row + H + col, inside).to(tl.float32)
    change = tl.load(dhidden + row + col, inside).to(tl.float32)
    value, derivative = activation_and_derivative(gate, ACT, dkept.dtype.element_ty != tl.float32)
    tl.store(dhidden + row + col, value * up, inside)
    tl.store(dkept + 2 * row + col, derivative * up * change, inside)
    tl.store(dkept + 2 * row + H + col, value * change, inside)


# ---- geglu_mlp: launches -----------------------------------------------------------------------------------


def _outputs(x: Tensor, w_gate_up: Tensor, keep: bool) -> list[Tensor]:
    M, H = x.shape[0], w_gate_up.shape[1]
    return [x.new_empty(*shape) for shape in ((M, H), (M, 2, H))[: 1 + keep]]


@operator(fake=_outputs)
def gate_up_forward(x: Tensor, w_gate_up: Tensor, keep: bool) -> list[Tensor]:
    """hidden (M, H); and to ``keep`` gate and up before the activation: (M, 2, H)."""
    hidden, *kept = _outputs(x, w_gate_up, keep)
    sides = kept[0].unbind(1) if keep else (None, None)
    launch_product(gate_up_kernel, x, w_gate_up, (), (hidden, *sides), "gelu_tanh")
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
        gate_up_grad_kernel[(M, cdiv(H, block))](hidden, kept, dkept, H, ACT="gelu_tanh", BLOCK=block)
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


# ---- the functions and the module --------------------------------------------------------------------------


def geglu_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """(gelu(x Wg.T) * (x Wu.T)) Wd.T, GELU in its tanh form.

    Args:
        x: (..., d); float32, float16 or bfloat16, any strides.
        w_gate_up: (2, h, d), gate first, of x's dtype and device.
        w_down: (d, h), the same.

    Returns:
        (..., d), contiguous, of x's dtype. The gated product, (..., h), is rounded on the way. In 16 bits a
        GPU computes gelu(z) by one special function, off by 2**-12 z at most. Where autograd records the
        call, gate and up are kept, rounded.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    The layer is GEGLU of https://arxiv.org/abs/2002.05202. cuBLAS computes the down product, and the four
    products of the backward.
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
        The result (M, h), and gate and up (M, 2, h) or None; contiguous, of x's dtype, each rounded once.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.
        RuntimeError: if autograd would have to record the call.
    """
    check_tensor("x", x, (None, None))
    check_tensor("w_gate_up", w_gate_up, (2, None, x.shape[-1]), like=x)
    no_gradient("fused_gate_up", x, w_gate_up)
    x, w_gate_up = autocast(x, w_gate_up)
    hidden, *kept = gate_up_forward(x, w_gate_up, keep)
    return hidden, kept[0] if keep else None


class GeGLU(nn.Module):
    """``geglu_mlp`` as a module: w_gate_up (2, h, d) and w_down (d, h), initialised like nn.Linear's weight.

    Args:
        d, h: the width of x, and that of the hidden layer.
        options: device and dtype of the parameters.
    """

    def __init__(self, d: int, h: int, **options: Any) -> None:
        super().__init__()
        self.w_gate_up = nn.Parameter(torch.empty(2, h, d, **options).uniform_(-(d**-0.5), d**-0.5))
        self.w_down = nn.Parameter(torch.empty(d, h, **options).uniform_(-(h**-0.5), h**-0.5))

    @classmethod
    def from_linears(cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> "GeGLU":
        """Copy the weights of three nn.Linear of one dtype and device: gate and up (d to h), down (h to d).

        Raises:
            ValueError: for a bias, another shape, dtype or device, naming the argument.
        """
        for name, one in (("gate", gate), ("up", up), ("down", down)):
            if not isinstance(one, nn.Linear) or one.bias is not None:
                raise ValueError(f"{name}: should be an nn.Linear without a bias")
            w, like = one.weight, gate.weight
            shape = tuple(like.shape[::-1] if name == "down" else like.shape)
            if (w.shape, w.dtype, w.device) != (shape, like.dtype, like.device):
                has = f"{tuple(w.shape)}, {w.dtype}, on {w.device}"
                raise ValueError(
                    f"{name}: has a weight {has}, should be {shape}, {like.dtype}, on {like.device}"
                )
        made = cls(*gate.weight.shape[::-1], device=gate.weight.device, dtype=gate.weight.dtype)
        with torch.no_grad():
            made.w_gate_up.copy_(torch.stack((gate.weight, up.weight)))
            made.w_down.copy_(down.weight)
        return made.train(gate.training)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) to (..., d)."""
        return geglu_mlp(x, self.w_gate_up, self.w_down)


# ---- fused_mlp: kernel -------------------------------------------------------------------------------------
# x is (R, W), weight (L, W, W) as in nn.Linear, bias and gain (L, W).


@triton.jit
def fused_mlp_kernel(
    x, weight, bias, gain, y, R, first, last, W: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr
):
    """A program takes BM whole rows, which the norm needs, through the blocks ``first`` to ``last`` - 1.

    Nothing is stored between two blocks, and no program waits for another. The compiler pipelines the loop:
    where two weights fit in shared memory, the next block's is loaded while this one is multiplied.
    """
    start = tl.program_id(0) + 0 * R  # 64-bit where R is
    m, n = tl.arange(0, BM)[:, None], tl.arange(0, BW)  # (BM, 1), (BW,)
    tile = offset64(start, BM * W)  # offsets within a tile need 32 bits only
    at, columns = m * W + n[None, :], n < W  # (BM, BW), (BW,)
    inside = (start * BM + m < R) & columns[None, :]  # (BM, BW)
    square = columns[:, None] & columns[None, :]  # (BW, BW)
    h = tl.load(x + tile + at, inside, other=0.0)  # (BM, BW)
    for i in tl.range(first, last):
        w = tl.load(weight + i * W * W + n[None, :] * W + n[:, None], square, other=0.0)  # (in, out)
        b = tl.load(bias + i * W + n, columns, other=0.0).to(tl.float32)  # (BW,)
        g = tl.load(gain + i * W + n, columns, other=0.0).to(tl.float32)
        # By multiply-adds in float32: three products of TF32 would take 250 registers instead of 80, and more
        # shared memory.
        z = dot(h, w, None, "ieee") + b[None, :]  # (BM, BW)
        u = z * inverse_rms(z, W) * g[None, :]
        h = (u * gelu_gate(u)).to(h.dtype)
    tl.store(y + tile + at, h, inside)


# ---- fused_mlp: launches -----------------------------------------------------------------------------------


def weight_stages(limits: DeviceLimits, BW: int, itemsize: int) -> int:
    """3 pipeline stages where two weights fit in shared memory, 2 where one does, a ValueError where none."""
    room = (limits.shared_bytes or 2**30) - 8192
    for stages in (3, 2):
        if (stages - 1) * BW * BW * itemsize <= room:
            return stages
    raise ValueError("weight: that of one block does not fit in this GPU's shared memory")


def rows_per_program(limits: DeviceLimits, R: int, BW: int, itemsize: int) -> int:
    """16 rows while not every multiprocessor has a program, then 32; 64 fit only beside a small weight."""
    most = 64 if BW <= 128 and itemsize == 2 else 32
    return next((rows for rows in (16, 32) if rows * limits.multiprocessors >= R or rows == most), 64)


@operator(fake=lambda x, *_: empty_contiguous(x))
def fused_mlp_forward(
    x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, blocks_per_launch: int
) -> Tensor:
    x, weight, bias, gain = x.contiguous(), weight.contiguous(), bias.contiguous(), gain.contiguous()
    (R, W), depth = x.shape, weight.shape[0]
    if not depth or not x.numel():
        return x.clone()
    if weight.numel() >= 2**31:  # the kernel counts weights in 32 bits: half of the blocks at a time
        half = depth // 2
        x = fused_mlp_forward(x, weight[:half], bias[:half], gain[:half], blocks_per_launch)
        return fused_mlp_forward(x, weight[half:], bias[half:], gain[half:], blocks_per_launch)
    limits, BW = device_limits(x.device), max(16, next_power_of_2(W))
    BM = rows_per_program(limits, R, BW, x.itemsize)
    warps = 8 if BW >= 128 or BM * BW >= 4096 else 4  # 8: a warp has less of each link
    tuned = dict(num_warps=warps, num_stages=weight_stages(limits, BW, x.itemsize))
    for first in range(0, depth, blocks_per_launch):
        y, last = torch.empty_like(x), min(first + blocks_per_launch, depth)
        grid = (cdiv(R, BM),)
        fused_mlp_kernel[grid](x, weight, bias, gain, y, R, first, last, W=W, BM=BM, BW=BW, **tuned)
        x = y
    return x


def fused_mlp(blocks_per_launch: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Make a function of (x, weight, bias, gain) that runs a stack of Linear, RMSNorm, GELU blocks.

    h = gelu(rms_norm(h weight[i].T + bias[i]) * gain[i]) for i = 0 to L-1, from h = x. rms_norm(z) is
    z / sqrt(mean(z**2) + 1e-6) over a row, and GELU is in its tanh form.

    Args:
        blocks_per_launch: at least 1; a number above L is one launch for all blocks.

    Returns:
        A function that takes
        x: (R, W); float32, float16 or bfloat16, any strides;
        weight: (L, W, W), each as in nn.Linear (out, in), of x's dtype and device. One of them has to fit in
        the shared memory of a multiprocessor: W up to 256 in 16 bits and 128 in float32 on an H200;
        bias, gain: (L, W), of x's dtype and device;
        and returns h, (R, W), contiguous, of x's dtype, rounded once after each block. It has no backward.

    Raises:
        ValueError: for another shape, dtype or device, naming the argument, and for a weight that is too
            large for the GPU.
        RuntimeError: if autograd would have to record the call.

    RMSNorm: https://arxiv.org/abs/1910.07467; GELU and its tanh form: https://arxiv.org/abs/1606.08415.
    """
    if not isinstance(blocks_per_launch, int) or blocks_per_launch < 1:
        raise ValueError(f"blocks_per_launch: is {blocks_per_launch!r}, should be an int of 1 or more")

    def call(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
        check_tensor("x", x, (None, None))
        W = x.shape[1]
        check_tensor("weight", weight, (*getattr(weight, "shape", ())[:1], W, W), like=x)
        check_tensor("bias", bias, (len(weight), W), like=x)
        check_tensor("gain", gain, (len(weight), W), like=x)
        no_gradient("fused_mlp", x, weight, bias, gain)
        return fused_mlp_forward(*autocast(x, weight, bias, gain), blocks_per_launch)

    return call
