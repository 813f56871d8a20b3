"""x * weight + bias, x (batch, width), weight and bias (width,): one read and one write of a tensor."""

from benchmarks.run import Operation
from benchmarks.workloads.elementwise import AFFINE, affine
from labkit import kernels

OPERATION = Operation(
    "affine",
    AFFINE,
    {"labkit": kernels.affine, "eager": affine, "torch.compile": affine},
    {"": {"batch": (1, 2**20, 1), "width": (16, 16384, 1)}},
)
