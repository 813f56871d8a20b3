"""RMSNorm, row by row: y = weight * x / sqrt(mean(x²) + 1e-6), with the mean over the row.

x and y are (batch, width), the weight is (width,). Fewest bytes: x in, y out (2N for N = batch * width
elements); backward x and dy in, dx out (3N). The weight and its gradient are a row each, and not counted.
Operations: 4N; backward 9N. Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

import torch
from torch import Tensor

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    return randn(shape["batch"], shape["width"]), 1 + 0.1 * randn(shape["width"])


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """Each row over its root mean square, times the weight."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    return {"forward": 2, "backward": 3}[direction] * shape["batch"] * shape["width"] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return {"forward": 4, "backward": 9}[direction] * shape["batch"] * shape["width"]


rms_norm = Work("rms_norm", _inputs, reference, _min_bytes, _flops)
