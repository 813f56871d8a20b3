"""Curves over an axis: times and ratios, in one panel or several, named at their ends."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, product
from textwrap import fill
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from labkit.measure.rows import KINDS, LIVE, PUBLISHED
from labkit.plots import style, words
from labkit.plots.style import INK, MUTED, Look, Picture

Model = Callable[[float], float] | str | Iterable[tuple[float, float]]
"""A thin line: a function of the axis, the name of a column, or points (x, y)."""
Models = Mapping[str, Model]
Regime = tuple[float | None, float | None, str]
"""A shaded stretch of the axis: from, to (None is open) and its name."""
_DASHES: tuple[Any, ...] = ("-", (0, (7, 2, 1.5, 2)), (0, (1.5, 2)), (0, (9, 4)))
_LABEL = 0.2
"""Height of a line of a label, in inches."""
_DIRECT = 8
"""The most names that stand at the ends of a panel's lines; more are a legend."""


class _Quantity(NamedTuple):
    """What the vertical axis shows: columns of value and spread, its name, how a value is written."""

    column: str
    low: str
    high: str
    name: str
    better: str
    text: Callable[[float], str]
    fixed: Models = MappingProxyType({})
    """Lines that every figure of it has."""


_TIME = _Quantity("median_us", "p20_us", "p80_us", "time per call", "lower", words.duration)
_SPEEDUP = _Quantity("speedup", "low", "high", "speedup", "higher", words.factor, {"equal": lambda _: 1.0})
_MOVED, _FEWEST = "bytes moved over the fewest possible", {"fewest possible": lambda _: 1.0}
_TRAFFIC = _Quantity("traffic", "low", "high", _MOVED, "lower", words.factor, _FEWEST)


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

    ``table`` is one of `labkit.measure.rows.table`; ``floor`` names thin dark model lines in microseconds;
    ``regimes`` are shaded and named; ``facet`` and ``rows`` are columns that make panels side by side and
    one above the other. Where panels differ, ``floor`` and ``regimes`` are functions of a panel's rows.
    Rows without a time are a small cross at the foot of the panel and a footnote; points that were disturbed
    (column ``noise``) stand in a ring, and a footnote says by what. The axis reaches over ``values`` too,
    where nothing was measured yet. ``alt`` replaces the generated alt text. ValueError names a column that
    the table lacks.
    """
    return _drawn(table, x, _TIME, title, floor, regimes, facet, rows, values, note, alt)


def speedups(
    table: pd.DataFrame,
    x: str = "width",
    *,
    title: str,
    naive: Models | Callable[[pd.DataFrame], Models] | None = None,
    **options: Any,
) -> Picture:
    """Ratios against an axis, both logarithmic: columns ``speedup``, ``kind``, ``contender`` or ``series``.

    ``series`` is what a curve is called, where that is not its contender; ``low`` and ``high`` are the band;
    ``source`` is named for published points. The ratio 1 is a line named "equal", and ``naive`` names thin
    lines of what one would expect. ``options`` are those of :func:`curves`, as is all else.
    """
    return _drawn(table, x, _SPEEDUP, title, naive, **options)


def traffic(table: pd.DataFrame, x: str = "width", *, title: str, **options: Any) -> Picture:
    """Bytes moved over the fewest possible, counted and not timed, against an axis: column ``traffic``.

    The line at 1 is one pass over inputs and outputs. ``options`` are those of :func:`curves`, as is all
    else.
    """
    return _drawn(table, x, _TRAFFIC, title, **options)


# --- what is drawn ----------------------------------------------------------------------------------


class _Curve(NamedTuple):
    name: str
    kind: str
    contender: str
    points: pd.DataFrame
    """Columns x, y, low, high, sorted by x; all finite but low and high."""


class _Panel(NamedTuple):
    name: str
    rows: pd.DataFrame
    curves: list[_Curve]
    models: dict[str, list[tuple[float, float]]]
    gaps: pd.DataFrame
    """Rows without a value, with their ``rank`` among those at the same place."""


@style.drawing()
def _drawn(
    table: pd.DataFrame,
    x: str,
    quantity: _Quantity,
    title: str,
    models: Models | Callable[[pd.DataFrame], Models] | None = None,
    regimes: Sequence[Regime] | Callable[[pd.DataFrame], Sequence[Regime]] = (),
    facet: str | None = None,
    rows: str | None = None,
    values: Sequence[float] = (),
    note: str = "",
    alt: str | None = None,
) -> Picture:
    split, columns = [name for name in (rows, facet) if name], [quantity.column, quantity.low, quantity.high]
    table = words.prepared(table, [x, quantity.column, *split], [x, *columns])
    reached = sorted({float(v) for v in [*table[x].dropna(), *values] if v > 0})
    x_limits = _limits(reached, least=1.0 if len(reached) > 1 else 4.0, pad=0.03) or (32.0, 32768.0)
    panels = []
    for name, part in _split(table, split):
        named = {**((models(part) if callable(models) else models) or {}), **quantity.fixed}
        lines = {key: _model_points(model, part, x, x_limits) for key, model in named.items()}
        gaps = part[~words.good(part, quantity.column) & (part[x] > 0)].drop_duplicates(["series", x])
        gaps = gaps.assign(rank=gaps.groupby(x).cumcount())
        panels.append(_Panel(name, part, _curves(part, x, quantity), lines, gaps))
    shown = table[words.good(table, quantity.column)]
    noisy = shown[(shown[x] > 0) & (shown["noise"] != "")]
    gap_words = words.gap_notes(table[~words.good(table, quantity.column)], x, split[::-1])
    noise_words = words.noise_notes(noisy, x, split[::-1])

    beside = table[facet].nunique() if facet and len(table) else 1
    # Without rows, a third panel goes below: three side by side get too narrow to read.
    across = beside if rows else min(beside, 2)
    down = -(-len(panels) // across)
    most = max(len(panel.curves) + len(panel.models) for panel in panels)
    direct = len(panels) <= 2 and most <= (_DIRECT if len(panels) == 2 else 2 * _DIRECT)
    height = max(2.5 if down > 1 else 3.3, 0.7 + 1.5 * _LABEL * most * direct, 1.3 * _LABEL * most / down)
    look = {kind: style.line_look(MUTED, kind) for kind in KINDS}
    keys = [style.line_key(said, marker="o", **look[kind]) for kind, said in words.origins(table)]
    if noise_words:
        keys.append(style.line_key("disturbed while it was measured", **style.RINGED))
    figure = style.sheet(
        title,
        0.45 + down * height,
        subtitle=words.conditions(table, (x, facet, rows)),
        keys=keys,
        notes=[*(f"{words.TIMES} {n}" for n in gap_words), *(f"{words.RING} {n}" for n in noise_words), note],
        width=style.WIDTH + 1.2 * (across - 1),
    )
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    axes = grid.ravel()
    y_values = shown[columns].to_numpy(dtype=float).ravel().tolist()
    y_values += [y for panel in panels for line in panel.models.values() for _, y in line if y_values]
    low, high = _limits(y_values, least=8.0, pad=0.05) or (1.0, 1000.0)
    ranks = max((int(panel.gaps["rank"].max()) + 1 for panel in panels if len(panel.gaps)), default=0)
    low /= (high / low) ** (0.05 * ranks)  # room for the crosses of gaps at the foot
    axes[0].set(xscale="log", yscale="log", xlim=x_limits, ylim=(low, high))
    width = figure.get_figwidth() / across - 2.0
    _set_ticks(axes[0], reached, width, quantity)
    for ax in grid[:, 0]:
        long = down > 1 or len(quantity.name) > 20  # for the height of a panel
        ax.set_ylabel(f"{quantity.name}{chr(10) if long else ' '}({quantity.better} is better)")
    for i, ax in enumerate(axes):
        ax.set_axis_on() if i < len(panels) else ax.set_axis_off()
        if i < len(panels) <= i + across:
            ax.set_xlabel(x)
            ax.tick_params(labelbottom=True)
    looks = _looks(table, panels)
    for ax, panel in zip(axes, panels, strict=False):
        shaded = regimes(panel.rows) if callable(regimes) else regimes
        ax.set_title(panel.name, pad=6 + _shade(ax, shaded))
        _fill(ax, panel, x, quantity, looks, noisy.loc[noisy.index.intersection(panel.rows.index)])
        if direct:
            _name_ends(ax, panel, looks, height - 0.5)
    if not direct:
        _legend(axes[across - 1], panels, looks)
    said = _alt(title, table, x, quantity, panels, (x, facet, rows))
    return Picture(figure, alt or said + words.missing(gap_words) + words.disturbed(noise_words))


def _looks(table: pd.DataFrame, panels: list[_Panel]) -> dict[str, Look]:
    """A look for each curve and each series: the first curve of a contender has the contender's."""
    keys: dict[str, str] = {}
    pairs = [(curve.name, curve.contender) for panel in panels for curve in panel.curves]
    for name, contender in [*pairs, *zip(table["series"], table["contender"], strict=True)]:
        keys.setdefault(name, name if contender in keys.values() else contender)
    found = style.looks(keys.values())
    return {name: found[key] for name, key in keys.items()}


def _split(table: pd.DataFrame, axes: list[str]) -> list[tuple[str, pd.DataFrame]]:
    """Panels row by row, each with its name; one panel when the table is not to be split or is empty."""
    if table.empty:
        return [("", table)]
    numeric = pd.api.types.is_numeric_dtype
    values = [sorted(table[a].unique()) if numeric(table[a]) else table[a].unique() for a in axes]
    found = []
    for place in product(*values):
        name = ", ".join(
            words.named(axis, value) for axis, value in list(zip(axes, place, strict=True))[::-1]
        )
        found.append((name, table[(table[axes] == list(place)).all(axis=1)]))
    return found


def _curves(rows: pd.DataFrame, x: str, quantity: _Quantity) -> list[_Curve]:
    """The panel's curves: one for each contender, kind, device and whatever else differs at one x."""
    rows = rows[words.good(rows, quantity.column) & (rows[x] > 0)]
    keys = ["contender", "series", "kind", "device", "direction", "dtype", "clock", "cache"]
    for name in words.extra_axes(rows):
        if name != x and (rows.groupby([*keys, x], dropna=False)[name].nunique(dropna=False) > 1).any():
            keys.append(name)
    columns = {x: "x", quantity.column: "y", quantity.low: "low", quantity.high: "high"}
    found = []
    for values, part in rows.groupby(keys, dropna=False, sort=False):
        key = dict(zip(keys, values, strict=True))
        alike = rows[(rows["series"] == key["series"]) & (rows["kind"] == key["kind"])]
        varying = [name for name in keys[3:] if key[name] != "" and alike[name].nunique() > 1]
        name = ", ".join([str(key["series"]), *(words.named(each, key[each]) for each in varying)])
        points = part[list(columns)].rename(columns=columns).astype(float).sort_values("x")
        found.append(_Curve(name, str(key["kind"]), str(key["contender"]), points))
    return found


def _model_points(
    model: Model, rows: pd.DataFrame, x: str, limits: tuple[float, float]
) -> list[tuple[float, float]]:
    if callable(model):
        return [(float(at), float(model(float(at)))) for at in np.geomspace(*limits, 200)]
    if isinstance(model, str):
        if model not in rows:
            raise ValueError(f"no column {model!r} to draw a line from")
        return _model_points(
            pd.to_numeric(rows[model]).groupby(rows[x]).median().dropna().items(), rows, x, limits
        )
    return sorted((float(at), float(y)) for at, y in model)


# --- axes -------------------------------------------------------------------------------------------


def _limits(values: Iterable[float], least: float, pad: float) -> tuple[float, float] | None:
    """Around the values: ``pad`` of the axis' length each side, ``least`` from end to end; None for none."""
    known = [v for v in values if v > 0 and math.isfinite(v)]
    if not known:
        return None
    low, high = min(known), max(known)
    widen = max((high / low) ** pad, math.sqrt(least / (high / low)))
    return low / widen, high * widen


def _set_ticks(ax: Axes, reached: list[float], width: float, quantity: _Quantity) -> None:
    """Below the data's own places where there is room for them, else at powers of two; values at 1, 2, 5."""
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    room = 0.15 + 0.085 * len(words.plain(max([32768.0, *reached])))  # inches of a label
    roomy = len(reached) and (np.diff(np.log(reached)) / math.log(right / left) * width > room).all()
    at = FixedLocator(reached) if roomy else LogLocator(2, numticks=int(width / room) + 1)
    ax.xaxis.set(major_locator=at, minor_locator=NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.plain(value)))
    ax.yaxis.set_major_locator(LogLocator(10, (1, 2, 5) if high / low < 200 else (1,)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity.text(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _shade(ax: Axes, regimes: Sequence[Regime]) -> int:
    """Shade the regimes and name them above the panel, on two rows in turn; the height of the names."""
    low, high = ax.get_xlim()
    inside = [(max(low, a or low), min(high, high if b is None else b), name) for a, b, name in regimes]
    inside = [(a, b, name) for a, b, name in inside if a < b]
    for i, (a, b, name) in enumerate(inside):
        ax.axvspan(a, b, color=style.SHADES[i % 2], linewidth=0, zorder=0)
        at, align = (
            (b, "right") if b == high and i else (a, "left") if i == 0 else (math.sqrt(a * b), "center")
        )
        style.note(ax, name, at, 1, 0, 3 + 14 * (i % 2), across="data", ha=align, color=MUTED, gid="regime")
    return 14 * min(len(inside), 2)


def _fill(
    ax: Axes, panel: _Panel, x: str, quantity: _Quantity, looks: Mapping[str, Look], noisy: pd.DataFrame
) -> None:
    for points, dashes in zip(panel.models.values(), _DASHES * len(panel.models), strict=False):
        ax.plot(*np.reshape(points, (-1, 2)).T, color=INK, linewidth=1.0, linestyle=dashes)
    for curve in panel.curves:
        look, band = looks[curve.name], curve.points.dropna()
        if len(band) > 1:
            ax.fill_between(band["x"], band["low"], band["high"], color=look.hue, alpha=0.16, linewidth=0)
        else:
            ax.vlines(band["x"], band["low"], band["high"], color=look.hue, linewidth=1.2)
        ax.plot(curve.points["x"], curve.points["y"], gid=f"{curve.kind} curve", **look.curve(curve.kind))
    rings = ax.plot(noisy[x], noisy[quantity.column], zorder=8, clip_on=False, gid="noisy", **style.RINGED)
    rings[0].set_in_layout(False)  # where they reach beyond the panel, it keeps its size
    for at, series, rank in panel.gaps[[x, "series", "rank"]].itertuples(index=False):
        cross: dict[str, Any] = {
            "marker": "x",
            "markeredgewidth": 1.7,
            "color": looks[series].hue,
            "gid": "gap",
        }
        ax.plot([at], [0.03 + 0.048 * rank], transform=ax.get_xaxis_transform(), **cross)
    if not panel.curves:
        ax.text(0.5, 0.5, words.NOTHING, transform=ax.transAxes, ha="center", color=MUTED)


# --- names ------------------------------------------------------------------------------------------


def _names(panels: list[_Panel]) -> dict[tuple[str, str], str]:
    """What each curve, by name and kind, is called: kinds are named when there are several."""
    found = [(curve.name, curve.kind) for panel in panels for curve in panel.curves]
    several = len({kind for _, kind in found}) > 1
    return {(name, kind): f"{name} ({kind})" if several and kind != LIVE else name for name, kind in found}


def _name_ends(ax: Axes, panel: _Panel, looks: Mapping[str, Look], height: float) -> None:
    """Right of the panel, each name beside the end of its line, moved up where two would meet."""
    names, low, high = _names([panel]), *np.log(ax.get_ylim())
    labels = []
    for curve in panel.curves:
        look = looks[curve.name]
        how: dict[str, Any] = {
            "color": style.text_colour(look.hue),
            "weight": "bold" if look.strong else "normal",
        }
        labels.append((*curve.points[["x", "y"]].iloc[-1], fill(names[curve.name, curve.kind], 20), how))
    thin: dict[str, Any] = {"color": INK, "style": "italic"}
    labels += [(*line[-1], fill(name, 20), thin) for name, line in panel.models.items() if line]
    labels.sort(key=lambda label: label[1])
    halves = [(_LABEL * (1 + text.count("\n")) + 0.03) / height / 2 for *_, text, _ in labels]
    places: list[float] = []
    for (_, y, *_), half, before in zip(labels, halves, [0.0, *halves], strict=False):
        least = places[-1] + before + half if places else -math.inf
        places.append(max((math.log(y) - low) / (high - low), least))
    top = 1.04
    for i in reversed(range(len(places))):  # and down again from the top
        places[i] = min(places[i], top - halves[i])
        top = places[i] - halves[i]
    for (x, y, text, how), place in zip(labels, places, strict=True):
        leader: dict[str, Any] = {
            "arrowstyle": "-",
            "color": how["color"],
            "linewidth": 0.7,
            "relpos": (0, 0.5),
        }
        how = {**how, "va": "center", "linespacing": 1.15, "annotation_clip": False, "gid": "label"}
        ax.annotate(text, (x, y), (1.05, place), textcoords="axes fraction", arrowprops=leader, **how)


def _legend(ax: Axes, panels: list[_Panel], looks: Mapping[str, Look]) -> None:
    """Beside the panels, where a name at each end of each line would be said too often."""
    found = {said: looks[name].curve(kind) for (name, kind), said in _names(panels).items()}
    models = dict.fromkeys(name for panel in panels for name in panel.models)
    found |= {
        name: {"color": INK, "linewidth": 1.0, "linestyle": dashes}
        for name, dashes in zip(models, _DASHES * len(models), strict=False)
    }
    handles = [ax.plot([], [], **how)[0] for how in found.values()]
    ax.legend(handles, [fill(name, 22, break_long_words=False) for name in found], loc=(1.04, 0))


# --- alt text ---------------------------------------------------------------------------------------


def _alt(
    title: str,
    table: pd.DataFrame,
    x: str,
    quantity: _Quantity,
    panels: list[_Panel],
    varying: Iterable[str | None],
) -> str:
    shown = table[words.good(table, quantity.column)]
    what = f"{title.rstrip('.')}. {quantity.name.capitalize()} against {x}, both axes logarithmic"
    if shown.empty:
        return f"{what}: {words.NOTHING}."
    ends = dict.fromkeys(words.plain(end) for end in (shown[x].min(), shown[x].max()))
    same = words.conditions(table, varying)
    sentences = [f"{what}, {x} {' to '.join(ends)}{', ' + same if same else ''}."]
    for kind in KINDS:
        told = []
        for panel in panels:
            if found := [curve for curve in panel.curves if curve.kind == kind]:
                tell = _winners if quantity is _TIME and kind != PUBLISHED else _ranges
                told.append((f"{panel.name}: " if panel.name else "") + tell(found, x, quantity))
        if told:
            sentences.append(
                words.sentence(f"{words.origin(shown[shown['kind'] == kind], kind)}: {'. '.join(told)}")
            )
    if names := dict.fromkeys(name for panel in panels for name in panel.models):
        sentences.append(f"Thin lines: {', '.join(names)}.")
    return " ".join(sentences)


def _winners(found: list[_Curve], x: str, quantity: _Quantity) -> str:
    """Who is fastest where; a difference within the larger spread is a tie. ``copy`` is a yardstick only."""
    rivals = [curve for curve in found if curve.contender != "copy"] or found
    places = sorted({at for curve in rivals for at in curve.points["x"]})
    runs = []
    for verdict, group in groupby(places, key=lambda at: _verdict(rivals, at)):
        ats = [words.plain(at) for at in group]
        runs.append(f"{verdict} {f'at {x} {ats[0]}' if len(ats) == 1 else f'from {x} {ats[0]} to {ats[-1]}'}")
    last = sorted((p.y, c.name) for c in rivals for p in c.points[c.points["x"] == places[-1]].itertuples())
    values = [f"{name} {quantity.text(y)}" for y, name in last]
    return f"{words.shortlist(runs, 4)}; at {x} {words.plain(places[-1])} {words.shortlist(values, 4)}"


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
        text = f"{curve.name} {quantity.text(ys[0])} at {x} {words.plain(xs[0])}"
        if len(xs) > 1:
            text += f" to {quantity.text(ys[-1])} at {words.plain(xs[-1])}"
            below = np.nonzero(ys <= 1)[0]
            if quantity.better == "higher" and len(below):
                last = below[-1] == len(ys) - 1
                text += (
                    ", not above 1 at the end"
                    if last
                    else f", above 1 from {words.plain(xs[below[-1] + 1])} on"
                )
        told.append(text)
    return "; ".join(told)
