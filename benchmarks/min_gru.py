"""h_t = (1 - z_t) h_{t-1} + z_t candidate_t along time, all (batch, time, width): a minimal GRU."""

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.linear_recurrence import SEQUENCES, short
from benchmarks.run import Operation
from labkit import kernels
from labkit.work import linear_recurrence, per_element


def reference(z: Tensor, candidate: Tensor) -> Tensor:
    """The states of all steps, (batch, time, width), step by step."""
    h, states = torch.zeros_like(z[:, 0]), []
    for z_now, candidate_now in zip(z.unbind(1), candidate.unbind(1), strict=True):
        h = (1 - z_now) * h + z_now * candidate_now
        states.append(h)
    return torch.stack(states, 1)


# Inputs, sizes and bytes are those of the linear recurrence: gates between 0 and 1, and what goes in.
# Operations: 1 - z, two products, their sum; backward 1 - z, two for the gradient of h, two for z's, one for
# the candidate's.
WORK = replace(linear_recurrence, name="min_gru", reference=reference, flops=per_element(4, 6))
OPERATION = Operation(
    "min_gru",
    WORK,
    {"labkit": kernels.min_gru, "eager loop": reference},
    {"": SEQUENCES},
    only={"eager loop": short},
)
