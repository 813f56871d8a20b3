"""A network of layers with a residual: h becomes h + relu(h Wᵀ)², once for each matrix.

x and y are (batch, width), the weight is (depth, width out, width in). The squared ReLU is that of So and
others, "Primer" (2021). Fewest bytes: x, weight and y once; backward x, dy and the weight in, both gradients
out. Operations: a multiplication and an addition for each element of a result and column of its matrix;
backward two such products a layer.
"""

import torch
from torch import Tensor

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    width = shape["width"]
    return randn(shape["batch"], width), randn(shape["depth"], width, width, scale=0.5 * width**-0.5)


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """All layers, one after the other."""
    for matrix in weight:
        x = x + torch.relu(x @ matrix.T) ** 2
    return x


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    tensor, matrices = shape["batch"] * shape["width"], shape["depth"] * shape["width"] ** 2
    return {"forward": 2 * tensor + matrices, "backward": 3 * tensor + 2 * matrices}[direction] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    products = {"forward": 1, "backward": 2}[direction]
    return products * 2 * shape["batch"] * shape["depth"] * shape["width"] ** 2


network = Work("network", _inputs, reference, _min_bytes, _flops)
