"""What a sweep can say where nothing can be timed: the launches and bytes of each contender, counted.

Bytes moved over the fewest possible hardly depend on the size, so small shapes do; Triton's interpreter
would need minutes for large ones. The interpreter is one for the whole process and not made for threads:
count where cells run, never beside them.
"""

import math
from typing import Any

import torch

from labkit import gpu
from labkit.measure import machine
from labkit.measure.clocks import describe
from labkit.measure.contender import Contender, Shape
from labkit.measure.rows import LIVE
from labkit.profiling import launch_counts

MOST_ELEMENTS = 2**16
"""Elements of a full tensor up to which a call is counted: well below a second, interpreted."""
ROWS = 64
"""Largest size of the other axes: parameters and partial sums are then a small part of forward traffic."""


STEPS = 4
"""Most steps in time, where a shape has them; there are that many times fewer rows then."""


def counted_shape(shape: Shape, x: str) -> Shape:
    """The shape with other axes no larger than ROWS; with time it is STEPS, the others ROWS // STEPS."""
    rows = ROWS // STEPS if "time" in shape else ROWS
    most = {axis: STEPS if axis == "time" else rows for axis in shape} | {x: shape[x]}
    return {axis: min(size, most[axis]) for axis, size in shape.items()}


def row(contender: Contender, shape: Shape, x: str, dtype: str, direction: str) -> dict[str, Any]:
    """What a contender launches and moves at one shape of few rows, as a row to draw or a noted gap.

    Columns contender, kind, device, dtype, direction, the axes, launches, programs, moved (bytes of distinct
    addresses of each launch), min_bytes, traffic (moved over min_bytes) and note.
    """
    shape = counted_shape(shape, x)
    made: dict[str, Any] = {
        "contender": contender.name,
        "kind": LIVE,
        "device": machine.identity().device,
        "dtype": dtype,
        "direction": direction,
        **shape,
        "traffic": float("nan"),
        "note": "",
    }
    if contender.compiled:
        return made | {"note": "what torch.compile fuses is seen in its kernels on a GPU only"}
    if math.prod(shape.values()) > MOST_ELEMENTS:
        return made | {"note": "too large for the interpreter"}
    try:
        found = _counts(contender, shape, dtype, direction)
    except Exception as problem:  # becomes the note of this contender's gap
        return made | {"note": describe(problem)}
    least = contender.work.min_bytes(shape, getattr(torch, dtype).itemsize, direction)
    return made | {
        "launches": len(found.launches),
        "programs": found.programs,
        "moved": found.touched,
        "min_bytes": least,
        "traffic": found.touched / least,
    }


def _counts(contender: Contender, shape: Shape, dtype: str, direction: str) -> launch_counts.Counts:
    inputs = [t.to(gpu.device(), getattr(torch, dtype)) for t in contender.work.inputs(shape)]
    if direction == "forward":
        with torch.no_grad():
            return launch_counts.count(lambda: contender.call(*inputs))
    leaves = [t.requires_grad_() for t in inputs]
    if direction == "forward_backward":
        return launch_counts.count(lambda: _backward(contender.call(*leaves), leaves))
    output = contender.call(*leaves)
    return launch_counts.count(lambda: _backward(output, leaves))


def _backward(output: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    torch.autograd.grad(output, leaves, output.detach())
