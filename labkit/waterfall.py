"""A waterfall: a total, what each step took off or added, and the total that results."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.bars import lay_out, look
from labkit.drawing import (
    LINE,
    MUTED,
    TEXT_SIZE,
    Key,
    Page,
    Shown,
    bounds,
    text_colour,
    text_width,
    wrap,
    write,
)
from labkit.provenance import digits, origins, prepared, sentence

TOTAL, SAVING, COST = "total", "saving", "cost"
_HUES = {TOTAL: "#5A5A5A", SAVING: "#0048DC", COST: "#CC8000"}
"""Grey, blue and orange: three of the palette that no colour vision deficiency confuses."""
_MINUS = "\N{MINUS SIGN}"
_KEYS = {TOTAL: "total", SAVING: f"{_MINUS} saved", COST: "+ added"}
_BAR, _PADDING, _LABEL_WIDTH = 17.0, 9.0, 200.0
_STAMP = ("kind", "device", "date", "clock", "cache", "source")


class Origin(Protocol):
    """Where the values come from: a Profile, a Row, a table's row (``table.iloc[0]``), a Measured.

    ``date``, ``clock``, ``cache`` and ``source`` are named too where it has them.
    """

    @property
    def kind(self) -> str: ...
    @property
    def device(self) -> str: ...


@dataclass(frozen=True)
class _Step:
    label: str
    value: float
    before: float
    after: float
    sort: str


def waterfall(
    steps: Sequence[tuple[str, float]],
    *,
    end: str,
    title: str,
    origin: Origin,
    unit: str = "us",
    note: str = "",
    alt: str | None = None,
) -> Shown:
    """Where the time went: bars that hang from running total to running total, from top to bottom.

    ``steps`` are pairs of label and value: the first is a total, each following one a signed change; the
    total that results is the last bar, labelled ``end``. ``origin`` says where the values come from; those of
    one figure are of one device and kind. Live bars are full, recorded ones pale with a dashed edge.
    ``unit`` stands behind each value. ``alt`` replaces the generated alt text.

    Raises ValueError without steps, for a value that is not finite, and where a running total is negative.
    """
    bars = _running(steps, end)
    figure = _Waterfall(bars, _origins(origin), "µs" if unit == "us" else unit)
    return Shown(figure.draw(title, note), alt or figure.alt(title))


def _running(steps: Sequence[tuple[str, float]], end: str) -> list[_Step]:
    """The bars from top to bottom, the first and the last of them totals."""
    if not steps:
        raise ValueError("steps: there are none; the first is a total, each following one a change")
    found: list[_Step] = []
    total, noise = 0.0, 1e-9 * max(abs(value) for _, value in steps)
    for label, value in steps:
        if not math.isfinite(value):
            raise ValueError(f"steps: the value of {label!r} is {value}, not a finite number")
        before, total = total, total + value
        if total < -noise:  # less than zero by more than adding up floats does
            raise ValueError(f"steps: after {label!r} the total is {digits(total)}, below zero")
        total = max(total, 0.0)
        sort = COST if value > 0 else SAVING
        found.append(_Step(label, value, before, total, sort if len(found) else TOTAL))
    return [*found, _Step(end, total, 0.0, total, TOTAL)]


def _origins(origin: Origin) -> tuple[str, str]:
    """Kind of the values, and where they come from in words."""
    stamp = {name: getattr(origin, name, "") for name in _STAMP}
    (found,) = origins(prepared(pd.DataFrame([{**stamp, "contender": ""}]), [], []))
    return found


@dataclass
class _Waterfall:
    steps: list[_Step]
    origin: tuple[str, str]
    unit: str

    def _text(self, value: float) -> str:
        return f"{digits(value)} {self.unit}"

    def _value(self, step: _Step) -> str:
        """With its sign, unless it is a total."""
        if step.sort == TOTAL or step.value == 0:
            return self._text(step.value)
        return f"{'+' if step.sort == COST else _MINUS}{self._text(abs(step.value))}"

    def draw(self, title: str, note: str) -> Figure:
        kind, words = self.origin
        names = [wrap(step.label, _LABEL_WIDTH, TEXT_SIZE, bold=step.sort == TOTAL) for step in self.steps]
        heights = [max(_BAR, len(lines) * LINE * TEXT_SIZE) + _PADDING for lines in names]
        sorts = [sort for sort in _HUES if any(step.sort == sort for step in self.steps)]
        page = Page(
            title,
            subtitle=words,
            keys=[Key(_KEYS[sort], look(_HUES[sort], kind), box=True) for sort in sorts],
            notes=[note] if note else [],
            panel_height=sum(heights),
            left=max(text_width(line, TEXT_SIZE, bold=True) for lines in names for line in lines) + 12,
            right=6,
            below=22,
        )
        figure, (ax,) = page.draw()
        reach = self._reach(page.panel_width)
        lay_out(ax, page, reach, self._text)
        y, above = 0.0, None
        for step, lines, height in zip(self.steps, names, heights, strict=True):
            middle = y - height / 2
            self._draw_step(figure, ax, step, "\n".join(lines), middle)
            if above is not None:
                at = step.after if step.sort == TOTAL else step.before
                ends = middle + _BAR / 2, above - _BAR / 2
                ax.vlines(at, *ends, color=MUTED, linewidth=1.0, zorder=2, gid="connector")
            y, above = y - height, middle
        return figure

    def _reach(self, width: float) -> float:
        """The axis' end: every bar, and the value printed behind it, fits."""
        needs = [
            max(step.before, step.after)
            * width
            / (width - 12 - text_width(self._value(step), TEXT_SIZE, bold=True))
            for step in self.steps
        ]
        return max(needs) or 1.0

    def _draw_step(self, figure: Figure, ax: Axes, step: _Step, label: str, y: float) -> None:
        left, _, right, top = bounds(ax)
        hue, bold = _HUES[step.sort], step.sort == TOTAL
        low, high = sorted((step.before, step.after))
        gid = f"{step.sort} bar"
        ax.barh(y, high - low, left=low, height=_BAR, **look(hue, self.origin[0]), zorder=3, gid=gid)
        at = left + high / ax.get_xlim()[1] * (right - left) + 6
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # the grid may cross the value
        value = self._value(step)
        write(
            figure,
            at,
            top + y,
            value,
            color=text_colour(hue),
            bold=bold,
            va="center",
            gid="value",
            bbox=ground,
        )
        write(
            figure,
            left - 6,
            top + y,
            label,
            bold=bold,
            ha="right",
            va="center",
            gid="label",
            linespacing=LINE,
        )

    def alt(self, title: str) -> str:
        first, *changes, last = self.steps
        told = [f"{first.label} {self._text(first.value)}"]
        for step in changes:
            verb = "adds" if step.sort == COST else "saves"
            told.append(
                f"{step.label} {verb} {self._text(abs(step.value))}, which makes {self._text(step.after)}"
            )
        told.append(f"{last.label} {self._text(last.value)}")
        what = f"{title.rstrip('.')}. A waterfall, from top to bottom"
        return f"{what}: {'; then '.join(told)}. {sentence(self.origin[1])}"
