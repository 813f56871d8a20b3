"""What the layers of the course compute: inputs, float64 reference, fewest bytes, operations, floors."""

from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit import device, machine, roofline
from labkit.sweeps import Shape, Work


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal random float32 values on the device of this session."""
    return torch.randn(shape, device=device.name()) * scale


def _linear_inputs(shape: Shape) -> tuple[Tensor, ...]:
    batch, width = shape["batch"], shape["width"]
    return draw(batch, width), draw(width, width, scale=width**-0.5), draw(width)


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
    return draw(shape["batch"], shape["width"]), draw(shape["width"]), draw(shape["width"])


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
    return *_affine_inputs(shape), draw(shape["batch"], shape["width"])


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


def _fixed(panel: pd.DataFrame) -> Shape:
    """The sizes that a panel over width has one of."""
    return {axis: int(panel[axis].iloc[0]) for axis in ("batch", "groups", "time") if axis in panel}


def floors(**works: Work) -> Callable[[pd.DataFrame], dict[str, Callable[[float], float]]]:
    """For plots.curves: the floor in us of each work against width, for a panel of one batch and dtype.

    ``floors(linear=LINEAR)`` draws "floor of linear". The roofs are those of the device of the panel's rows.
    """

    def of(panel: pd.DataFrame) -> dict[str, Callable[[float], float]]:
        roofs = machine.roofs_of(panel)
        if roofs is None:
            return {}
        sizes, dtype = _fixed(panel), str(panel["dtype"].iloc[0])

        def line(work: Work) -> Callable[[float], float]:
            return lambda width: work.floor_us({**sizes, "width": int(width)}, dtype, roofs)

        return {f"floor of {name}": line(work) for name, work in works.items()}

    return of


def regimes(work: Work) -> Callable[[pd.DataFrame], list[tuple[float, float, str]]]:
    """For plots.curves: over which widths launch, memory or arithmetic is the highest floor of ``work``."""

    def of(panel: pd.DataFrame) -> list[tuple[float, float, str]]:
        roofs = machine.roofs_of(panel)
        if roofs is None:
            return []
        sizes, dtype = _fixed(panel), str(panel["dtype"].iloc[0])
        itemsize = getattr(torch, dtype).itemsize
        least, most = int(panel["width"].min()), int(panel["width"].max())

        def shape(width: float) -> Shape:
            return {**sizes, "width": int(width)}

        def moved(width: float) -> float:
            return work.min_bytes(shape(width), itemsize, "forward") / roofs.bandwidth * 1e6

        def computed(width: float) -> float:
            return work.flops(shape(width), "forward") / roofs.matmul[dtype] * 1e6

        widths = [least * (most / least) ** (i / 200) for i in range(201)]
        bounds = {"launch": lambda _: roofs.node_us, "memory": moved, "arithmetic": computed}
        return roofline.regimes(widths, bounds)

    return of


def product(second: Callable[[int, int], Tensor], reads: int) -> Work:
    """x times a second operand: ``second(batch, width)`` draws it, ``reads`` full tensors are read in all."""

    def inputs(shape: Shape) -> tuple[Tensor, ...]:
        return draw(shape["batch"], shape["width"]), second(shape["batch"], shape["width"])

    def moved(shape: Shape, itemsize: int, direction: str) -> int:
        if direction != "forward":
            raise ValueError(f"direction: a product is measured forward only, not {direction}")
        return (reads + 1) * shape["batch"] * shape["width"] * itemsize

    return Work(inputs, torch.mul, moved, lambda shape, _: shape["batch"] * shape["width"], sample={})
