"""The figures under the names that lessons 2, 4 and 9 were recorded with; new code uses `labkit.plots`."""

from labkit.plots import bars, timeline, traffic, waterfall
from labkit.plots import curves as sweep
from labkit.plots import speedups as speedup
from labkit.plots import stacked as stacks

__all__ = ["bars", "speedup", "stacks", "sweep", "timeline", "traffic", "waterfall"]
