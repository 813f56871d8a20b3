"""Each row of a matrix times the same vector: y = x * row.

x and y are (batch, width), row (width,). Fewest bytes: x in and y out, 2N for N = batch * width elements;
backward x and dy in, dx out, 3N. The vector is too small to count. Operations: a product for each element;
backward dy * row, dy * x, and a sum over rows.
"""

import torch

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[torch.Tensor, ...]:
    return randn(shape["batch"], shape["width"]), randn(shape["width"])


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    return {"forward": 2, "backward": 3}[direction] * shape["batch"] * shape["width"] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return {"forward": 1, "backward": 3}[direction] * shape["batch"] * shape["width"]


row_product = Work("row_product", _inputs, torch.mul, _min_bytes, _flops)
