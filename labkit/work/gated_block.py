"""A block of a sequence model: a norm, a product, two gated recurrences, another product, and a residual.

Of each sequence, with x of a step (width,), and s and u zeros before the first step:

    n = gain * x / sqrt(mean(x**2) + 1e-6)
    logit, c = the two halves of w_gates n + b_gates
    z = sigmoid(logit)
    s_new = (1 - z) * s + z * c
    u_new = (1 - z) * u + z * s_new
    y = x + w_out u_new

x and y are (batch, time, width), gain (width,), w_gates (2 width, width), b_gates (2 width,), w_out (width,
width). Fewest bytes: x and the weights in, y out; backward dy, x and the weights in, all gradients out.
Operations: those of the products, two with each matrix and element forward, and twice as many backward. The
first recurrence is the minimal GRU of Feng and others, "Were RNNs All We Needed?" (2024).
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    width = shape["width"]
    return (
        randn(shape["batch"], shape["time"], width),
        1 + randn(width, scale=0.1),
        randn(2 * width, width, scale=width**-0.5),
        randn(2 * width),
        randn(width, width, scale=width**-0.5),
    )


def reference(x: Tensor, gain: Tensor, w_gates: Tensor, b_gates: Tensor, w_out: Tensor) -> Tensor:
    """y of all steps, (batch, time, width), step by step."""
    normed = gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    logits, candidates = linear(normed, w_gates, b_gates).chunk(2, -1)
    s = u = torch.zeros_like(x[:, 0])
    states = []
    for z, c in zip(torch.sigmoid(logits).unbind(1), candidates.unbind(1), strict=True):
        s = (1 - z) * s + z * c
        u = (1 - z) * u + z * s
        states.append(u)
    return x + linear(torch.stack(states, 1), w_out)


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    width = shape["width"]
    tensor, weights = shape["batch"] * shape["time"] * width, 3 * width * (width + 1)
    return {"forward": 2 * tensor + weights, "backward": 3 * tensor + 2 * weights}[direction] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    each = {"forward": 6, "backward": 12}[direction] * shape["width"]
    return each * shape["batch"] * shape["time"] * shape["width"]


gated_block = Work("gated_block", _inputs, reference, _min_bytes, _flops)
