"""Curves over an axis: times and ratios, in one panel or several, named at their ends."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from labkit.plots.style import (
    INK,
    MUTED,
    RINGED,
    SHADES,
    SMALL,
    WIDTH,
    Look,
    Picture,
    line_key,
    line_look,
    looks,
    sheet,
    styled,
    text_colour,
)
from labkit.plots.words import (
    NOTHING,
    RING,
    TIMES,
    conditions,
    disturbed,
    duration,
    extra_axes,
    factor,
    gap_notes,
    good,
    missing,
    named,
    noise_notes,
    origin,
    origins,
    plain,
    prepared,
    sentence,
    shortlist,
)
from labkit.rows import KINDS, LIVE, PUBLISHED

Model = Callable[[float], float] | str | Iterable[tuple[float, float]]
"""A thin line: a function of the axis, the name of a column, or points (x, y)."""
Models = Mapping[str, Model]
Regime = tuple[float | None, float | None, str]
"""A shaded stretch of the axis: from, to (None is open) and its name."""
_DASHES: tuple[Any, ...] = ("-", (0, (7, 2, 1.5, 2)), (0, (1.5, 2)), (0, (9, 4)))
_LABEL = 0.2
"""Height of a line of a label, in inches."""


@dataclass(frozen=True)
class _Quantity:
    """What the vertical axis shows: columns of value and spread, its name, how a value is written."""

    column: str
    low: str
    high: str
    name: str
    better: str
    text: Callable[[float], str]
    ranked: bool = False
    """Whether the alt text says who wins."""


_TIME = _Quantity("median_us", "p20_us", "p80_us", "time per call", "lower", duration, True)
_SPEEDUP = _Quantity("speedup", "low", "high", "speedup", "higher", factor)
_TRAFFIC = _Quantity("traffic", "low", "high", "bytes moved over the fewest possible", "lower", factor)


def curves(
    table: pd.DataFrame,
    x: str = "width",
    *,
    title: str,
    floor: Models | Callable[[pd.DataFrame], Models] | None = None,
    regimes: Sequence[Regime] | Callable[[pd.DataFrame], Sequence[Regime]] = (),
    facet: str | None = None,
    rows: str | None = None,
    values: Sequence[float] = (),
    note: str = "",
    alt: str | None = None,
) -> Picture:
    """Time per call against an axis, both logarithmic, a curve with its p20 to p80 band per contender.

    ``table`` is one of :func:`labkit.rows.table`; ``floor`` names thin dark model lines in microseconds;
    ``regimes`` are shaded and named; ``facet`` and ``rows`` are columns that make panels side by side and
    one above the other. Where panels differ, ``floor`` and ``regimes`` are functions of a panel's rows.
    Rows without a time are a small cross at the foot of the panel and a footnote; points that were disturbed
    (column ``noise``) stand in a ring, and a footnote says by what. The axis reaches over ``values`` too,
    where nothing was measured yet. ``alt`` replaces the generated alt text. ValueError names a column that
    the table lacks.
    """
    return _drawn(table, x, _TIME, title, floor or {}, {}, regimes, facet, rows, values, note, alt)


def speedups(
    table: pd.DataFrame,
    x: str = "width",
    *,
    title: str,
    naive: Models | Callable[[pd.DataFrame], Models] | None = None,
    facet: str | None = None,
    rows: str | None = None,
    values: Sequence[float] = (),
    note: str = "",
    alt: str | None = None,
) -> Picture:
    """Ratios against an axis, both logarithmic: columns ``speedup``, ``kind``, ``contender`` or ``series``.

    ``series`` is what a curve is called, where that is not its contender; ``low`` and ``high`` are the band;
    ``source`` is named for published points. The ratio 1 is a line named "equal", and ``naive`` names thin
    lines of what one would expect. The rest as in :func:`curves`.
    """
    fixed = {"equal": lambda _: 1.0}
    return _drawn(table, x, _SPEEDUP, title, naive or {}, fixed, (), facet, rows, values, note, alt)


def traffic(
    table: pd.DataFrame,
    x: str = "width",
    *,
    title: str,
    facet: str | None = None,
    rows: str | None = None,
    values: Sequence[float] = (),
    note: str = "",
    alt: str | None = None,
) -> Picture:
    """Bytes moved over the fewest possible, counted and not timed, against an axis: column ``traffic``.

    The line at 1 is one pass over inputs and outputs. The rest as in :func:`curves`.
    """
    fixed = {"fewest possible": lambda _: 1.0}
    return _drawn(table, x, _TRAFFIC, title, {}, fixed, (), facet, rows, values, note, alt)


# --- what is drawn ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curve:
    name: str
    kind: str
    series: str
    points: pd.DataFrame
    """Columns x, y, low, high, sorted by x; all finite but low and high."""


@dataclass(frozen=True)
class _Panel:
    name: str
    rows: pd.DataFrame
    curves: list[_Curve]
    models: dict[str, list[tuple[float, float]]]
    regimes: list[tuple[float, float, str]]

    def deepest(self, x: str, column: str) -> pd.DataFrame:
        """The rows without a value, with their rank among those at the same place."""
        gaps = self.rows[~good(self.rows, column) & (self.rows[x] > 0)].drop_duplicates(["series", x])
        return gaps.assign(rank=gaps.groupby(x).cumcount())


@styled
def _drawn(
    table: pd.DataFrame,
    x: str,
    quantity: _Quantity,
    title: str,
    models: Models | Callable[[pd.DataFrame], Models],
    fixed: Models,
    regimes: Sequence[Regime] | Callable[[pd.DataFrame], Sequence[Regime]],
    facet: str | None,
    down: str | None,
    values: Sequence[float],
    note: str,
    alt: str | None,
) -> Picture:
    split = [name for name in (facet, down) if name]
    columns = [quantity.column, quantity.low, quantity.high]
    table = prepared(table, [x, quantity.column, *split], [x, *columns])
    reached = sorted({float(v) for v in [*table[x].dropna(), *values] if v > 0})
    x_limits = _limits(reached, least=1.0 if len(reached) > 1 else 4.0, pad=0.03) or (32.0, 32768.0)
    panels = []
    for name, rows in _split(table, facet, down):
        lines = {**(models(rows) if callable(models) else models), **fixed}
        shaded = regimes(rows) if callable(regimes) else regimes
        panels.append(
            _Panel(
                name,
                rows,
                _curves(rows, x, quantity),
                {name: _model_points(line, rows, x, x_limits) for name, line in lines.items()},
                _clipped(shaded, x_limits),
            )
        )
    shown = table[good(table, quantity.column)]
    noisy = shown[(shown[x] > 0) & (shown["noise"] != "")]
    gap_words = gap_notes(table[~good(table, quantity.column)], x, split)
    noise_words = noise_notes(noisy, x, split)

    beside = len(_values(table, facet))
    # Without rows, a third panel goes below: three side by side get too narrow to read.
    across = beside if down else min(beside, 2)
    lines_of_panels = -(-len(panels) // across)
    direct = len(panels) <= 2
    most = max(len(panel.curves) + len(panel.models) for panel in panels)
    height = max(2.5 if lines_of_panels > 1 else 3.3, 0.8 + 1.4 * _LABEL * most * direct)
    keys = [
        line_key(words, marker="o", **line_look(MUTED, kind), linewidth=1.6) for kind, words in origins(table)
    ]
    if noise_words:
        keys.append(line_key("disturbed while it was measured", **RINGED))
    figure = sheet(
        title,
        0.45 + lines_of_panels * height,
        subtitle=conditions(table, (x, facet, down)),
        keys=keys,
        notes=[*(f"{TIMES} {n}" for n in gap_words), *(f"{RING} {n}" for n in noise_words), note],
        width=WIDTH if across == 1 else WIDTH + 1.2 * (across - 1),
    )
    axes = figure.subplots(lines_of_panels, across, sharex=True, sharey=True, squeeze=False).ravel()
    for spare in axes[len(panels) :]:
        spare.set_axis_off()
    look = _looks(table)
    model_ys = [y for panel in panels for line in panel.models.values() for _, y in line]
    y_values = [*shown[columns].to_numpy(dtype=float).ravel(), *(model_ys if len(shown) else [])]
    low, high = _limits(y_values, least=8.0, pad=0.05) or (1.0, 1000.0)
    ranks = [panel.deepest(x, quantity.column)["rank"].max() for panel in panels]
    low /= (high / low) ** (0.05 * (1 + max((rank for rank in ranks if rank == rank), default=-1)))
    axes[0].set(xscale="log", yscale="log", xlim=x_limits, ylim=(low, high))
    panel_width = figure.get_figwidth() / across - 2.0
    _set_ticks(axes[0], reached, x_limits, panel_width, high / low, quantity)
    grid = axes.reshape(lines_of_panels, across)
    for ax in grid[:, 0]:
        ax.set_ylabel(fill(f"{quantity.name} ({quantity.better} is better)", 30))
    for i, column in enumerate(grid.T):
        lowest = column[(len(panels) - 1 - i) // across]
        lowest.set_xlabel(x)
        lowest.tick_params(labelbottom=True)
    for ax, panel in zip(axes, panels, strict=False):
        _fill(ax, panel, x, quantity, look, noisy)
        title_rows = _name_regimes(ax, panel.regimes, x_limits, panel_width)
        ax.set_title(panel.name, pad=6 + 14 * title_rows)
        if direct:
            _label_ends(ax, _labels(panel, look), height - 0.5)
    if not direct:
        _legend(axes[across - 1], panels, look)
    said = _alt(title, table, x, quantity, panels, (x, facet, down))
    return Picture(figure, alt or said + missing(gap_words) + disturbed(noise_words))


def _looks(table: pd.DataFrame) -> dict[str, Look]:
    """A look for each series: its contender's, but two series of one contender differ."""
    pairs = dict(zip(table["series"], table["contender"], strict=True))
    names = {name: str(pairs[name]) for name in pairs}
    alone = {name for name, contender in names.items() if list(names.values()).count(contender) == 1}
    by_key = looks(names[name] if name in alone else name for name in names)
    return {name: by_key[names[name] if name in alone else name] for name in names}


def _split(table: pd.DataFrame, facet: str | None, down: str | None) -> list[tuple[str, pd.DataFrame]]:
    """Panels row by row, each with its name; one panel when the table is not to be split or is empty."""
    panels = []
    for row in _values(table, down):
        for column in _values(table, facet):
            rows, names = table, []
            for axis, value in ((facet, column), (down, row)):
                if axis and len(table):
                    rows = rows[rows[axis] == value]
                    names.append(named(axis, value))
            panels.append((", ".join(names), rows))
    return panels


def _values(table: pd.DataFrame, axis: str | None) -> list[Any]:
    if axis is None or table.empty:
        return [None]
    values = list(table[axis].unique())
    return sorted(values) if pd.api.types.is_numeric_dtype(table[axis]) else values


def _curves(rows: pd.DataFrame, x: str, quantity: _Quantity) -> list[_Curve]:
    """The panel's curves: one for each contender, kind, device and whatever else differs at one x."""
    rows = rows[good(rows, quantity.column) & (rows[x] > 0)]
    keys = ["contender", "series", "kind", "device", "direction", "dtype", "clock", "cache"]
    for name in extra_axes(rows):
        if name != x and (rows.groupby([*keys, x], dropna=False)[name].nunique(dropna=False) > 1).any():
            keys.append(name)
    columns = {x: "x", quantity.column: "y", quantity.low: "low", quantity.high: "high"}
    found = []
    for values, part in rows.groupby(keys, dropna=False, sort=False):
        key = dict(zip(keys, values, strict=True))
        alike = rows[(rows["series"] == key["series"]) & (rows["kind"] == key["kind"])]
        details = [
            named(name, key[name]) for name in keys[3:] if key[name] != "" and alike[name].nunique() > 1
        ]
        points = part.rename(columns=columns)[list(columns.values())].astype(float).sort_values("x")
        name = ", ".join([str(key["series"]), *details])
        found.append(_Curve(name, str(key["kind"]), str(key["series"]), points.reset_index(drop=True)))
    return found


def _model_points(
    model: Model, rows: pd.DataFrame, x: str, limits: tuple[float, float]
) -> list[tuple[float, float]]:
    if callable(model):
        return [(float(at), float(model(float(at)))) for at in np.geomspace(*limits, 200)]
    if isinstance(model, str):
        if model not in rows:
            raise ValueError(f"no column {model!r} to draw a line from")
        column = rows.assign(**{model: pd.to_numeric(rows[model])}).groupby(x)[model].median().dropna()
        return [(float(at), float(y)) for at, y in column.items()]
    return sorted((float(at), float(y)) for at, y in model)


def _clipped(regimes: Sequence[Regime], limits: tuple[float, float]) -> list[tuple[float, float, str]]:
    low, high = limits
    inside = [(max(low, a or low), min(high, high if b is None else b), name) for a, b, name in regimes]
    return [(a, b, name) for a, b, name in inside if a < b]


# --- axes -------------------------------------------------------------------------------------------


def _limits(values: Iterable[float], least: float, pad: float) -> tuple[float, float] | None:
    """Around the values: ``pad`` of the axis' length each side, ``least`` from end to end; None for none."""
    known = [v for v in values if v > 0 and math.isfinite(v)]
    if not known:
        return None
    low, high = min(known), max(known)
    widen = max((high / low) ** pad, math.sqrt(least / (high / low)))
    return low / widen, high * widen


def _set_ticks(
    ax: Axes,
    reached: list[float],
    limits: tuple[float, float],
    width: float,
    reach: float,
    quantity: _Quantity,
) -> None:
    """Below the data's own places where there is room for them, else powers of two; values in 1, 2, 5."""
    steps = np.diff(np.log(reached)) / math.log(limits[1] / limits[0]) * width
    roomy = len(reached) and (steps > 0.55).all()
    ax.xaxis.set_major_locator(
        FixedLocator(reached) if roomy else LogLocator(2, numticks=int(width / 0.62) + 1)
    )
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(10, (1, 2, 5) if reach < 200 else (1,)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity.text(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _name_regimes(
    ax: Axes, regimes: list[tuple[float, float, str]], limits: tuple[float, float], width: float
) -> int:
    """Shade the regimes and name them above the panel, a row up where two would meet; the rows it took."""
    ends = [-math.inf, -math.inf, -math.inf]
    used = 0
    for i, (a, b, name) in enumerate(regimes):
        ax.axvspan(a, b, color=SHADES[i % 2], linewidth=0, zorder=0)
        middle = math.log(math.sqrt(a * b) / limits[0]) / math.log(limits[1] / limits[0])
        half = 0.04 * len(name) / width
        middle = min(max(middle, half), 1 - half)
        row = next((row for row, end in enumerate(ends) if middle - half > end), 2)
        ends[row], used = middle + half, max(used, row + 1)
        ax.annotate(
            name,
            (middle, 1),
            (0, 3 + 14 * row),
            xycoords="axes fraction",
            textcoords="offset points",
            **{"size": SMALL, "color": MUTED, "ha": "center", "gid": "regime"},
        )
    return used


def _fill(
    ax: Axes, panel: _Panel, x: str, quantity: _Quantity, look: Mapping[str, Look], noisy: pd.DataFrame
) -> None:
    for line, dashes in zip(panel.models.values(), _DASHES * len(panel.models), strict=False):
        ax.plot([at for at, _ in line], [y for _, y in line], color=INK, linewidth=1.0, linestyle=dashes)
    for curve in panel.curves:
        hue, marker, strong = look[curve.series]
        band = curve.points.dropna()
        if len(band) > 1:
            ax.fill_between(band["x"], band["low"], band["high"], color=hue, alpha=0.16, linewidth=0)
        else:
            ax.vlines(band["x"], band["low"], band["high"], color=hue, linewidth=1.2)
        ax.plot(
            curve.points["x"],
            curve.points["y"],
            marker=marker,
            markersize=(9 if marker == "*" else 6.5) if strong else 5.5,
            linewidth=2.6 if strong else 1.6,
            zorder=6 if strong else 5,
            gid=f"{curve.kind} curve",
            **line_look(hue, curve.kind),
        )
    rings = noisy.loc[noisy.index.intersection(panel.rows.index)]
    ax.plot(rings[x], rings[quantity.column], zorder=7, gid="noisy", **RINGED)
    gaps = panel.deepest(x, quantity.column)
    for at, series, rank in zip(gaps[x], gaps["series"], gaps["rank"], strict=True):
        ax.plot(
            [at],
            [0.03 + 0.048 * rank],
            transform=ax.get_xaxis_transform(),
            color=look[series].hue,
            marker="x",
            markeredgewidth=1.7,
            gid="gap",
        )
    if not panel.curves:
        ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", color=MUTED)


# --- names ------------------------------------------------------------------------------------------

Label = tuple[str, float, float, dict[str, Any]]
"""A name, where its curve ends, and how it is written."""


def _labels(panel: _Panel, look: Mapping[str, Look]) -> list[Label]:
    """One for each line; kinds are named when there are several, models stand in italics."""
    several = len({curve.kind for curve in panel.curves}) > 1
    found: list[Label] = []
    for curve in panel.curves:
        hue, _, strong = look[curve.series]
        name = f"{curve.name} ({curve.kind})" if several and curve.kind != LIVE else curve.name
        x, y = curve.points[["x", "y"]].iloc[-1]
        found.append((name, x, y, {"color": text_colour(hue), "weight": "bold" if strong else "normal"}))
    models = ((name, *line[-1]) for name, line in panel.models.items() if line)
    return found + [(name, x, y, {"color": INK, "style": "italic"}) for name, x, y in models]


def _label_ends(ax: Axes, labels: list[Label], height: float) -> None:
    """Right of the panel, each beside the end of its curve, from the bottom moved up where two would meet."""
    low, high = np.log(ax.get_ylim())
    labels = sorted(labels, key=lambda label: label[2])
    texts = [fill(name, 20) for name, *_ in labels]
    heights = [(_LABEL * (1 + text.count("\n")) + 0.03) / height for text in texts]
    places: list[float] = []
    for (_, _, y, _), tall in zip(labels, heights, strict=True):
        lowest = places[-1] + heights[len(places) - 1] / 2 + tall / 2 if places else -math.inf
        places.append(max((math.log(y) - low) / (high - low), lowest))
    highest = 1.04
    for i in reversed(range(len(places))):  # and down again from the top
        places[i] = min(places[i], highest - heights[i] / 2)
        highest = places[i] - heights[i] / 2
    for (_, x, y, look), text, place in zip(labels, texts, places, strict=True):
        ax.annotate(
            text,
            (x, y),
            (1.05, place),
            textcoords="axes fraction",
            va="center",
            linespacing=1.15,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": look["color"], "linewidth": 0.7, "relpos": (0, 0.5)},
            gid="label",
            **look,
        )


def _legend(ax: Axes, panels: list[_Panel], look: Mapping[str, Look]) -> None:
    """Beside the grid of panels, where a name at each end of each curve would be said too often."""
    handles: dict[str, Any] = {}
    for panel in panels:
        for curve in panel.curves:
            hue, marker, strong = look[curve.series]
            how = {"marker": marker, "linewidth": 2.6 if strong else 1.6, **line_look(hue, curve.kind)}
            name = curve.name if curve.kind == LIVE else f"{curve.name} ({curve.kind})"
            handles.setdefault(name, ax.plot([], [], **how)[0])
        for name, dashes in zip(panel.models, _DASHES * len(panel.models), strict=False):
            handles.setdefault(name, ax.plot([], [], color=INK, linewidth=1.0, linestyle=dashes)[0])
    ax.legend(list(handles.values()), [fill(name, 20) for name in handles], loc=(1.04, 0))


# --- alt text ---------------------------------------------------------------------------------------


def _alt(
    title: str,
    table: pd.DataFrame,
    x: str,
    quantity: _Quantity,
    panels: list[_Panel],
    varying: Iterable[str | None],
) -> str:
    shown = table[good(table, quantity.column)]
    what = f"{title.rstrip('.')}. {quantity.name.capitalize()} against {x}, both axes logarithmic"
    if shown.empty:
        return f"{what}: {NOTHING}."
    ends = dict.fromkeys(plain(end) for end in (shown[x].min(), shown[x].max()))
    same = conditions(table, varying)
    sentences = [f"{what}, {x} {' to '.join(ends)}{', ' + same if same else ''}."]
    for kind in KINDS:
        told = []
        for panel in panels:
            if found := [curve for curve in panel.curves if curve.kind == kind]:
                tell = _winners if quantity.ranked and kind != PUBLISHED else _ranges
                told.append((f"{panel.name}: " if panel.name else "") + tell(found, x, quantity))
        if told:
            sentences.append(sentence(f"{origin(shown[shown['kind'] == kind], kind)}: {'. '.join(told)}"))
    if names := dict.fromkeys(name for panel in panels for name in panel.models):
        sentences.append(f"Thin lines: {', '.join(names)}.")
    return " ".join(sentences)


def _winners(found: list[_Curve], x: str, quantity: _Quantity) -> str:
    """Who is fastest where; a difference within the larger spread is a tie. ``copy`` is a yardstick only."""
    rivals = [curve for curve in found if curve.series != "copy"] or found
    places = sorted({at for curve in rivals for at in curve.points["x"]})
    runs = []
    for verdict, group in groupby(places, key=lambda at: _verdict(rivals, at)):
        ats = [plain(at) for at in group]
        runs.append(f"{verdict} {f'at {x} {ats[0]}' if len(ats) == 1 else f'from {x} {ats[0]} to {ats[-1]}'}")
    last = sorted((p.y, c.name) for c in rivals for p in c.points[c.points["x"] == places[-1]].itertuples())
    values = [f"{name} {quantity.text(y)}" for y, name in last]
    return f"{shortlist(runs, 4)}; at {x} {plain(places[-1])} {shortlist(values, 4)}"


def _verdict(rivals: list[_Curve], at: float) -> str:
    here = [
        (p.y, float(np.nan_to_num(p.high - p.low)), curve.name)
        for curve in rivals
        for p in curve.points[curve.points["x"] == at].itertuples()
    ]
    best, noise, _ = min(here)
    level = sorted({name for y, own, name in here if y - best <= max(own, noise)})
    if len(level) == 1:
        return f"{level[0]} fastest"
    many = f"{len(level)} contenders"
    return f"{many if len(level) > 3 else ', '.join(level[:-1]) + ' and ' + level[-1]} tie"


def _ranges(found: list[_Curve], x: str, quantity: _Quantity) -> str:
    """From where to where each curve goes; of a ratio also from which x on it stays above 1."""
    told = []
    for curve in found:
        xs, ys = curve.points["x"].to_numpy(), curve.points["y"].to_numpy()
        text = f"{curve.name} {quantity.text(ys[0])} at {x} {plain(xs[0])}"
        if len(xs) > 1:
            text += f" to {quantity.text(ys[-1])} at {plain(xs[-1])}"
            below = np.nonzero(ys <= 1)[0]
            if quantity.better == "higher" and len(below):
                last = below[-1] == len(ys) - 1
                text += (
                    ", not above 1 at the end" if last else f", above 1 from {plain(xs[below[-1] + 1])} on"
                )
        told.append(text)
    return "; ".join(told)
