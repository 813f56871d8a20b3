"""Layers that reduce each row of x: x and y are (batch, width).

Fewest bytes: x in and y out, 2N for N = batch * width elements; backward two tensors in, dx out, 3N.
"""

import torch
from torch import Tensor

from labkit.gpu import randn
from labkit.work.base import Shape, Work, per_element


def rms_norm_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x and the weight (width,)."""
    return randn(shape["batch"], shape["width"]), 1 + 0.1 * randn(shape["width"])


def rms_norm_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Each row over its root mean square, times the weight."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


rms_norm = Work("rms_norm", rms_norm_inputs, rms_norm_reference, per_element(2, 3), per_element(4, 9))
"""RMSNorm: y = weight * x / sqrt(mean(x²) + 1e-6), with the mean over the row.

The weight and its gradient are a row each, and not counted. Source: Zhang and Sennrich, "Root Mean Square
Layer Normalization" (2019).
"""


def softmax_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x."""
    return (4 * randn(shape["batch"], shape["width"]),)


def softmax_reference(x: Tensor) -> Tensor:
    """The softmax of each row."""
    return torch.softmax(x, -1)


softmax = Work("softmax", softmax_inputs, softmax_reference, per_element(2, 3), per_element(5, 4))
"""y = exp(x - max(x)) / sum(exp(x - max(x))); backward y and dy in, dx out."""
