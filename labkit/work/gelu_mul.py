"""The pointwise part of a gated MLP: y = gelu(x + bias) * other, GELU in its tanh form.

x, other and y are (batch, width), bias (width,). Fewest bytes: x and other in and y out, 3N for N = batch *
width elements; backward dy, x and other in, dx and dother out, 5N. The bias is too small to count.
Operations: about 12 for each element; backward twice as many.
"""

import torch

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[torch.Tensor, ...]:
    size = shape["batch"], shape["width"]
    return randn(*size), randn(shape["width"]), randn(*size)


def reference(x: torch.Tensor, bias: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """gelu(x + bias) * other."""
    return torch.nn.functional.gelu(x + bias, approximate="tanh") * other


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    return {"forward": 3, "backward": 5}[direction] * shape["batch"] * shape["width"] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return {"forward": 12, "backward": 24}[direction] * shape["batch"] * shape["width"]


gelu_mul = Work("gelu_mul", _inputs, reference, _min_bytes, _flops, batched=(0, 2))
