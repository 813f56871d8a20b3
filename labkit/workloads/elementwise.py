"""What the layers of the course compute: inputs, float64 reference, fewest bytes, operations."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit import gpu
from labkit.measure.contender import Shape, Work


def _linear_inputs(shape: Shape) -> tuple[Tensor, ...]:
    batch, width = shape["batch"], shape["width"]
    return gpu.randn(batch, width), gpu.randn(width, width, scale=width**-0.5), gpu.randn(width)


def _linear_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    """Forward X + Y + W; backward X + dY + dX + W + dW."""
    activations, weights = {"forward": (2, 1), "backward": (3, 2), "forward_backward": (5, 3)}[direction]
    batch, width = shape["batch"], shape["width"]
    return (activations * batch * width + weights * width**2) * itemsize


def _linear_flops(shape: Shape, direction: str) -> int:
    """One product of 2 B N N operations forward, two backward."""
    products = {"forward": 1, "backward": 2, "forward_backward": 3}[direction]
    return products * 2 * shape["batch"] * shape["width"] ** 2


LINEAR = Work(_linear_inputs, linear, _linear_bytes, _linear_flops)
"""nn.Linear from ``width`` to ``width`` features with bias: inputs x (batch, width), weight, bias."""


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x * weight + bias in plain PyTorch: the reference of the elementwise layer."""
    return x * weight + bias


def _affine_inputs(shape: Shape) -> tuple[Tensor, ...]:
    return (
        gpu.randn(shape["batch"], shape["width"]),
        gpu.randn(shape["width"]),
        gpu.randn(shape["width"]),
    )


def _affine_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    """2N forward, 3N backward, N being one full tensor."""
    passes = {"forward": 2, "backward": 3, "forward_backward": 5}[direction]
    return passes * shape["batch"] * shape["width"] * itemsize


def _affine_flops(shape: Shape, direction: str) -> int:
    """Multiply and add forward; dy*w, dy*x and two sums backward."""
    operations = {"forward": 2, "backward": 4, "forward_backward": 6}[direction]
    return operations * shape["batch"] * shape["width"]


AFFINE = Work(_affine_inputs, affine, _affine_bytes, _affine_flops)
"""x*w+b with vectors w and b: inputs x (batch, width), weight (width,), bias (width,)."""


def residual_block(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """relu(x * weight + bias) + residual in plain PyTorch."""
    return torch.relu(x * weight + bias) + residual


def _residual_inputs(shape: Shape) -> tuple[Tensor, ...]:
    return *_affine_inputs(shape), gpu.randn(shape["batch"], shape["width"])


def _residual_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    """3N: x and residual in, the result out."""
    if direction != "forward":
        raise ValueError(f"direction: the residual block is measured forward only, not {direction}")
    return 3 * shape["batch"] * shape["width"] * itemsize


def _residual_flops(shape: Shape, direction: str) -> int:
    """Multiply, add, compare, add."""
    return 4 * shape["batch"] * shape["width"]


RESIDUAL = Work(_residual_inputs, residual_block, _residual_bytes, _residual_flops, sample={})
"""relu(x*w+b) + residual, forward: inputs x and residual (batch, width), weight and bias (width,) between."""


def product(second: Callable[[int, int], Tensor], reads: int) -> Work:
    """x times a second operand: ``second(batch, width)`` draws it, ``reads`` full tensors are read in all."""

    def inputs(shape: Shape) -> tuple[Tensor, ...]:
        return gpu.randn(shape["batch"], shape["width"]), second(shape["batch"], shape["width"])

    def moved(shape: Shape, itemsize: int, direction: str) -> int:
        if direction != "forward":
            raise ValueError(f"direction: a product is measured forward only, not {direction}")
        return (reads + 1) * shape["batch"] * shape["width"] * itemsize

    return Work(inputs, torch.mul, moved, lambda shape, _: shape["batch"] * shape["width"], sample={})
