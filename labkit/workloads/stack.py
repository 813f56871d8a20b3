"""What a stack of blocks (Linear, RMSNorm, GELU) computes: inputs, float64 reference, fewest bytes.

Axes: ``batch`` rows, ``width`` features, ``depth`` blocks (8 where left out). A block's weights are weight
(out, in), as nn.Linear has it, bias (out,) and the norm's gain (out,); a stack keeps those of all blocks in
one tensor each, the block first.

Bytes and operations are those of the whole stack in one pass: input, output and weights once, nothing that
lies between two blocks; two operations for each multiply and add of the products, norm and GELU not counted.
"""

from torch import Tensor
from torch.nn import functional

from labkit.gpu import randn
from labkit.measure.contender import Shape, Work

EPS = 1e-6
"""What RMSNorm adds to the mean square."""


def depth_of(shape: Shape) -> int:
    """How many blocks: 8 where the shape does not say."""
    return shape.get("depth", 8)


def block(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    """gelu(rms_norm(x weightᵀ + bias) gain), GELU in its tanh form: x (..., in), weight (out, in)."""
    z = functional.linear(x, weight, bias)
    # of one dtype, also under autocast: PyTorch's fused norm takes nothing else
    return functional.gelu(functional.rms_norm(z, gain.shape, gain.to(z.dtype), EPS), approximate="tanh")


def stack(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
    """Block after block: x (..., W), weight (L, W, W), bias and gain (L, W)."""
    for layer in zip(weight, bias, gain, strict=True):
        x = block(x, *layer)
    return x


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    width, depth = shape["width"], depth_of(shape)
    # A bias as large as the product would make all rows alike within a few blocks: no check could tell x.
    bias, gain = randn(depth, width, scale=0.3), 1 + randn(depth, width, scale=0.1)
    return randn(shape["batch"], width), randn(depth, width, width, scale=width**-0.5), bias, gain


def _bytes(shape: Shape, itemsize: int, direction: str) -> int:
    """Forward X + Y + weights; backward X + dY + dX + weights + their gradients."""
    rows = shape["batch"] * shape["width"]
    weights = depth_of(shape) * shape["width"] * (shape["width"] + 2)
    moved = {"forward": 2 * rows + weights, "backward": 3 * rows + 2 * weights}
    moved["forward_backward"] = moved["forward"] + moved["backward"]
    return moved[direction] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    """A product of 2 B W W operations for each block forward, two backward."""
    products = {"forward": 1, "backward": 2, "forward_backward": 3}
    return products[direction] * 2 * depth_of(shape) * shape["batch"] * shape["width"] ** 2


STACK = Work(_inputs, stack, _bytes, _flops)
