"""A copy: y = x.

x and y are (batch, width). Fewest bytes: x in and y out, 2N for N = batch * width elements, in either
direction. Operations: none.
"""

import torch

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[torch.Tensor, ...]:
    return (randn(shape["batch"], shape["width"]),)


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    return 2 * shape["batch"] * shape["width"] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return 0


copy = Work("copy", _inputs, torch.clone, _min_bytes, _flops)
