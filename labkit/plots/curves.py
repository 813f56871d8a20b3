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
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from labkit.measure.rows import KINDS, LIVE, PUBLISHED
from labkit.plots import formatting, style
from labkit.plots.formatting import RING_SIGN, TIMES_SIGN, axis_value, format_size
from labkit.plots.style import INK, MUTED, ContenderStyle, Picture

Model = Callable[[float], float] | str | Iterable[tuple[float, float]]
"""A thin line: a function of the axis, the name of a column, or points (x, y)."""
Models = Mapping[str, Model]
Regime = tuple[float | None, float | None, str]
"""A shaded stretch of the axis: from, to (None is open) and its name."""
_DASHES: tuple[Any, ...] = ("-", (0, (7, 2, 1.5, 2)), (0, (1.5, 2)), (0, (9, 4)))
_REFERENCE = "copy"
"""The contender that is the roof of all others, and no competitor: a copy of the same bytes."""
_LABEL_LINE = 0.2
"""Height of a line of a label, in inches."""
_MOST_LABELS = 8
"""The most names that stand at the ends of a panel's lines; more are a legend."""


class Quantity(NamedTuple):
    """What the vertical axis shows: columns of value and spread, its name, how a value is written."""

    column: str
    low: str
    high: str
    name: str
    better: str
    written: Callable[[float], str]
    models: Models = MappingProxyType({})
    """Lines that every figure of it has."""


TIME = Quantity("median_us", "p20_us", "p80_us", "time per call", "lower", formatting.format_duration)
_RATIO = formatting.format_ratio
SPEEDUP = Quantity("speedup", "low", "high", "speedup", "higher", _RATIO, {"equal": lambda _: 1.0})
_MOVED, _FEWEST = "bytes moved over the fewest possible", {"fewest possible": lambda _: 1.0}
TRAFFIC = Quantity("traffic", "low", "high", _MOVED, "lower", _RATIO, _FEWEST)


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
    """Rows without a value, with their ``rank`` among those at the same x."""


@style.course_style()
def curves(
    table: pd.DataFrame,
    x: str = "width",
    *,
    title: str,
    floor: Models | Callable[[pd.DataFrame], Models] | None = None,
    regimes: Callable[[pd.DataFrame], Sequence[Regime]] | None = None,
    facet: str | None = None,
    rows: str | None = None,
    values: Sequence[float] = (),
    quantity: Quantity = TIME,
) -> Picture:
    """Time per call against an axis, both logarithmic, a curve with its p20 to p80 band per contender.

    ``table`` is one of `labkit.measure.rows.table`; ``floor`` names thin dark model lines in microseconds;
    ``regimes`` are shaded and named; ``facet`` and ``rows`` are columns that make panels side by side and
    one above the other. ``regimes`` is a function of a panel's rows, and so is ``floor`` where panels differ.
    Rows without a time are a small cross at the foot of the panel and a footnote; points that were disturbed
    (column ``noise``) stand in a ring, and a footnote says by what. The axis reaches over ``values`` too,
    where nothing was measured yet. ``quantity`` is what is drawn: `TIME`, `SPEEDUP` or `TRAFFIC`. Raises
    ValueError for a column that the table lacks.
    """
    split, columns = [name for name in (rows, facet) if name], [quantity.column, quantity.low, quantity.high]
    table = formatting.checked_table(table, [x, quantity.column, *split], [x, *columns])
    has_value = formatting.has_value(table, quantity.column)
    shown = table[has_value]
    noisy = shown[(shown[x] > 0) & (shown["noise"] != "")]
    gap_notes = formatting.gap_notes(table[~has_value], x, split[::-1])
    noise_notes = formatting.noise_notes(noisy, x, split[::-1])
    sizes = sorted({float(v) for v in [*table[x].dropna(), *values] if v > 0})
    x_limits = _limits(sizes, least=1.0 if len(sizes) > 1 else 4.0, pad=0.03) or (32.0, 32768.0)
    panels = []
    for name, part in _split_into_panels(table, split):
        named = {**((floor(part) if callable(floor) else floor) or {}), **quantity.models}
        lines = {key: _model_points(model, part, x, x_limits) for key, model in named.items()}
        gaps = part[~has_value.loc[part.index] & (part[x] > 0)].drop_duplicates(["series", x])
        gaps = gaps.assign(rank=gaps.groupby(x).cumcount())
        panels.append(_Panel(name, part, _panel_curves(part, x, quantity), lines, gaps))

    # How many panels side by side. Without rows, a third one goes below: three get too narrow to read.
    n_facets = table[facet].nunique() if facet and len(table) else 1
    across = n_facets if rows else min(n_facets, 2)
    down = -(-len(panels) // across)
    most = max(len(panel.curves) + len(panel.models) for panel in panels)
    labelled = len(panels) <= 2 and most <= (_MOST_LABELS if len(panels) == 2 else 2 * _MOST_LABELS)
    label_height = 1.5 * _LABEL_LINE * most if labelled else 0.0
    height = max(2.5 if down > 1 else 3.3, 0.7 + label_height, 1.3 * _LABEL_LINE * most / down)
    key = {kind: style.line_style(MUTED, kind) | {"marker": "o"} for kind in KINDS}
    legend = [Line2D([], [], label=origin, **key[kind]) for kind, origin in formatting.origins(table)]
    if noise_notes:
        legend.append(Line2D([], [], label="disturbed while it was measured", **style.NOISE_RING))
    figure = style.new_figure(
        title,
        0.45 + down * height,
        subtitle=formatting.common_conditions(table, (x, facet, rows)),
        legend=legend,
        footnotes=[*(f"{TIMES_SIGN} {n}" for n in gap_notes), *(f"{RING_SIGN} {n}" for n in noise_notes)],
        width=style.WIDTH + 1.2 * (across - 1),
    )
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    axes = grid.ravel()

    y_values = shown[columns].to_numpy(dtype=float).ravel().tolist()
    y_values += [y for panel in panels for line in panel.models.values() for _, y in line if y_values]
    low, high = _limits(y_values, least=8.0, pad=0.05) or (1.0, 1000.0)
    n_crosses = max((int(panel.gaps["rank"].max()) + 1 for panel in panels if len(panel.gaps)), default=0)
    low /= (high / low) ** (0.05 * n_crosses)  # room for the crosses of gaps at the foot
    axes[0].set(xscale="log", yscale="log", xlim=x_limits, ylim=(low, high))
    _set_ticks(axes[0], sizes, figure.get_figwidth() / across - 2.0, quantity)
    for ax in grid[:, 0]:
        is_long = down > 1 or len(quantity.name) > 20  # for the height of a panel
        ax.set_ylabel(f"{quantity.name}{chr(10) if is_long else ' '}({quantity.better} is better)")
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    for ax in axes[max(0, len(panels) - across) : len(panels)]:
        ax.set_xlabel(x)
        ax.tick_params(labelbottom=True)
    styles = _curve_styles(table, panels)
    for ax, panel in zip(axes, panels, strict=False):
        ax.set_title(panel.name, pad=6 + _shade_regimes(ax, regimes(panel.rows) if regimes else ()))
        _draw_panel(ax, panel, x, quantity, styles, noisy.loc[noisy.index.intersection(panel.rows.index)])
        if labelled:
            _label_line_ends(ax, panel, styles, height - 0.5)
    if not labelled:
        _add_legend(axes[across - 1], panels, styles)
    alt = _alt_text(title, shown, x, quantity, panels, formatting.common_conditions(table, (x, facet, rows)))
    notes = [formatting.notes_as_alt("Missing", gap_notes), formatting.notes_as_alt("Disturbed", noise_notes)]
    return Picture(figure, alt + "".join(notes))


def speedups(
    table: pd.DataFrame, x: str = "width", *, title: str, naive: Models | None = None, **options: Any
) -> Picture:
    """Ratios against an axis, both logarithmic: columns ``speedup``, ``kind``, ``contender`` or ``series``.

    ``series`` is what a curve is called, where that is not its contender; ``low`` and ``high`` are the band;
    ``source`` is named for published points. The ratio 1 is a line named "equal", and ``naive`` names thin
    lines of what one would expect. ``options`` are those of :func:`curves`, as is all else.
    """
    return curves(table, x, title=title, floor=naive, quantity=SPEEDUP, **options)


def traffic(table: pd.DataFrame, x: str = "width", *, title: str, **options: Any) -> Picture:
    """Bytes moved over the fewest possible, counted and not timed, against an axis: column ``traffic``.

    The line at 1 is one pass over inputs and outputs. ``options`` are those of :func:`curves`, as is all
    else.
    """
    return curves(table, x, title=title, quantity=TRAFFIC, **options)


# --- panels and their curves ------------------------------------------------------------------------


def _curve_styles(table: pd.DataFrame, panels: list[_Panel]) -> dict[str, ContenderStyle]:
    """A style for each curve and each series: the first curve of a contender has the contender's."""
    keys: dict[str, str] = {}
    pairs = [(curve.name, curve.contender) for panel in panels for curve in panel.curves]
    for name, contender in [*pairs, *zip(table["series"], table["contender"], strict=True)]:
        keys.setdefault(name, name if contender in keys.values() else contender)
    styles = style.contender_styles(keys.values())
    return {name: styles[key] for name, key in keys.items()}


def _split_into_panels(table: pd.DataFrame, axes: list[str]) -> list[tuple[str, pd.DataFrame]]:
    """Panels row by row, each with its name; one panel when the table is not to be split or is empty."""
    if table.empty:
        return [("", table)]
    numeric = pd.api.types.is_numeric_dtype
    values = [sorted(table[a].unique()) if numeric(table[a]) else table[a].unique() for a in axes]
    panels = []
    for chosen in product(*values):
        names = [axis_value(axis, value) for axis, value in zip(axes, chosen, strict=True)]
        panels.append((", ".join(names[::-1]), table[(table[axes] == list(chosen)).all(axis=1)]))
    return panels


def _panel_curves(rows: pd.DataFrame, x: str, quantity: Quantity) -> list[_Curve]:
    """The panel's curves: one for each contender, kind, device and whatever else differs at one x."""
    rows = rows[formatting.has_value(rows, quantity.column) & (rows[x] > 0)]
    keys = ["contender", "series", "kind", "device", "direction", "dtype", "clock", "cache"]
    for name in formatting.shape_axes(rows):
        if name != x and (rows.groupby([*keys, x], dropna=False)[name].nunique(dropna=False) > 1).any():
            keys.append(name)
    columns = {x: "x", quantity.column: "y", quantity.low: "low", quantity.high: "high"}
    found = []
    for values, part in rows.groupby(keys, dropna=False, sort=False):
        key = dict(zip(keys, values, strict=True))
        same_name = rows[(rows["series"] == key["series"]) & (rows["kind"] == key["kind"])]
        varying = [name for name in keys[3:] if key[name] != "" and same_name[name].nunique() > 1]
        name = ", ".join([str(key["series"]), *(axis_value(each, key[each]) for each in varying)])
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
        points = pd.to_numeric(rows[model]).groupby(rows[x]).median().dropna().items()
    else:
        points = iter(model)
    return sorted((float(at), float(y)) for at, y in points)


# --- axes -------------------------------------------------------------------------------------------


def _limits(values: Iterable[float], least: float, pad: float) -> tuple[float, float] | None:
    """Around the values: ``pad`` of the axis' length each side, ``least`` from end to end; None for none."""
    known = [v for v in values if v > 0 and math.isfinite(v)]
    if not known:
        return None
    low, high = min(known), max(known)
    widen = max((high / low) ** pad, math.sqrt(least / (high / low)))
    return low / widen, high * widen


def _set_ticks(ax: Axes, sizes: list[float], width: float, quantity: Quantity) -> None:
    """Ticks at the measured sizes where there is room, else at powers of two; of values at 1, 2, 5 and 10.

    ``width`` is that of the axis in inches.
    """
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    label = 0.15 + 0.085 * len(format_size(max([32768.0, *sizes])))  # inches
    fits = sizes and (np.diff(np.log(sizes)) / math.log(right / left) * width > label).all()
    locator = FixedLocator(sizes) if fits else LogLocator(2, numticks=int(width / label) + 1)
    ax.xaxis.set(major_locator=locator, minor_locator=NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(value)))
    ax.yaxis.set_major_locator(LogLocator(10, (1, 2, 5) if high / low < 200 else (1,)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity.written(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _shade_regimes(ax: Axes, regimes: Sequence[Regime]) -> int:
    """Shade the regimes and name them above the panel, on two rows in turn; returns the names' height."""
    low, high = ax.get_xlim()
    inside = [(max(low, a or low), min(high, high if b is None else b), name) for a, b, name in regimes]
    inside = [(a, b, name) for a, b, name in inside if a < b]
    for i, (a, b, name) in enumerate(inside):
        ax.axvspan(a, b, color=style.SHADES[i % 2], linewidth=0, zorder=0)
        at, align = math.sqrt(a * b), "center"
        if i == 0:
            at, align = a, "left"
        elif b == high:
            at, align = b, "right"
        how = {"xycoords": ("data", "axes fraction"), "ha": align, "color": MUTED, "gid": "regime"}
        style.offset_text(ax, name, (at, 1), (0, 3 + 14 * (i % 2)), **how)
    return 14 * min(len(inside), 2)


def _draw_panel(
    ax: Axes,
    panel: _Panel,
    x: str,
    quantity: Quantity,
    styles: Mapping[str, ContenderStyle],
    noisy: pd.DataFrame,
) -> None:
    for points, dashes in zip(panel.models.values(), _DASHES * len(panel.models), strict=False):
        ax.plot(*np.reshape(points, (-1, 2)).T, color=INK, linewidth=1.0, linestyle=dashes)
    for curve in panel.curves:
        look, band = styles[curve.name], curve.points.dropna()
        if len(band) > 1:
            ax.fill_between(band["x"], band["low"], band["high"], color=look.colour, alpha=0.16, linewidth=0)
        else:
            ax.vlines(band["x"], band["low"], band["high"], color=look.colour, linewidth=1.2)
        ax.plot(curve.points["x"], curve.points["y"], gid=f"{curve.kind} curve", **look.curve(curve.kind))
    ring_style = {**style.NOISE_RING, "zorder": 8, "clip_on": False, "gid": "noisy"}
    (rings,) = ax.plot(noisy[x], noisy[quantity.column], **ring_style)
    rings.set_in_layout(False)  # where they reach beyond the panel, it keeps its size
    for at, series, rank in panel.gaps[[x, "series", "rank"]].itertuples(index=False):
        cross: dict[str, Any] = dict(marker="x", markeredgewidth=1.7, color=styles[series].colour, gid="gap")
        ax.plot([at], [0.03 + 0.048 * rank], transform=ax.get_xaxis_transform(), **cross)
    if not panel.curves:
        ax.text(0.5, 0.5, formatting.NOTHING_MEASURED, transform=ax.transAxes, ha="center", color=MUTED)


# --- names of curves --------------------------------------------------------------------------------


def _labels(panels: list[_Panel]) -> dict[tuple[str, str], str]:
    """The label of each curve, by name and kind: kinds are named when there are several."""
    found = [(curve.name, curve.kind) for panel in panels for curve in panel.curves]
    several = len({kind for _, kind in found}) > 1
    return {(name, kind): f"{name} ({kind})" if several and kind != LIVE else name for name, kind in found}


def _label_line_ends(ax: Axes, panel: _Panel, styles: Mapping[str, ContenderStyle], height: float) -> None:
    """Right of the panel, each name beside the end of its line, moved up where two would meet.

    ``height`` is that of the panel in inches.
    """
    names, low, high = _labels([panel]), *np.log(ax.get_ylim())
    labels: list[tuple[float, float, str, dict[str, Any]]] = []
    for curve in panel.curves:
        look = styles[curve.name]
        weight = "bold" if look.emphasised else "normal"
        font: dict[str, Any] = {"color": style.text_colour(look.colour), "weight": weight}
        x, y = curve.points[["x", "y"]].iloc[-1]
        labels.append((x, y, fill(names[curve.name, curve.kind], 20), font))
    for name, line in panel.models.items():
        if line:
            labels.append((*line[-1], fill(name, 20), {"color": INK, "style": "italic"}))
    labels.sort(key=lambda label: label[1])
    # Heights as shares of the panel's: half of each label, then the middle of each.
    halves = [(_LABEL_LINE * (1 + text.count("\n")) + 0.03) / height / 2 for *_, text, _ in labels]
    middles: list[float] = []
    floor = -math.inf
    for (_, y, *_), half in zip(labels, halves, strict=True):
        middles.append(max((math.log(y) - low) / (high - low), floor + half))
        floor = middles[-1] + half
    ceiling = 1.04
    for i in reversed(range(len(middles))):  # and down again from the top
        middles[i] = min(middles[i], ceiling - halves[i])
        ceiling = middles[i] - halves[i]
    for (x, y, text, font), middle in zip(labels, middles, strict=True):
        leader: dict[str, Any] = dict(arrowstyle="-", color=font["color"], linewidth=0.7, relpos=(0, 0.5))
        font |= {"va": "center", "linespacing": 1.15, "annotation_clip": False, "gid": "label"}
        ax.annotate(text, (x, y), (1.05, middle), textcoords="axes fraction", arrowprops=leader, **font)


def _add_legend(ax: Axes, panels: list[_Panel], styles: Mapping[str, ContenderStyle]) -> None:
    """Beside the panels, where a name at each end of each line would be said too often."""
    found = {label: styles[name].curve(kind) for (name, kind), label in _labels(panels).items()}
    models = dict.fromkeys(name for panel in panels for name in panel.models)
    for name, dashes in zip(models, _DASHES * len(models), strict=False):
        found[name] = {"color": INK, "linewidth": 1.0, "linestyle": dashes}
    handles = [Line2D([], [], **how) for how in found.values()]
    ax.legend(handles, [fill(name, 22, break_long_words=False) for name in found], loc=(1.04, 0))


# --- alt text ---------------------------------------------------------------------------------------


def _alt_text(
    title: str, shown: pd.DataFrame, x: str, quantity: Quantity, panels: list[_Panel], conditions: str
) -> str:
    """The figure in sentences: its axes; the findings of each kind and panel; the names of thin lines."""
    axes = f"{title.rstrip('.')}. {quantity.name.capitalize()} against {x}, both axes logarithmic"
    if shown.empty:
        return f"{axes}: {formatting.NOTHING_MEASURED}."
    ends = dict.fromkeys(format_size(end) for end in (shown[x].min(), shown[x].max()))
    sentences = [f"{axes}, {x} {' to '.join(ends)}{', ' + conditions if conditions else ''}."]
    for kind in KINDS:
        findings = []
        for panel in panels:
            if found := [curve for curve in panel.curves if curve.kind == kind]:
                describe = _fastest if quantity is TIME and kind != PUBLISHED else _ranges
                findings.append((f"{panel.name}: " if panel.name else "") + describe(found, x, quantity))
        if findings:
            origin = formatting.origin(shown[shown["kind"] == kind], kind)
            sentences.append(formatting.as_sentence(f"{origin}: {'. '.join(findings)}"))
    if names := dict.fromkeys(name for panel in panels for name in panel.models):
        sentences.append(f"Thin lines: {', '.join(names)}.")
    return " ".join(sentences)


def _fastest(found: list[_Curve], x: str, quantity: Quantity) -> str:
    """Who is fastest where; a difference within the larger spread is a tie."""
    rivals = [curve for curve in found if curve.contender != _REFERENCE] or found
    points = pd.concat([curve.points.assign(name=curve.name) for curve in rivals])
    points = points.assign(spread=(points["high"] - points["low"]).fillna(0.0)).sort_values(["y", "spread"])

    def outcome(size: float) -> str:
        here = points[points["x"] == size]
        best = here.iloc[0]
        within = here["y"] - best["y"] <= here["spread"].clip(lower=best["spread"])
        tied = sorted(here.loc[within, "name"].unique())
        if len(tied) == 1:
            return f"{tied[0]} fastest"
        return (
            f"{len(tied)} contenders tie" if len(tied) > 3 else f"{', '.join(tied[:-1])} and {tied[-1]} tie"
        )

    sizes, stretches = sorted(points["x"].unique()), []
    for said, group in groupby(sizes, key=outcome):
        ends = [format_size(size) for size in group]
        where = f"at {x} {ends[0]}" if len(ends) == 1 else f"from {x} {ends[0]} to {ends[-1]}"
        stretches.append(f"{said} {where}")
    last = points[points["x"] == sizes[-1]].sort_values(["y", "name"])
    times = [f"{name} {quantity.written(y)}" for name, y in zip(last["name"], last["y"], strict=True)]
    summary = formatting.first_items(stretches, 4)
    return f"{summary}; at {x} {format_size(sizes[-1])} {formatting.first_items(times, 4)}"


def _ranges(found: list[_Curve], x: str, quantity: Quantity) -> str:
    """From where to where each curve goes; of a ratio also from which x on it stays above 1."""
    described = []
    for curve in found:
        xs, ys = curve.points["x"].to_numpy(), curve.points["y"].to_numpy()
        text = f"{curve.name} {quantity.written(ys[0])} at {x} {format_size(xs[0])}"
        if len(xs) > 1:
            text += f" to {quantity.written(ys[-1])} at {format_size(xs[-1])}"
            below = np.nonzero(ys <= 1)[0]
            if quantity.better == "higher" and len(below):
                above = xs[below[-1] + 1 :]
                text += (
                    f", above 1 from {format_size(above[0])} on" if len(above) else ", not above 1 at the end"
                )
        described.append(text)
    return "; ".join(described)
