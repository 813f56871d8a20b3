"""What the layers of an MLP compute: inputs, float64 reference, fewest bytes, operations.

Axes: ``batch`` rows, ``width`` features, and ``hidden`` features inside, four times the width where it is
left out. GELU is the tanh approximation of Hendrycks and Gimpel (arXiv:1606.08415); GeGLU is the gated layer
of Shazeer (arXiv:2002.05202), without bias. Weights are kept as nn.Linear keeps them: (out, in).

Bytes count each input once and each output once; a bias of one row does not count, nor does what a forward
pass saves for its backward. Operations are those of the matrix products, two for each multiply and add; a
backward pass has twice as many products as its forward.
"""

from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear

from labkit.gpu import randn
from labkit.measure.contender import Shape, Work

PRODUCTS = {"forward": 1, "backward": 2, "forward_backward": 3}
"""How often the matrix products of a forward pass are done: once, and once for each operand's gradient."""


def hidden_of(shape: Shape) -> int:
    """Features of the hidden layer: four times the width where the shape does not name them."""
    return shape.get("hidden", 4 * shape["width"])


def _touched(direction: str, rows_in: int, rows_out: int, weights: int) -> int:
    """Elements: forward X + Y + W; backward X + dY + dX + W + dW."""
    forward = rows_in + rows_out + weights
    backward = 2 * rows_in + rows_out + 2 * weights
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[direction]


def gelu(z: Tensor) -> Tensor:
    """GELU by its tanh approximation: z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3)))."""
    return functional.gelu(z, approximate="tanh")


def _out_of(shape: Shape) -> int:
    return shape.get("out", shape["width"])


def _matmul_inputs(shape: Shape) -> tuple[Tensor, ...]:
    batch, width = shape["batch"], shape["width"]
    return randn(batch, width), randn(_out_of(shape), width, scale=width**-0.5)


def _matmul_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    batch, width, out = shape["batch"], shape["width"], _out_of(shape)
    return _touched(direction, batch * width, batch * out, width * out) * itemsize


def _matmul_flops(shape: Shape, direction: str) -> int:
    return PRODUCTS[direction] * 2 * shape["batch"] * shape["width"] * _out_of(shape)


MATMUL = Work(_matmul_inputs, linear, _matmul_bytes, _matmul_flops)
"""x W^T without bias: inputs x (batch, width), weight (out, width); ``out`` is the width where left out."""


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x W^T + b) in plain PyTorch."""
    return gelu(linear(x, weight, bias))


def _as_matmul(shape: Shape) -> Shape:
    return {**shape, "out": hidden_of(shape)}


def _linear_gelu_inputs(shape: Shape) -> tuple[Tensor, ...]:
    return *_matmul_inputs(_as_matmul(shape)), randn(hidden_of(shape))


def _linear_gelu_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    return _matmul_bytes(_as_matmul(shape), itemsize, direction)


def _linear_gelu_flops(shape: Shape, direction: str) -> int:
    return _matmul_flops(_as_matmul(shape), direction)


LINEAR_GELU = Work(_linear_gelu_inputs, linear_gelu, _linear_gelu_bytes, _linear_gelu_flops)
"""Linear layer and GELU: inputs x (batch, width), weight (hidden, width), bias (hidden,)."""


def chain(x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """gelu(x + bias) * other in plain PyTorch."""
    return gelu(x + bias) * other


def _chain_inputs(shape: Shape) -> tuple[Tensor, ...]:
    batch, width = shape["batch"], shape["width"]
    return randn(batch, width), randn(width), randn(batch, width)


def _chain_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    """Forward 3N: x, other, y; backward 5N: x, other, dy, dx, dother."""
    passes = {"forward": 3, "backward": 5, "forward_backward": 8}[direction]
    return passes * shape["batch"] * shape["width"] * itemsize


def _chain_flops(shape: Shape, direction: str) -> int:
    """Each element, tanh as one: 11 forward (sum, 9 of GELU, product); 22 backward, with GELU done again."""
    operations = {"forward": 11, "backward": 22, "forward_backward": 33}[direction]
    return operations * shape["batch"] * shape["width"]


CHAIN = Work(_chain_inputs, chain, _chain_bytes, _chain_flops, batched=(0, 2))
"""A pointwise chain: inputs x (batch, width), bias (width,), other (batch, width)."""


def gate_up(x: Tensor, w_gate_up: Tensor) -> Tensor:
    """gelu(x Wg^T) * (x Wu^T) in plain PyTorch."""
    return gelu(linear(x, w_gate_up[0])) * linear(x, w_gate_up[1])


def _gate_up_inputs(shape: Shape) -> tuple[Tensor, ...]:
    batch, width = shape["batch"], shape["width"]
    return randn(batch, width), randn(2, hidden_of(shape), width, scale=width**-0.5)


def _gate_up_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    """X + W + H, forward."""
    if direction != "forward":
        raise ValueError(f"direction: gate and up are measured forward only, not {direction}")
    batch, width, hidden = shape["batch"], shape["width"], hidden_of(shape)
    return _touched(direction, batch * width, batch * hidden, 2 * hidden * width) * itemsize


def _gate_up_flops(shape: Shape, direction: str) -> int:
    return PRODUCTS[direction] * 2 * shape["batch"] * shape["width"] * 2 * hidden_of(shape)


GATE_UP = Work(_gate_up_inputs, gate_up, _gate_up_bytes, _gate_up_flops)
"""The first half of GeGLU, forward: inputs x (batch, width), w_gate_up (2, hidden, width), gate first."""


def geglu(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The GeGLU MLP in plain PyTorch: (gelu(x Wg^T) * (x Wu^T)) Wd^T."""
    return linear(gate_up(x, w_gate_up), w_down)


def _geglu_inputs(shape: Shape) -> tuple[Tensor, ...]:
    hidden = hidden_of(shape)
    return *_gate_up_inputs(shape), randn(shape["width"], hidden, scale=hidden**-0.5)


def _geglu_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    batch, width, hidden = shape["batch"], shape["width"], hidden_of(shape)
    return _touched(direction, batch * width, batch * width, 3 * hidden * width) * itemsize


def _geglu_flops(shape: Shape, direction: str) -> int:
    return PRODUCTS[direction] * 6 * shape["batch"] * shape["width"] * hidden_of(shape)


GEGLU = Work(_geglu_inputs, geglu, _geglu_bytes, _geglu_flops)
"""The GeGLU MLP: inputs x (batch, width), w_gate_up (2, hidden, width), w_down (width, hidden)."""


def geglu_apart(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """The GeGLU MLP as three Linears keep their weights."""
    return linear(gelu(linear(x, w_gate)) * linear(x, w_up), w_down)


def _apart_inputs(shape: Shape) -> tuple[Tensor, ...]:
    x, (w_gate, w_up), w_down = _geglu_inputs(shape)
    return x, w_gate.clone(), w_up.clone(), w_down


GEGLU_APART = Work(_apart_inputs, geglu_apart, _geglu_bytes, _geglu_flops)
"""The same with two weights (hidden, width) for gate and up: no contender pays for taking one apart."""
