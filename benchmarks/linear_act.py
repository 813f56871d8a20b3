"""gelu(x @ weight.T + bias), x (batch, width), weight (hidden, width): a Linear layer and its activation."""

import torch
from torch import Tensor

from benchmarks.run import Operation, Ranges
from benchmarks.workloads.mlp import LINEAR_GELU, linear_gelu
from labkit import kernels

ALIGNED: Ranges = {"batch": (64, 8192, 1), "width": (64, 8192, 8), "hidden": (64, 8192, 8)}
ANY: Ranges = ALIGNED | {"width": (64, 8192, 1), "hidden": (64, 8192, 1)}


def epilogue(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """cuBLASLt's own epilogue, which has no backward pass."""
    y: Tensor = torch._addmm_activation(bias, x, weight.T, use_gelu=True)
    return y


CONTENDERS = {"labkit": kernels.linear_act, "eager": linear_gelu, "torch.compile": linear_gelu}
OPERATION = Operation(
    "linear_act",
    LINEAR_GELU,
    CONTENDERS | {"cuBLASLt's epilogue": epilogue},
    {"": ALIGNED, "any": ANY},
    only={"cuBLASLt's epilogue": lambda direction, dtype, size: direction == "forward"},
    bound="product",
)
