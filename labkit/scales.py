"""Logarithmic scales: how far an axis reaches and where its ticks stand."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from labkit.drawing import GRID, SMALL_SIZE, text_width
from labkit.provenance import plain

Ticks = tuple[list[float], list[float]]
"""Major ticks, which are labelled, and minor ones."""


def limits(values: Iterable[float], *, least: float, pad: float) -> tuple[float, float]:
    """A logarithmic axis around the values: ``pad`` of its length each side, ``least`` from end to end."""
    known = np.array([v for v in values if np.isfinite(v) and v > 0], dtype=float)
    if not len(known):
        return 32.0, 32768.0
    low, high = float(known.min()), float(known.max())
    widen = max((high / low) ** pad, np.sqrt(least / (high / low)))
    return low / widen, high * widen


def doubling_ticks(values: Iterable[float], limits: tuple[float, float], width: float) -> Ticks:
    """Major and minor ticks: the data's own points when they are few, else powers of two that fit."""

    def fit(ticks: Sequence[float]) -> bool:
        places = [np.log(tick / limits[0]) / np.log(limits[1] / limits[0]) * width for tick in ticks]
        widths = [text_width(plain(tick), SMALL_SIZE) for tick in ticks]
        return all(
            places[i + 1] - places[i] >= (widths[i] + widths[i + 1]) / 2 + 8 for i in range(len(ticks) - 1)
        )

    own = sorted({float(v) for v in values if np.isfinite(v) and v > 0})
    powers = [2.0**k for k in range(int(np.ceil(np.log2(limits[0]))), int(np.floor(np.log2(limits[1]))) + 1)]
    if own and (len(own) <= 4 or len(powers) < 3) and fit(own):
        return own, powers
    step = next(step for step in range(1, len(powers) + 2) if fit(powers[::step]))
    # Counted from the largest power that the step divides, so that the same widths get the same ticks.
    major = [p for p in powers if int(np.log2(p)) % step == 0] or powers[:1]
    return major, powers


def value_ticks(limits: tuple[float, float], height: float) -> Ticks:
    """Major and minor ticks of a logarithmic axis of values: 1-2-5 where there is room, else decades."""
    low, high = limits
    decades = range(int(np.floor(np.log10(low))) - 1, int(np.ceil(np.log10(high))) + 1)

    def ticks(digits: Sequence[int], step: int = 1) -> list[float]:
        every = (digit * 10.0**k for k in decades if k % step == 0 for digit in digits)
        return [tick for tick in every if low <= tick <= high]

    most = max(3, int(height / 26))
    choices = [ticks((1, 2, 5)), *(ticks((1,), step) for step in range(1, len(decades) + 1))]
    major = next(choice for choice in choices if len(choice) <= most)
    minor = ticks(range(1, 10)) if len(decades) < 8 else ticks((1,))
    return major, minor


def set_ticks(ax: Axes, x_ticks: Ticks, y_ticks: Ticks, y_text: Callable[[float], str]) -> None:
    """Put ticks and a grid on a panel; ``y_text`` writes a value of the vertical axis."""
    for axis, ticks, text in ((ax.xaxis, x_ticks, plain), (ax.yaxis, y_ticks, y_text)):
        _set_axis(axis, ticks, text)
    ax.grid(color=GRID, linewidth=0.7)


def _set_axis(axis: Axis, ticks: Ticks, text: Callable[[float], str]) -> None:
    major, minor = ticks
    axis.set_major_locator(FixedLocator(major))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(FixedLocator(sorted(set(minor) - set(major))))
    axis.set_minor_formatter(NullFormatter())
