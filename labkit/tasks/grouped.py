"""What lesson 4's kernels are judged by: one call with groups of some width."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from labkit import checks
from labkit.tasks import whereabouts
from labkit.tasks.tiles import Call

Sizes = tuple[int, int, int]
"""Rows, groups, and the width D of a group."""


class Grouped(Call):
    """One call on x (rows, groups * D), weight (groups, D, D) and perhaps bias (groups, D).

    In the group ``poisoned`` x is NaN and the weight infinite: what comes out there is not looked at.
    """

    def __init__(
        self,
        answer: Callable[..., Tensor],
        sizes: Sizes,
        dtype: torch.dtype,
        hints: Mapping[str, tuple[str, ...]],
        *,
        bias: bool = False,
        layout: str = "contiguous",
        undefined: bool = False,
        poisoned: int | None = None,
    ) -> None:
        self.rows, self.groups, self.width = sizes
        values = {
            "x": torch.randn(self.rows, self.groups * self.width),
            "weight": torch.randn(self.groups, self.width, self.width) * self.width**-0.5,
        }
        if bias:
            values["bias"] = torch.randn(self.groups, self.width)
        self._judged = torch.ones(self.groups, self.width, dtype=torch.bool)
        if poisoned is not None:
            self._judged[poisoned] = False
            values["x"].masked_fill_(~self._judged.flatten(), math.nan)
            values["weight"][poisoned] = math.inf
        values = {name: value.to(dtype) for name, value in values.items()}
        want = self.by_group(values["x"]) @ values["weight"].double()
        if bias:
            want = want + values["bias"].double()[:, None]
        want = want.transpose(0, 1).flatten(1)
        super().__init__(answer, values, want, hints, layout=layout, undefined=undefined)

    def by_group(self, columns: Tensor) -> Tensor:
        """A tensor (rows, groups * D) as (groups, rows, D), in float64."""
        return columns.double().view(self.rows, self.groups, self.width).transpose(0, 1)

    @property
    def problem(self) -> str:
        """Where the output is wrong in a group that counts, as the end of a sentence; empty if nowhere."""
        got, want = (each.where(self._judged.flatten(), 0.0) for each in (self.got, self.want))
        found = checks.diagnose(got, want, checks.TOLERANCE[self.dtype])
        return whereabouts(found) if found else ""
