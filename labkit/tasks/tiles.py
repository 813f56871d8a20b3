"""What lesson 2's and 3's kernels of tiles are judged by: one call between fences, and what it touched."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from labkit import checks, codegen
from labkit.tasks import Wrong, lanes, some, whereabouts

DTYPES = (torch.float32, torch.float16)
"""Those that lesson 2 judges in."""
TILE = 32
"""Rows, columns and depth of the scaffolds' tiles."""


class Call:
    """One call of an answer: its inputs between fences, what it returned, what its kernel touched.

    ``hints`` are the exercise's, by reason. With ``undefined`` a place that a load's mask shuts out, and that
    has no ``other``, holds NaN: on a GPU it may hold anything, while the interpreter makes it zero.
    """

    def __init__(
        self,
        answer: Callable[..., Tensor],
        values: Mapping[str, Tensor],
        want: Tensor,
        hints: Mapping[str, tuple[str, ...]],
        *,
        layout: str = "contiguous",
        undefined: bool = False,
    ) -> None:
        self.values, self.want, self.layout = values, want, layout
        self._hints, self._name = hints, getattr(answer, "__name__", "the answer")
        self.dtype = next(iter(values.values())).dtype
        self.fences = checks.Fences()
        self.inputs = {name: self.fences.place(value, layout) for name, value in values.items()}

        def look(kernel: Any) -> None:
            if lanes.unfinished(kernel):
                raise self.wrong("unfinished", f"{kernel.__name__} still has its three dots.")

        # What overflows is the answer's business; numpy's warnings would only stand above the verdict.
        with self.fences, np.errstate(all="ignore"), _undefined(undefined), _products_of_bfloat16():
            self.got, self.seen = lanes.watch(lambda: answer(*self.inputs.values()), look)

    def __str__(self) -> str:
        shapes = " and ".join(f"{name} {tuple(value.shape)}" for name, value in self.values.items())
        layout = "" if self.layout == "contiguous" else f", {self.layout}"
        return f"With {shapes} in {_short(self.dtype)}{layout}"

    def wrong(self, reason: str, observed: str) -> Wrong:
        """A `Wrong` with the exercise's hints."""
        return Wrong(reason, observed, self._hints[reason])

    @property
    def kernel(self) -> tuple[Any, dict[str, Any]]:
        """The kernel that was launched, and its arguments by name."""
        return self.seen.kernels[0]

    def given(self, name: str) -> int:
        """A constant that the kernel was launched with, the scaffold's where it is called something else."""
        return int(self.kernel[1].get(name, TILE))

    @property
    def problem(self) -> str:
        """Where the output is wrong, as the end of a sentence; empty when it's right."""
        found = checks.diagnose(self.got, self.want, checks.TOLERANCE[self.dtype])
        return whereabouts(found) if found else ""

    def differing(self) -> int:
        """How many results are not the exact ones rounded once."""
        return int((self.got != self.want.to(self.dtype)).sum())

    def gave(self, other: Tensor) -> bool:
        """Whether the output is another tensor's, roughly."""
        return torch.allclose(self.got.double(), other, rtol=0.02, atol=0.02, equal_nan=True)

    def strays(self) -> dict[str, int]:
        """Places outside an input that were loaded, by the input's name; contiguous inputs only."""
        found = {name: lanes.outside(self.seen.loaded(t), t) for name, t in self.inputs.items()}
        return {name: places for name, places in found.items() if places}

    def refuse_form(self) -> None:
        """`Wrong` for what is not about the numbers: what was handed over, launched and stored."""
        for look in (self.refuse_handed_over, self.refuse_launches, self.refuse_stores):
            look()

    def refuse_reused(self, answer: Callable[..., Tensor]) -> None:
        """`Wrong` when a second call hands back the memory of this one's result."""
        # What it stores outside its result must not hit anything else.
        with self.fences, np.errstate(all="ignore"):
            again = answer(*self.inputs.values())
        if isinstance(again, Tensor) and again.data_ptr() == self.got.data_ptr():
            raise self.wrong(
                "reused-output", "A second call handed back the memory of the first call's result."
            )

    def refuse_strides(self) -> None:
        """`Wrong` when inputs of other strides come out wrong; contiguous ones came first, and passed."""
        if self.layout != "contiguous" and self.problem:
            raise self.wrong("strides", f"{self}: the output is wrong in {self.problem}")

    def refuse_handed_over(self) -> None:
        """`Wrong` for inputs that were written to, and for a result that is no such tensor."""
        for name, before in self.values.items():
            if not torch.equal(before, self.inputs[name]):
                raise self.wrong("writes-input", f"{self}: {name} was overwritten.")
        if not isinstance(self.got, Tensor):
            raise self.wrong(
                "not-a-tensor", f"{self._name} returned {type(self.got).__name__}, not a tensor."
            )
        if self.got.shape != self.want.shape or self.got.dtype != self.dtype:
            shape = f"shape {tuple(self.got.shape)} and dtype {_short(self.got.dtype)}"
            raise self.wrong("shape-or-dtype", f"{self}: the output has {shape}.")

    def refuse_launches(self) -> None:
        """`Wrong` unless one kernel does it."""
        if self.layout != "contiguous":
            return  # copies of strided inputs are allowed
        names = [launch.name for launch in self.seen.launches]
        if not self.seen.kernels:
            raise self.wrong(
                "no-kernel", f"No Triton kernel was launched, but {', '.join(names) or 'nothing'}."
            )
        if len(names) > 1:
            raise self.wrong("several-launches", f"{len(names)} launches: {', '.join(names)}.")

    def refuse_stores(self) -> None:
        """`Wrong` unless each element of the result is stored once, and nothing else."""
        if not self.seen.kernels:
            return
        stored, count = self.seen.stored(self.got), self.got.numel()
        if stray := lanes.outside(stored, self.got) or self.fences.broken():
            raise self.wrong("unmasked-store", f"{self}: {some(stray, 'place')} outside y got a value.")
        written = len(np.unique(stored))
        if len(stored) > written:
            again = some(len(stored) - written, "store")
            raise self.wrong("stored-twice", f"{self}: {again} went to an element of y that had its value.")
        if written < count:
            programs = self.seen.launches[-1].programs
            missing = f"{count - written} of {count} elements of y were never written"
            raise self.wrong("not-all-written", f"{self}: {missing}, by {programs} programs.")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _undefined(on: bool) -> Iterator[None]:
    """While ``on``, places that a load's mask shuts out hold NaN where no ``other`` is given."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load = InterpreterBuilder.create_masked_load

    def poisoned(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        kind = pointers.get_element_ty()
        if on and other is None and kind.is_floating():
            like = load(builder, pointers, mask, None, *rest).data
            other = TensorHandle(np.full_like(like, np.nan), kind)
        return load(builder, pointers, mask, other, *rest)

    with patch.object(InterpreterBuilder, "create_masked_load", poisoned):
        yield


@contextmanager
def _products_of_bfloat16() -> Iterator[None]:
    """Meanwhile tl.dot multiplies bfloat16 as float32: the interpreter multiplies the bits it is kept in."""
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def widened(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (builder.cast_impl(side, tl.float32) for side in (a, b))
        return dot(builder, a, b, *rest)

    with patch.object(InterpreterBuilder, "create_dot", widened):
        yield


def misread(kernel: Any) -> str:
    """What in a kernel's source means something else than it looks like; "" where there is nothing.

    "python-and" (``and``, ``or``, ``not``), "chained" (``a < M & b < K`` is ``a < (M & b) < K``),
    "python-if".
    """
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))))
    if any(isinstance(getattr(node, "op", None), (ast.And, ast.Or, ast.Not)) for node in nodes):
        return "python-and"
    if any(_chained(node) for node in nodes if isinstance(node, ast.Compare)):
        return "chained"
    return "python-if" if any(isinstance(node, (ast.If, ast.IfExp)) for node in nodes) else ""


def _chained(node: ast.Compare) -> bool:
    parts = [part for part in (node.left, *node.comparators) if isinstance(part, ast.BinOp)]
    return len(node.ops) > 1 or any(isinstance(part.op, (ast.BitAnd, ast.BitOr)) for part in parts)


def compiled(*calls: Call) -> list[codegen.Compiled]:
    """The kernel of each call as compiled for sm_90; `Wrong` when the compiler refuses one."""
    try:
        requests = [codegen.request(*call.kernel, target="sm_90") for call in calls]
        return codegen.compile_many(requests)
    except codegen.CompileError as error:
        message = next(filter(None, reversed(str(error).strip().splitlines())), "")
        reason = "small-tile" if "K >= 16" in message else misread(calls[0].kernel[0]) or "not-compiled"
        raise calls[0].wrong(reason, f"The compiler for sm_90 refuses the kernel: {message}") from error
