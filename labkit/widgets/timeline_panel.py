"""The profile of a call with a slider to zoom in: from the whole of it to the gap between two kernels."""

import math
from typing import Any

import ipywidgets

from labkit import plots
from labkit.plots.style import WIDTH
from labkit.plots.timeline import span_and_longest_gap
from labkit.profiling.profiles import Profile
from labkit.widgets.static import StaticCopy, interactive

SLIDER_STEPS = 500
"""Places that each end of the slider has; arrow keys move by one."""


def timeline(profile: Profile, *, title: str) -> None:
    """Show a profile as plots.timeline does, with a slider for the part that is looked at.

    A recorded profile has one as well. Where nobody could move it, or there are no times (no GPU and nothing
    recorded), only the figure is shown.
    """
    shown = plots.timeline(profile, title=title)
    usable = interactive() and span_and_longest_gap(profile)[0] > 0
    StaticCopy(shown._repr_html_(), shown.alt).show(TimelinePanel(profile, title).box if usable else None)


class TimelinePanel:
    """The widgets: from and to in microseconds, buttons for the whole and for the longest gap, the figure.

    While the slider is dragged the front end sends a place only after the last one was drawn.
    """

    def __init__(self, profile: Profile, title: str) -> None:
        self._profile, self._title = profile, title
        self._span, gap = span_and_longest_gap(profile)
        step = self._span / SLIDER_STEPS
        self.range = ipywidgets.FloatRangeSlider(
            value=(0.0, self._span),
            max=self._span,
            step=step,
            description="Show µs",
            readout_format=f".{max(0, math.ceil(-math.log10(step)))}f",
            layout={"width": "auto"},
        )
        self.whole = ipywidgets.Button(description="Whole call")
        self.gap = ipywidgets.Button(description="Longest gap", disabled=gap is None)
        self.picture = ipywidgets.HTML()
        # The controls stand above: the figure's height changes with what it has to explain.
        self.box = ipywidgets.VBox(
            [self.range, ipywidgets.HBox([self.whole, self.gap]), self.picture],
            layout={"width": f"{96 * WIDTH:.0f}px", "max_width": "100%"},
        )
        self.range.observe(self._draw, "value")
        start, end = gap or (0.0, self._span)
        around = (end - start) / 2  # as much again of the kernels around the gap
        near = max(0.0, start - around), min(self._span, end + around)
        self.whole.on_click(lambda _: self.range.set_trait("value", (0.0, self._span)))
        self.gap.on_click(lambda _: self.range.set_trait("value", near))
        self._draw()

    def _draw(self, _: Any = None) -> None:
        start, end = self.range.value
        if end - start < self.range.step:  # both ends on one place
            start = max(0.0, min(start, self._span - self.range.step))
            end = start + self.range.step
        window = None if end - start >= self._span else (start, end)
        self.picture.value = plots.timeline(self._profile, title=self._title, window=window)._repr_html_()
