"""Stacked bars: what each total is made of, row under row, and the measured total beside the sum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.bars import lay_out, look
from labkit.drawing import INK, LINE, TEXT_SIZE, Key, Page, Shown, bounds, text_width, wrap, write
from labkit.provenance import duration, origins, prepared, sentence

HUES = ("#5A5A5A", "#CC8000", "#0048DC", "#1AA57D", "#5C0088", "#4D90FF")
"""Of the palette, neighbours far apart in lightness: a part's colour is that of its place."""
_BAR, _PADDING, _LABEL_WIDTH = 17.0, 10.0, 190.0


def stacks(
    table: pd.DataFrame,
    parts: Mapping[str, str],
    *,
    total: str,
    title: str,
    note: str = "",
    alt: str | None = None,
) -> Shown:
    """A bar for each row of ``table``, made of its columns ``parts``, from left to right; in microseconds.

    ``parts`` says what each column means, for the key. A line across the bar marks the column ``total``,
    which was measured by itself and is printed at the bar's end. Rows have a contender, and say where they
    come from (kind, device, date); those of one figure are of one device and kind. Clock and cache are left
    out: a part need not come from the clock that measured the total. Live bars are full, recorded ones pale
    with a dashed edge. ``alt`` replaces the generated alt text.

    Raises ValueError for a table without rows, or with rows of two devices or kinds; for a column that is
    missing; and for a part or total that is negative or no finite number.
    """
    if table.empty:
        raise ValueError("table: has no rows")
    if not 1 <= len(parts) <= len(HUES):
        raise ValueError(f"parts: there are {len(parts)}; 1 to {len(HUES)} can be told apart")
    numbers = [*parts, total]
    table = prepared(table.assign(clock="", cache=""), numbers, numbers)
    for name in numbers:
        for value in table[name]:
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"table: a value of {name!r} is {value:g}; it has to be zero or more")
    found = origins(table)
    if len(found) > 1:
        raise ValueError(f"table: rows {' and '.join(words for _, words in found)}; select one of them")
    drawn = _Stacks(table, dict(parts), total, found[0])
    return Shown(drawn.draw(title, note), alt or drawn.alt(title))


@dataclass(frozen=True)
class _Stacks:
    table: pd.DataFrame
    parts: dict[str, str]
    total: str
    origin: tuple[str, str]

    def _rows(self) -> Sequence[dict[str, float | str]]:
        return self.table.to_dict("records")

    def draw(self, title: str, note: str) -> Figure:
        kind, words = self.origin
        rows = self._rows()
        names = [wrap(str(row["contender"]), _LABEL_WIDTH, TEXT_SIZE) for row in rows]
        heights = [max(_BAR, len(lines) * LINE * TEXT_SIZE) + _PADDING for lines in names]
        keys = [
            Key(f"{part}: {meaning}", look(hue, kind), box=True)
            for (part, meaning), hue in zip(self.parts.items(), HUES, strict=False)
        ]
        line = {"color": INK, "linestyle": "none", "marker": "|", "markersize": 11, "markeredgewidth": 1.8}
        page = Page(
            title,
            subtitle=words,
            keys=[*keys, Key(f"{self.total}: the total as measured by itself; its value is printed", line)],
            notes=[note] if note else [],
            panel_height=sum(heights),
            left=max((text_width(line, TEXT_SIZE) for lines in names for line in lines), default=0) + 12,
            right=6,
            below=22,
        )
        figure, (ax,) = page.draw()
        reach = self._reach(page.panel_width)
        lay_out(ax, page, reach, _text)
        y = 0.0
        for row, lines, height in zip(rows, names, heights, strict=True):
            self._draw_row(figure, ax, row, "\n".join(lines), y - height / 2)
            y -= height
        return figure

    def _sum(self, row: Mapping[str, float | str]) -> float:
        return sum(float(row[part]) for part in self.parts)

    def _end(self, row: Mapping[str, float | str]) -> float:
        return max(float(row[self.total]), self._sum(row))

    def _reach(self, width: float) -> float:
        """The axis' end: every bar, and the total printed behind it, fits."""
        needs = [
            self._end(row)
            * width
            / (width - 14 - text_width(_text(float(row[self.total])), TEXT_SIZE, bold=True))
            for row in self._rows()
        ]
        return max(needs) or 1.0

    def _draw_row(
        self, figure: Figure, ax: Axes, row: Mapping[str, float | str], label: str, y: float
    ) -> None:
        left, _, right, top = bounds(ax)
        at, spans = 0.0, []
        for part, hue in zip(self.parts, HUES, strict=False):
            length = float(row[part])
            spans.append((length, at, part, hue))
            at += length
        for length, start, part, hue in sorted(spans, reverse=True):  # no edge covers a short neighbour
            if length:
                style = look(hue, self.origin[0])
                ax.barh(y, length, left=start, height=_BAR, **style, zorder=3, gid=f"{part} bar")
        total = float(row[self.total])
        ax.vlines(total, y - _BAR / 2 - 3, y + _BAR / 2 + 3, color=INK, linewidth=1.8, zorder=5, gid="total")
        end = left + self._end(row) / ax.get_xlim()[1] * (right - left)
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # the grid may cross the value
        write(figure, end + 8, top + y, _text(total), bold=True, va="center", gid="value", bbox=ground)
        write(figure, left - 6, top + y, label, ha="right", va="center", gid="label", linespacing=LINE)

    def alt(self, title: str) -> str:
        told = []
        for row in self._rows():
            made = " + ".join(f"{part} {_text(float(row[part]))}" for part in self.parts)
            both = f"{_text(self._sum(row))}, {self.total} {_text(float(row[self.total]))}"
            told.append(f"{row['contender']}: {made} = {both}")
        what = f"{title.rstrip('.')}. Stacked bars, from top to bottom"
        return f"{what}: {'; '.join(told)}. {sentence(self.origin[1])}"


def _text(us: float) -> str:
    return duration(us) if us else "0"
