"""Horizontal bars: values side by side, totals made of parts, and a total taken apart step by step."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from labkit.measure.rows import LIVE, PUBLISHED
from labkit.plots import style, words
from labkit.plots.style import INK, MUTED, OTHERS, Look, Picture, bar_look
from labkit.plots.words import digits, duration

_ROW, _BAR = 0.31, 0.66
"""Height of a row in inches, and of its bar in rows."""
_DECADE = 10.0
"""Values that span more stand on a logarithmic axis."""
_MIB = 2**20
_TICK: dict[str, Any] = {"color": INK, "linestyle": "none", "marker": "|", "markeredgewidth": 1.8}
_LOWER = ("times_as_long", "copies", "MB", "peak_bytes")
"""Columns of which less is better, besides times; of a share, a rate or a speedup more is."""


@style.drawing()
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
    ticks = {name: column for name, column in (floor or {}).items() if isinstance(column, str)}
    lines = {name: at for name, at in (floor or {}).items() if not isinstance(at, str)}
    numbers = [value, *ticks.values()]
    needed = [*numbers, label, *([group] if group else [])]
    table = words.prepared(table, needed, [*numbers, "p20_us", "p80_us"]).reset_index(drop=True)
    timed = value.endswith("_us")
    quantity, text = value.replace("_", " "), duration if timed else lambda at: f"{digits(at)}{unit}"
    if timed:
        quantity = "time per call"
    elif value == "peak_bytes":
        quantity, text = "memory high-water mark of one call", lambda at: f"{digits(at)} MiB"
        table[numbers] /= _MIB
        lines = {name: at / _MIB for name, at in lines.items()}
        table = table.assign(clock="", cache="")  # which did not measure it
        table.loc[table[value] == 0, "note"] = "nothing beyond its inputs"
    several = table["kind"].nunique() > 1
    plain = table["series"] if label == "series" else [words.named(label, each) for each in table[label]]
    kinds = [f" ({kind})" if several and kind != LIVE else "" for kind in table["kind"]]
    table["name"] = [f"{name}{kind}" for name, kind in zip(plain, kinds, strict=True)]
    if not timed:
        table["noise"] = ""
    table["shown"] = [
        text(at) if at > 0 else f"none ({why or 'no value'})"
        for at, why in zip(table[value], table["note"], strict=True)
    ]
    spread = ["p20_us", "p80_us"] if value == "median_us" else []
    good = table.loc[words.good(table, value), value]
    log = len(good) > 0 and good.max() > _DECADE * good.min()
    parts = [("", table)]
    if group and len(table):
        parts = [(words.named(group, key), part) for key, part in table.groupby(group, sort=False)]
    headings = [heading for heading, _ in parts if heading]

    noisy: dict[str, list[str]] = {}
    for heading, part in parts:
        for name, noise in zip(part["name"], part["noise"], strict=True):
            if noise:
                noisy.setdefault(noise, []).append(f"{name} ({heading})" if heading else name)
    noise_words = [f"{noise}: {words.shortlist(names, 6)}" for noise, names in noisy.items()]
    same, sources = words.conditions(table, (group, label)), words.origins(table)
    rows = max(len(table) + len(headings), 2)
    samples = [(said, Look(MUTED, "o"), kind) for kind, said in sources]
    figure = style.sheet(
        title,
        0.6 + rows * _ROW + 0.19 * len(lines),
        subtitle=same,
        keys=[
            *(
                style.line_key(said, **_dot(look, kind))
                if log
                else style.box_key(said, **bar_look(MUTED, kind))
                for said, look, kind in samples
            ),
            *(style.line_key(name, **_TICK, markersize=11) for name in ticks),
        ],
        notes=[note, *(f"{words.RING} {said}" for said in noise_words)],
    )
    more = value == "speedup" or value.startswith("share") or value.endswith("/s")
    way = "lower is better" if timed or value in _LOWER else "higher is better" if more else ""
    said = ", ".join(filter(None, [way, "logarithmic axis" if log else ""]))
    ax = figure.add_subplot()
    ax.set(xlabel=f"{quantity} ({said})" if said else quantity, ylim=(rows - 0.5, -0.5))
    ends = table[[value, *spread[1:], *ticks.values()]].max(axis=1)
    _scale(ax, [*table[numbers].to_numpy().ravel(), *ends, *lines.values()], text, log)
    for i, (name, at) in enumerate(lines.items()):
        ax.axvline(at, color=INK, linewidth=1.0, zorder=4)
        style.note(ax, name, at, 1, 0, 3 + 14 * i, across="data", style="italic", ha="center")
    if table.empty:
        ax.text(0.5, 0.5, words.NOTHING, transform=ax.transAxes, ha="center", color=MUTED)
    looks, y, names = style.looks(table["contender"]), 0, []
    for heading, part in parts:
        if heading:
            style.note(ax, heading, 0, y + 0.1, 6, 0, along="data", va="center", weight="bold", size=10.5)
            y += 1
        for i, row in part.iterrows():
            look, at, bold = looks[row["contender"]], row[value], "normal"
            ground = style.tint(look.hue, 0.09) if look.strong else "white"
            if look.strong:
                bold = "bold"
                ax.axhspan(y - 0.46, y + 0.46, color=ground, linewidth=0, zorder=0)
            names.append((y, words.cut(row["name"], 36), bold))
            y += 1
            if not at > 0:
                why = words.cut(f"{words.TIMES} {row['note'] or 'no value'}", 58)
                _beside(ax, 0, y - 1, why, across="axes fraction", color=MUTED, gid="gap")
                continue
            if log:
                ax.plot(
                    [ax.get_xlim()[0], at], [y - 1] * 2, **_dot(look, row["kind"]), markevery=[1], zorder=5
                )
            else:
                ax.barh(
                    y - 1,
                    at,
                    height=_BAR,
                    **bar_look(look.hue, row["kind"]),
                    zorder=3,
                    gid=f"{row['kind']} bar",
                )
            if spread:
                ax.plot(
                    row[spread], [y - 1] * 2, color=INK, linewidth=1.3, marker="|", markersize=7, zorder=4
                )
            for column in ticks.values():
                ax.plot([row[column]], [y - 1], **_TICK, markersize=19, zorder=6, gid="floor")
            ring = f" {words.RING}" if row["noise"] else ""
            _beside(ax, ends[i], y - 1, row["shown"] + ring, weight=bold, ground=ground, gid="value")
    _name_rows(ax, names)

    what = f"{title.rstrip('.')}. Bars of {quantity}{', on a logarithmic axis' if log else ''}"
    told = [f"{what}{', ' + same if same else ''}." if len(table) else f"{what}: {words.NOTHING}."]
    for heading, part in parts if len(table) else []:
        found = words.shortlist(
            [f"{name} {shown}" for name, shown in zip(part["name"], part["shown"], strict=True)], 10
        )
        told.append(f"{heading}: {found}." if heading else f"{found}.")
    if lines:
        told.append(f"Lines: {', '.join(f'{name} {text(at)}' for name, at in lines.items())}.")
    told += [words.sentence(source) for _, source in sources]
    return Picture(figure, alt or " ".join(told) + words.disturbed(noise_words))


def _dot(look: Look, kind: str) -> dict[str, Any]:
    """A dot at the end of a thin line: on a logarithmic axis a bar's length means nothing."""
    line = ":" if kind == PUBLISHED else style.LINES[kind]
    how = {**style.line_look(look.hue, kind), "linestyle": line, "gid": f"{kind} bar"}
    return {**how, "marker": "o", "markersize": 9.5, "linewidth": 3.0 if look.strong else 2.0}


# --- what all bars share ----------------------------------------------------------------------------


def _scale(ax: Axes, values: Sequence[float], text: Callable[[float], str], log: bool = False) -> None:
    """A value axis from zero, or a logarithmic one, with room for a value behind the longest bar."""
    known = [float(v) for v in values if v > 0]
    ax.set_xlim(0, 1.16 * max(known, default=0.0) or 1.0)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    if log:
        low, reach = min(known), max(known) / min(known)
        ax.set(xscale="log", xlim=(low / reach**0.08, low * reach**1.18))
        ax.xaxis.set_major_locator(LogLocator(10, (1, 2, 5) if reach < 100 else (1,)))
        ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda at, _: text(at) if at else "0"))
    ax.grid(axis="y", visible=False)


def _name_rows(ax: Axes, names: Sequence[tuple[float, str, str]]) -> None:
    """Names left of the axis, each in its weight."""
    ax.set_yticks([y for y, *_ in names], [name for _, name, _ in names], size="medium")
    ax.tick_params(axis="y", length=0)
    for tick, (_, _, weight) in zip(ax.get_yticklabels(), names, strict=True):
        tick.set(weight=weight, linespacing=1.1, gid="label")


def _beside(ax: Axes, x: float, y: float, text: str, ground: str = "white", **how: Any) -> None:
    """Text right of a place, on a ground that hides the grid and the lines behind it."""
    box = {"facecolor": ground, "edgecolor": "none", "pad": 1.0}
    how = {"across": "data", "size": 10.5, "va": "center", "bbox": box, **how}
    style.note(ax, text, x, y, 7, 0, along="data", **how)


def _only_origin(table: pd.DataFrame) -> tuple[str, str]:
    found = words.origins(table)
    if len(found) > 1:
        raise ValueError(f"table: rows {' and '.join(said for _, said in found)}; select one of them")
    return found[0]


# --- stacked bars -----------------------------------------------------------------------------------

PARTS = ("#5A5A5A", "#CC8000", "#0048DC", "#1AA57D", "#5C0088", "#4D90FF")
"""Neighbours far apart in lightness: a part's colour is that of its place."""


@style.drawing()
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
    table = words.prepared(table.assign(clock="", cache=""), numbers, numbers)
    for name in numbers:
        wrong = table.loc[~(np.isfinite(table[name]) & (table[name] >= 0)), name]
        if len(wrong):
            raise ValueError(f"table: a value of {name!r} is {wrong.iloc[0]:g}; it has to be zero or more")
    kind, source = _only_origin(table)
    hues = dict(zip(parts, PARTS, strict=False))
    keys = [style.box_key(f"{part}: {parts[part]}", **bar_look(hue, kind)) for part, hue in hues.items()]
    printed = f"{total}: the total as measured by itself; its value is printed"
    keys.append(style.line_key(printed, **_TICK, markersize=11))
    figure = style.sheet(title, 0.6 + 1.1 * _ROW * len(table), subtitle=source, keys=keys, notes=[note])
    ax = figure.add_subplot()
    ax.set(xlabel="time (lower is better)", ylim=(len(table) - 0.5, -0.5))
    _scale(ax, [*table[list(parts)].sum(axis=1), *table[total]], duration)
    told = []
    for y, (_, row) in enumerate(table.iterrows()):
        at = 0.0
        for part, hue in hues.items():
            look = {**bar_look(hue, kind), "linewidth": 0.6}
            ax.barh(y, row[part], left=at, height=_BAR, **look, zorder=3, gid=f"{part} bar")
            at += row[part]
        ax.plot([row[total]], [y], **_TICK, markersize=19, zorder=5, gid="total")
        _beside(ax, max(at, row[total]), y, _time(row[total]), weight="bold", gid="value")
        made = " + ".join(f"{part} {_time(row[part])}" for part in parts)
        told.append(f"{row['contender']}: {made} = {_time(at)}, {total} {_time(row[total])}")
    _name_rows(ax, [(y, fill(str(name), 32), "normal") for y, name in enumerate(table["contender"])])
    what = f"{title.rstrip('.')}. Stacked bars, from top to bottom"
    return Picture(figure, alt or f"{what}: {'; '.join(told)}. {words.sentence(source)}")


def _time(us: float) -> str:
    return duration(us) if us else "0"


# --- a waterfall ------------------------------------------------------------------------------------

_MINUS = "\N{MINUS SIGN}"
_HUES = {"total": "#5A5A5A", f"{_MINUS} saved": OTHERS[0].hue, "+ added": OTHERS[1].hue}
"""Grey, blue and orange, which no colour vision deficiency confuses."""
_STAMP = ("kind", "device", "date", "clock", "cache", "source")


@style.drawing()
def waterfall(
    steps: Sequence[tuple[str, float]],
    *,
    end: str,
    title: str,
    origin: Any,
    unit: str = "us",
    note: str = "",
    alt: str | None = None,
) -> Picture:
    """Where the time went: bars that hang from running total to running total, from top to bottom.

    ``steps`` are pairs of label and value: the first is a total, each following one a signed change; the
    total that results is the last bar, labelled ``end``. ``origin`` says where the values come from: a
    Profile, a Row, a table's row (``table.iloc[0]``), a Measured, of which kind, device, date, clock, cache
    and source are named where it has them. Live bars are full, recorded ones pale with a dashed edge.
    ``unit`` stands behind each value. ``alt`` replaces the generated alt text.

    Raises ValueError without steps, for a value that is not finite, and where a running total is negative.
    """
    if not steps:
        raise ValueError("steps: there are none; the first is a total, each following one a change")
    totals = list(accumulate(value for _, value in steps))
    noise = 1e-9 * max(abs(value) for _, value in steps)  # what adding up floats may leave
    for (label, value), total in zip(steps, totals, strict=True):
        if not math.isfinite(value):
            raise ValueError(f"steps: the value of {label!r} is {value}, not a finite number")
        if total < -noise:
            raise ValueError(f"steps: after {label!r} the total is {digits(total)}, below zero")
    unit = "µs" if unit == "us" else unit
    stamp = {name: getattr(origin, name, "") for name in _STAMP}
    kind, source = _only_origin(words.prepared(pd.DataFrame([{**stamp, "contender": ""}]), [], []))
    first, saved, added = _HUES
    last = max(totals[-1], 0.0)
    drawn = [
        (label, value, added if value > 0 else saved, total)
        for (label, value), total in zip(steps, totals, strict=True)
    ]
    drawn = [(*steps[0], first, totals[0]), *drawn[1:], (end, last, first, last)]
    sorts = [sort for sort in _HUES if any(sort == row[2] for row in drawn)]
    keys = [style.box_key(sort, **bar_look(_HUES[sort], kind)) for sort in sorts]
    figure = style.sheet(title, 0.5 + 1.1 * _ROW * len(drawn), subtitle=source, keys=keys, notes=[note])
    ax = figure.add_subplot()
    ax.set_ylim(len(drawn) - 0.5, -0.5)
    _scale(ax, totals, lambda at: f"{digits(at)} {unit}")
    before, told, names = 0.0, [], []
    for y, (label, value, sort, now) in enumerate(drawn):
        low, high = sorted((0.0 if sort == first else before, now))
        size, strong = f"{digits(abs(value))} {unit}", "bold" if sort == first else "normal"
        look = bar_look(_HUES[sort], kind)
        ax.barh(y, high - low, left=low, height=_BAR, **look, zorder=3, gid=f"{sort} bar")
        if y:
            ax.vlines(before, y - 1 + _BAR / 2, y - _BAR / 2, color=MUTED, linewidth=1.0, gid="connector")
        shown = size if sort == first or not value else f"{sort[0]}{size}"
        _beside(ax, high, y, shown, color=style.text_colour(_HUES[sort]), weight=strong, gid="value")
        change = f"{label} {'adds' if value > 0 else 'saves'} {size}, which makes {digits(now)} {unit}"
        told.append(f"{label} {size}" if sort == first else change)
        names.append((y, fill(label, 32), strong))
        before = now
    _name_rows(ax, names)
    what = f"{title.rstrip('.')}. A waterfall, from top to bottom"
    return Picture(figure, alt or f"{what}: {'; then '.join(told)}. {words.sentence(source)}")
