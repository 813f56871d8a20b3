"""The matrix layer: y = x Wᵀ + b, as nn.Linear computes it.

x and y are (batch, width), W (width, width), b (width,). Fewest bytes: x, W and y once; backward x, dy, W in,
dx and dW out. Operations: a multiplication and an addition for each row and element of W; backward two such
products. The bias counts for neither.
"""

from torch import Tensor
from torch.nn import functional

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    batch, width = shape["batch"], shape["width"]
    return randn(batch, width), randn(width, width, scale=width**-0.5), randn(width)


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    rows, matrix = shape["batch"] * shape["width"], shape["width"] ** 2
    return {"forward": 2 * rows + matrix, "backward": 3 * rows + 2 * matrix}[direction] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return {"forward": 2, "backward": 4}[direction] * shape["batch"] * shape["width"] ** 2


linear = Work("linear", _inputs, functional.linear, _min_bytes, _flops)
