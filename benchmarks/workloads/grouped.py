"""Many small Linears side by side: inputs, float64 reference, fewest bytes, operations.

Axes: ``batch`` rows, ``groups`` (100 if left out), and ``width``, the features of a group, in and out. A row
holds its groups one after the other: x is (batch, groups * width), and so is the result.

Bytes and operations are those of the Linears alone: each input and each output once, two operations for each
multiply and add, twice as many products backward. The bias does not count.
"""

import torch
from torch import Tensor

from benchmarks.workloads.base import Shape
from benchmarks.workloads.elementwise import LayerSize, matrix_layer
from labkit.gpu import randn


def grouped_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each group times its weight: x (..., G * D_in), weight (G, D_in, D_out), bias (G, D_out)."""
    groups = x.unflatten(-1, weight.shape[:2])
    return (torch.einsum("...gi,gio->...go", groups, weight) + bias).flatten(-2)


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    groups, width = shape.get("groups", 100), shape["width"]
    weight = randn(groups, width, width, scale=width**-0.5)
    return randn(shape["batch"], groups * width), weight, randn(groups, width)


def _size(shape: Shape) -> LayerSize:
    features = shape.get("groups", 100) * shape["width"]
    return shape["batch"], features, features, features * shape["width"], 0


GROUPED = matrix_layer(_inputs, grouped_reference, _size)
"""x (batch, groups * width), weight (groups, width in, width out), bias (groups, width)."""
