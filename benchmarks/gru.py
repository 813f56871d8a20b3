"""A GRU layer as nn.GRU has it, x and the states (batch, time, width), beside cuDNN's in two layouts."""

import torch
from torch import Tensor

from benchmarks.run import Operation
from benchmarks.workloads.gru import GRU, library_gru, library_gru_by_time
from labkit import kernels


def time_first(x: Tensor, flat: Tensor) -> Tensor:
    """cuDNN's in the layout that it was made for. The transposes are views."""
    return library_gru_by_time(x.transpose(0, 1), flat).transpose(0, 1)


def by_time(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """x with the sequences of a step side by side in memory, and all weights in one tensor."""
    return x.transpose(0, 1).contiguous().transpose(0, 1), torch.cat([weight.flatten() for weight in weights])


OPERATION = Operation(
    "gru",
    GRU,
    {"labkit": kernels.gru, "cuDNN, batch first": library_gru, "cuDNN, time first": time_first},
    {"": {"batch": (16, 4096, 1), "time": (1, 256, 1), "width": (16, 128, 1)}},
    directions=("forward", "forward_backward"),
    layouts={"cuDNN, time first": by_time},
)
