"""gelu(x @ weight.T + bias), x (batch, width), weight (out, width): a Linear layer and its activation."""

import torch
from torch import Tensor

from benchmarks import matmul
from benchmarks.run import Operation, Ranges
from labkit import kernels, work

ALIGNED: Ranges = {"batch": (64, 8192, 1), "width": (64, 8192, 8), "hidden": (64, 8192, 8)}


def epilogue(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """cuBLASLt's own epilogue, which has no backward pass."""
    y: Tensor = torch._addmm_activation(bias, x, weight.T, use_gelu=True)
    return y


EAGER = work.linear_gelu.reference
CONTENDERS = {"labkit": kernels.linear_act, "eager": EAGER, "torch.compile": EAGER}
OPERATION = Operation(
    "linear_act",
    work.linear_gelu,
    CONTENDERS | {"cuBLASLt's epilogue": epilogue},
    {"": matmul.ALIGNED, "any": matmul.ANY},
    only={"cuBLASLt's epilogue": lambda direction, dtype, size: direction == "forward"},
    bound="product",
)
