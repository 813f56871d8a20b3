"""The profile of a call with a slider to zoom in: from the whole of it to the gap between two kernels."""

import asyncio
import math
import time
from typing import Any

import ipywidgets

from labkit import live, plots
from labkit.plots import Picture
from labkit.plots.timeline import extent
from labkit.profiles import Profile

_STEPS = 500
"""Places that each end of the slider has; arrow keys move by one."""
_PAUSE = 0.1
"""Seconds between two pictures while the slider is dragged."""


def timeline(profile: Profile, *, title: str, note: str = "") -> None:
    """Show a profile as plots.timeline does, with a slider for the part that is looked at.

    A recorded profile has one as well. Where nobody could move it, or there are no times (no GPU and nothing
    recorded), only the figure is shown.
    """
    shown = plots.timeline(profile, title=title, note=note)
    twin = live.Twin(shown._repr_html_(), shown.alt)
    span, _ = extent(profile)
    if live.interactive() and span > 0:
        twin.show(TimelinePanel(profile, shown, title, note).box)
    else:
        twin.show()


class TimelinePanel:
    """The widgets: from and to in microseconds, buttons for the whole and for the longest gap, the figure."""

    def __init__(self, profile: Profile, shown: Picture, title: str, note: str = "") -> None:
        self._profile, self._title, self._note, self._shown = profile, title, note, shown
        self._span, self._gap = extent(profile)
        self._drawn = -math.inf
        self._pending: asyncio.TimerHandle | None = None
        step = self._span / _STEPS
        self.range = ipywidgets.FloatRangeSlider(
            value=(0.0, self._span),
            min=0.0,
            max=self._span,
            step=step,
            description="Show µs",
            readout_format=f".{max(0, math.ceil(-math.log10(step)))}f",
            layout=ipywidgets.Layout(width="auto"),
        )
        self.whole = ipywidgets.Button(description="Whole call")
        self.gap = ipywidgets.Button(description="Longest gap", disabled=self._gap is None)
        self.picture = ipywidgets.HTML(shown._repr_html_())
        width = f"{shown.size[0]:.0f}px"
        # The controls stand above: the figure's height changes with what it has to explain.
        self.box = ipywidgets.VBox(
            [self.range, ipywidgets.HBox([self.whole, self.gap]), self.picture],
            layout=ipywidgets.Layout(width=width, max_width="100%"),
        )
        self.range.observe(self._moved, "value")
        self.whole.on_click(lambda _: self._show(0.0, self._span))
        self.gap.on_click(lambda _: self._show_gap())

    def _show(self, start: float, end: float) -> None:
        self.range.value = (start, end)

    def _show_gap(self) -> None:
        """The longest gap, and as much again of the kernels around it."""
        if self._gap is not None:
            start, end = self._gap
            around = (end - start) / 2
            self._show(max(0.0, start - around), min(self._span, end + around))

    def _moved(self, _: dict[str, Any]) -> None:
        """Draw now, or a little later when the last picture is younger than a tenth of a second."""
        if self._pending is not None:
            return  # it will draw what the slider says then
        wait = self._drawn + _PAUSE - time.monotonic()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a callback outside of the kernel's loop: nothing could draw later
            loop = None
        if wait <= 0 or loop is None:
            self._draw()
        else:
            self._pending = loop.call_later(wait, self._draw)

    def _draw(self) -> None:
        self._pending = None
        start, end = self.range.value
        if start <= 0 and end >= self._span:
            self.picture.value = self._shown._repr_html_()
        else:
            if end - start < self.range.step:  # both ends on one place
                start = max(0.0, min(start, self._span - self.range.step))
                end = start + self.range.step
            zoomed = plots.timeline(self._profile, title=self._title, note=self._note, window=(start, end))
            self.picture.value = zoomed._repr_html_()
        self._drawn = time.monotonic()
