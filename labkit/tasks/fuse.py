"""Lesson 1, exercise "fuse": y = relu(x*w + b) + residual in one kernel and one pass."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit import checks, codegen
from labkit.tasks import Evidence, Wrong, lanes, some, whereabouts
from labkit.tasks.fuse_hints import HINTS
from labkit.works import residual_block

SHAPES = ((64, 128), (37, 33), (5, 640), (1, 1), (3, 5, 33), (19,))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDED_TWICE = 0.02
"""Share of float16 results that may differ from the exact one rounded once. With arithmetic in float32 it is
far below a percent, with one intermediate result in float16 a seventh. (The interpreter's own conversion to
bfloat16 differs from the hardware's too often to tell.)"""


def wrong(reason: str, observed: str) -> Wrong:
    """A `Wrong` with this exercise's hints."""
    return Wrong(reason, observed, HINTS[reason])


def check(fused: Callable[..., Tensor]) -> Evidence:
    """Compare ``fused(x, weight, bias, residual)`` with float64 and count what it does; `Wrong` if wrong."""
    torch.manual_seed(0)
    passed, differing, halves = 0, 0, 0
    for dtype in DTYPES:
        for shape in SHAPES:
            for layout in checks.LAYOUTS:
                if layout == "transposed" and len(shape) < 2:
                    continue  # the same as contiguous
                case = _Case(fused, shape, dtype, layout)
                case.check()
                if not passed:
                    _refuse_reused(fused, case)
                passed += 1
                if dtype is torch.float16:
                    differing, halves = differing + case.differing(), halves + case.got.numel()
        if differing > ROUNDED_TWICE * halves:
            share = f"In float16, {differing / halves:.0%} of the results are not the exact ones rounded once"
            raise wrong("half-precision", f"{share}: something on the way was rounded too.")
    return Evidence(_evidence(fused, passed), passed)


def _refuse_reused(fused: Callable[..., Tensor], case: "_Case") -> None:
    """A result that the next call writes over, or hands back once more, is right only until then."""
    again = _Case(fused, case.shape, case.dtype, case.layout)
    if isinstance(again.got, Tensor) and again.got.data_ptr() == case.got.data_ptr():
        raise wrong("reused-output", "A second call handed back the memory of the first call's result.")


def _evidence(fused: Callable[..., Tensor], passed: int) -> str:
    """Launches, bytes, and the width of the compiled loads at 2 x 1024 in bfloat16."""
    case = _Case(fused, (2, 1024), torch.bfloat16, "contiguous")
    case.check()
    kernel, given = case.seen.kernels[0]
    least = 3 * case.got.numel() * case.got.element_size()
    return (
        f"{passed} checks against float64. One launch. At 2 x 1024 in bfloat16 it moves {case.moved():,} "
        f"bytes; the least possible, three tensors (x and residual in, y out), is {least:,}. "
        f"{_compiled(kernel, given)}."
    )


def _compiled(kernel: Any, given: dict[str, Any]) -> str:
    """How wide the loads are when the kernel is compiled for a GPU, with the arguments of this launch."""
    try:
        code = codegen.compile(kernel, given, target="sm_90")
    except codegen.CompileError as error:
        message = next(filter(None, reversed(str(error).strip().splitlines())), "")
        raise wrong("not-compiled", f"The compiler for sm_90 refuses the kernel: {message}") from error
    widths = " and ".join(f"{width}" for width in sorted(code.loads, reverse=True))
    return f"Compiled for sm_90, its loads there are {widths} bits wide"


def _refuse_unfinished(kernel: Any) -> None:
    if lanes.unfinished(kernel):
        raise wrong("unfinished", f"{kernel.__name__} still has its three dots.")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DECIDED = {"max": "python-max", "min": "python-max", "if": "python-if"}


class _Case:
    """One call: inputs between fences, the output, and what the kernel touched."""

    def __init__(
        self, fused: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype, layout: str
    ) -> None:
        self.shape, self.dtype, self.layout = shape, dtype, layout
        sizes = (shape, shape[-1:], shape[-1:], shape)
        self.values = [torch.randn(size).to(dtype) for size in sizes]
        self.exact = [value.double() for value in self.values]
        self.want = residual_block(*self.exact)
        self.fences = checks.Fences()
        self.inputs = [self.fences.place(value, layout) for value in self.values]
        with self.fences:
            self.got, self.seen = lanes.watch(lambda: fused(*self.inputs), _refuse_unfinished)

    def __str__(self) -> str:
        layout = "" if self.layout == "contiguous" else f", {self.layout} inputs"
        return f"Shape {self.shape}, {_short(self.dtype)}{layout}"

    def check(self) -> None:
        """`Wrong` for the first thing that is not as it should be; what explains most comes first."""
        for look in (self._handed_in, self._launches, self._places, self._values, self._passes):
            look()

    def differing(self) -> int:
        """How many results are not the exact ones rounded once."""
        return int((self.got != self.want.to(self.dtype)).sum())

    def moved(self) -> int:
        """Bytes of x, residual and y that were touched."""
        x, _, _, residual = self.inputs
        lanes_used = (self.seen.loaded(x), self.seen.loaded(residual), self.seen.stored(self.got))
        return sum(len(elements) for elements in lanes_used) * self.got.element_size()

    def _handed_in(self) -> None:
        names = ("x", "weight", "bias", "residual")
        for name, before, after in zip(names, self.values, self.inputs, strict=True):
            if not torch.equal(before, after):
                raise wrong("writes-input", f"{self}: {name} was overwritten.")
        if not isinstance(self.got, Tensor):
            raise wrong("not-a-tensor", f"fused returned {type(self.got).__name__}, not a tensor.")
        if self.got.shape != self.shape or self.got.dtype != self.dtype:
            raise wrong(
                "shape-or-dtype",
                f"{self}: the output has shape {tuple(self.got.shape)} and dtype {_short(self.got.dtype)}.",
            )

    def _places(self) -> None:
        """Stores, then loads, that left their tensors or never came."""
        if not self.seen.kernels:
            return
        stored, count = self.seen.stored(self.got), self.got.numel()
        if stray := lanes.outside(stored, self.got) or self.fences.broken():
            raise wrong("unmasked-store", f"{self}: {some(stray, 'place')} outside y got a value.")
        if missing := count - len(np.unique(stored)):
            again = len(np.unique(stored)) < len(stored)
            reason = "no-program" if again else "small-grid"
            programs = self.seen.launches[-1].programs
            raise wrong(
                reason, f"{self}: {missing} of {count} elements of y never written, by {programs} programs."
            )

    def _launches(self) -> None:
        if self.layout != "contiguous":
            return  # copies of strided inputs are allowed
        names = [launch.name for launch in self.seen.launches]
        if not self.seen.kernels:
            raise wrong("no-kernel", f"No Triton kernel was launched, but {', '.join(names) or 'nothing'}.")
        if len(names) > 1:
            raise wrong("several-launches", f"{len(names)} launches: {', '.join(names)}.")

    def _values(self) -> None:
        problem = checks.diagnose(self.got, self.want, checks.TOLERANCE[self.dtype])
        if not problem:
            return
        observed = f"{self}: the output is wrong in {whereabouts(problem)}"
        raise wrong(self._reason(), observed)

    def _reason(self) -> str:
        """The mistake that explains wrong values."""
        if self.layout != "contiguous":  # which came first, and passed
            return "strides"
        # Half precision in the arithmetic is told from other mistakes by its size; see ``check``.
        relative = checks.relative_error(self.got, self.want)
        if self.dtype is not torch.float32 and math.isfinite(relative) and relative < 0.02:
            return "half-precision"
        for tensor in (self.inputs[0], self.inputs[3]):
            if 0 < len(np.unique(self.seen.loaded(tensor))) < tensor.numel():
                return "not-all-read"
        others = (reason for reason, other in self._mistakes() if self._gave(other))
        reason = next(others, "wrong-values")
        if reason in ("no-relu", "wrong-values"):  # max(0.0, block) is the block, as if there were no ReLU
            return _DECIDED.get(lanes.decided_at_once(self.seen.kernels[0][0]), reason)
        return reason

    def _gave(self, other: Tensor) -> bool:
        return torch.allclose(self.got.double(), other, rtol=0.02, atol=0.02, equal_nan=True)

    def _mistakes(self) -> Iterator[tuple[str, Tensor]]:
        """What would have come out, had this or that mistake been made."""
        x, weight, bias, residual = self.exact
        yield "no-residual", torch.relu(x * weight + bias)
        yield "relu-last", torch.relu(x * weight + bias + residual)
        yield "no-relu", x * weight + bias + residual
        at = torch.arange(x.numel())
        _, given = self.seen.kernels[0]
        block = next((given[name] for name in ("BLOCK", "block") if name in given), 0)
        columns = {"wrong-index": at, "row-is-not-column": at // weight.numel()}
        columns |= {"block-is-not-width": at % block} if block else {}
        for reason, column in columns.items():
            # beyond the end of weight lies NaN, which tl.maximum(value, 0) makes a zero
            beyond = column >= weight.numel()
            affine = x.flatten() * weight[column % weight.numel()] + bias[column % weight.numel()]
            for lost in (0.0, math.nan):
                value = torch.where(beyond, lost, torch.relu(affine)) + residual.flatten()
                yield reason, value.view(x.shape)

    def _passes(self) -> None:
        """Loads beyond the end, which masked stores hide, and elements that were loaded twice."""
        if self.layout != "contiguous":
            return
        names = ("x", "weight", "bias", "residual")
        for name, tensor in zip(names, self.inputs, strict=True):
            if stray := lanes.outside(self.seen.loaded(tensor), tensor):
                what = f"{some(stray, 'place')} beyond the end of {name} got loaded."
                raise wrong("unmasked-load", f"{self}: {what}")
        for name, tensor in (("x", self.inputs[0]), ("residual", self.inputs[3])):
            loads = len(self.seen.loaded(tensor)) / tensor.numel()
            if loads > 1:
                raise wrong("read-again", f"{self}: each element of {name} was loaded {loads:.3g} times.")
