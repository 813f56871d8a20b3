"""Many small Linears side by side: each group of columns of x times a matrix of its own, plus its bias.

x and y are (batch, groups * width), the weight (groups, width in, width out), the bias (groups, width).
Fewest bytes: x, weight, bias and y once; backward x, dy and the weight in, all gradients out. Operations: a
multiplication and an addition for each element of y and column of its group; backward two such products.
"""

import torch
from torch import Tensor

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    groups, width = shape["groups"], shape["width"]
    weight = randn(groups, width, width, scale=width**-0.5)
    return randn(shape["batch"], groups * width), weight, randn(groups, width)


def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each group's columns times its matrix, plus its bias."""
    by_group = x.reshape(len(x), *bias.shape)
    return (torch.einsum("rgi,gio->rgo", by_group, weight) + bias).flatten(1)


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    columns = shape["groups"] * shape["width"]
    tensor, matrices = shape["batch"] * columns, columns * (shape["width"] + 1)
    return {"forward": 2 * tensor + matrices, "backward": 3 * tensor + 2 * matrices}[direction] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    products = {"forward": 1, "backward": 2}[direction]
    return products * 2 * shape["batch"] * shape["groups"] * shape["width"] ** 2


grouped = Work("grouped", _inputs, reference, _min_bytes, _flops)
