"""Lesson 5, exercise "safe": a kernel that a graph can replay, though one of its numbers changes."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode

from labkit import checks, codegen
from labkit.tasks import Evidence, some, whereabouts
from labkit.tasks.graph_safe_hints import HINTS
from labkit.tasks.tiles import Call

SIZES = (1, 7, 1024, 1025, 5000)
"""One element, few, one program exactly, one more, several."""
FACTOR_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,))
SHAPE = (33, 40)
"""That of x where layouts are tried."""
REPLAYS = 3
LARGE = 98304.0
"""A factor that float16 can't hold, for small x; loss scales are of this size."""
HOST_READS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "is_nonzero",
    *(f"__{name}__" for name in ("float", "int", "bool", "index", "array", "repr", "format", "contains")),
}
"""Functions of a tensor for which Python waits until the device has its values."""
COPIES = {"clone", "_to_copy", "copy_"}


def check(scaled: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """Compare ``scaled(x, factor)`` with float64, then launch the same again with other values in place."""
    torch.manual_seed(0)
    calls: list[_Scaled] = []
    for at, size in enumerate(SIZES):
        call = _Scaled(scaled, (size,), FACTOR_SHAPES[at % 2])
        call.refuse_host_reads()
        call.refuse_form()
        calls.append(call)
    calls[0].refuse_reused(scaled)
    _refuse_values(calls)
    for call in calls:
        call.refuse_loads_outside()
    passed = len(calls)
    for call in calls:
        passed += call.replayed()
    for dtype in checks.DTYPES:
        for layout in checks.LAYOUTS:
            for at, kind in enumerate((dtype, torch.float32)):
                shape = FACTOR_SHAPES[at % 2]
                other = _Scaled(scaled, SHAPE, shape, dtype, factor_dtype=kind, layout=layout)
                other.refuse_host_reads()
                other.refuse_form()
                other.refuse_strides()
                _refuse_values([other])
                passed += 1
    _refuse_low_precision(scaled)
    _refuse_uncompiled(calls[0])
    return Evidence(_evidence(scaled, passed + 1), passed + 1)


class _Scaled(Call):
    """One call, whose launch can be made again."""

    def __init__(
        self,
        scaled: Callable[..., Tensor],
        shape: tuple[int, ...],
        factor_shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        *,
        factor_dtype: torch.dtype = torch.float32,
        factor: float | None = None,
        layout: str = "contiguous",
    ) -> None:
        self.reads: list[str] = []
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        scale = 1.0 if factor is None else 1 / factor
        values = {
            "x": (scale * torch.randn(shape)).to(dtype),
            "factor": _factor(factor_shape, factor_dtype, factor),
        }

        @functools.wraps(scaled)
        def watched(*tensors: Tensor) -> Tensor:
            with _Reading(self.reads) as reading, _launched(self.launches, reading):
                return scaled(*tensors)

        super().__init__(watched, values, _product(values), HINTS, layout=layout)

    def refuse_host_reads(self) -> None:
        """`Wrong` where Python asked for the values of a tensor."""
        if self.reads:
            name = self.reads[0]
            raise self.wrong("host-read", f"{self}: Python read a tensor's values, by {name}.")

    def refuse_launches(self) -> None:
        """`Wrong` unless one kernel does it all."""
        names = [launch.name for launch in self.seen.launches]
        others = set(names) - {kernel.__name__ for kernel, _ in self.seen.kernels}
        if self.layout == "contiguous" and self.seen.kernels and others:
            launches = f"{self}: {len(names)} launches: {', '.join(names)}."
            if "mul" in others:
                raise self.wrong("multiplied-before", launches)
            raise self.wrong("factor-copied" if others <= COPIES else "several-launches", launches)
        super().refuse_launches()

    def refuse_loads_outside(self) -> None:
        """`Wrong` where places outside x or factor were loaded."""
        for name, places in self.strays().items():
            reason = "block-of-factors" if name == "factor" else "reads-outside"
            raise self.wrong(reason, f"{self}: {some(places, 'place')} outside {name} got loaded.")

    def replayed(self) -> int:
        """How often the launch gave the right y again, for other values in place; `Wrong` if it didn't."""
        for _ in range(REPLAYS):
            x, old = self.inputs["x"], self.inputs["factor"].clone()
            x.copy_(torch.randn(x.shape))
            self.inputs["factor"].copy_(_factor(old.shape, old.dtype))
            self.got.fill_(torch.nan)
            with np.errstate(all="ignore"), _of_bfloat16():
                for kernel, args, kwargs in self.launches:
                    kernel.run(*args, **kwargs)
            found = checks.diagnose(self.got, _product(self.inputs), checks.TOLERANCE[self.dtype])
            if found:
                new = self.inputs["factor"]
                how = f"launched again after factor became {float(new):.4g} in place of {float(old):.4g}"
                raise self.wrong("stale", f"{self}, {how}: y is wrong in {whereabouts(found)}")
        return REPLAYS


def _factor(shape: tuple[int, ...], dtype: torch.dtype, value: float | None = None) -> Tensor:
    """A tensor of one number, well away from 0 and 1 if it is drawn."""
    drawn = 1.5 + 2 * torch.rand(()) if value is None else torch.tensor(value)
    return drawn.to(dtype).reshape(shape)


def _product(values: Mapping[str, Tensor]) -> Tensor:
    return values["x"].double() * values["factor"].double()


class _Reading(TorchFunctionMode):
    """Notes for which functions Python waits for a tensor's values."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads, self.paused = reads, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, (str, torch.device))]
        to_host = name == "to" and any(torch.device(each).type == "cpu" for each in given)
        if not self.paused and (name in HOST_READS or to_host):
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _launched(launches: list[Any], reading: _Reading) -> Iterator[None]:
    """Meanwhile keep each launch with its very arguments. What the interpreter reads is its own business."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def kept(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append((kernel, args, kwargs))
        reading.paused = True
        try:
            return run(kernel, *args, **kwargs)
        finally:
            reading.paused = False

    with patch.object(InterpretedFunction, "run", kept), _of_bfloat16():
        yield


@contextmanager
def _of_bfloat16() -> Iterator[None]:
    """Meanwhile products of bfloat16 are right: the interpreter multiplies the bits that it is kept in."""
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_fmul

    def widened(builder: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return multiply(builder, a, b)
        a, b = (builder.cast_impl(side, tl.float32) for side in (a, b))
        return builder.cast_impl(multiply(builder, a, b), tl.bfloat16)

    with patch.object(InterpreterBuilder, "create_fmul", widened):
        yield


def _refuse_values(calls: list[_Scaled]) -> None:
    first = next((call for call in calls if call.problem), None)
    if first is None:
        return
    for call in calls:
        if call.layout == "contiguous" and call.strays().get("factor"):
            call.refuse_loads_outside()  # which explains the wrong values
    raise first.wrong(_reason(calls), f"{first}: the output is wrong in {first.problem}")


def _reason(calls: list[_Scaled]) -> str:
    if all(call.gave(call.want) for call in calls):
        return "low-precision"
    for reason, other in _MISTAKES.items():
        if all(call.gave(other(call)) for call in calls):
            return reason
    return "wrong-values"


_MISTAKES: dict[str, Callable[[_Scaled], Tensor]] = {
    "no-factor": lambda call: call.values["x"].double(),
    "address": lambda call: call.values["x"].double() * call.inputs["factor"].data_ptr(),
    "added": lambda call: call.values["x"].double() + call.values["factor"].double(),
}


def _refuse_low_precision(scaled: Callable[..., Tensor]) -> None:
    call = _Scaled(scaled, (64,), (), torch.float16, factor=LARGE)
    call.refuse_form()
    if call.problem:
        held = f"where factor is {LARGE:g} in float32, which float16 can't hold"
        raise call.wrong("low-precision", f"{call}, {held}: the output is wrong in {call.problem}")


def _refuse_uncompiled(call: _Scaled) -> None:
    try:
        codegen.compile_many([codegen.request(*call.kernel, target="sm_90")])
    except codegen.CompileError as error:
        message = next(filter(None, reversed(str(error).strip().splitlines())), "")
        observed = f"The compiler for sm_90 refuses the kernel: {message}"
        raise call.wrong("not-compiled", observed) from error


def _evidence(scaled: Callable[..., Tensor], passed: int) -> str:
    """What was passed, and what a number in memory costs."""
    call = _Scaled(scaled, (SIZES[-1],), ())
    loads, size = len(call.seen.loaded(call.inputs["factor"])), call.dtype.itemsize
    return (
        f"{passed} checks against float64; {REPLAYS * len(SIZES)} of them made a launch again, with the same "
        "arguments, after x and factor had changed in place, as a replay does. A number in memory costs "
        f"little: for {SIZES[-1]} elements factor is loaded {some(loads, 'time')}, {loads * size} bytes "
        f"beside {SIZES[-1] * size:,} of x."
    )
