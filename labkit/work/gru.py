"""A GRU layer over time, as `nn.GRU` computes it, from a state of zeros.

Of each step, with h the state before it, (batch, width):

    r = sigmoid(W_ir x + b_ir + W_hr h + b_hr)
    z = sigmoid(W_iz x + b_iz + W_hz h + b_hz)
    n = tanh(W_in x + b_in + r * (W_hn h + b_hn))
    h_new = (1 - z) * n + z * h

x and the states are (batch, time, width), weights (3 width, width), biases (3 width,), in the order r, z, n.
Fewest bytes: x, the weights and biases in, the states out; backward the states' gradient, x and the states
and the weights in, all gradients out. Operations: those of the products, two with each matrix and element
forward, and twice as many backward. Source: Cho and others, "Learning Phrase Representations using RNN
Encoder-Decoder" (2014); the candidate n in PyTorch's form.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    width, row = shape["width"], 3 * shape["width"]
    x = randn(shape["batch"], shape["time"], width)
    # As large as those of nn.GRU, which are uniform, with the same standard deviation.
    weights = (randn(row, width), randn(row, width), randn(row), randn(row))
    return x, *(row**-0.5 * weight for weight in weights)


def reference(x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
    """The states of all steps, (batch, time, width), step by step."""
    h, states = x.new_zeros(x.shape[0], weight_hh.shape[1]), []
    for now in linear(x, weight_ih, bias_ih).unbind(1):
        ir, iz, i_n = now.chunk(3, 1)
        hr, hz, hn = linear(h, weight_hh, bias_hh).chunk(3, 1)
        z = torch.sigmoid(iz + hz)
        n = torch.tanh(i_n + torch.sigmoid(ir + hr) * hn)
        h = (1 - z) * n + z * h
        states.append(h)
    return torch.stack(states, 1)


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    width = shape["width"]
    tensor, weights = shape["batch"] * shape["time"] * width, 6 * width * (width + 1)
    return {"forward": 2 * tensor + weights, "backward": 4 * tensor + 2 * weights}[direction] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    each = {"forward": 12, "backward": 24}[direction] * shape["width"]
    return each * shape["batch"] * shape["time"] * shape["width"]


gru = Work("gru", _inputs, reference, _min_bytes, _flops)
