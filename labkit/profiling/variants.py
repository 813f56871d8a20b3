"""Variants of one piece of work, each measured by every clock and profiled."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from pandas.io.formats.style import Styler
from torch import Tensor

from labkit import gpu
from labkit.measure import sweeps
from labkit.measure.clocks import Clock
from labkit.measure.contender import Contender, Shape, Work
from labkit.profiling import profiles
from labkit.profiling.profiles import Profile

CLOCKS: tuple[Clock, ...] = ("host", "events", "graph")


@dataclass(frozen=True)
class Variants:
    """Variants of ``work`` are measured and profiled at ``shape``, with a warm cache.

    Without a GPU they are profiled at the shape ``small``. The call of a variant that is a CUDA graph has an
    attribute ``held``: the call that was captured.
    """

    suite: str
    work: Work
    shape: Shape
    small: Shape
    dtype: str

    def timed(self, name: str, *variants: Contender, clock: Clock | tuple[Clock, ...]) -> pd.DataFrame:
        """Rows of the sweep ``name``, all variants interleaved. The clock "host" gives wall time."""
        suite = f"{self.suite}/{name}"
        return sweeps.sweep(suite, list(variants), [self.shape], dtype=self.dtype, clock=clock, cache="warm")

    def by_clock(self, name: str, *variants: Contender) -> dict[Clock, pd.DataFrame]:
        """Rows by each of CLOCKS. Of a graph the graph clock captures its call, with a copy of the input."""
        captured = [_without_graph(variant) for variant in variants]
        return {
            clock: self.timed(name, *(captured if clock == "graph" else variants), clock=clock)
            for clock in CLOCKS
        }

    def profiled(self, *variants: Contender) -> dict[str, Profile]:
        """A profile of each. Without a GPU nothing is compiled, and of a graph the call is profiled."""
        return {variant.name: self._profile(variant) for variant in variants}

    def _profile(self, variant: Contender) -> Profile:
        inputs = self.inputs()
        call = variant.build() if gpu.available() else getattr(variant.call, "held", variant.call)
        return profiles.profile(lambda: call(*inputs), tape=f"{self.suite}/{variant.name}")

    def inputs(self) -> list[Tensor]:
        """Random inputs of the size that runs here, on the device that runs it."""
        shape = self.shape if gpu.available() else self.small
        return [t.to(gpu.device(), getattr(torch, self.dtype)) for t in self.work.inputs(shape)]


def _without_graph(variant: Contender) -> Contender:
    """The call that a graph holds, with the copy of the input that its replay makes."""
    held: Any = getattr(variant.call, "held", None)
    if held is None:
        return variant
    return replace(variant, call=lambda x, *weights: held(x.clone(), *weights))


def table(found: Mapping[Clock, pd.DataFrame]) -> Styler:
    """Microseconds of each variant by each clock, in the order of measurement; empty if none are recorded."""
    by_clock = pd.DataFrame({clock: rows.set_index("contender").median_us for clock, rows in found.items()})
    ordered = by_clock.loc[found["host"].contender].rename_axis(None)
    return ordered.style.format("{:.0f}", na_rep="").set_caption("µs a pass")
