"""The GRU layer in the layout that cuDNN was made for.

As `gru`, but x and the states are (time, batch, width), and all weights lie one after the other in one
tensor: weight_ih, weight_hh, bias_ih, bias_hh.
"""

from dataclasses import replace

import torch
from torch import Tensor

from labkit.work.base import Shape
from labkit.work.gru import gru


def parted(flat: Tensor, width: int) -> list[Tensor]:
    """weight_ih and weight_hh (3 width, width), bias_ih and bias_hh (3 width,): views of a flat tensor."""
    row = 3 * width
    weight_ih, weight_hh, bias_ih, bias_hh = flat.split([row * width, row * width, row, row])
    return [weight_ih.view(row, width), weight_hh.view(row, width), bias_ih, bias_hh]


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    x, *weights = gru.inputs(shape)
    return x.transpose(0, 1).contiguous(), torch.cat([weight.flatten() for weight in weights])


def reference(x: Tensor, flat: Tensor) -> Tensor:
    """The states of all steps, (time, batch, width)."""
    return gru.reference(x.transpose(0, 1), *parted(flat, x.shape[2])).transpose(0, 1)


gru_by_time = replace(gru, name="gru_by_time", inputs=_inputs, reference=reference, batched=())
