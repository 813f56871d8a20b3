"""Is it right? Against a float64 reference, on awkward inputs, into poisoned and fenced memory.

Inputs and everything that a call allocates lie between fences of NaN: an element that was never
written stays NaN, a load beyond the end brings NaN in, and a store beyond the end breaks the fence.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labkit import gpu

Call = Callable[..., Tensor]
Inputs = Callable[[tuple[int, ...]], tuple[Tensor, ...]]

CHECK_MIME = "application/vnd.labkit.check+json"
SHAPES = ((64, 128), (37, 33), (5, 640), (1, 1), (3, 5, 33), (3600, 3), (19,), (0, 8), (4, 0))
"""Full, ragged, wide, one element, three dimensions, tall (sums over many rows), one dimension, empty."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Allowed |error| / (|reference| + its root mean square): a few roundings of the dtype."""
FENCE = 16384
"""Elements of NaN before and after each tensor; a tile that overruns ends up here."""


@dataclass(frozen=True)
class CorrectnessReport:
    """What was checked, and how many results were."""

    name: str
    passed: int
    scope: str

    def __str__(self) -> str:
        return (
            f"{self.name} is right: {self.passed} results compared with float64 ({self.scope}), "
            "each off by a few roundings at most."
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            "text/plain": str(self),
            "text/html": f'<span style="color:#1a7f37">&#10003;</span> {self}',
            CHECK_MIME: {"name": self.name, "passed": self.passed},
        }


def check(
    call: Call,
    reference: Call,
    inputs: Inputs,
    *,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtypes: Sequence[torch.dtype] = DTYPES,
    gradients: bool = True,
    roundings: int = 1,
    name: str = "",
) -> CorrectnessReport:
    """Compare ``call`` with ``reference`` in float64; AssertionError says in a sentence what is wrong.

    ``inputs(shape)`` returns random float32 tensors on the CPU. Each shape is tried in each dtype, and with
    the inputs laid out contiguous, transposed, strided and misaligned (without a GPU, where there are many
    shapes, the last three in one dtype for each); the outputs and, with ``gradients``, the gradient of every
    input for an upstream gradient of twice the output (which is correlated with it: a random one can hide
    errors) must be right, and equal from run to run; the inputs must be left alone.
    ``roundings`` counts the tensors in half precision that a result passes through, itself included: a chain
    of matmuls is allowed as many times the error of one.
    """
    title = name or getattr(call, "__name__", "the call")
    passed, cases = 0, _cases(inputs, shapes, dtypes)
    torch.manual_seed(0)
    for shape, dtype, layout in cases:
        drawn = inputs(shape)  # anew: what an earlier call left somewhere is wrong here
        if layout == "transposed" and all(t.dim() < 2 for t in drawn):
            continue  # the same as contiguous
        try:
            passed += _compared(call, reference, drawn, dtype, layout, gradients, roundings)
        except AssertionError as problem:
            case = f"{title}, shape {tuple(shape)}, {dtype_name(dtype)}, {layout} inputs"
            raise AssertionError(f"{case}: {problem}") from problem
    what = "outputs and gradients" if gradients else "outputs"
    grid = f"{len(shapes)} shapes, {len(LAYOUTS)} layouts, {', '.join(map(dtype_name, dtypes))}"
    return CorrectnessReport(title, passed, f"{what}; {grid}")


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def _cases(
    inputs: Inputs, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> list[tuple[tuple[int, ...], torch.dtype, str]]:
    """What is tried: on a GPU each shape in each dtype and layout.

    The interpreter needs a thousand times as long for each. There every dtype comes contiguous, and each of
    the other layouts in one dtype, which changes from shape to shape; all pairs of dtype and layout meet in
    shapes that have a layout, with two sizes above 1. Where these are too few everything is tried there, too.
    """
    has_layout = []
    for shape in shapes:
        try:
            has_layout += [any(sum(size > 1 for size in t.shape) > 1 for t in inputs(shape))]
        except Exception as error:
            raise ValueError(
                f"inputs: no tensors for the shape {tuple(shape)} ({type(error).__name__}: {error}); "
                "say shapes=[(37, 33), (0, 8), ...] if your function takes only some"
            ) from error
    everything = gpu.available() or sum(has_layout) < len(dtypes)
    found = []
    for index, shape in enumerate(shapes):
        for number, layout in enumerate(LAYOUTS, sum(has_layout[:index])):
            one = dtypes[number % len(dtypes)]
            every = everything or layout == "contiguous"
            found += [(shape, dtype, layout) for dtype in (dtypes if every else [one])]
    return found


def _compared(
    call: Call,
    reference: Call,
    drawn: Sequence[Tensor],
    dtype: torch.dtype,
    layout: str,
    gradients: bool,
    roundings: int,
) -> int:
    """How many tensors are right, output and gradients; AssertionError for the first wrong one."""
    fences = GuardZones()
    rounded = [t.to(gpu.device(), dtype) for t in drawn]
    placed = [fences.place(t, layout) for t in rounded]
    exact = [t.double() for t in rounded]
    upstream = (2 * reference(*exact)).to(dtype) if gradients else None
    wants = _evaluate(reference, exact, upstream)
    # below the smallest normal number a rounding is no longer a share of the number
    denormal = roundings * torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    slacks = [noise + denormal for noise in _float32_noise(reference, exact, upstream)]
    laid_out = None if upstream is None else fences.place(upstream, layout)
    runs = []
    for _ in range(2 if layout == "contiguous" else 1):
        try:
            with fences:
                runs.append(_evaluate(call, placed, laid_out))
            gpu.synchronize()
        except Exception as error:
            raise AssertionError(f"it raised {type(error).__name__}: {error}") from error
    for number, (given, after) in enumerate(zip(rounded, placed, strict=True)):
        if not torch.equal(given, after):
            raise AssertionError(f"input {number} was overwritten; write to a new tensor.")
    names = ["the output", *(f"the gradient of input {i}" for i in range(len(drawn)))][: len(wants)]
    tolerance = TOLERANCE[dtype] * (roundings if dtype in (torch.float16, torch.bfloat16) else 1)
    distance = fences.broken()
    for name, got, again, want, slack in zip(names, runs[0], runs[-1], wants, slacks, strict=True):
        if got.shape != want.shape or got.dtype != dtype:
            raise AssertionError(
                f"{name} has shape {tuple(got.shape)} and dtype {got.dtype}, "
                f"not {tuple(want.shape)} and {dtype}."
            )
        if problem := diagnose(got, want, tolerance, slack):
            if layout != "contiguous":  # contiguous inputs come first
                problem += " The contiguous inputs of this shape passed."
            raise AssertionError(f"{name} is wrong. {problem}")
        if distance:
            raise AssertionError(
                f"something was stored outside its tensor, up to {distance} elements away. "
                "A store lacks its mask, or the mask compares with the wrong bound."
            )
        if not torch.equal(got, again):
            raise AssertionError(f"{name} changed from one run to the next: a race, or atomics in any order.")
    return len(wants)


def _evaluate(call: Call, inputs: Sequence[Tensor], upstream: Tensor | None) -> list[Tensor]:
    """The output, and with an upstream gradient the gradient of every input."""
    if upstream is None:
        return [call(*inputs).detach()]
    leaves = [t.detach().requires_grad_() for t in inputs]
    output = call(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def _float32_noise(reference: Call, exact: Sequence[Tensor], upstream: Tensor | None) -> list[float]:
    """What float32 arithmetic cannot do better: large where terms cancel, as in the gradient of a norm.

    Eight times the largest error of the reference itself in float32, for a few inputs close to these.
    """
    worst = []
    for _ in range(3):
        near = [(t * (1 + 1e-3 * torch.randn_like(t))).float() for t in exact]
        dy = None if upstream is None else upstream.float()
        single = _evaluate(reference, near, dy)
        double = _evaluate(reference, [t.double() for t in near], None if dy is None else dy.double())
        pairs = zip(single, double, strict=True)
        worst.append([(s.double() - d).abs().max().item() if d.numel() else 0.0 for s, d in pairs])
    return [8 * max(errors) for errors in zip(*worst, strict=True)]


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; NaN where ``got`` has a NaN, 0 for empty tensors."""
    want = want.double()
    difference = (got.double() - want).norm().item()
    scale = want.norm().item()
    return difference / scale if scale else difference


def wrong_elements(got: Tensor, want: Tensor, tolerance: float, slack: float = 0.0) -> Tensor:
    """Which elements of ``got`` are wrong.

    One is right when |got - want| <= tolerance * (|want| + rms(want)) + slack. What is not finite has to be
    so in both.
    """
    got, want = got.detach().double(), want.detach().double()
    finite = want[want.isfinite()]
    rms = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    return ~torch.isclose(got, want, rtol=tolerance, atol=tolerance * rms + slack, equal_nan=True)


def diagnose(got: Tensor, want: Tensor, tolerance: float, slack: float = 0.0) -> str:
    """How many elements of ``got`` are wrong, and the worst one; empty when it is right."""
    got, want = got.double().cpu(), want.double().cpu()
    wrong = wrong_elements(got, want, tolerance, slack)
    if not wrong.any():
        return ""
    excess = torch.where(wrong, (got - want).abs().nan_to_num(math.inf), -1.0)
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), want.shape))
    return (
        f"{int(wrong.sum())} of {want.numel()} elements; "
        f"worst at {worst}: {got[worst].item():.6g} instead of {want[worst].item():.6g}."
    )


_NAN_BITS = {
    torch.float64: (torch.int64, 0x7FF8000000000000),
    torch.float32: (torch.int32, 0x7FC00000),
    torch.float16: (torch.int16, 0x7E00),
    torch.bfloat16: (torch.int16, 0x7FC0),
}
"""By dtype: integers of its size, and the bits of its quiet NaN; the lowest six bits are free."""
_OTHERS = (torch.uint8, 64)
"""For dtypes without a NaN, bytes that no bool and hardly a small integer holds."""


class GuardZones(TorchDispatchMode):
    """While active, new uninitialised floating-point tensors hold NaN and lie between fences of NaN.

    ``fence`` is the length of each fence, in elements.
    """

    def __init__(self, fence: int = FENCE) -> None:
        super().__init__()
        self._fence = fence
        self._blocks: list[tuple[Tensor, int, int]] = []

    def place(self, values: Tensor, layout: str) -> Tensor:
        """A copy of ``values`` between fences, laid out as LAYOUTS says."""
        return LAYOUTS[layout](self, values).copy_(values)

    def allocate(self, count: int, like: Tensor) -> Tensor:
        """``count`` elements of NaN between two fences; of integers and bool, any other marks."""
        block = like.new_empty(count + 2 * self._fence)
        bits, quiet = _NAN_BITS.get(like.dtype, _OTHERS)
        # Each block has a NaN of its own: one that a stray load brings from elsewhere is not taken for it.
        mark = quiet + 1 + len(self._blocks) % 62
        block.view(bits).fill_(mark)
        self._blocks.append((block, count, mark))
        return block[self._fence : self._fence + count]

    def broken(self) -> int:
        """How many elements outside its tensor the farthest stray store went; 0 when all fences stand."""
        farthest = 0
        for block, count, mark in self._blocks:
            bits, _ = _NAN_BITS.get(block.dtype, _OTHERS)
            whole = block.view(bits) == mark
            if len(whole) > len(block):  # elements of several bytes without a NaN
                whole = whole.view(len(block), -1).all(1)
            for fence in (whole[: self._fence].flip(0), whole[self._fence + count :]):
                if not fence.all():
                    farthest = max(farthest, int((~fence).nonzero().max()) + 1)
        return farthest

    def watches(self, func: Any, made: Any) -> bool:
        """Whether what an operation made is to lie between fences."""
        return func.overloadpacket in _UNINITIALISED and made.is_floating_point()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self.watches(func, made):
            return made
        room = self.allocate(made.untyped_storage().nbytes() // made.element_size(), made)
        room = room.as_strided(made.size(), made.stride(), room.storage_offset())
        return room if "empty" in func._schema.name else room.copy_(made)


_NEW = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_UNINITIALISED = {getattr(torch.ops.aten, name) for name in _NEW}


LAYOUTS: dict[str, Callable[[GuardZones, Tensor], Tensor]] = {
    "contiguous": lambda zone, t: zone.allocate(t.numel(), t).view(t.shape),
    "transposed": lambda zone, t: zone.allocate(t.numel(), t).view(t.transpose(0, -1).shape).transpose(0, -1),
    "strided": lambda zone, t: zone.allocate(2 * t.numel(), t).view(*t.shape, 2)[..., 0],
    "misaligned": lambda zone, t: zone.allocate(t.numel() + 1, t)[1:].view(t.shape),
}
