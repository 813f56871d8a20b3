"""Linear and elementwise layers: inputs, float64 reference, fewest bytes, operations.

Axes: ``batch`` rows and ``width`` features. Bytes count each input and each output once.
"""

import math
from collections.abc import Callable

from torch import Tensor

from benchmarks.workloads.base import Shape, Work
from labkit.gpu import randn


def by_direction(direction: str, forward: int, backward: int) -> int:
    """The bytes or operations of a direction; those of "forward_backward" are the sum of both."""
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[direction]


LayerSize = tuple[int, int, int, int, int]
"""Rows, features of a row of x, features of a row of y, elements of all matrices (each row is multiplied by
each of them), and elements of biases and gains, where they count."""


def matrix_layer(
    inputs: Callable[[Shape], tuple[Tensor, ...]],
    reference: Callable[..., Tensor],
    size: Callable[[Shape], LayerSize],
) -> Work:
    """The work of a layer of matrix products, whose size for a shape is ``size(shape)``.

    Bytes are forward X + Y + W, backward X + dY + dX + W + dW. Each row times each element of a matrix is two
    operations forward, and four backward: there are two products, one for each operand's gradient.
    """

    def min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
        rows, x, y, matrices, vectors = size(shape)
        weights = matrices + vectors
        return by_direction(direction, rows * (x + y) + weights, rows * (2 * x + y) + 2 * weights) * itemsize

    def flops(shape: Shape, direction: str) -> int:
        rows, _, _, matrices, _ = size(shape)
        return by_direction(direction, 2, 4) * rows * matrices

    return Work(inputs, reference, min_bytes, flops)


def elementwise_layer(
    inputs: Callable[[Shape], tuple[Tensor, ...]],
    reference: Callable[..., Tensor],
    tensors: tuple[int, int],
    operations: tuple[int, int],
    axes: tuple[str, ...] = ("batch", "width"),
    vectors: int = 0,
) -> Work:
    """The work of a layer on the elements of tensors with these axes.

    ``tensors`` are how many full tensors move forward and backward, ``operations`` how many there are for
    each element. ``vectors`` (width,) move once forward, and backward with their gradients.
    """

    def elements(shape: Shape) -> int:
        return math.prod(shape[axis] for axis in axes)

    def min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
        once, twice = by_direction(direction, *tensors), by_direction(direction, 1, 2)
        return (once * elements(shape) + twice * vectors * shape["width"]) * itemsize

    def flops(shape: Shape, direction: str) -> int:
        return by_direction(direction, *operations) * elements(shape)

    return Work(inputs, reference, min_bytes, flops)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x * weight + bias in plain PyTorch: the reference of the elementwise layer."""
    return x * weight + bias


def _affine_inputs(shape: Shape) -> tuple[Tensor, ...]:
    return randn(shape["batch"], shape["width"]), randn(shape["width"]), randn(shape["width"])


AFFINE = elementwise_layer(_affine_inputs, affine, tensors=(2, 3), operations=(2, 4))
"""x*w+b with vectors w and b: inputs x (batch, width), weight (width,), bias (width,).

Operations are a product and a sum forward; dy*w, dy*x and two sums backward. The vectors do not count.
"""
