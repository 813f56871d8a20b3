"""y[..., g] = x[..., g] @ weight[g] + bias[g]: many small Linear layers side by side, in one kernel."""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from labkit.kernels.common import (
    Gpu,
    autocast,
    cdiv,
    check_tensor,
    gpu_of,
    needs_grad,
    next_power_of_2,
    once_differentiable,
    operator,
)
from labkit.kernels.grouped_kernels import (
    backward_kernel,
    forward_kernel,
    once_kernel,
    sum_kernel,
    wide_kernel,
)

# ---- plans: how the work is cut up -------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a product is cut up; measured on an H200, sizes that fit the shared memory of others."""

    pack: int
    """Groups a program."""
    rows: int
    """Of a tile."""
    cols: int
    """Of the weight that stay with a program."""
    warps: int
    stages: int
    resident: int
    """Programs a multiprocessor."""
    tiles: int = 0
    """At most so many a program; 0: as many as let all end soon."""
    tma: bool = False
    """Whether x comes by descriptors."""
    store: bool = False
    """Whether y goes by descriptors."""
    mixed: bool = False
    """Whether a program's tiles lie far apart, not one after the other."""


def power(width: int) -> int:
    """The width of a tile that holds so many columns."""
    return max(16, next_power_of_2(width))


def forward_plan(d_in: int, d_out: int, itemsize: int, tma: bool, gpu: Gpu) -> Plan | None:
    """For groups of d_in to d_out; ``tma`` says whether descriptors can load x. None: the weight of a group
    is too large to stay."""
    widest, single, room = power(max(d_in, d_out)), itemsize == 4, gpu.shared_bytes // 1024
    cols = min(power(d_out), 64 if single else 128)
    if not room:  # interpreted: small tiles
        if {d_in, d_out} <= {16, 32}:
            return Plan(4, 32, 4 * d_out, 4, 1, 1)
        return Plan(1, 32, cols, 4, 1, 1) if widest <= 64 else None
    if {d_in, d_out} <= {16, 32} and widest * itemsize <= 64:
        small = widest == 16 and not single
        return Plan(4, 64 if small else 32, 4 * d_out, 4, 1, 5, 2 * small, store=True, mixed=True)
    if widest <= 32:
        return Plan(1, 64, cols, 4, 1, 8)
    if tma and room >= 160 and widest <= 128:
        if widest == 64 and not single:
            return Plan(1, 64, cols, 4, 3, 5, tiles=1 if d_in == d_out == 64 else 4, tma=True, store=True)
        if widest == 64:
            return Plan(1, 64, cols, 4, 3, 2, tma=True, store=True)
        if d_in == 128:
            return Plan(1, 64, cols, 4 if single else 8, 2 if single else 3, 2, tiles=13, tma=True)
        return Plan(1, 64, cols, 4, 3, 2, tma=True)
    if tma and room >= 200 and widest <= 256 and not single:
        return Plan(1, 64, cols, 8, 4, 1, tma=True)
    if widest <= (64 if single else 128):
        return Plan(1, 64, cols, 4 if widest == 64 else 8, 1, 4 if widest == 64 else 2)
    if widest <= 256 and not single:
        return Plan(1, 64, cols if room >= 160 else 64, 8, 1, 2)
    return None


def backward_plan(d_in: int, d_out: int, itemsize: int, gpu: Gpu) -> Plan:
    """The same; ``cols`` is the side of the square of dW that a program keeps, ``store`` is about dX."""
    widest, single, room = power(max(d_in, d_out)), itemsize == 4, gpu.shared_bytes // 1024
    if not room:
        return Plan(2 if {d_in, d_out} <= {16, 32} else 1, 32, 64, 4, 1, 1)
    if {d_in, d_out} <= {16, 32} and (single or widest == 16):
        return Plan(4, 32, 128, 4, 1, 3) if single else Plan(4, 64, 64, 4, 3, 2, tma=True, store=True)
    if widest <= 32 or (widest == 64 and (not single or room >= 200)):
        return Plan(1, 64, 64, 4, 1 if single else 3, 4, tma=widest == 32, store=True)
    if single or room < 200:  # in squares of 64 or 32, and dX apart
        side = 64 if room >= 200 or not single else 32
        return Plan(1, side, side, 4, 1 if single else 2, 2)
    return Plan(1, 64, 128, 8, 4, 1, tma=True, store=True)


@functools.cache
def spread(tiles: int, abreast: int, places: int, lead: int) -> int:
    """How many of the tiles a program takes, so that the last one ends soonest.

    ``abreast`` programs share each part of the tiles, ``places`` programs run at once, and ``lead`` is what a
    program's start costs, in tiles. 64 tiles of 100 groups in 264 places: in 4 parts of 16 tiles they are two
    waves, the second half empty; in parts of 26, 26 and 12 a short one begins where another ends.
    """

    def end(per: int) -> int:
        parts, rest = divmod(tiles, per)
        waves, more = divmod(abreast * parts, places)
        ends = Counter({waves * (per + lead): places - more, (waves + 1) * (per + lead): more})
        left = abreast if rest else 0
        while left:  # the last part is shorter; its programs begin where others end
            soonest = min(+ends)
            begun = min(left, ends[soonest])
            ends[soonest] -= begun
            ends[soonest + rest + lead] += begun
            left -= begun
        return max(+ends)

    fewest = cdiv(tiles, 256)  # so many parts does `sum_kernel` add at most
    return min(range(min(tiles, fewest + 512), fewest - 1, -1), key=end)


# ---- launches: x, y and their gradients as (B, T, C) views -------------------------------------------------


def aligned(t: Tensor, gpu: Gpu) -> bool:
    """Whether the hardware can copy tiles of t (1, rows, columns)."""
    begins = t.data_ptr() % 16 == 0 and t.stride(1) * t.itemsize % 16 == 0
    return gpu.tile_copies and t.shape[0] == 1 and t.stride(2) == 1 and begins and t.shape[1] < 2**31


def far_apart(widest: int, strides: Iterable[int]) -> bool:
    """Whether 32 bits may not count what a tile spans, its indices being smaller than 256 or ``widest``."""
    return 2 * max(256, widest) * max(strides) >= 2**31


def tiles_of(t: Tensor | None, wanted: bool, *block: int) -> Any:
    """A descriptor of t (1, rows, columns), where one is wanted."""
    return TensorDescriptor.from_tensor(t[0], block) if wanted and t is not None else t


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Fill y (B, T, G * d_out) from x (B, T, G * d_in); any strides."""
    (B, T, _), (G, d_in, d_out), gpu = x.shape, weight.shape, gpu_of(x.device)
    if not x.numel() or not y.numel():
        y.zero_()
        if bias is not None:
            y += bias.flatten()
        return
    unit = 16 // x.itemsize  # a descriptor may begin this many numbers, or fewer, before the group
    reach = d_in + unit - math.gcd(d_in, unit)
    plan = forward_plan(d_in, d_out, x.itemsize, aligned(x, gpu) and reach <= power(d_in), gpu)
    strides = *x.stride(), *weight.stride(), *(bias.stride() if bias is not None else (0, 0)), *y.stride()
    if plan is None:
        BM, BN, BK, warps = (128, 64, 32, 4) if x.itemsize == 4 else (128, 128, 64, 8)
        if gpu.shared_bytes < 200 * 1024:
            BM, BK, warps = 64, 32, 4
        grid = (cdiv(d_out, BN) * G * B * cdiv(T, BM),)
        blocks = dict(BM=BM, BK=BK, BN=BN, num_warps=warps, num_stages=3)
        wide_kernel[grid](x, weight, bias, y, B, T, G, *strides, d_in, d_out, **blocks)
        return
    pack, BM, BN, warps, stages, resident, per, tma, store, mixed = plan
    BK, packs, tiles = power(pack * d_in), cdiv(G, pack), B * cdiv(T, BM)
    large = far_apart(256, strides[1:8] + strides[9:])  # a tile lies in one sequence
    if tma and per == 1 and d_in == BK and d_out == BN and not large and aligned(y, gpu):
        sizes = dict(D_IN=d_in, D_OUT=d_out, BM=BM, num_warps=warps)
        x_tiles, y_tiles = tiles_of(x, True, BM, BK), tiles_of(y, True, BM, BN)
        once_kernel[(G * tiles,)](x_tiles, weight, bias, y_tiles, T, G, *strides[3:8], **sizes)
        return
    abreast = packs * cdiv(pack * d_out, BN)
    per = min(per or tiles, spread(tiles, abreast, resident * gpu.multiprocessors, 2))
    parts = cdiv(tiles, per)
    hop, step = (1, parts) if mixed else (per, 1)
    # a second pass by pointers must not meet stores that are still under way
    store = store and (not tma or d_in == BK) and aligned(y, gpu) and pack * d_out == BN and G % pack == 0
    seen = weight.flatten(0, 1)[None] if weight.is_contiguous() else weight
    whole = tma and d_in == BK and d_out % BN == 0 and aligned(seen, gpu)
    forward_kernel[(abreast * parts,)](
        x, tiles_of(x, tma, BM, BK), weight, tiles_of(seen, True, BK, BN) if whole else None,
        bias, y, tiles_of(y, store, BM, BN), B, T, G, per, hop, step, *strides,
        D_IN=d_in, D_OUT=d_out, PACK=pack, FLAT=B == 1, LARGE=large, TMA=tma, STORE=store,
        BM=BM, BK=BK, BN=BN, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def launch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None, dw: Tensor, db: Tensor
) -> Tensor:
    """Fill dw, and dx if it is wanted; db is returned, in the tensor given or in a new one."""
    (B, T, _), (G, d_in, d_out), gpu = x.shape, weight.shape, gpu_of(x.device)
    plan = backward_plan(d_in, d_out, x.itemsize, gpu)
    pack, BM, side, warps, stages, resident, per, tma, store, _ = plan
    BK, BN = min(power(pack * d_in), side), min(power(pack * d_out), side)
    down, slices = cdiv(pack * d_in, BK), cdiv(pack * d_out, BN)
    packs, tiles, whole = cdiv(G, pack), B * cdiv(T, BM), down * slices == 1
    per = per or spread(tiles, packs * down * slices, resident * gpu.multiprocessors, 7)
    P, size = cdiv(tiles, per), G * (d_in + 1) * d_out
    parts = torch.empty(P, size, dtype=torch.float32, device=x.device)
    filled = dx if whole else None
    exact = whole and pack * d_in == BK and G % pack == 0
    tma = tma and exact and pack * d_out == BN and aligned(x, gpu) and aligned(dy, gpu)
    store = store and exact and filled is not None and aligned(filled, gpu)
    sx, sg, sw, sd = x.stride(), dy.stride(), weight.stride(), filled.stride() if filled is not None else ()
    spans = sx[1:] + sg[1:] + (sw + sd[1:] if sd else ()) + (d_out,)  # the last: rows of dW in `parts`
    backward_kernel[(packs * down * slices * P,)](
        x, tiles_of(x, tma, BM, BK), dy, tiles_of(dy, tma, BM, BN), weight,
        filled, tiles_of(filled, store, BM, BK), parts, B, T, G, per, *sx, *sg, *sw, *(sd or (0, 0, 0)),
        D_IN=d_in, D_OUT=d_out, PACK=pack, FLAT=B == 1,
        LARGE=far_apart(max(d_in, d_out), spans), TMA=tma, STORE=store,
        KEEP=min(BM, max(1, 256 * warps // BN)), BM=BM, BK=BK, BN=BN, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    PARTS = next_power_of_2(P)
    BLOCK = max(32, min(512, 8192 // PARTS))
    blocks = dict(LARGE=size + BLOCK > 2**31, PARTS=PARTS, BLOCK=BLOCK)
    sum_kernel[(cdiv(size, BLOCK),)](parts, dw, db, P, size, d_in, d_out, **blocks)
    if filled is None:
        db = dy.sum((0, 1), dtype=torch.float32).view(G, d_out).to(db.dtype)
        if dx is not None:  # too wide for one program: a forward pass with the weight transposed
            launch_forward(dy, weight.transpose(1, 2), None, dx)
    return db


# ---- operators: x as (B, T, C), or with ``columns`` as (B, C, T), the last stride being 1 or not -----------


def as_rows(columns: bool, *tensors: Tensor) -> list[Tensor]:
    """The tensors as (B, T, C) views, as (1, B * T, C) where the strides of all allow it."""
    seen = [t.transpose(1, 2) if columns else t for t in tensors]
    if all(t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1) for t in seen):
        seen = [t.flatten(0, 1)[None] for t in seen]
    return seen


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, columns: bool) -> Tensor:
    B, first, last = x.shape
    width = weight.shape[0] * weight.shape[2]
    return x.new_empty(B, width, last) if columns else x.new_empty(B, first, width)


@operator(fake=_output)
def grouped_linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, columns: bool) -> Tensor:
    y = _output(x, weight, bias, columns)
    x, seen = as_rows(columns, x, y)
    launch_forward(x, weight, bias, seen)
    return y


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, columns: bool, with_dx: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if with_dx else x.new_empty(0)
    return dx, weight.new_empty(weight.shape), weight.new_empty(weight.shape[0], weight.shape[2])


@operator(fake=_gradients)
def grouped_linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, columns: bool, with_dx: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias."""
    dx, dw, db = _gradients(dy, x, weight, columns, with_dx)
    if not dy.numel() or not x.numel():
        sums = dy.sum((0, 2) if columns else (0, 1), dtype=torch.float32)
        return dx.zero_(), dw.zero_(), sums.view(db.shape).to(db.dtype)
    dy, x, *filled = as_rows(columns, dy, x, *([dx] if with_dx else ()))
    return dx, dw, launch_backward(dy, x, weight, filled[0] if with_dx else None, dw, db)


class GroupedProduct(torch.autograd.Function):
    """``grouped_linear_forward`` with its gradients, once differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, columns: bool) -> Tensor:
        of_sums = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]  # dx alone does not ask for x
        ctx.save_for_backward(x if of_sums else None, weight)
        ctx.columns = columns
        return grouped_linear_forward(x, weight, bias, columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        if x is None:
            return grouped_linear_forward(dy, weight.transpose(1, 2), None, ctx.columns), None, None, None
        dx, dw, db = grouped_linear_backward(dy, x, weight, ctx.columns, of_x)
        return dx if of_x else None, dw if of_weight else None, db if of_bias else None, None


# ---- the function and the module ---------------------------------------------------------------------------


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x[..., g] @ weight[g] + bias[g] for G groups of features that lie side by side.

    Args:
        x: (..., G * D_in); float32, float16 or bfloat16. Any strides, without a copy unless more than two
            leading dimensions cannot be merged.
        weight: (G, D_in, D_out), of x's dtype and device; any strides.
        bias: (G, D_out), or None.

    Returns:
        (..., G * D_out), of x's dtype; summed in float32 and rounded once. It has x's order in memory:
        (B, C, T) data, seen as (B, T, C), stays (B, C, T).

    Raises:
        ValueError: for another shape, dtype or device, naming the argument.

    The many small layers are those of https://discuss.pytorch.org/t/160141.
    """
    check_tensor("weight", weight, (None, None, None))
    G, d_in, d_out = weight.shape
    if G * max(d_in, d_out) >= 2**31:
        raise ValueError(f"weight: has {G} groups of {d_in} to {d_out}, and a row of 2**31 features or more")
    check_tensor("x", x, (..., G * d_in), like=weight)
    if bias is not None:
        check_tensor("bias", bias, (G, d_out), like=weight)
    x, weight, bias = autocast(x, weight, bias)
    *outer, inner = x.shape[:-1] or (1,)
    rows = x.reshape(math.prod(outer), inner, G * d_in)
    columns = rows.stride(2) != 1 and rows.stride(1) == 1
    if columns:
        rows = rows.transpose(1, 2)
    if needs_grad(rows, weight, bias):
        y = GroupedProduct.apply(rows, weight, bias, columns)
    else:
        y = grouped_linear_forward(rows, weight, bias, columns)
    if columns:
        y = y.transpose(1, 2)
    return y.reshape(*x.shape[:-1], G * d_out)


class GroupedLinear(nn.Module):
    """G Linears side by side: (..., G * d_in) to (..., G * d_out). Its state_dict is that of a ModuleList."""

    def __init__(self, groups: int, d_in: int, d_out: int, bias: bool = True, **options: Any) -> None:
        super().__init__()
        bound = d_in**-0.5 if d_in else 0.0
        self.weight = nn.Parameter(torch.empty(groups, d_in, d_out, **options).uniform_(-bound, bound))
        self.bias = (
            nn.Parameter(torch.empty(groups, d_out, **options).uniform_(-bound, bound)) if bias else None
        )
        self.register_state_dict_post_hook(self._part)
        self.register_load_state_dict_pre_hook(self._join)

    @classmethod
    def from_linears(cls, linears: Iterable[nn.Module]) -> "GroupedLinear":
        """With copies of the weights of nn.Linear layers that are all of one shape."""
        layers = list(linears)
        if not layers or not all(isinstance(one, nn.Linear) for one in layers):
            raise ValueError("linears: should be one or more nn.Linear")
        forms = {
            tuple((n, p.shape, p.dtype, p.device, p.requires_grad) for n, p in one.named_parameters())
            for one in layers
        }
        if len(forms) != 1:
            raise ValueError(f"linears: should be of one shape, dtype and device, not of {len(forms)} kinds")
        one: Any = layers[0]
        options = dict(device=one.weight.device, dtype=one.weight.dtype)
        made = cls(len(layers), one.in_features, one.out_features, one.bias is not None, **options)
        made.load_state_dict(nn.ModuleList(layers).state_dict())
        for name, parameter in one.named_parameters():
            made.get_parameter(name).requires_grad_(parameter.requires_grad)
        return made.train(one.training)

    def extra_repr(self) -> str:
        groups, d_in, d_out = self.weight.shape
        return f"groups={groups}, d_in={d_in}, d_out={d_out}, bias={self.bias is not None}"

    def forward(self, x: Tensor) -> Tensor:
        """x (..., G * d_in) to (..., G * d_out)."""
        return grouped_linear(x, self.weight, self.bias)

    # Outside "0.weight", "1.weight" and so on, each (out, in); inside one "weight".
    @staticmethod
    def _part(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
        for name in ("weight", "bias"):
            for group, value in enumerate(state.pop(prefix + name, ())):
                state[f"{prefix}{group}.{name}"] = value.mT if name == "weight" else value

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            names = [f"{prefix}{group}.{name}" for group in range(len(parameter))]
            if all(each in state for each in names):
                joined = torch.stack([state.pop(each) for each in names])
                state[prefix + name] = joined.mT.contiguous() if name == "weight" else joined
