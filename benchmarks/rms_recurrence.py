"""u_t = a_t h_{t-1} + b_t, h_t = rms_norm(u_t) * weight, a, b and h (batch, time, width), weight (width,)."""

import torch
from torch import Tensor

from benchmarks.linear_recurrence import short
from benchmarks.rms_norm import eager as rms_norm
from benchmarks.run import Operation
from labkit import kernels, work
from labkit.work import Shape


def loop(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """The states step by step, each normalised by PyTorch's own function."""
    h, states = torch.zeros_like(a[:, 0]), []
    for a_now, b_now in zip(a.unbind(1), b.unbind(1), strict=True):
        h = rms_norm(a_now * h + b_now, weight)
        states.append(h)
    return torch.stack(states, 1)


def short_single(direction: str, dtype: str, size: Shape) -> bool:
    """In 16 bits a loop of PyTorch rounds the state at each step, and each norm makes more of that."""
    return short(direction, dtype, size) and dtype == "float32"


OPERATION = Operation(
    "rms_recurrence",
    work.rms_recurrence,
    {"labkit": kernels.rms_recurrence, "eager loop": loop},
    {"": {"batch": (256, 16384, 1), "time": (1, 512, 1), "width": (16, 4096, 1)}},
    only={"eager loop": short_single},
)
