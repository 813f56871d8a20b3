"""One look for every plot of the course, with alt text.

The plots take tables of `labkit.measure.rows.table` and return a :class:`Picture`. How a number was come by
shows in shape and in words: live is a solid line with filled markers, recorded a dashed line with hollow
markers, published markers alone.
"""

from labkit.plots.bars import bars, stacked, waterfall
from labkit.plots.curves import curves, speedups, traffic
from labkit.plots.style import Picture, colour
from labkit.plots.timeline import timeline

__all__ = ["Picture", "bars", "colour", "curves", "speedups", "stacked", "timeline", "traffic", "waterfall"]
