"""Layers with a state that each step changes: sequences are (batch, time, width), states begin with zeros.

Fewest bytes: the sequences that are read and written, N = batch * time * width elements each, and large
weights.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit.gpu import randn
from labkit.work.base import Count, Shape, Work, per_element


def with_weights(matrices: int, backward: int) -> Count:
    """Two tensors of all steps and the weights; backward so many tensors, the weights and their gradients.

    The weights are so many matrices (width, width), with a bias each.
    """

    def count(shape: Shape, direction: str) -> int:
        width = shape["width"]
        tensor, weights = shape["batch"] * shape["time"] * width, matrices * width * (width + 1)
        return {"forward": 2 * tensor + weights, "backward": backward * tensor + 2 * weights}[direction]

    return count


def linear_recurrence_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """a, between 0 and 1, and b."""
    size = shape["batch"], shape["time"], shape["width"]
    return torch.sigmoid(randn(*size)), randn(*size)


def linear_recurrence_reference(a: Tensor, b: Tensor) -> Tensor:
    """The states of all steps, (batch, time, width), step by step."""
    state, states = torch.zeros_like(a[:, 0]), []
    for gate, new in zip(a.unbind(1), b.unbind(1), strict=True):
        state = gate * state + new
        states.append(state)
    return torch.stack(states, 1)


linear_recurrence = Work(
    "linear_recurrence",
    linear_recurrence_inputs,
    linear_recurrence_reference,
    per_element(3, 5),
    per_element(2, 4),
    batched=(0, 1),
)
"""h_t = a_t * h_(t-1) + b_t, feature by feature: a and b in, h out, 3N; backward dh, a and h in, da and db
out, 5N. Source: Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length" (2017).
"""


def time_last_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """a and b as views of tensors (batch, width, time)."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in linear_recurrence_inputs(shape))


time_last = replace(linear_recurrence, name="time_last", inputs=time_last_inputs)
"""The linear recurrence of views whose steps lie side by side in memory: some libraries want them so."""


def rms_recurrence_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """a, between 0 and 1, b, and the weight (width,)."""
    return *linear_recurrence_inputs(shape), 1 + 0.1 * randn(shape["width"])


def rms_recurrence_reference(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """The states of all steps, (batch, time, width), step by step."""
    state, states = torch.zeros_like(a[:, 0]), []
    for gate, new in zip(a.unbind(1), b.unbind(1), strict=True):
        u = gate * state + new
        state = weight * u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6)
        states.append(state)
    return torch.stack(states, 1)


rms_recurrence = Work(
    "rms_recurrence",
    rms_recurrence_inputs,
    rms_recurrence_reference,
    per_element(3, 6),
    per_element(6, 16),
    batched=(0, 1),
)
"""A norm at every step: u = a_t * h_(t-1) + b_t, h_t = weight * u / sqrt(mean(u²) + 1e-6).

The mean is over the features. a and b in, h out, 3N; backward dh, a, b and h in, da and db out, 6N.
"""


def gated_block_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x, gain (width,), w_gates (2 width, width), b_gates (2 width,), w_out (width, width)."""
    width = shape["width"]
    return (
        randn(shape["batch"], shape["time"], width),
        1 + randn(width, scale=0.1),
        randn(2 * width, width, scale=width**-0.5),
        randn(2 * width),
        randn(width, width, scale=width**-0.5),
    )


def gated_block_reference(x: Tensor, gain: Tensor, w_gates: Tensor, b_gates: Tensor, w_out: Tensor) -> Tensor:
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


def gated_block_flops(shape: Shape, direction: str) -> int:
    """Those of the products, two with each matrix and element forward, and twice as many backward."""
    return shape["width"] * per_element(6, 12)(shape, direction)


gated_block = Work(
    "gated_block", gated_block_inputs, gated_block_reference, with_weights(3, 3), gated_block_flops
)
"""A block of a sequence model: a norm, a product, two gated recurrences, another product, and a residual.

Of each sequence, with x of a step (width,):

    n = gain * x / sqrt(mean(x**2) + 1e-6)
    logit, c = the two halves of w_gates n + b_gates
    z = sigmoid(logit)
    s_new = (1 - z) * s + z * c
    u_new = (1 - z) * u + z * s_new
    y = x + w_out u_new

The first recurrence is the minimal GRU of Feng and others, "Were RNNs All We Needed?" (2024).
"""


# ---- a GRU -------------------------------------------------------------------------------------------------


def gru_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x, two weights (3 width, width) and two biases (3 width,), each in the order r, z, n."""
    width, row = shape["width"], 3 * shape["width"]
    x = randn(shape["batch"], shape["time"], width)
    # As large as those of nn.GRU, which are uniform, with the same standard deviation.
    weights = (randn(row, width), randn(row, width), randn(row), randn(row))
    return x, *(row**-0.5 * weight for weight in weights)


def gru_reference(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor
) -> Tensor:
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


def gru_flops(shape: Shape, direction: str) -> int:
    """Those of the products, two with each matrix and element forward, and twice as many backward."""
    return shape["width"] * per_element(12, 24)(shape, direction)


gru = Work("gru", gru_inputs, gru_reference, with_weights(6, 4), gru_flops)
"""A GRU layer over time, as `nn.GRU` computes it. Of each step, with h the state before it, (batch, width):

    r = sigmoid(W_ir x + b_ir + W_hr h + b_hr)
    z = sigmoid(W_iz x + b_iz + W_hz h + b_hz)
    n = tanh(W_in x + b_in + r * (W_hn h + b_hn))
    h_new = (1 - z) * n + z * h

Source: Cho and others, "Learning Phrase Representations using RNN Encoder-Decoder" (2014); the candidate n in
PyTorch's form.
"""


def parted(flat: Tensor, width: int) -> list[Tensor]:
    """weight_ih and weight_hh (3 width, width), bias_ih and bias_hh (3 width,): views of a flat tensor."""
    row = 3 * width
    weight_ih, weight_hh, bias_ih, bias_hh = flat.split([row * width, row * width, row, row])
    return [weight_ih.view(row, width), weight_hh.view(row, width), bias_ih, bias_hh]


def gru_by_time_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x (time, batch, width), and all weights one after the other in one tensor."""
    x, *weights = gru_inputs(shape)
    return x.transpose(0, 1).contiguous(), torch.cat([weight.flatten() for weight in weights])


def gru_by_time_reference(x: Tensor, flat: Tensor) -> Tensor:
    """The states of all steps, (time, batch, width)."""
    return gru_reference(x.transpose(0, 1), *parted(flat, x.shape[2])).transpose(0, 1)


gru_by_time = replace(
    gru, name="gru_by_time", inputs=gru_by_time_inputs, reference=gru_by_time_reference, batched=()
)
"""The GRU layer in the layout that cuDNN was made for: (time, batch, width), the weights in one tensor."""
