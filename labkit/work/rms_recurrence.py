"""A recurrence with a norm at every step: u = a_t * h_(t-1) + b_t, h_t = weight * u / sqrt(mean(u²) + 1e-6).

The mean is over the features, and before step 0 h is zero. a, b and h are (batch, time, width), the weight is
(width,). Fewest bytes: a and b in, h out (3N for N = batch * time * width elements); backward dh, a, b and h
in, da and db out (6N). Operations: 6N; backward 16N.
"""

import torch
from torch import Tensor

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    size = shape["batch"], shape["time"], shape["width"]
    return torch.sigmoid(randn(*size)), randn(*size), 1 + 0.1 * randn(shape["width"])


def reference(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """The states of all steps, (batch, time, width), step by step."""
    state, states = torch.zeros_like(a[:, 0]), []
    for gate, new in zip(a.unbind(1), b.unbind(1), strict=True):
        u = gate * state + new
        state = weight * u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6)
        states.append(state)
    return torch.stack(states, 1)


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    count = shape["batch"] * shape["time"] * shape["width"]
    return {"forward": 3, "backward": 6}[direction] * count * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return {"forward": 6, "backward": 16}[direction] * shape["batch"] * shape["time"] * shape["width"]


rms_recurrence = Work(
    "rms_recurrence",
    _inputs,
    reference,
    _min_bytes,
    _flops,
    batched=(0, 1),
)
