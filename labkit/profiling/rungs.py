"""One piece of work in ever better ways: each rung by every clock, and under the profiler."""

from collections.abc import Callable, Mapping
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
from labkit.measure.results import Results
from labkit.profiling import profiles
from labkit.profiling.profiles import Profile

CLOCKS: tuple[Clock, ...] = ("host", "events", "graph")


@dataclass(frozen=True)
class Rungs:
    """Rungs are measured at ``shape``, with a warm cache, and profiled there; at ``small`` without a GPU.

    A rung that is a CUDA graph has a call with an attribute ``held``: the call that was captured.
    """

    suite: str
    work: Work
    shape: Shape
    small: Shape
    dtype: str

    def timed(self, name: str, *rungs: Contender, clock: Clock | tuple[Clock, ...]) -> Results:
        """Rows of a pass, all rungs interleaved: "host" is wall time, "graph" the device's alone."""
        suite = f"{self.suite}/{name}"
        return sweeps.sweep(suite, list(rungs), [self.shape], dtype=self.dtype, clock=clock, cache="warm")

    def by_clock(self, name: str, *rungs: Contender) -> dict[Clock, Results]:
        """Rows by each of CLOCKS. The graph clock captures what a graph holds, and the copy of its input."""
        within = [replace(rung, call=_copying(held)) if (held := _held(rung)) else rung for rung in rungs]
        return {
            clock: self.timed(name, *(within if clock == "graph" else rungs), clock=clock) for clock in CLOCKS
        }

    def profiled(self, *rungs: Contender) -> dict[str, Profile]:
        """A pass of each under the profiler; without a GPU what a graph holds is launched."""
        return {rung.name: self._profile(rung) for rung in rungs}

    def inputs(self) -> list[Tensor]:
        """Drawn for the size that runs here, where it runs."""
        shape = self.shape if gpu.available() else self.small
        return [t.to(gpu.device(), getattr(torch, self.dtype)) for t in self.work.inputs(shape)]

    def _profile(self, rung: Contender) -> Profile:
        held, inputs = _held(rung), self.inputs()
        call = rung.made() if gpu.available() else held or rung.call  # without one nothing is compiled
        return profiles.profile(lambda: call(*inputs), tape=f"{self.suite}/{rung.name}")


def table(found: Mapping[Clock, Results]) -> Styler:
    """Microseconds of each rung by each clock, in the order of measurement; empty if none are recorded."""
    by_clock = pd.DataFrame({clock: rows.set_index("contender").median_us for clock, rows in found.items()})
    ordered = by_clock.loc[found["host"].contender].rename_axis(None)
    return ordered.style.format("{:.0f}", na_rep="").set_caption("µs a pass")


def _held(rung: Contender) -> Callable[..., Any] | None:
    return getattr(rung.call, "held", None)


def _copying(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *weights: call(x.clone(), *weights)
