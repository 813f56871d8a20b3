"""One look for every plot of the course, with alt text.

The plots take tables of :func:`labkit.rows.table` and return a :class:`Shown`. How a number was come by
shows in shape and in words: live is a solid line with filled markers, recorded a dashed line with hollow
markers, published markers alone.
"""

from labkit.bars import bars
from labkit.butterfly import butterfly
from labkit.curves import speedup, sweep, traffic
from labkit.drawing import Shown, colour, marker
from labkit.stacks import stacks
from labkit.timeline import timeline
from labkit.waterfall import waterfall

__all__ = [
    "Shown",
    "bars",
    "butterfly",
    "colour",
    "marker",
    "speedup",
    "stacks",
    "sweep",
    "timeline",
    "traffic",
    "waterfall",
]
