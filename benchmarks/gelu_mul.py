"""gelu(x + bias) * other, x and other (batch, width), bias (width,): a chain of elementwise operations."""

from benchmarks.run import Operation
from benchmarks.workloads.mlp import CHAIN, chain
from labkit import kernels

OPERATION = Operation(
    "gelu_mul",
    CHAIN,
    {"labkit": kernels.gelu_mul, "eager": chain, "torch.compile": chain},
    {"": {"batch": (1, 2**20, 1), "width": (16, 16384, 1)}},
)
