"""A GRU layer over (B, T, H): inputs, float64 reference, fewest bytes, operations.

Axes: ``batch`` sequences B, ``time`` steps T, ``width`` features H, of the input and of the state.

Bytes count x, the states, the weights and all gradients once: 2 B T H numbers and the weights forward,
4 B T H and twice the weights backward (x, h, dh; dx). What a layer keeps for its backward, or passes through
memory between its kernels, does not count.

Operations are those of the products, 12 H for each element of (B, T, H) forward and 24 H backward, and those
of the gates, 11 and 16. Sigmoid and tanh do not count.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.workloads.base import Shape, Work
from benchmarks.workloads.elementwise import by_direction
from labkit.gpu import randn


def gru(x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
    """nn.GRU's formula, step after step, from a state of zeros.

    x (B, T, I), weights (3 H, I) and (3 H, H), biases (3 H,), in the order r, z, n; the states (B, T, H).
    """
    h, states = x.new_zeros(x.shape[0], weight_hh.shape[1]), []
    for now in linear(x, weight_ih, bias_ih).unbind(1):
        r, z, n = now.chunk(3, 1)
        hr, hz, hn = linear(h, weight_hh, bias_hh).chunk(3, 1)
        z = torch.sigmoid(z + hz)
        n = torch.tanh(n + torch.sigmoid(r + hr) * hn)
        h = n + z * (h - n)
        states.append(h)
    return torch.stack(states, 1)


def library_gru(x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
    """The same by nn.GRU's own function, on a GPU cuDNN's."""
    weights = [weight_ih, weight_hh, bias_ih, bias_hh]
    h0 = x.new_zeros(1, x.shape[0], weight_hh.shape[1])
    states, _ = torch.gru(x, h0, weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)
    return states


def library_gru_by_time(x: Tensor, flat: Tensor) -> Tensor:
    """The same in the layout that cuDNN was made for: x and the states (T, B, H), weights in one tensor."""
    h0 = x.new_zeros(1, x.shape[1], x.shape[2])
    states, _ = torch.gru(
        x, h0, _parted(flat, x.shape[2]), True, 1, 0.0, torch.is_grad_enabled(), False, False
    )
    return states


def _parted(flat: Tensor, width: int) -> list[Tensor]:
    """Views of weight_ih, weight_hh, bias_ih and bias_hh, which lie one after the other."""
    square, row = 3 * width * width, 3 * width
    weight_ih, weight_hh, bias_ih, bias_hh = flat.split([square, square, row, row])
    return [weight_ih.view(row, width), weight_hh.view(row, width), bias_ih, bias_hh]


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    """Weights with the standard deviation of nn.GRU's, which are uniform."""
    width, row = shape["width"], 3 * shape["width"]
    weights = (randn(row, width), randn(row, width), randn(row), randn(row))
    x = randn(shape["batch"], shape["time"], width)
    return x, *(row**-0.5 * weight for weight in weights)


def _bytes(shape: Shape, itemsize: int, direction: str) -> int:
    width = shape["width"]
    full, weights = shape["batch"] * shape["time"] * width, 6 * width * (width + 1)
    return by_direction(direction, 2 * full + weights, 4 * full + 2 * weights) * itemsize


def _flops(shape: Shape, direction: str) -> int:
    width = shape["width"]
    return by_direction(direction, 12 * width + 11, 24 * width + 16) * shape["batch"] * shape["time"] * width


GRU = Work(_inputs, gru, _bytes, _flops)
"""A GRU layer: inputs x (B, T, H), weight_ih and weight_hh (3 H, H), bias_ih and bias_hh (3 H,)."""
