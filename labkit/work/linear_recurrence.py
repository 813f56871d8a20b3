"""A linear recurrence over time: h_t = a_t * h_(t-1) + b_t, feature by feature, with zeros before step 0.

a, b and h are (batch, time, width). Fewest bytes: a and b in, h out (3N for N = batch * time * width
elements); backward dh, a and h in, da and db out (5N). Operations: 2N; backward 4N. Source: Martin and Cundy,
"Parallelizing Linear Recurrent Neural Nets Over Sequence Length" (2017).
"""

import torch
from torch import Tensor

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    size = shape["batch"], shape["time"], shape["width"]
    return torch.sigmoid(randn(*size)), randn(*size)


def reference(a: Tensor, b: Tensor) -> Tensor:
    """The states of all steps, (batch, time, width), step by step."""
    state, states = torch.zeros_like(a[:, 0]), []
    for gate, new in zip(a.unbind(1), b.unbind(1), strict=True):
        state = gate * state + new
        states.append(state)
    return torch.stack(states, 1)


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    count = shape["batch"] * shape["time"] * shape["width"]
    return {"forward": 3, "backward": 5}[direction] * count * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return {"forward": 2, "backward": 4}[direction] * shape["batch"] * shape["time"] * shape["width"]


linear_recurrence = Work(
    "linear_recurrence",
    _inputs,
    reference,
    _min_bytes,
    _flops,
    batched=(0, 1),
)
