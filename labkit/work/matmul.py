"""The product of two matrices: y = x Wᵀ.

x is (batch, width), W (out, width), y (batch, out); ``out`` is the width unless it is given. Fewest bytes: x,
W and y once; backward x, dy, W in, dx and dW out. Operations: a multiplication and an addition for each
element of y and column of x; backward two such products.
"""

from torch import Tensor
from torch.nn import functional

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _out(shape: Shape) -> int:
    return shape.get("out", shape["width"])


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    width = shape["width"]
    return randn(shape["batch"], width), randn(_out(shape), width, scale=width**-0.5)


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    x, matrix, y = shape["batch"] * shape["width"], _out(shape) * shape["width"], shape["batch"] * _out(shape)
    return {"forward": x + matrix + y, "backward": 2 * x + 2 * matrix + y}[direction] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return {"forward": 2, "backward": 4}[direction] * shape["batch"] * _out(shape) * shape["width"]


matmul = Work("matmul", _inputs, functional.linear, _min_bytes, _flops)
