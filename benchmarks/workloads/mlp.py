"""Layers of an MLP: inputs, float64 reference, fewest bytes, operations.

Axes: ``batch`` rows, ``width`` features, and ``hidden`` features inside, four times the width if left out.
GELU is the tanh approximation of Hendrycks and Gimpel (arXiv:1606.08415); GeGLU is the gated layer of Shazeer
(arXiv:2002.05202), without bias. Weights have the layout of nn.Linear: (out, in).

Bytes count each input once and each output once. A bias of one row does not count, nor does what a forward
pass saves for its backward pass. Operations are those of the matrix products, two for each multiply and add.
A backward pass has twice as many products as its forward pass.
"""

from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear

from benchmarks.workloads.base import Shape
from benchmarks.workloads.elementwise import LayerSize, elementwise_layer, matrix_layer
from labkit.gpu import randn


def hidden_of(shape: Shape) -> int:
    """Features of the hidden layer: four times the width if the shape does not name them."""
    return shape.get("hidden", 4 * shape["width"])


def gelu(z: Tensor) -> Tensor:
    """GELU by its tanh approximation: z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3)))."""
    return functional.gelu(z, approximate="tanh")


def _out_of(shape: Shape) -> int:
    return shape.get("out", shape["width"])


def _matmul_inputs(shape: Shape) -> tuple[Tensor, ...]:
    batch, width = shape["batch"], shape["width"]
    return randn(batch, width), randn(_out_of(shape), width, scale=width**-0.5)


def _matmul_size(shape: Shape) -> LayerSize:
    width, out = shape["width"], _out_of(shape)
    return shape["batch"], width, out, width * out, 0


MATMUL = matrix_layer(_matmul_inputs, linear, _matmul_size)
"""x W^T without bias: inputs x (batch, width), weight (out, width); ``out`` is the width if left out."""


def chain(x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """gelu(x + bias) * other in plain PyTorch."""
    return gelu(x + bias) * other


def _chain_inputs(shape: Shape) -> tuple[Tensor, ...]:
    batch, width = shape["batch"], shape["width"]
    return randn(batch, width), randn(width), randn(batch, width)


CHAIN = elementwise_layer(_chain_inputs, chain, tensors=(3, 5), operations=(11, 22))
"""A pointwise chain: inputs x (batch, width), bias (width,), other (batch, width).

Forward x, other and y move, backward x, other, dy, dx and dother. Of operations, tanh as one, there are a
sum, 9 of GELU and a product; backward, with GELU done again, 22.
"""


def gate_up(x: Tensor, w_gate_up: Tensor) -> Tensor:
    """gelu(x Wg^T) * (x Wu^T) in plain PyTorch."""
    return gelu(linear(x, w_gate_up[0])) * linear(x, w_gate_up[1])


def _gate_up_inputs(shape: Shape) -> tuple[Tensor, ...]:
    batch, width = shape["batch"], shape["width"]
    return randn(batch, width), randn(2, hidden_of(shape), width, scale=width**-0.5)


def geglu(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The GeGLU MLP in plain PyTorch: (gelu(x Wg^T) * (x Wu^T)) Wd^T."""
    return linear(gate_up(x, w_gate_up), w_down)


def _geglu_inputs(shape: Shape) -> tuple[Tensor, ...]:
    hidden = hidden_of(shape)
    return *_gate_up_inputs(shape), randn(shape["width"], hidden, scale=hidden**-0.5)


def _geglu_size(shape: Shape) -> LayerSize:
    width, hidden = shape["width"], hidden_of(shape)
    return shape["batch"], width, width, 3 * hidden * width, 0


GEGLU = matrix_layer(_geglu_inputs, geglu, _geglu_size)
"""The GeGLU MLP: inputs x (batch, width), w_gate_up (2, hidden, width), w_down (width, hidden)."""


def geglu_apart(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """The GeGLU MLP with the weights of three Linears."""
    return linear(gelu(linear(x, w_gate)) * linear(x, w_up), w_down)
