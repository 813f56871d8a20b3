"""Layers that compute each element by itself or reduce each row. x and y: (batch, width), vectors: (width,).

Fewest bytes: the matrices that are read and written, N = batch * width elements each. The vectors are too
small to count.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from labkit.gpu import randn
from labkit.work.base import Shape, Work, per_element


def copy_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x."""
    return (randn(shape["batch"], shape["width"]),)


copy = Work("copy", copy_inputs, torch.clone, per_element(2, 2), per_element(0, 0))
"""y = x: 2N in either direction."""


def row_product_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x and a row."""
    return randn(shape["batch"], shape["width"]), randn(shape["width"])


row_product = Work("row_product", row_product_inputs, torch.mul, per_element(2, 3), per_element(1, 3))
"""y = x * row, for every row of x: 2N; backward x and dy in, dx out, 3N."""


def affine_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x, w and b."""
    batch, width = shape["batch"], shape["width"]
    return randn(batch, width), randn(width), randn(width)


def affine_reference(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """x * w + b in plain PyTorch."""
    return x * w + b


affine = Work("affine", affine_inputs, affine_reference, per_element(2, 3), per_element(2, 4))
"""y = x * w + b with vectors w and b: 2N; backward x and dy in, dx out, 3N.

Operations: a product and a sum for each element; backward dy * w, dy * x and two sums over rows.
"""


def gelu_mul_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x, the bias, and the other matrix."""
    size = shape["batch"], shape["width"]
    return randn(*size), randn(shape["width"]), randn(*size)


def gelu_mul_reference(x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """gelu(x + bias) * other."""
    return functional.gelu(x + bias, approximate="tanh") * other


gelu_mul = Work(
    "gelu_mul", gelu_mul_inputs, gelu_mul_reference, per_element(3, 5), per_element(12, 24), batched=(0, 2)
)
"""The pointwise part of a gated MLP: y = gelu(x + bias) * other, GELU in its tanh form.

x and other in and y out, 3N; backward dy, x and other in, dx and dother out, 5N. Operations: about 12 for
each element; backward twice as many.
"""


def gelus_inputs(shape: Shape) -> tuple[Any, ...]:
    """x, and how many GELUs."""
    return randn(shape["batch"], shape["width"]), shape["gelus"]


def gelus_reference(x: Tensor, gelus: int) -> Tensor:
    """The GELUs one after the other."""
    for _ in range(gelus):
        x = functional.gelu(x, approximate="tanh")
    return x


def gelus_flops(shape: Shape, direction: str) -> int:
    """About 10 operations for each GELU of an element."""
    return 10 * shape["gelus"] * shape["batch"] * shape["width"]


gelus = Work("gelus", gelus_inputs, gelus_reference, per_element(2, 2), gelus_flops)
"""GELU after GELU, in its tanh form, as many of them as the size ``gelus`` says: 2N, however many there are.

Forward only.
"""


# ---- a number for each row ---------------------------------------------------------------------------------


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
