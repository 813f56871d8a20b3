"""What the tests of the finished grouped Linears share."""

from typing import Any

import operators as op
import torch
from cases import GROUPED, grouped
from cases import plain_grouped as plain
from operators import bf16, drawn, fp32, meta
from torch import Tensor

from labkit.kernels import grouped as family

__all__ = ["KERNELS", "assert_right", "bf16", "drawn", "examine", "grouped", "in_columns", "launch", "plain"]
KERNELS = {family: ("single_tile_kernel", "forward_kernel", "wide_kernel", "backward_kernel", "sum_kernel")}


def in_columns(x: Tensor) -> Tensor:
    """The same numbers, their memory (B, C, T)."""
    return x.mT.contiguous().mT


def assert_right(tensors: Any, upstream: Tensor | None = None) -> None:
    """Output and gradients in these very strides, which a copy in float64 need not have."""
    upstream = 2 * plain(*tensors).detach() if upstream is None else upstream
    wants = op.exact(GROUPED, tensors, upstream.double())
    op.all_close(op.gradients(family.grouped_linear, tensors, upstream), wants, tensors[0].dtype)


def launch(dtype: torch.dtype, groups: int, d_in: int, d_out: int, rows: int, columns: bool = False) -> None:
    """On meta tensors: what the host's part would launch both ways, with its arguments."""
    _, *weights = (t.to("meta", dtype) for t in grouped(groups, d_in, d_out)((1,)))
    C = groups * d_in
    x = meta(8, C, rows // 8, dtype=dtype).mT if columns else meta(rows, C, dtype=dtype)
    op.launch_both_ways(family.grouped_linear, x, *weights)


def examine(inputs: Any, *leading: Any, dtypes: Any = (fp32,), **options: Any) -> None:
    """A check in some layouts only; all of them are the business of a few classes of shapes."""
    op.examine(GROUPED._replace(inputs=inputs), *leading, dtypes=dtypes, **options)
