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
    StaticCopy(shown._repr_html_(), shown.alt).show(timeline_widget(profile, title) if usable else None)


def timeline_widget(profile: Profile, title: str) -> ipywidgets.VBox:
    """A slider (from and to in microseconds), buttons for the whole and for the longest gap, the figure.

    While the slider is dragged the front end sends a place only after the last one was drawn.
    """
    span, gap = span_and_longest_gap(profile)
    step = span / SLIDER_STEPS
    seen = ipywidgets.FloatRangeSlider(
        value=(0.0, span),
        max=span,
        step=step,
        description="Show µs",
        readout_format=f".{max(0, math.ceil(-math.log10(step)))}f",
        layout={"width": "auto"},
    )
    picture = ipywidgets.HTML()

    def draw(_: Any = None) -> None:
        start, end = seen.value
        if end - start < step:  # both ends on one place
            start = max(0.0, min(start, span - step))
            end = start + step
        window = None if end - start >= span else (start, end)
        picture.value = plots.timeline(profile, title=title, window=window)._repr_html_()

    start, end = gap or (0.0, span)
    around = (end - start) / 2  # as much again of the kernels around the gap
    windows = {"Whole call": (0.0, span), "Longest gap": (max(0.0, start - around), min(span, end + around))}
    buttons = [ipywidgets.Button(description=name) for name in windows]
    buttons[1].disabled = gap is None
    for button in buttons:
        button.on_click(lambda pressed: seen.set_trait("value", windows[pressed.description]))
    seen.observe(draw, "value")
    draw()
    layout = {"width": f"{96 * WIDTH:.0f}px", "max_width": "100%"}
    return ipywidgets.VBox([seen, ipywidgets.HBox(buttons), picture], layout=layout)
