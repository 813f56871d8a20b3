"""The figures of a lesson: curves against a size, speedups, bars, and a timeline."""

from labkit.bars import bars
from labkit.curves import speedup as speedups
from labkit.curves import sweep as curves
from labkit.timeline import timeline

__all__ = ["bars", "curves", "speedups", "timeline"]
