"""A GRU layer as nn.GRU has it, x and the states (batch, time, width), beside cuDNN's in two layouts."""

import torch
from torch import Tensor

from benchmarks.run import Operation
from labkit import kernels, work
from labkit.work.recurrences import parted


def batch_first(x: Tensor, *weights: Tensor) -> Tensor:
    """nn.GRU's own function, on a GPU cuDNN's: x and the states (batch, time, width)."""
    h0 = x.new_zeros(1, x.shape[0], x.shape[2])
    return torch.gru(x, h0, weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)[0]


def time_first(x: Tensor, flat: Tensor) -> Tensor:
    """The same in the layout that cuDNN was made for: (time, batch, width), the weights in one tensor."""
    h0 = x.new_zeros(1, x.shape[1], x.shape[2])
    weights = parted(flat, x.shape[2])
    return torch.gru(x, h0, weights, True, 1, 0.0, torch.is_grad_enabled(), False, False)[0]


OPERATION = Operation(
    "gru",
    work.gru,
    {"labkit": kernels.gru, "cuDNN, batch first": batch_first, "cuDNN, time first": time_first},
    {"": {"batch": (16, 4096, 1), "time": (1, 256, 1), "width": (16, 128, 1)}},
    directions=("forward", "forward_backward"),
    works={"cuDNN, time first": work.gru_by_time},
)
