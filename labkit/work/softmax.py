"""Softmax, row by row: y = exp(x - max(x)) / sum(exp(x - max(x))).

x and y are (batch, width). Fewest bytes: x in, y out (2N for N = batch * width elements); backward y and dy
in, dx out (3N). Operations: 5N; backward 4N.
"""

import torch
from torch import Tensor

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    return (4 * randn(shape["batch"], shape["width"]),)


def reference(x: Tensor) -> Tensor:
    """The softmax of each row."""
    return torch.softmax(x, -1)


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    return {"forward": 2, "backward": 3}[direction] * shape["batch"] * shape["width"] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return {"forward": 5, "backward": 4}[direction] * shape["batch"] * shape["width"]


softmax = Work("softmax", _inputs, reference, _min_bytes, _flops)
