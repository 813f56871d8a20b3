"""Stacked bars: what each total is made of, row under row, and the measured total beside the sum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.bars import look
from labkit.drawing import GRID, INK, LINE, TEXT_SIZE, Key, Page, Shown, bounds, text_width, wrap, write
from labkit.provenance import digits, duration, origins, prepared, sentence

HUES = ("#5A5A5A", "#0048DC", "#1AA57D", "#CC8000", "#5C0088", "#4D90FF")
"""Of the palette, neighbours far apart in lightness: a part's colour is that of its place."""
_BAR, _PITCH, _LABEL_WIDTH = 17.0, 27.0, 190.0


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
    come from (kind, device, date); those of one figure are of one device and kind. Live bars are full,
    recorded ones pale with a dashed edge. ``alt`` replaces the generated alt text.

    Raises ValueError for a table without rows, and for a part that is negative or no number.
    """
    if table.empty:
        raise ValueError("table: has no rows")
    if len(parts) > len(HUES):
        raise ValueError(f"parts: {len(parts)}, at most {len(HUES)} can be told apart")
    values = table[list(parts)]
    if not (values >= 0).to_numpy().all():
        raise ValueError("table: every part has to be a number, zero or more")
    (found,) = origins(prepared(table.assign(direction=""), [], []))
    drawn = _Stacks(table, dict(parts), total, found)
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
        keys = [
            Key(f"{part}: {meaning}", look(hue, kind), box=True)
            for (part, meaning), hue in zip(self.parts.items(), HUES, strict=False)
        ]
        mark = Key(
            f"{self.total} time, as measured", {"color": INK, "marker": "|", "markersize": 11, "ls": ""}
        )
        page = Page(
            title,
            subtitle=words,
            keys=[*keys, mark],
            notes=[note] if note else [],
            panel_height=_PITCH * len(rows),
            left=max(text_width(line, TEXT_SIZE) for lines in names for line in lines) + 12,
            right=6,
            below=22,
        )
        figure, (ax,) = page.draw()
        ax.set(xlim=(0, self._reach(page.panel_width)), ylim=(-page.panel_height, 0), yticks=[])
        ax.xaxis.set_major_locator(MaxNLocator(6))
        ax.xaxis.set_major_formatter(lambda at, _: duration(at) if at else "0")
        ax.grid(axis="x", color=GRID, linewidth=0.7)
        for number, (row, lines) in enumerate(zip(rows, names, strict=True)):
            self._draw_row(figure, ax, row, "\n".join(lines), -_PITCH * (number + 0.5))
        return figure

    def _end(self, row: Mapping[str, float | str]) -> float:
        return max(float(row[self.total]), sum(float(row[part]) for part in self.parts))

    def _reach(self, width: float) -> float:
        """The axis' end: every bar, and the total printed behind it, fits."""
        return max(
            self._end(row)
            * width
            / (width - 14 - text_width(duration(float(row[self.total])), TEXT_SIZE, bold=True))
            for row in self._rows()
        )

    def _draw_row(
        self, figure: Figure, ax: Axes, row: Mapping[str, float | str], label: str, y: float
    ) -> None:
        left, _, right, top = bounds(ax)
        at = 0.0
        for part, hue in zip(self.parts, HUES, strict=False):
            length = float(row[part])
            ax.barh(y, length, left=at, height=_BAR, **look(hue, self.origin[0]), zorder=3, gid=f"{part} bar")
            at += length
        total = float(row[self.total])
        ax.vlines(total, y - _BAR / 2 - 3, y + _BAR / 2 + 3, color=INK, linewidth=1.8, zorder=5, gid="total")
        end = left + self._end(row) / ax.get_xlim()[1] * (right - left)
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # the grid may cross the value
        write(figure, end + 8, top + y, duration(total), bold=True, va="center", gid="value", bbox=ground)
        write(figure, left - 6, top + y, label, ha="right", va="center", gid="label", linespacing=LINE)

    def alt(self, title: str) -> str:
        told = []
        for row in self._rows():
            made = ", ".join(f"{part} {digits(float(row[part]))} µs" for part in self.parts)
            told.append(f"{row['contender']} {duration(float(row[self.total]))}: {made}")
        what = f"{title.rstrip('.')}. Stacked bars, from top to bottom"
        return f"{what}: {'; '.join(told)}. {sentence(self.origin[1])}"
