"""A Linear layer with its activation: y = gelu(x Wᵀ + b), GELU in its tanh form.

x is (batch, width), W (out, width), b (out,), y (batch, out). Fewest bytes: x, W and y once. Forward only.
Operations: a multiplication and an addition for each element of y and column of x; bias and GELU not counted.
"""

from torch import Tensor
from torch.nn import functional

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    width, out = shape["width"], shape["out"]
    return randn(shape["batch"], width), randn(out, width, scale=width**-0.5), randn(out)


def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x Wᵀ + b)."""
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    batch, width, out = shape["batch"], shape["width"], shape["out"]
    return (batch * width + out * width + batch * out) * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return 2 * shape["batch"] * shape["width"] * shape["out"]


linear_gelu = Work("linear_gelu", _inputs, reference, _min_bytes, _flops)
