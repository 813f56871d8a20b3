"""Horizontal bars from zero: a few values side by side, each printed at its bar's end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from labkit.drawing import (
    GRID,
    INK,
    LINE,
    MARGIN,
    MUTED,
    SLOTS,
    SMALL_SIZE,
    TEXT_SIZE,
    Key,
    Page,
    Shown,
    bounds,
    figure_of,
    points,
    shorten,
    slots,
    stagger,
    text_width,
    tint,
    write,
)
from labkit.provenance import (
    NOTHING,
    RING,
    TIMES,
    conditions,
    digits,
    disturbed,
    duration,
    good,
    named,
    origins,
    prepared,
    sentence,
    shortlist,
)
from labkit.rows import LIVE, PUBLISHED, RECORDED

_EDGES: dict[str, Any] = {LIVE: "-", RECORDED: (0, (4, 2)), PUBLISHED: (0, (1, 1.5))}
_FILLS = {LIVE: 1.0, RECORDED: 0.3, PUBLISHED: 0.0}
_BAR, _PITCH, _HEADING = 15.0, 23.0, 22.0
_LABEL_WIDTH = 190.0
_MIB = 2**20
_ON_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
"""Behind text that a reference line or the grid may cross."""


def bars(
    table: pd.DataFrame,
    *,
    title: str,
    value: str = "median_us",
    label: str = "contender",
    group: str | None = None,
    floor: Mapping[str, float | str] | None = None,
    unit: str = "",
    note: str = "",
    alt: str | None = None,
) -> Shown:
    """A bar for each row, in the table's order, from zero; whiskers from p20 to p80 of ``median_us``.

    ``label`` is the column that names the bars, ``group`` one that puts them under headings. ``floor`` names
    references: a number is a line through all bars, the name of a column (``"copy_us"``) a tick across each.
    Values in a column ending in ``_us`` are printed as times, those in ``peak_bytes`` (and whatever ``floor``
    names then) in MiB, others with ``unit`` after them. Live bars are full, recorded ones pale with a dashed
    edge, published ones hollow with a dotted edge. Behind a time that something disturbed (column ``noise``)
    stands a ring, and a footnote says what. ``alt`` replaces the generated alt text. ValueError names a
    column that the table lacks.
    """
    columns = [name for name in (floor or {}).values() if isinstance(name, str)]
    split = [group] if group else []
    time = value.endswith("_us")
    table = prepared(table, [value, label, *split, *columns], [value, "p20_us", "p80_us", *columns])
    lines = dict(floor or {})
    quantity = "time per call" if time else value.replace("_", " ")
    if value == "peak_bytes":
        unit, quantity = " MiB", "memory high-water mark of one call"
        table[[value, *columns]] /= _MIB
        table = table.assign(clock="", cache="")  # which did not measure it
        table.loc[table[value] == 0, "note"] = "nothing beyond its inputs"
        lines = {name: at if isinstance(at, str) else at / _MIB for name, at in lines.items()}
    figure = _Bars(
        table,
        value,
        label,
        group,
        lines,
        duration if time else lambda number: f"{digits(number)}{unit}",
        ("p20_us", "p80_us") if value == "median_us" else None,
        quantity,
    )
    return Shown(figure.draw(title, note), alt or figure.alt(title))


@dataclass
class _Bars:
    table: pd.DataFrame
    value: str
    label: str
    group: str | None
    floor: dict[str, float | str]
    text: Callable[[float], str]
    spread: tuple[str, str] | None
    quantity: str

    @property
    def axis(self) -> str:
        """What is written along the axis."""
        return f"{self.quantity} (shorter is better)" if self.text is duration else self.quantity

    def __post_init__(self) -> None:
        self.groups = list(self.table[self.group].unique()) if self.group and len(self.table) else [None]
        self.slots = slots(self.table["contender"])
        self.several_kinds = self.table["kind"].nunique() > 1
        self.noise_notes = self._disturbances()

    def _disturbances(self) -> list[str]:
        """What disturbed which bars, a note for each disturbance; it matters for times."""
        if not self.value.endswith("_us") or "noise" not in self.table:
            return []
        whom: dict[str, list[str]] = {}
        for heading in self.groups:
            for _, row in self._rows_of(heading).iterrows():
                if row["noise"]:
                    where = "" if heading is None else f" ({named(str(self.group), heading)})"
                    whom.setdefault(str(row["noise"]), []).append(self._name(row) + where)
        return [f"{noise}: {shortlist(names, 6)}" for noise, names in whom.items()]

    def _value(self, row: "pd.Series[Any]") -> str:
        """What stands at a bar's end."""
        return self.text(row[self.value]) + (f" {RING}" if self.noise_notes and row["noise"] else "")

    def _rows_of(self, heading: Any) -> pd.DataFrame:
        return self.table if heading is None else self.table[self.table[self.group] == heading]

    def _name(self, row: "pd.Series[Any]") -> str:
        name = named(self.label, row[self.label]) if self.label != "series" else str(row["series"])
        return f"{name} ({row['kind']})" if self.several_kinds and row["kind"] != LIVE else name

    def _end(self, row: "pd.Series[Any]") -> float:
        """Where a bar with its whisker and its reference tick ends."""
        ticks = [row[column] for column in self.floor.values() if isinstance(column, str)]
        high = [row[self.spread[1]]] if self.spread else []
        return float(np.nanmax([row[self.value], *high, *ticks]))

    def draw(self, title: str, note: str) -> Figure:
        names = [shorten(self._name(row), _LABEL_WIDTH, TEXT_SIZE) for _, row in self.table.iterrows()]
        headings = 0 if self.groups == [None] else len(self.groups)
        lines = {name: at for name, at in self.floor.items() if not isinstance(at, str)}
        page = Page(
            title,
            subtitle=conditions(self.table, (self.group, self.label)),
            keys=[
                *(Key(words, look(MUTED, kind), box=True) for kind, words in origins(self.table)),
                *self._tick_keys(),
            ],
            notes=[*([note] if note else []), *(f"{RING} {words}" for words in self.noise_notes)],
            panel_height=max(70.0, len(self.table) * _PITCH + headings * _HEADING + 8),
            left=max((text_width(name, TEXT_SIZE, bold=True) for name in names), default=40) + 12,
            right=6,
        )
        reach = self._reach(page.panel_width, lines)
        widths = [text_width(name, SMALL_SIZE) for name in lines]
        places = stagger(
            [at / reach * page.panel_width for at in lines.values()], widths, 0, page.panel_width
        )
        page = replace(page, above=LINE * SMALL_SIZE * max((row + 1 for _, row in places), default=0) + 6)
        figure, (ax,) = page.draw()
        lay_out(ax, page, reach, self.text)
        left, bottom, right, top = bounds(ax)
        write(figure, (left + right) / 2, bottom - 34, self.axis, ha="center", va="bottom")
        for (name, at), (centre, row) in zip(lines.items(), places, strict=True):
            ax.axvline(at, color=INK, linewidth=1.0, zorder=4)
            y = top + 3 + row * LINE * SMALL_SIZE
            write(figure, left + centre, y, name, size=SMALL_SIZE, italic=True, ha="center", va="bottom")
        if self.table.empty:
            ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", color=MUTED, size=TEXT_SIZE + 1)
        y = -4.0
        for heading in self.groups:
            if heading is not None:
                write(
                    figure,
                    MARGIN,
                    top + y - _HEADING / 2 - 2,
                    named(str(self.group), heading),
                    bold=True,
                    va="center",
                    bbox=_ON_LINES,  # a long one crosses the axis
                )
                y -= _HEADING
            for _, bar in self._rows_of(heading).iterrows():
                self._draw_bar(ax, bar, y - _PITCH / 2)
                y -= _PITCH
        return figure

    def _reach(self, width: float, lines: dict[str, Any]) -> float:
        """The axis' end: every bar, and the value printed behind it, fits."""
        rows = self.table[good(self.table, self.value)]
        needs = [
            self._end(row) * width / (width - 12 - text_width(self._value(row), TEXT_SIZE, bold=True))
            for _, row in rows.iterrows()
        ]
        return max([*needs, *(1.05 * at for at in lines.values())], default=1.0)

    def _tick_keys(self) -> list[Key]:
        sample = {"color": INK, "linestyle": "none", "marker": "|", "markersize": 11, "markeredgewidth": 1.8}
        return [Key(name, sample) for name, column in self.floor.items() if isinstance(column, str)]

    def _draw_bar(self, ax: Axes, row: "pd.Series[Any]", y: float) -> None:
        left, _, _, top = bounds(ax)
        figure, (width, _) = figure_of(ax), points(figure_of(ax))
        per_point = ax.get_xlim()[1] / (ax.get_position().width * width)
        slot = self.slots[row["contender"]]
        hue, ours = SLOTS[slot][0], slot == 0
        name = shorten(self._name(row), _LABEL_WIDTH, TEXT_SIZE)
        write(figure, left - 6, top + y, name, bold=ours, ha="right", va="center", gid="label")
        if not (np.isfinite(row[self.value]) and row[self.value] > 0):
            room = ax.get_position().width * width - 12
            words = shorten(f"{TIMES} {' '.join(str(row['note'] or 'no value').split())}", room, TEXT_SIZE)
            write(figure, left + 6, top + y, words, color=MUTED, va="center", gid="gap", bbox=_ON_LINES)
            return
        ax.barh(
            y,
            row[self.value],
            height=_BAR,
            **look(hue, row["kind"]),
            zorder=3,
            gid=f"{row['kind']} bar",
        )
        if self.spread and np.isfinite([row[end] for end in self.spread]).all():
            ax.plot(
                [row[end] for end in self.spread],
                [y, y],
                color=INK,
                linewidth=1.3,
                marker="|",
                markersize=6,
                zorder=5,
            )
        for column in self.floor.values():
            if isinstance(column, str):
                ax.vlines(row[column], y - _BAR * 0.7, y + _BAR * 0.7, color=INK, linewidth=1.8, zorder=6)
        at = left + self._end(row) / per_point + 6
        write(
            figure,
            at,
            top + y,
            self._value(row),
            bold=ours,
            va="center",
            gid="value",
            bbox=_ON_LINES,
        )

    def alt(self, title: str) -> str:
        what = f"{title.rstrip('.')}. Bars of {self.quantity}"
        if self.table.empty:
            return f"{what}: {NOTHING}."
        same = conditions(self.table, (self.group, self.label))
        sentences = [f"{what}{', ' + same if same else ''}."]
        for heading in self.groups:
            found = []
            for _, row in self._rows_of(heading).iterrows():
                has = np.isfinite(row[self.value]) and row[self.value] > 0
                shown = self.text(row[self.value]) if has else f"none ({row['note'] or 'no value'})"
                found.append(f"{self._name(row)} {shown}")
            lead = "" if heading is None else f"{named(str(self.group), heading)}: "
            sentences.append(f"{lead}{shortlist(found, 10)}.")
        fixed = [f"{name} {self.text(at)}" for name, at in self.floor.items() if not isinstance(at, str)]
        if fixed:
            sentences.append(f"Lines: {', '.join(fixed)}.")
        sentences += [sentence(words) for _, words in origins(self.table)]
        return " ".join(sentences) + disturbed(self.noise_notes)


def look(hue: str, kind: str) -> dict[str, Any]:
    """How a bar of a kind is drawn: full, pale with a dashed edge, or hollow with a dotted one."""
    return {
        "facecolor": tint(hue, _FILLS[kind]),
        "edgecolor": hue,
        "linestyle": _EDGES[kind],
        "linewidth": 1.2,
    }


def lay_out(ax: Axes, page: Page, reach: float, text: Callable[[float], str]) -> None:
    """An axis from zero to ``reach`` along a panel, which counts its height in points from the top down."""
    ax.set(xlim=(0, reach), ylim=(-page.panel_height, 0), yticks=[])
    ax.xaxis.set_major_locator(FixedLocator(ticks(reach, page.panel_width, text)))
    ax.xaxis.set_major_formatter(lambda at, _: text(at) if at else "0")
    ax.grid(axis="x", color=GRID, linewidth=0.7)


def ticks(reach: float, width: float, text: Callable[[float], str]) -> list[float]:
    """Round values of an axis from zero to ``reach`` whose text does not end beyond the page."""

    def fits(at: float) -> bool:
        return at / reach * width + text_width(text(at), SMALL_SIZE) / 2 <= width + MARGIN / 2

    return [at for at in MaxNLocator(6).tick_values(0, reach) if 0 <= at <= reach and fits(at)]
