"""gelu(x + bias) * other, x and other (batch, width), bias (width,): a chain of elementwise operations."""

from benchmarks.run import Operation
from labkit import kernels, work

EAGER = work.gelu_mul.reference
OPERATION = Operation(
    "gelu_mul",
    work.gelu_mul,
    {"labkit": kernels.gelu_mul, "eager": EAGER, "torch.compile": EAGER},
    {"": {"batch": (1, 2**20, 1), "width": (16, 16384, 1)}},
)
