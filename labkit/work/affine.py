"""The elementwise layer: y = x * w + b with vectors w and b.

x and y are (batch, width), w and b (width,). Fewest bytes: x in and y out, 2N for N = batch * width elements;
backward x and dy in, dx out, 3N. The vectors are too small to count. Operations: a product and a sum for each
element; backward dy * w, dy * x and two sums over rows.
"""

from torch import Tensor

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def reference(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """x * w + b in plain PyTorch."""
    return x * w + b


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    batch, width = shape["batch"], shape["width"]
    return randn(batch, width), randn(width), randn(width)


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    return {"forward": 2, "backward": 3}[direction] * shape["batch"] * shape["width"] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return {"forward": 2, "backward": 4}[direction] * shape["batch"] * shape["width"]


affine = Work("affine", _inputs, reference, _min_bytes, _flops)
