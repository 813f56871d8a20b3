"""Products of matrices, and what is made of them. x is (batch, width).

Fewest bytes: the inputs and y once; backward the inputs and dy in, all gradients out. Operations: a
multiplication and an addition for each element of a result and column of its matrix, backward two such
products; biases and activations are not counted.
"""

import torch
from torch import Tensor
from torch.nn import functional

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def out_of(shape: Shape) -> int:
    """The width of y: ``out``, or that of x where none is given."""
    return shape.get("out", shape["width"])


def passes(direction: str) -> int:
    """How many products a direction has, for each one that it has forward."""
    return {"forward": 1, "backward": 2}[direction]


# ---- one matrix --------------------------------------------------------------------------------------------


def matmul_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x and the weight (out, width)."""
    width = shape["width"]
    return randn(shape["batch"], width), randn(out_of(shape), width, scale=width**-0.5)


def matmul_moved(shape: Shape, direction: str) -> int:
    """x, the weight and y; backward x, dy, the weight in, dx and the weight's gradient out."""
    batch, width, out = shape["batch"], shape["width"], out_of(shape)
    x, matrix, y = batch * width, out * width, batch * out
    return {"forward": x + matrix + y, "backward": 2 * x + 2 * matrix + y}[direction]


def matmul_flops(shape: Shape, direction: str) -> int:
    """Two operations for each row of x and element of the weight."""
    return 2 * passes(direction) * shape["batch"] * out_of(shape) * shape["width"]


matmul = Work("matmul", matmul_inputs, functional.linear, matmul_moved, matmul_flops)
"""y = x Wᵀ with W (out, width)."""


def linear_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x, the weight (out, width) and the bias (out,)."""
    return *matmul_inputs(shape), randn(out_of(shape))


linear = Work("linear", linear_inputs, functional.linear, matmul_moved, matmul_flops)
"""The matrix layer y = x Wᵀ + b, as nn.Linear computes it."""


def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x Wᵀ + b)."""
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


linear_gelu = Work("linear_gelu", linear_inputs, linear_gelu_reference, matmul_moved, matmul_flops)
"""A Linear layer with its activation: y = gelu(x Wᵀ + b), GELU in its tanh form. Forward only."""


def linear_relu_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x Wᵀ + b)."""
    return torch.relu(functional.linear(x, weight, bias))


linear_relu = Work("linear_relu", linear_inputs, linear_relu_reference, matmul_moved, matmul_flops)
"""The same with another activation: y = relu(x Wᵀ + b). Forward only."""


# ---- several matrices --------------------------------------------------------------------------------------


def gate_up_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x, and one weight (2, out, width) of both matrices, that of the gate first."""
    width = shape["width"]
    return randn(shape["batch"], width), randn(2, out_of(shape), width, scale=width**-0.5)


def gate_up_reference(x: Tensor, weight: Tensor) -> Tensor:
    """gelu(x Gᵀ) * (x Uᵀ)."""
    gate, up = functional.linear(x, weight[0]), functional.linear(x, weight[1])
    return functional.gelu(gate, approximate="tanh") * up


def gate_up_moved(shape: Shape, direction: str) -> int:
    """x, the weight and y."""
    batch, width, out = shape["batch"], shape["width"], out_of(shape)
    return batch * width + 2 * out * width + batch * out


def gate_up_flops(shape: Shape, direction: str) -> int:
    """Those of two products."""
    return 2 * matmul_flops(shape, direction)


gate_up = Work("gate_up", gate_up_inputs, gate_up_reference, gate_up_moved, gate_up_flops)
"""The first half of a gated MLP: y = gelu(x Gᵀ) * (x Uᵀ), GELU in its tanh form, y (batch, out).

Forward only.
"""


def grouped_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x (batch, groups * width), the weight (groups, width in, width out), the bias (groups, width)."""
    groups, width = shape["groups"], shape["width"]
    weight = randn(groups, width, width, scale=width**-0.5)
    return randn(shape["batch"], groups * width), weight, randn(groups, width)


def grouped_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each group's columns times its matrix, plus its bias."""
    by_group = x.reshape(len(x), *bias.shape)
    return (torch.einsum("rgi,gio->rgo", by_group, weight) + bias).flatten(1)


def grouped_moved(shape: Shape, direction: str) -> int:
    """x, weight, bias and y; backward x, dy and the weight in, all gradients out."""
    columns = shape["groups"] * shape["width"]
    tensor, matrices = shape["batch"] * columns, columns * (shape["width"] + 1)
    return {"forward": 2 * tensor + matrices, "backward": 3 * tensor + 2 * matrices}[direction]


def grouped_flops(shape: Shape, direction: str) -> int:
    """Two operations for each row and element of the weight."""
    return 2 * passes(direction) * shape["batch"] * shape["groups"] * shape["width"] ** 2


grouped = Work("grouped", grouped_inputs, grouped_reference, grouped_moved, grouped_flops)
"""Many small Linears side by side: each group of columns of x times a matrix of its own, plus its bias."""


def network_inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x and the weight (depth, width out, width in)."""
    width = shape["width"]
    return randn(shape["batch"], width), randn(shape["depth"], width, width, scale=0.5 * width**-0.5)


def network_reference(x: Tensor, weight: Tensor) -> Tensor:
    """All layers, one after the other."""
    for matrix in weight:
        x = x + torch.relu(x @ matrix.T) ** 2
    return x


def network_moved(shape: Shape, direction: str) -> int:
    """x, weight and y; backward x, dy and the weight in, both gradients out."""
    tensor, matrices = shape["batch"] * shape["width"], shape["depth"] * shape["width"] ** 2
    return {"forward": 2 * tensor + matrices, "backward": 3 * tensor + 2 * matrices}[direction]


def network_flops(shape: Shape, direction: str) -> int:
    """Two operations for each row and element of the weight."""
    return 2 * passes(direction) * shape["batch"] * shape["depth"] * shape["width"] ** 2


network = Work("network", network_inputs, network_reference, network_moved, network_flops)
"""A network of layers with a residual: h becomes h + relu(h Wᵀ)², once for each matrix.

The squared ReLU is that of So and others, "Primer" (2021).
"""
