"""The first half of a gated MLP: y = gelu(x Gᵀ) * (x Uᵀ), GELU in its tanh form.

x is (batch, width), y (batch, out); one weight (2, out, width) has both matrices, G first. Fewest bytes: x,
the weight and y once. Forward only. Operations: those of the two products.
"""

from torch import Tensor
from torch.nn import functional

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    width, out = shape["width"], shape["out"]
    return randn(shape["batch"], width), randn(2, out, width, scale=width**-0.5)


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """gelu(x Gᵀ) * (x Uᵀ)."""
    gate, up = functional.linear(x, weight[0]), functional.linear(x, weight[1])
    return functional.gelu(gate, approximate="tanh") * up


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    batch, width, out = shape["batch"], shape["width"], shape["out"]
    return (batch * width + 2 * out * width + batch * out) * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return 4 * shape["batch"] * shape["width"] * shape["out"]


gate_up = Work("gate_up", _inputs, reference, _min_bytes, _flops)
