"""Figures in one style, with alt text.

The plots take tables of `labkit.measure.rows.as_results` and return a :class:`Picture`. Lines and words show
where numbers come from: live is a solid line with filled markers, recorded a dashed line with hollow markers,
published markers alone.
"""

from labkit.plots.bars import bars, stacked
from labkit.plots.curves import curves, speedups
from labkit.plots.style import Picture

__all__ = ["Picture", "bars", "curves", "speedups", "stacked"]
