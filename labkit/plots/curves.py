"""Curves over an axis: times and ratios, in one panel or several, named in one legend."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice, product
from textwrap import fill
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from labkit.measure.rows import KINDS, LIVE
from labkit.plots import formatting, style
from labkit.plots.formatting import RING_SIGN, TIMES_SIGN, axis_value, format_size
from labkit.plots.style import INK, MUTED, ContenderStyle, Picture

Points = list[tuple[float, float]]
ReferenceLines = Mapping[str, Callable[[float], float]]
"""Thin lines by name, functions of the axis."""
Styles = Mapping[str, ContenderStyle]
_EMPTY_X_LIMITS, _EMPTY_Y_LIMITS = (32.0, 32768.0), (1.0, 1000.0)
"""Ends of the axes of a figure that has no values: the widths and times that are usual in the course."""
_DASHES: tuple[Any, ...] = ("-", (0, (7, 2, 1.5, 2)), (0, (1.5, 2)), (0, (9, 4)))


class Quantity(NamedTuple):
    """What the vertical axis shows: columns of value and spread, its name, how a value is formatted."""

    column: str
    low: str
    high: str
    name: str
    better: str
    format: Callable[[float], str]
    reference_lines: ReferenceLines = MappingProxyType({})
    """Lines that every figure of it has."""


TIME = Quantity("median_us", "p20_us", "p80_us", "time per call", "lower", formatting.format_duration)
_RATIO = formatting.format_ratio
SPEEDUP = Quantity("speedup", "low", "high", "speedup", "higher", _RATIO, {"equal": lambda _: 1.0})


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
    reference_points: dict[str, Points]
    """Points (x, y) of each reference line, sorted by x."""


@style.course_style()
def curves(
    table: pd.DataFrame,
    x: str = "width",
    *,
    title: str,
    reference_lines: ReferenceLines | Callable[[pd.DataFrame], ReferenceLines] | None = None,
    facet: str | None = None,
    rows: str | None = None,
    values: Sequence[float] = (),
    quantity: Quantity = TIME,
) -> Picture:
    """Time per call against an axis, both logarithmic, a curve with its p20 to p80 band per contender.

    ``table`` is one of `labkit.measure.rows.as_results`; ``facet`` and ``rows`` are columns that make panels
    side by side and one above the other. ``reference_lines`` are thin dark lines in the unit of the quantity,
    by name, or a function from a panel's rows to them. ``values``: x positions that the axis must include
    even if they have no rows yet. ``quantity`` is what is drawn: `TIME` (in microseconds) or `SPEEDUP`.

    Rows without a time are a small cross at the foot of the panel and a footnote; points that were disturbed
    (column ``noise``) stand in a ring, and a footnote says by what. Raises ValueError for a column that the
    table lacks.
    """
    panel_axes = [name for name in (rows, facet) if name]
    columns = [quantity.column, quantity.low, quantity.high]
    table = formatting.checked_table(table, [x, quantity.column, *panel_axes], [x, *columns])
    conditions = formatting.common_conditions(table, (x, facet, rows))
    has_value = formatting.has_value(table, quantity.column)
    shown, gaps = table[has_value], table[~has_value]
    noisy = shown[shown["noise"] != ""]
    gap_notes = formatting.footnotes(gaps, gaps["note"].replace("", "no value"), x, panel_axes[::-1])
    noise_notes = formatting.footnotes(noisy, noisy["noise"], x, panel_axes[::-1])
    positions = sorted({*table[x].dropna(), *values})
    near = 1 < len(positions) < 8 and positions[-1] < 2 * positions[0]  # no power of two tells them apart
    x_limits = _log_limits(positions, least=1.0 if near else 4.0, pad=0.03) or _EMPTY_X_LIMITS
    panels = []
    for name, part in _split_into_panels(table, panel_axes):
        given = (reference_lines(part) if callable(reference_lines) else reference_lines) or {}
        lines = _reference_points({**given, **quantity.reference_lines}, x_limits)
        panels.append(_Panel(name, part, _panel_curves(part, x, quantity), lines))
    styles = _curve_styles(panels)

    # How many panels side by side. Without rows, a third one goes below: three get too narrow to read.
    n_facets = table[facet].nunique() if facet and len(table) else 1
    across = n_facets if rows else min(n_facets, 2)
    key = ContenderStyle(MUTED, "o")
    origins = [Line2D([], [], label=text, **key.curve(kind)) for kind, text in formatting.origins(table)]
    if noise_notes:
        origins.append(Line2D([], [], label="disturbed while it was measured", **style.NOISE_RING))
    notes = [f"{TIMES_SIGN} {n}" for n in gap_notes] + [f"{RING_SIGN} {n}" for n in noise_notes]
    legend = _legend_lines(panels, styles)
    down = math.ceil(len(panels) / across)
    legend_height = style.LINE_HEIGHT * sum(1.4 + str(line.get_label()).count("\n") for line in legend)
    height, width = max(2.5 * down if down > 1 else 3.3, legend_height), style.WIDTH + 1.2 * (across - 1)
    words: dict[str, Any] = dict(subtitle=conditions, legend=origins, footnotes=notes)
    figure = style.new_figure(title, 0.45 + height, **words, width=width)
    figure.legend(handles=legend, loc="outside right center", borderaxespad=0.6)
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)

    y_values = shown[columns].to_numpy(float).ravel().tolist()
    if y_values:
        y_values += [y for panel in panels for line in panel.reference_points.values() for _, y in line]
    y_limits = _log_limits(y_values, least=8.0, pad=0.05) or _EMPTY_Y_LIMITS
    grid[0, 0].set(xscale="log", yscale="log", xlim=x_limits, ylim=y_limits)
    _set_axes(grid, len(panels), x, quantity, positions if near else None)
    for ax, panel in zip(grid.ravel(), panels, strict=False):
        ax.set_title(panel.name)
        _draw_panel(ax, panel, x, quantity, styles)
    alt = _alt_text(title, shown, x, quantity, panels, conditions)
    alt += formatting.notes_as_alt("Missing", gap_notes) + formatting.notes_as_alt("Disturbed", noise_notes)
    return Picture(figure, alt)


def speedups(table: pd.DataFrame, x: str = "width", *, title: str, **options: Any) -> Picture:
    """Ratios against an axis, both logarithmic: columns ``speedup``, ``kind``, ``contender`` or ``series``.

    ``series`` is what a curve is called, where that is not its contender; ``low`` and ``high`` are the band;
    ``source`` is named for published points. The ratio 1 is a line named "equal". ``options`` are those of
    :func:`curves`, as is all else.
    """
    return curves(table, x, title=title, quantity=SPEEDUP, **options)


# --- panels and their curves ------------------------------------------------------------------------


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


def _reference_points(lines: ReferenceLines, x_limits: tuple[float, float]) -> dict[str, Points]:
    """Points (x, y) of each line over the whole axis, sorted by x."""
    positions = np.geomspace(*x_limits, 200).tolist()
    return {name: [(x, line(x)) for x in positions] for name, line in lines.items()}


def _panel_curves(rows: pd.DataFrame, x: str, quantity: Quantity) -> list[_Curve]:
    """The panel's curves: one for each contender, kind, device and whatever else differs at one x."""
    rows = rows[formatting.has_value(rows, quantity.column) & rows[x].notna()]
    labelled_columns = ["device", "direction", "dtype", "clock", "cache"]  # named where they differ
    for name in formatting.shape_axes(rows):
        same_x = rows.groupby(["contender", "series", "kind", *labelled_columns, x], dropna=False)
        if name != x and (same_x[name].nunique(dropna=False) > 1).any():
            labelled_columns.append(name)
    keys = ["contender", "series", "kind", *labelled_columns]
    columns = {x: "x", quantity.column: "y", quantity.low: "low", quantity.high: "high"}
    found = []
    for values, part in rows.groupby(keys, dropna=False, sort=False):
        key = dict(zip(keys, values, strict=True))
        same_name = rows[(rows["series"] == key["series"]) & (rows["kind"] == key["kind"])]
        varying = [name for name in labelled_columns if key[name] != "" and same_name[name].nunique() > 1]
        name = ", ".join([str(key["series"]), *(axis_value(each, key[each]) for each in varying)])
        points = part[list(columns)].rename(columns=columns).astype(float).sort_values("x")
        found.append(_Curve(name, str(key["kind"]), str(key["contender"]), points))
    return found


def _curve_styles(panels: list[_Panel]) -> dict[str, ContenderStyle]:
    """A contender's first curve has the contender's style; further curves get styles of their own."""
    keys: dict[str, str] = {}
    for curve in [curve for panel in panels for curve in panel.curves]:
        keys.setdefault(curve.name, curve.name if curve.contender in keys.values() else curve.contender)
    styles = style.contender_styles(keys.values())
    return {name: styles[key] for name, key in keys.items()}


def _legend_lines(panels: list[_Panel], styles: Styles) -> list[Line2D]:
    """A line with a label for each curve and reference line, ordered by where they end in the last panel."""
    several_kinds = len({curve.kind for panel in panels for curve in panel.curves}) > 1
    found: dict[str, tuple[float, dict[str, Any]]] = {}  # by label: where it ends, and its look
    for panel in panels:
        for curve in panel.curves:
            kind = f" ({curve.kind})" if several_kinds and curve.kind != LIVE else ""
            found[curve.name + kind] = curve.points["y"].iloc[-1], styles[curve.name].curve(curve.kind)
        looks = _reference_styles(panel)
        for (name, points), look in zip(panel.reference_points.items(), looks, strict=True):
            found[name] = points[-1][1], look
    ordered = sorted(found.items(), key=lambda one: one[1][0], reverse=True)
    return [Line2D([], [], label=fill(name, 22, break_long_words=False), **how) for name, (_, how) in ordered]


def _reference_styles(panel: _Panel) -> list[dict[str, Any]]:
    """A thin dark line for each reference line of a panel, told apart by their dashes."""
    dashes = islice(cycle(_DASHES), len(panel.reference_points))
    return [{"color": INK, "linewidth": 1.0, "linestyle": dash} for dash in dashes]


# --- layout and axes --------------------------------------------------------------------------------


def _set_axes(grid: Any, n_panels: int, x: str, quantity: Quantity, ticks: list[float] | None) -> None:
    """Set the axes, which all panels share: ticks and names. What has no panel is left empty.

    ``ticks``: those of x, if not at powers of two.
    """
    axes, (_, across) = grid.ravel(), grid.shape
    first = axes[0]
    low, high = first.get_ylim()
    powers = LogLocator(2, numticks=9 if across == 1 else 5)
    first.xaxis.set(major_locator=FixedLocator(ticks) if ticks else powers)
    first.xaxis.set(minor_locator=NullLocator(), major_formatter=FuncFormatter(lambda v, _: format_size(v)))
    first.yaxis.set(major_locator=LogLocator(10, (1, 2, 5) if high / low < 200 else (1,)))
    first.yaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity.format(value)))
    first.yaxis.set_minor_formatter(NullFormatter())
    for ax in grid[:, 0]:
        ax.set_ylabel(f"{quantity.name}\n({quantity.better} is better)")
    for ax in axes[n_panels:]:
        ax.set_axis_off()
    for ax in axes[max(0, n_panels - across) : n_panels]:
        ax.set_xlabel(x)
        ax.tick_params(labelbottom=True)


def _log_limits(values: Iterable[float], least: float, pad: float) -> tuple[float, float] | None:
    """Log-axis limits around positive values: at least a factor ``least`` apart, ``pad`` of the length added
    at each end; None without values.
    """
    known = [v for v in values if v > 0 and math.isfinite(v)]
    if not known:
        return None
    low, high = min(known), max(known)
    widen = max((high / low) ** pad, math.sqrt(least / (high / low)))
    return low / widen, high * widen


def _draw_panel(ax: Axes, panel: _Panel, x: str, quantity: Quantity, styles: Styles) -> None:
    for points, look in zip(panel.reference_points.values(), _reference_styles(panel), strict=True):
        ax.plot(*np.array(points).T, **look)
    for curve in panel.curves:
        contender, (at, y, low, high) = styles[curve.name], curve.points.to_numpy().T
        ax.fill_between(at, low, high, color=contender.colour, alpha=0.16, linewidth=0)
        ax.plot(at, y, gid=f"{curve.kind} curve", **contender.curve(curve.kind))
    has_value = formatting.has_value(panel.rows, quantity.column)
    noisy, gaps = panel.rows[has_value & (panel.rows["noise"] != "")], panel.rows.loc[~has_value, x].unique()
    rings = style.NOISE_RING | {"clip_on": False, "in_layout": False, "gid": "noisy"}
    ax.plot(noisy[x], noisy[quantity.column], zorder=8, **rings)
    foot = ax.get_xaxis_transform()
    ax.plot(gaps, [0.03] * len(gaps), "x", color=INK, markeredgewidth=1.7, transform=foot, gid="gap")
    if not panel.curves:
        ax.text(0.5, 0.5, formatting.NOTHING_MEASURED, transform=ax.transAxes, ha="center", color=MUTED)


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
                findings.append((f"{panel.name}: " if panel.name else "") + _ranges(found, x, quantity))
        if findings:
            origin = formatting.origin(shown[shown["kind"] == kind], kind)
            sentences.append(formatting.as_sentence(f"{origin}: {'. '.join(findings)}"))
    if names := dict.fromkeys(name for panel in panels for name in panel.reference_points):
        sentences.append(f"Thin lines: {', '.join(names)}.")
    return " ".join(sentences)


def _ranges(found: list[_Curve], x: str, quantity: Quantity) -> str:
    """From where to where each curve goes; of a ratio also from which x on it stays above 1."""
    described = []
    for curve in found:
        xs, ys = curve.points["x"].to_numpy(), curve.points["y"].to_numpy()
        text = f"{curve.name} {quantity.format(ys[0])} at {x} {format_size(xs[0])}"
        if len(xs) > 1:
            text += f" to {quantity.format(ys[-1])} at {format_size(xs[-1])}"
            below = np.nonzero(ys <= 1)[0]
            if quantity.better == "higher" and len(below):
                above = xs[below[-1] + 1 :]
                end = f"above 1 from {format_size(above[0])} on" if len(above) else "not above 1 at the end"
                text += f", {end}"
        described.append(text)
    return "; ".join(described)
