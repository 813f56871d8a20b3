"""A stack of blocks (Linear, RMSNorm, GELU): inputs, float64 reference, fewest bytes, operations.

Axes: ``batch`` rows, ``width`` features, ``depth`` blocks (8 if left out). A block has a weight (out, in), as
nn.Linear has it, a bias (out,) and the norm's gain (out,). A stack keeps those of all blocks in one tensor
each, with the block as first axis.

Bytes and operations are those of the whole stack in one pass: input, output and weights once, and nothing
that lies between two blocks. Each multiply and add of the products is two operations; norm and GELU do not
count.
"""

from torch import Tensor
from torch.nn import functional

from labkit.gpu import randn
from labkit.measure.contender import Shape
from labkit.workloads.elementwise import LayerSize, matrix_layer

EPS = 1e-6
"""What RMSNorm adds to the mean square."""


def depth_of(shape: Shape) -> int:
    """The number of blocks: 8 if the shape does not say."""
    return shape.get("depth", 8)


def block(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    """gelu(rms_norm(x weightᵀ + bias) gain), GELU in its tanh form: x (..., in), weight (out, in)."""
    z = functional.linear(x, weight, bias)
    # The gain gets the dtype of z, also under autocast: PyTorch's fused norm takes nothing else.
    return functional.gelu(functional.rms_norm(z, gain.shape, gain.to(z.dtype), EPS), approximate="tanh")


def stack(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    """Block after block: x (..., W), weight (L, W, W), bias and gain (L, W)."""
    for layer in zip(weight, bias, gain, strict=True):
        x = block(x, *layer)
    return x


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    width, depth = shape["width"], depth_of(shape)
    # A bias as large as the product would make all rows alike within a few blocks, and a check would miss x.
    bias, gain = randn(depth, width, scale=0.3), 1 + randn(depth, width, scale=0.1)
    return randn(shape["batch"], width), randn(depth, width, width, scale=width**-0.5), bias, gain


def _size(shape: Shape) -> LayerSize:
    width, depth = shape["width"], depth_of(shape)
    return shape["batch"], width, width, depth * width**2, 2 * depth * width


STACK = matrix_layer(_inputs, stack, _size)
