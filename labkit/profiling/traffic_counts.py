"""What a sweep shows if nothing can be timed: the launches and the bytes of each contender, counted.

Bytes moved over the fewest possible hardly depend on the size, so small shapes are counted: Triton's
interpreter would need minutes for large ones. The interpreter is one for the whole process and not made for
threads, so contenders are counted in the thread that runs cells.
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

MAX_ELEMENTS = 2**16
"""Elements of a full tensor up to which a call is counted: well below a second, interpreted."""
MAX_ROWS = 64
"""Largest size of the other axes. Parameters and partial sums are then a small part of forward traffic."""
MAX_STEPS = 4
"""Largest size of a time axis; the other axes are then at most MAX_ROWS // MAX_STEPS."""


def counted_shape(shape: Shape, x: str) -> Shape:
    """The shape that is counted for a point of a sweep over ``x``: the other axes are limited."""
    rows = MAX_ROWS // MAX_STEPS if "time" in shape else MAX_ROWS
    limits = {axis: MAX_STEPS if axis == "time" else rows for axis in shape} | {x: shape[x]}
    return {axis: min(size, limits[axis]) for axis, size in shape.items()}


def counted_row(contender: Contender, shape: Shape, x: str, dtype: str, direction: str) -> dict[str, Any]:
    """What a contender launches and moves, as a row of a sweep over the axis ``x``.

    Columns contender, kind, device, dtype, direction, the axes, launches, programs, moved (bytes of distinct
    addresses of each launch), min_bytes, traffic (moved over min_bytes) and note. A contender that cannot be
    counted has no launches, a traffic of NaN, and the reason as its note.
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
    if math.prod(shape.values()) > MAX_ELEMENTS:
        return made | {"note": "too large for the interpreter"}
    try:
        counts = _counts(contender, shape, dtype, direction)
    except Exception as error:  # becomes the note of this contender's gap
        return made | {"note": describe(error)}
    least = contender.work.min_bytes(shape, getattr(torch, dtype).itemsize, direction)
    return made | {
        "launches": len(counts.launches),
        "programs": counts.programs,
        "moved": counts.distinct_bytes,
        "min_bytes": least,
        "traffic": counts.distinct_bytes / least,
    }


def _counts(contender: Contender, shape: Shape, dtype: str, direction: str) -> launch_counts.Counts:
    inputs = [t.to(gpu.device(), getattr(torch, dtype)) for t in contender.work.inputs(shape)]
    if direction == "forward":
        with torch.no_grad():
            return launch_counts.count(lambda: contender.call(*inputs))
    leaves = [t.requires_grad_() for t in inputs]
    output = contender.call(*leaves) if direction == "backward" else None

    def backward() -> None:
        y = contender.call(*leaves) if output is None else output
        torch.autograd.grad(y, leaves, y.detach())

    return launch_counts.count(backward)
