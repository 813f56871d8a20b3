"""The linear recurrence of tensors that have time as the last axis in memory.

a, b and h are (batch, time, width), as in `linear_recurrence`, but views: the steps of a feature lie side by
side. Some libraries want them so.
"""

from dataclasses import replace

from torch import Tensor

from labkit.work.base import Shape
from labkit.work.linear_recurrence import linear_recurrence


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in linear_recurrence.inputs(shape))


time_last = replace(linear_recurrence, name="time_last", inputs=_inputs)
