"""Linear and elementwise layers: inputs, float64 reference, fewest bytes, operations.

Axes: ``batch`` rows and ``width`` features. Bytes count each input and each output once.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit.gpu import randn
from labkit.measure.contender import Shape, Work

PRODUCTS = {"forward": 1, "backward": 2, "forward_backward": 3}
"""Matrix products of a layer with a weight: one forward, and one backward for each operand's gradient."""


def by_direction(direction: str, forward: int, backward: int) -> int:
    """The bytes or operations of a direction; those of "forward_backward" are the sum of both."""
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[direction]


def forward_only(direction: str) -> None:
    """Raise ValueError for any other direction: the work has no backward pass."""
    if direction != "forward":
        raise ValueError(f"direction: this work is measured forward only, not {direction}")


def weighted_elements(direction: str, x: int, y: int, weights: int) -> int:
    """Elements that a layer with weights moves: forward X + Y + W; backward X + dY + dX + W + dW.

    ``x``, ``y`` and ``weights`` are the numbers of elements of input, output and weights.
    """
    return by_direction(direction, x + y + weights, 2 * x + y + 2 * weights)


def _linear_inputs(shape: Shape) -> tuple[Tensor, ...]:
    batch, width = shape["batch"], shape["width"]
    return randn(batch, width), randn(width, width, scale=width**-0.5), randn(width)


def _linear_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    """Forward X + Y + W; backward X + dY + dX + W + dW. The bias does not count."""
    full = shape["batch"] * shape["width"]
    return weighted_elements(direction, full, full, shape["width"] ** 2) * itemsize


def _linear_flops(shape: Shape, direction: str) -> int:
    """One product of 2 B N N operations forward, two backward."""
    return PRODUCTS[direction] * 2 * shape["batch"] * shape["width"] ** 2


LINEAR = Work(_linear_inputs, linear, _linear_bytes, _linear_flops)
"""nn.Linear from ``width`` to ``width`` features with bias: inputs x (batch, width), weight, bias."""


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x * weight + bias in plain PyTorch: the reference of the elementwise layer."""
    return x * weight + bias


def _affine_inputs(shape: Shape) -> tuple[Tensor, ...]:
    return randn(shape["batch"], shape["width"]), randn(shape["width"]), randn(shape["width"])


def _affine_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    """2N forward, 3N backward, N being one full tensor."""
    return by_direction(direction, 2, 3) * shape["batch"] * shape["width"] * itemsize


def _affine_flops(shape: Shape, direction: str) -> int:
    """Multiply and add forward; dy*w, dy*x and two sums backward."""
    return by_direction(direction, 2, 4) * shape["batch"] * shape["width"]


AFFINE = Work(_affine_inputs, affine, _affine_bytes, _affine_flops)
"""x*w+b with vectors w and b: inputs x (batch, width), weight (width,), bias (width,)."""


def product(second: Callable[[int, int], Tensor], reads: int) -> Work:
    """The elementwise product of x (batch, width) and a second operand, forward.

    ``second(batch, width)`` makes the operand. ``reads`` is the number of full tensors that are read in all.
    """

    def inputs(shape: Shape) -> tuple[Tensor, ...]:
        return randn(shape["batch"], shape["width"]), second(shape["batch"], shape["width"])

    def min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
        forward_only(direction)
        return (reads + 1) * shape["batch"] * shape["width"] * itemsize

    return Work(inputs, torch.mul, min_bytes, lambda shape, _: shape["batch"] * shape["width"], sample={})
