"""weight * x / sqrt(mean of x² over a row + eps), x (batch, width), weight (width,)."""

from torch import Tensor
from torch.nn import functional

from benchmarks import peers
from benchmarks.run import Operation
from labkit import kernels, work


def eager(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's own function."""
    return functional.rms_norm(x, weight.shape, weight, peers.EPS)


OPERATION = Operation(
    "rms_norm",
    work.rms_norm,
    {"labkit": kernels.rms_norm, "eager": eager, "torch.compile": eager, "Liger": peers.liger_rms_norm},
    {"": {"batch": (1, 2**20, 1), "width": (16, 8192, 1)}},
)
