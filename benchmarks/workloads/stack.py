"""A stack of blocks (Linear, RMSNorm, GELU) in PyTorch: the reference of `kernels.fused_mlp`."""

from torch import Tensor
from torch.nn import functional

EPS = 1e-6
"""What RMSNorm adds to the mean square."""


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
