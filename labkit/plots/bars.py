"""Horizontal bars: values side by side, totals made of parts, and a total taken apart step by step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Protocol

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from labkit.plots.style import (
    INK,
    MUTED,
    OTHERS,
    SMALL,
    Key,
    Picture,
    bar_look,
    box_key,
    line_key,
    line_look,
    looks,
    sheet,
    styled,
    text_colour,
    tint,
)
from labkit.plots.words import (
    NOTHING,
    RING,
    TIMES,
    conditions,
    cut,
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
from labkit.rows import LIVE, PUBLISHED

_ROW, _BAR = 0.31, 0.66
"""Height of a row in inches, and of its bar in rows."""
_DECADE = 10.0
"""Values that span more stand on a logarithmic axis."""
_MIB = 2**20
_TICK: dict[str, Any] = {
    **{"color": INK, "linestyle": "none", "marker": "|"},
    **{"markersize": 11, "markeredgewidth": 1.8},
}
_ON_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
"""Behind text that a reference line or the grid may cross."""


# --- bars -------------------------------------------------------------------------------------------


@styled
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
) -> Picture:
    """A bar for each row, in the table's order; whiskers from p20 to p80 of ``median_us``.

    Bars start at zero. Where values span more than a decade the axis is logarithmic and says so, and dots at
    the end of a thin line take the place of bars. ``label`` is the column that names the bars, ``group`` one
    that puts them under headings. ``floor`` names references: a number is a line through all bars, the name
    of a column (``"copy_us"``) a tick across each. Values in a column ending in ``_us`` are printed as times,
    those in ``peak_bytes`` (and whatever ``floor`` names then) in MiB, others with ``unit`` after them. Live
    bars are full, recorded ones pale with a dashed edge, published ones hollow with a dotted edge. Behind a
    time that something disturbed (column ``noise``) stands a ring, and a footnote says what. ``alt`` replaces
    the generated alt text. ValueError names a column that the table lacks.
    """
    columns = [name for name in (floor or {}).values() if isinstance(name, str)]
    table = prepared(
        table, [value, label, *([group] if group else []), *columns], [value, "p20_us", "p80_us", *columns]
    )
    lines = {name: at for name, at in (floor or {}).items() if not isinstance(at, str)}
    ticks = {name: column for name, column in (floor or {}).items() if isinstance(column, str)}
    quantity = "time per call" if value.endswith("_us") else value.replace("_", " ")
    text = duration if value.endswith("_us") else lambda number: f"{digits(number)}{unit}"
    if value == "peak_bytes":
        quantity, text = "memory high-water mark of one call", lambda number: f"{digits(number)} MiB"
        table[[value, *columns]] /= _MIB
        table = table.assign(clock="", cache="")  # which did not measure it
        table.loc[table[value] == 0, "note"] = "nothing beyond its inputs"
        lines = {name: at / _MIB for name, at in lines.items()}
    drawn = _Bars(table, value, label, group, lines, ticks, text, quantity)
    return Picture(drawn.draw(title, note), alt or drawn.alt(title))


def _better(value: str) -> str:
    """Which way is better, where the column's name says it."""
    if value == "speedup" or value.startswith("share") or value.endswith("/s"):
        return "higher is better"
    known = value.endswith(("_us", "_bytes")) or value in ("times_as_long", "copies", "MB")
    return "lower is better" if known else ""


@dataclass
class _Bars:
    table: pd.DataFrame
    value: str
    label: str
    group: str | None
    lines: dict[str, float]
    ticks: dict[str, str]
    text: Callable[[float], str]
    quantity: str

    def __post_init__(self) -> None:
        self.several = self.table["kind"].nunique() > 1
        table = self.table.assign(name=[self._name(row) for _, row in self.table.iterrows()])
        if not self.value.endswith("_us"):
            table["noise"] = ""
        spread = ["p20_us", "p80_us"] if self.value == "median_us" else []
        table["end"] = table[[self.value, *spread[1:], *self.ticks.values()]].max(axis=1)
        self.parts = [("", table)]
        if self.group and len(table):
            parts = table.groupby(self.group, sort=False, dropna=False)
            self.parts = [(named(self.group, key), part) for key, part in parts]
        self.noise = self._disturbances()
        shown = table.loc[good(table, self.value), self.value]
        self.log = len(shown) > 0 and shown.max() > _DECADE * shown.min()

    def _name(self, row: "pd.Series[Any]") -> str:
        name = str(row["series"]) if self.label == "series" else named(self.label, row[self.label])
        return f"{name} ({row['kind']})" if self.several and row["kind"] != LIVE else name

    def _disturbances(self) -> list[str]:
        """What disturbed which bars, a note for each disturbance."""
        whom: dict[str, list[str]] = {}
        for heading, part in self.parts:
            for noise, name in zip(part["noise"], part["name"], strict=True):
                if noise:
                    whom.setdefault(str(noise), []).append(f"{name} ({heading})" if heading else name)
        return [f"{noise}: {shortlist(names, 6)}" for noise, names in whom.items()]

    def draw(self, title: str, note: str) -> Figure:
        headings = len(self.parts) if self.parts[0][0] else 0
        rows = max(len(self.table) + headings, 2)
        sample = self._sample
        figure = sheet(
            title,
            0.6 + rows * _ROW + 0.19 * len(self.lines),
            subtitle=conditions(self.table, (self.group, self.label)),
            keys=[
                *(sample(words, kind) for kind, words in origins(self.table)),
                *(line_key(name, **_TICK) for name in self.ticks),
            ],
            notes=[note, *(f"{RING} {words}" for words in self.noise)],
        )
        ax = figure.add_subplot()
        better = ", ".join(filter(None, [_better(self.value), "logarithmic axis" if self.log else ""]))
        ax.set_xlabel(f"{self.quantity} ({better})" if better else self.quantity)
        ax.set_ylim(rows - 0.5, -0.5)
        self._set_axis(ax)
        for i, (name, at) in enumerate(self.lines.items()):
            ax.axvline(at, color=INK, linewidth=1.0, zorder=4)
            place, how = (0, 3 + 14 * i), {"size": SMALL, "style": "italic", "ha": "center"}
            above = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
            ax.annotate(name, (at, 1), place, **above, **how)
        if self.table.empty:
            ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", color=MUTED)
        look = looks(str(name) for name in self.table["contender"])
        y, names = 0, []
        for heading, part in self.parts:
            if heading:
                ax.annotate(
                    heading,
                    (0, y + 0.1),
                    (6, 0),
                    xycoords=ax.get_yaxis_transform(),
                    textcoords="offset points",
                    **{"va": "center", "weight": "bold", "bbox": _ON_LINES},
                )
                y += 1
            for _, row in part.iterrows():
                hue, _, strong = look[row["contender"]]
                names.append((y, cut(row["name"], 36), strong))
                self._draw_bar(ax, row, y, hue, strong)
                y += 1
        _name_rows(ax, names)
        return figure

    def _sample(self, words: str, kind: str) -> Key:
        if self.log:
            return line_key(words, **_stem(MUTED, kind), marker="o", **_dot(MUTED, kind))
        return box_key(words, **bar_look(MUTED, kind))

    def _set_axis(self, ax: Axes) -> None:
        """From zero, or logarithmic around all that is drawn."""
        table = pd.concat([part for _, part in self.parts])
        ends = [*table["end"].dropna(), *self.lines.values()]
        if not self.log:
            return _from_zero(ax, max(ends, default=0.0), self.text)
        starts = table[[self.value, *self.ticks.values()]].to_numpy(dtype=float).ravel()
        low = min([v for v in [*starts, *self.lines.values()] if v > 0])
        high = max(ends)
        ax.set(xscale="log", xlim=(low / (high / low) ** 0.08, high * (high / low) ** 0.13))
        ax.xaxis.set_major_locator(LogLocator(10, (1, 2, 5) if high / low < 500 else (1,)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda at, _: self.text(at)))
        ax.grid(axis="y", visible=False)

    def _draw_bar(self, ax: Axes, row: "pd.Series[Any]", y: float, hue: str, strong: bool) -> None:
        if not (np.isfinite(row[self.value]) and row[self.value] > 0):
            words = f"{TIMES} {cut(str(row['note'] or 'no value'), 72)}"
            _beside(ax, 0, y, words, xycoords=ax.get_yaxis_transform(), color=MUTED, gid="gap")
            return
        at, kind = float(row[self.value]), str(row["kind"])
        if strong:
            ax.axhspan(y - 0.46, y + 0.46, color=tint(hue, 0.09), linewidth=0, zorder=0)
        if self.log:
            ax.hlines(y, ax.get_xlim()[0], at, **_stem(hue, kind), zorder=3)
            ax.plot([at], [y], marker="o", **_dot(hue, kind), zorder=5, gid=f"{kind} bar")
        else:
            ax.barh(y, at, height=_BAR, **bar_look(hue, kind), zorder=3, gid=f"{kind} bar")
        if self.value == "median_us" and np.isfinite([row["p20_us"], row["p80_us"]]).all():
            ends = [row["p20_us"], row["p80_us"]]
            ax.plot(ends, [y, y], color=INK, linewidth=1.3, marker="|", markersize=7, zorder=4, gid="spread")
        for column in self.ticks.values():
            ax.plot([row[column]], [y], **_TICK | {"markersize": 19}, zorder=7, gid="floor")
        ring = f" {RING}" if row["noise"] else ""
        ground = {**_ON_LINES, "facecolor": tint(hue, 0.09) if strong else "white"}
        _beside(
            ax,
            row["end"],
            y,
            self.text(at) + ring,
            weight="bold" if strong else "normal",
            bbox=ground,
            gid="value",
        )

    def alt(self, title: str) -> str:
        what = f"{title.rstrip('.')}. Bars of {self.quantity}{', logarithmic' if self.log else ''}"
        if self.table.empty:
            return f"{what}: {NOTHING}."
        same = conditions(self.table, (self.group, self.label))
        sentences = [f"{what}{', ' + same if same else ''}."]
        for heading, part in self.parts:
            found = [
                f"{name} {self.text(at) if at > 0 else f'none ({note or NO_VALUE})'}"
                for name, at, note in zip(part["name"], part[self.value], part["note"], strict=True)
            ]
            sentences.append(f"{heading + ': ' if heading else ''}{shortlist(found, 10)}.")
        if self.lines:
            told = ", ".join(f"{name} {self.text(at)}" for name, at in self.lines.items())
            sentences.append(f"Lines: {told}.")
        sentences += [sentence(words) for _, words in origins(self.table)]
        return " ".join(sentences) + disturbed(self.noise)


NO_VALUE = "no value"


def _stem(hue: str, kind: str) -> dict[str, Any]:
    """The thin line to a dot on a logarithmic axis, whose left edge means nothing."""
    return {
        "color": hue,
        "linewidth": 1.6,
        "linestyle": ":" if kind == PUBLISHED else line_look(hue, kind)["linestyle"],
    }


def _dot(hue: str, kind: str) -> dict[str, Any]:
    return {
        "markersize": 9.5,
        "markeredgecolor": hue,
        "markerfacecolor": line_look(hue, kind)["markerfacecolor"],
    }


# --- what all bars share ----------------------------------------------------------------------------


def _from_zero(ax: Axes, reach: float, text: Callable[[float], str]) -> None:
    """An axis from zero, with room for a value behind the longest bar."""
    ax.set_xlim(0, 1.16 * reach or 1.0)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda at, _: text(at) if at else "0"))
    ax.grid(axis="y", visible=False)


def _name_rows(ax: Axes, names: Sequence[tuple[float, str, bool]]) -> None:
    """Names left of the axis, those that stand out in bold."""
    labels = [name for _, name, _ in names]
    ax.set_yticks([y for y, *_ in names], labels, size="medium")
    ax.tick_params(axis="y", length=0)
    for tick, (_, _, strong) in zip(ax.get_yticklabels(), names, strict=True):
        tick.set(weight="bold" if strong else "normal", linespacing=1.1, gid="label")


def _beside(ax: Axes, x: float, y: float, text: str, **how: Any) -> None:
    """Text right of a place, on a ground of its own."""
    ax.annotate(text, (x, y), (7, 0), textcoords="offset points", va="center", **{"bbox": _ON_LINES} | how)


def _only_origin(table: pd.DataFrame) -> tuple[str, str]:
    found = origins(table)
    if len(found) > 1:
        raise ValueError(f"table: rows {' and '.join(words for _, words in found)}; select one of them")
    return found[0]


# --- stacked bars -----------------------------------------------------------------------------------

PARTS = ("#5A5A5A", "#CC8000", "#0048DC", "#1AA57D", "#5C0088", "#4D90FF")
"""Neighbours far apart in lightness: a part's colour is that of its place."""


@styled
def stacked(
    table: pd.DataFrame,
    parts: Mapping[str, str],
    *,
    total: str,
    title: str,
    note: str = "",
    alt: str | None = None,
) -> Picture:
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
    if not 1 <= len(parts) <= len(PARTS):
        raise ValueError(f"parts: there are {len(parts)}; 1 to {len(PARTS)} can be told apart")
    numbers = [*parts, total]
    table = prepared(table.assign(clock="", cache=""), numbers, numbers)
    for name in numbers:
        wrong = table.loc[~(np.isfinite(table[name]) & (table[name] >= 0)), name]
        if len(wrong):
            raise ValueError(f"table: a value of {name!r} is {wrong.iloc[0]:g}; it has to be zero or more")
    kind, words = _only_origin(table)
    hues = dict(zip(parts, PARTS, strict=False))
    figure = sheet(
        title,
        0.6 + 1.1 * _ROW * len(table),
        subtitle=words,
        keys=[
            *(box_key(f"{part}: {parts[part]}", **bar_look(hue, kind)) for part, hue in hues.items()),
            line_key(f"{total}: the total as measured by itself; its value is printed", **_TICK),
        ],
        notes=[note],
    )
    ax = figure.add_subplot()
    ax.set(xlabel="time (lower is better)", ylim=(len(table) - 0.5, -0.5))
    sums = table[list(parts)].sum(axis=1)
    _from_zero(ax, float(max(sums.max(), table[total].max())), _time)
    told = []
    for y, (_, row) in enumerate(table.iterrows()):
        at = 0.0
        for part, hue in hues.items():
            look = bar_look(hue, kind) | {"linewidth": 0.6}
            ax.barh(y, row[part], left=at, height=_BAR, **look, zorder=3, gid=f"{part} bar")
            at += row[part]
        ax.plot([row[total]], [y], **_TICK | {"markersize": 19}, zorder=5, gid="total")
        _beside(ax, max(at, row[total]), y, _time(row[total]), weight="bold", gid="value")
        made = " + ".join(f"{part} {_time(row[part])}" for part in parts)
        told.append(f"{row['contender']}: {made} = {_time(at)}, {total} {_time(row[total])}")
    _name_rows(ax, [(y, fill(str(name), 32), False) for y, name in enumerate(table["contender"])])
    what = f"{title.rstrip('.')}. Stacked bars, from top to bottom"
    return Picture(figure, alt or f"{what}: {'; '.join(told)}. {sentence(words)}")


def _time(us: float) -> str:
    return duration(us) if us else "0"


# --- a waterfall ------------------------------------------------------------------------------------


class Origin(Protocol):
    """Where the values come from: a Profile, a Row, a table's row (``table.iloc[0]``), a Measured.

    ``date``, ``clock``, ``cache`` and ``source`` are named too where it has them.
    """

    @property
    def kind(self) -> str: ...
    @property
    def device(self) -> str: ...


_MINUS = "\N{MINUS SIGN}"
_HUES = {"total": "#5A5A5A", f"{_MINUS} saved": OTHERS[0].hue, "+ added": OTHERS[1].hue}
"""Grey, blue and orange, which no colour vision deficiency confuses."""


@styled
def waterfall(
    steps: Sequence[tuple[str, float]],
    *,
    end: str,
    title: str,
    origin: Origin,
    unit: str = "us",
    note: str = "",
    alt: str | None = None,
) -> Picture:
    """Where the time went: bars that hang from running total to running total, from top to bottom.

    ``steps`` are pairs of label and value: the first is a total, each following one a signed change; the
    total that results is the last bar, labelled ``end``. ``origin`` says where the values come from; those of
    one figure are of one device and kind. Live bars are full, recorded ones pale with a dashed edge.
    ``unit`` stands behind each value. ``alt`` replaces the generated alt text.

    Raises ValueError without steps, for a value that is not finite, and where a running total is negative.
    """
    stamp = {
        name: getattr(origin, name, "") for name in ("kind", "device", "date", "clock", "cache", "source")
    }
    kind, words = _only_origin(prepared(pd.DataFrame([{**stamp, "contender": ""}]), [], []))
    ends = _running(steps)
    unit = "µs" if unit == "us" else unit
    rows = [(label, value, sort) for (label, value), sort in zip(steps, _sorts(steps), strict=True)]
    rows.append((end, ends[-1], "total"))
    starts = [0.0, *ends[:-1], 0.0]
    sorts = [sort for sort in _HUES if any(sort == row[2] for row in rows)]
    figure = sheet(
        title,
        0.6 + sum(1.1 * _ROW for _ in rows),
        subtitle=words,
        keys=[box_key(sort, **bar_look(_HUES[sort], kind)) for sort in sorts],
        notes=[note],
    )
    ax = figure.add_subplot()
    ax.set_ylim(len(rows) - 0.5, -0.5)
    _from_zero(ax, max(ends), lambda at: f"{digits(at)} {unit}")
    told = []
    for y, ((label, value, sort), start, now) in enumerate(zip(rows, starts, [*ends, ends[-1]], strict=True)):
        hue, size = _HUES[sort], f"{digits(abs(value))} {unit}"
        low, high = sorted((start, now))
        ax.barh(y, high - low, left=low, height=_BAR, **bar_look(hue, kind), zorder=3, gid=f"{sort} bar")
        if y:
            at = now if y == len(rows) - 1 else start
            ax.vlines(at, y - 1 + _BAR / 2, y - _BAR / 2, color=MUTED, linewidth=1.0, gid="connector")
        shown = size if sort == "total" or not value else f"{sort[0]}{size}"
        strong = "bold" if sort == "total" else "normal"
        _beside(ax, high, y, shown, color=text_colour(hue), weight=strong, gid="value")
        change = f"{label} {'adds' if value > 0 else 'saves'} {size}, which makes {digits(now)} {unit}"
        told.append(f"{label} {size}" if sort == "total" else change)
    _name_rows(ax, [(y, fill(label, 32), sort == "total") for y, (label, _, sort) in enumerate(rows)])
    what = f"{title.rstrip('.')}. A waterfall, from top to bottom"
    return Picture(figure, alt or f"{what}: {'; then '.join(told)}. {sentence(words)}")


def _sorts(steps: Sequence[tuple[str, float]]) -> list[str]:
    total, saved, added = _HUES
    return [total, *(added if value > 0 else saved for _, value in steps[1:])]


def _running(steps: Sequence[tuple[str, float]]) -> list[float]:
    """The total after each step."""
    if not steps:
        raise ValueError("steps: there are none; the first is a total, each following one a change")
    for label, value in steps:
        if not math.isfinite(value):
            raise ValueError(f"steps: the value of {label!r} is {value}, not a finite number")
    totals = np.cumsum([value for _, value in steps])
    noise = 1e-9 * max(abs(value) for _, value in steps)  # what adding up floats may leave
    for (label, _), total in zip(steps, totals, strict=True):
        if total < -noise:
            raise ValueError(f"steps: after {label!r} the total is {digits(total)}, below zero")
    return [max(float(total), 0.0) for total in totals]
