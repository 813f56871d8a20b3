"""x * weight + bias, x (batch, width), weight and bias (width,): one read and one write of a tensor."""

from benchmarks.run import Operation
from labkit import kernels, work

EAGER = work.affine.reference
OPERATION = Operation(
    "affine",
    work.affine,
    {"labkit": kernels.affine, "eager": EAGER, "torch.compile": EAGER},
    {"": {"batch": (1, 2**20, 1), "width": (16, 16384, 1)}},
)
