"""A Linear of its own for each group of features, all side by side: x (batch, groups * width)."""

import torch
from torch import Tensor

from benchmarks.run import Operation, Ranges
from labkit import kernels, work

ANY: Ranges = {"batch": (64, 65536, 1), "groups": (2, 256, 1), "width": (8, 256, 1)}
ALIGNED: Ranges = ANY | {"width": (16, 256, 16)}


def bmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A batched product, written where it belongs, without a copy. out= has no gradient."""
    y = torch.empty_like(x)
    by_group = [t.unflatten(1, (len(weight), -1)).transpose(0, 1) for t in (x, y)]  # views
    torch.bmm(by_group[0], weight, out=by_group[1])
    return y.add_(bias.flatten())


EAGER = work.grouped.reference
OPERATION = Operation(
    "grouped_linear",
    work.grouped,
    {"labkit": kernels.grouped_linear, "eager": EAGER, "torch.compile": EAGER, "bmm, out=": bmm},
    {"": ANY, "aligned": ALIGNED},
    only={"bmm, out=": lambda direction, dtype, size: direction == "forward"},
)
