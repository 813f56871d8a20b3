"""Properties that exercises with a kernel share: what it launches, touches and rounds."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.exercises import common_hints
from labkit.exercises.engine import Call, Property, dtype_name
from labkit.measure.correctness import DTYPES

ROUNDED_TWICE = 0.02
"""Share of float16 results that may differ from the exact ones rounded once. With float32 arithmetic it is
far below a percent, with one intermediate result in float16 about a seventh."""
FEWEST = 5
"""So many results may differ whatever their share is: of few results a share says little."""


def _outside(call: Call) -> str:
    if not call.stored_outside:
        return ""
    return f"something was stored outside of its tensor, up to {call.stored_outside} elements away."


def _loads_outside(call: Call) -> str:
    count = call.loaded_outside
    return f"{count} places outside of the tensors were loaded, though nothing came of it." if count else ""


def _kernel(call: Call) -> str:
    operations = ", ".join(call.launches.names) or "nothing"
    return "" if call.launches.kernels else f"no Triton kernel was launched, but {operations}."


def _one_launch(call: Call) -> str:
    names = call.launches.names
    return _kernel(call) or (f"{len(names)} launches: {', '.join(names)}." if len(names) > 1 else "")


def _stored_once(call: Call) -> str:
    for got, _ in call.result_tensors():
        stored = call.launches.stored(got) if got.is_contiguous() else np.zeros(0)
        if again := len(stored) - len(np.unique(stored)):
            return f"{again} stores went to elements of the result that already had their value."
    return ""


def _read_once(call: Call) -> str:
    """Of inputs as large as the result: those that are broadcast are read again and again."""
    size = call.result_tensors()[0][0].shape
    for name, tensor in call.passed.items():
        if isinstance(tensor, Tensor) and tensor.shape == size and tensor.is_contiguous():
            loads = len(call.launches.loaded(tensor)) / max(1, tensor.numel())
            if loads > 1:
                return f"each element of {name} was loaded {loads:.3g} times."
    return ""


def _full_float32(call: Call) -> str:
    return "a product of float32 blocks was taken in TF32." if call.launches.tf32 else ""


def _half_products(call: Call) -> str:
    if call.dtype not in (torch.float16, torch.bfloat16) or not call.launches.float32_products:
        return ""
    return f"blocks were multiplied in float32, though the tensors are {dtype_name(call.dtype)}."


def _rounded_once(call: Call) -> str:
    if call.launches.half_sums:
        return "a product was summed up in float16."
    if call.dtype is not torch.float16:  # to bfloat16 the interpreter rounds in a way of its own
        return ""
    for got, want in call.result_tensors():
        rounded = want.to(got.dtype)
        counted = want.abs() > 0.01 * want[want.isfinite()].square().mean().sqrt()  # no subnormals, no NaN
        differing = int(((got != rounded) & counted).sum())
        if differing > max(FEWEST, ROUNDED_TWICE * got.numel()):
            return f"{differing / got.numel():.0%} of the results are not the exact ones rounded once."
    return ""


NOTHING_OUTSIDE = Property("stores-outside", _outside, *common_hints.STORES_OUTSIDE, before_values=True)
LOADS_INSIDE = Property("loads-outside", _loads_outside, *common_hints.LOADS_OUTSIDE)
KERNEL = Property("no-kernel", _kernel, *common_hints.NO_KERNEL, before_values=True)
ONE_LAUNCH = Property(
    "launches", _one_launch, *common_hints.LAUNCHES, before_values=True, contiguous_only=True
)
STORED_ONCE = Property("stored-twice", _stored_once, *common_hints.STORED_TWICE)
READ_ONCE = Property("read-again", _read_once, *common_hints.READ_AGAIN, contiguous_only=True)
FULL_FLOAT32 = Property("tf32", _full_float32, *common_hints.TF32, before_values=True)
HALF_PRODUCTS = Property("wide-products", _half_products, *common_hints.WIDE_PRODUCTS)
ROUNDED_ONCE = Property("rounded-twice", _rounded_once, *common_hints.ROUNDED_TWICE, before_values=True)
KERNEL_CASES: dict[str, Any] = {
    "dtypes": DTYPES,
    "layouts": ("contiguous", "transposed", "strided"),
}
"""How the kernel of most exercises is tried."""
POINTWISE = (ONE_LAUNCH, NOTHING_OUTSIDE, LOADS_INSIDE, STORED_ONCE, ROUNDED_ONCE)
"""Of a kernel that stores each element of one result once."""
PRODUCT = (FULL_FLOAT32, *POINTWISE, HALF_PRODUCTS)
"""Of a kernel with tl.dot."""
