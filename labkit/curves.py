"""Curves over an axis: times and ratios, in one panel or several, labelled directly at their ends."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.curve_labels import LEADER, Label, ink, place_labels
from labkit.drawing import (
    INK,
    LINE,
    MARGIN,
    MUTED,
    SHADES,
    SLOTS,
    SMALL_SIZE,
    TEXT_SIZE,
    Key,
    Page,
    Shown,
    bounds,
    figure_of,
    slots,
    stagger,
    text_colour,
    text_width,
    tint,
    write,
)
from labkit.provenance import (
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
from labkit.rows import KINDS, LIVE, PUBLISHED, RECORDED
from labkit.scales import doubling_ticks, limits, set_ticks, value_ticks

Model = Callable[[float], float] | str | Iterable[tuple[float, float]]
"""A thin line: a function of the axis, the name of a column, or points (x, y)."""
Models = Mapping[str, Model]
Regime = tuple[float | None, float | None, str]
"""A shaded stretch of the axis: from, to (None is open) and its name."""

_LINES: dict[str, Any] = {LIVE: "-", RECORDED: (0, (4.5, 2.2)), PUBLISHED: "none"}
_MODEL_LINES = ("-", (0, (7, 2, 1.5, 2)), (0, (1.5, 2)), (0, (9, 4)))
_GAP_STEP = 9.0
_RINGED: dict[str, Any] = {
    "color": INK,
    "linestyle": "none",
    "marker": "o",
    "markersize": 11.0,
    "markerfacecolor": "none",
    "markeredgewidth": 1.0,
}
"""What was disturbed, whatever its kind: the fill of the marker inside says that."""


@dataclass(frozen=True)
class _Quantity:
    """What the vertical axis shows: columns of value and spread, its name, how a value is written."""

    column: str
    low: str
    high: str
    name: str
    text: Callable[[float], str]
    less_is_better: bool
    ranked: bool = True
    """Whether the alt text says who wins."""

    @property
    def axis(self) -> str:
        """What is written along the axis."""
        if not self.ranked:
            return self.name
        return f"{self.name} ({'lower' if self.less_is_better else 'higher'} is better)"


_TIME = _Quantity("median_us", "p20_us", "p80_us", "time per call", duration, True)
_SPEEDUP = _Quantity("speedup", "low", "high", "speedup", factor, False)
_TRAFFIC = _Quantity("traffic", "low", "high", "bytes moved over the fewest possible", factor, True, False)


# --- curves over an axis ----------------------------------------------------------------------------


def sweep(
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
) -> Shown:
    """Time per call against an axis, both logarithmic, a curve with its p20 to p80 band per contender.

    ``table`` is one of :func:`labkit.rows.table`; ``floor`` names thin dark model lines in microseconds;
    ``regimes`` are shaded and named; ``facet`` and ``rows`` are columns that make panels side by side and
    one above the other. Where panels differ, ``floor`` and ``regimes`` are functions of a panel's rows.
    Rows without a time are a small cross at the foot of the panel and a footnote; points that were disturbed
    (column ``noise``) stand in a ring, and a footnote says by what. The axis reaches over ``values`` too,
    where nothing was measured yet. ``alt`` replaces the generated alt text. ValueError names a column that
    the table lacks.
    """
    return _curves_figure(table, x, _TIME, title, floor or {}, regimes, facet, rows, values, note, alt, {})


def speedup(
    table: pd.DataFrame,
    x: str = "width",
    *,
    title: str,
    one_line: bool = True,
    naive: Models | Callable[[pd.DataFrame], Models] | None = None,
    regimes: Sequence[Regime] | Callable[[pd.DataFrame], Sequence[Regime]] = (),
    facet: str | None = None,
    rows: str | None = None,
    values: Sequence[float] = (),
    note: str = "",
    alt: str | None = None,
) -> Shown:
    """Ratios against an axis, both logarithmic: columns ``speedup``, ``kind``, ``contender`` or ``series``.

    ``series`` is what a curve is called, where that is not its contender; ``low`` and ``high`` are the band;
    ``source`` is named for published points. ``one_line`` draws the ratio 1 as "equal", ``naive`` thin
    lines of what one would expect. The rest as in :func:`sweep`.
    """
    fixed: Models = {"equal": lambda _: 1.0} if one_line else {}
    return _curves_figure(
        table, x, _SPEEDUP, title, naive or {}, regimes, facet, rows, values, note, alt, fixed
    )


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
) -> Shown:
    """Bytes moved over the fewest possible, counted and not timed, against an axis: column ``traffic``.

    The line at 1 is one pass over inputs and outputs. The rest as in :func:`sweep`.
    """
    fixed: Models = {"fewest possible": lambda _: 1.0}
    return _curves_figure(table, x, _TRAFFIC, title, {}, (), facet, rows, values, note, alt, fixed)


@dataclass(frozen=True)
class _Curve:
    contender: str
    name: str
    kind: str
    points: pd.DataFrame
    """Columns x, y, low, high, sorted by x; all finite but low and high."""


@dataclass(frozen=True)
class _Panel:
    name: str
    rows: pd.DataFrame
    curves: list[_Curve]
    models: list[tuple[str, list[tuple[float, float]]]]
    regimes: list[tuple[float, float, str]]


def _curves_figure(
    table: pd.DataFrame,
    x: str,
    quantity: _Quantity,
    title: str,
    models: Models | Callable[[pd.DataFrame], Models],
    regimes: Sequence[Regime] | Callable[[pd.DataFrame], Sequence[Regime]],
    facet: str | None,
    down: str | None,
    values: Sequence[float],
    note: str,
    alt: str | None,
    fixed: Models,
) -> Shown:
    split = [name for name in (facet, down) if name]
    table = prepared(table, [x, quantity.column, *split], [x, quantity.column, quantity.low, quantity.high])
    reached = [*table[x].dropna(), *values]
    x_limits = limits(reached, least=4.0 if len(set(reached)) < 2 else 1.0, pad=0.03)
    panels = []
    for name, rows in _split(table, facet, down):
        spec = models(rows) if callable(models) else models
        shaded = regimes(rows) if callable(regimes) else regimes
        panels.append(
            _Panel(
                name,
                rows,
                _curves(rows, x, quantity),
                [(key, _model_points(model, rows, x, x_limits)) for key, model in {**spec, **fixed}.items()],
                _clipped(shaded, x_limits),
            )
        )
    figure = _CurvesFigure(table, x, quantity, panels, reached, x_limits, facet, down)
    return Shown(figure.draw(title, note), alt or figure.alt(title))


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
    curves = []
    for values, found in rows.groupby(keys, dropna=False, sort=False):
        key = dict(zip(keys, values, strict=True))
        alike = rows[(rows["series"] == key["series"]) & (rows["kind"] == key["kind"])]
        details = [
            named(name, key[name]) for name in keys[3:] if key[name] != "" and alike[name].nunique() > 1
        ]
        name = ", ".join([str(key["series"]), *details])
        drawn = (
            found.rename(columns=columns)[list(columns.values())]
            .astype(float)
            .sort_values("x", kind="stable")
        )
        curves.append(_Curve(str(key["contender"]), name, str(key["kind"]), drawn.reset_index(drop=True)))
    return curves


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


@dataclass
class _CurvesFigure:
    """Curves in panels that share their axes; a label stands at each curve's end."""

    table: pd.DataFrame
    x: str
    quantity: _Quantity
    panels: list[_Panel]
    reached: list[float]
    """What the horizontal axis has room for."""
    x_limits: tuple[float, float]
    facet: str | None
    down: str | None

    def __post_init__(self) -> None:
        across = len(_values(self.table, self.facet))
        # Without rows, a third panel goes below: three side by side get too narrow to read.
        self.columns = across if self.down else min(across, 2)
        self.lines = -(-len(self.panels) // self.columns)
        self.gaps = self.table[~good(self.table, self.quantity.column)]
        split = [name for name in (self.facet, self.down) if name]
        self.gap_notes = gap_notes(self.gaps, self.x, split)
        self.noise_notes = noise_notes(self._noisy(self.table), self.x, split)
        contenders = [curve.contender for panel in self.panels for curve in panel.curves]
        self.slots = slots([*contenders, *self.gaps["contender"]])

    # -- layout

    def draw(self, title: str, note: str) -> Figure:
        many = len(self.panels) > 1
        labels = [self._labels(panel) for panel in self.panels]
        tallest = max(sum(label.height for label in group) for group in labels)
        height = max(170.0 if self.lines > 1 else 215.0 if many else 255.0, tallest + 8)
        y_limits = self._y_limits(height)
        y_ticks = value_ticks(y_limits, height)
        page = Page(
            title,
            subtitle=conditions(self.table, (self.x, self.facet, self.down)),
            keys=[
                *(Key(words, _sample(kind)) for kind, words in origins(self.table)),
                *([Key("disturbed while it was measured", _RINGED)] if self.noise_notes else []),
            ],
            notes=[
                *(f"{TIMES} {gap}" for gap in self.gap_notes),
                *(f"{RING} {noise}" for noise in self.noise_notes),
                *([note] if note else []),
            ],
            rows=self.lines,
            columns=self.columns,
            panel_height=height,
            left=max(text_width(self.quantity.text(tick), SMALL_SIZE) for tick in y_ticks[0]) + 32,
            right=max((label.width for group in labels for label in group), default=0)
            + LEADER
            + (14 if self.columns > 1 else 4),  # not up to the next panel
            width=576.0 if self.columns == 1 else 120 + 270.0 * self.columns,
        )
        places = [self._regime_places(panel, page.panel_width) for panel in self.panels]
        above = LINE * SMALL_SIZE * max((row + 1 for group in places for _, row in group), default=0)
        page = replace(page, above=above + (LINE * TEXT_SIZE if many else 0) + 6)
        x_ticks = doubling_ticks(self.reached, self.x_limits, page.panel_width)
        figure, axes = page.draw()
        for spare in axes[len(self.panels) :]:
            spare.set_visible(False)
        for i, panel in enumerate(self.panels):
            axes[i].set(xscale="log", yscale="log", xlim=self.x_limits, ylim=y_limits)
            set_ticks(axes[i], x_ticks, y_ticks, self.quantity.text)
            self._name_axes(axes[i], i)
            if many:
                left, _, _, top = bounds(axes[i])
                write(figure, left, top + 3 + above, panel.name, bold=True, va="bottom")
            self._fill(axes[i], panel, places[i], labels[i])
        return figure

    def _y_limits(self, height: float) -> tuple[float, float]:
        """Around everything that is drawn, with room at the foot for the crosses of gaps."""
        columns = [self.quantity.column, self.quantity.low, self.quantity.high]
        shown = self.table[good(self.table, self.quantity.column)][columns].to_numpy(dtype=float).ravel()
        if not len(shown):
            return (1.0, 1000.0) if self.quantity.less_is_better else (0.1, 100.0)
        models = [y for panel in self.panels for _, line in panel.models for _, y in line]
        low, high = limits([*shown, *models], least=8.0, pad=0.05)
        counts = [n for panel in self.panels for n in self._gaps(panel)[self.x].value_counts()]
        deepest = max(counts, default=0)
        foot = deepest * _GAP_STEP
        return low / (high / low) ** (foot / (height - foot)), high

    def _name_axes(self, ax: Axes, i: int) -> None:
        left, bottom, right, top = bounds(ax)
        leftmost, lowest = i % self.columns == 0, i + self.columns >= len(self.panels)
        ax.tick_params(labelleft=leftmost, labelbottom=lowest)
        if lowest:
            write(figure_of(ax), (left + right) / 2, bottom - 34, self.x, ha="center", va="bottom")
        if leftmost:
            middle = (bottom + top) / 2
            write(figure_of(ax), MARGIN, middle, self.quantity.axis, rotation=90, ha="left", va="center")

    def _regime_places(self, panel: _Panel, width: float) -> list[tuple[float, int]]:
        low, high = np.log(self.x_limits)
        centres = [(np.log(a * b) / 2 - low) / (high - low) * width for a, b, _ in panel.regimes]
        return stagger(centres, [text_width(name, SMALL_SIZE) for *_, name in panel.regimes], 0, width)

    # -- what a panel shows

    def _fill(self, ax: Axes, panel: _Panel, places: list[tuple[float, int]], labels: list[Label]) -> None:
        left, _, _, top = bounds(ax)
        for i, ((a, b, name), (centre, row)) in enumerate(zip(panel.regimes, places, strict=True)):
            ax.axvspan(a, b, color=SHADES[i % len(SHADES)], linewidth=0, zorder=0)
            y = top + 3 + row * LINE * SMALL_SIZE
            write(
                figure_of(ax), left + centre, y, name, size=SMALL_SIZE, color=MUTED, ha="center", va="bottom"
            )
        for i, (_, line) in enumerate(panel.models):
            if line:
                dashes = _MODEL_LINES[i % len(_MODEL_LINES)]
                ax.plot(*zip(*line, strict=True), color=INK, linewidth=1.0, linestyle=dashes, zorder=2)
        for curve in panel.curves:
            self._draw_curve(ax, curve)
        for _, point in self._noisy(panel.rows).iterrows():
            ax.plot([point[self.x]], [point[self.quantity.column]], zorder=7, gid="noisy", **_RINGED)
        for at, gaps in self._gaps(panel).groupby(self.x):
            for i, contender in enumerate(gaps["contender"]):
                self._draw_gap(ax, float(at), i, str(contender))
        if not panel.curves:
            ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", color=MUTED, size=TEXT_SIZE + 1)
        lines: list[tuple[Any, Any]] = [(curve.points["x"], curve.points["y"]) for curve in panel.curves]
        lines += [([x for x, _ in line], [y for _, y in line]) for _, line in panel.models if line]
        place_labels(ax, labels, ink(ax, lines))

    def _draw_curve(self, ax: Axes, curve: _Curve) -> None:
        hue, shape = SLOTS[self.slots[curve.contender]]
        ours = hue == SLOTS[0][0]
        band = curve.points.dropna()
        if len(band) > 1:
            ax.fill_between(
                band["x"], band["low"], band["high"], color=hue, alpha=0.16, linewidth=0, zorder=3
            )
        else:
            ax.vlines(band["x"], band["low"], band["high"], color=hue, linewidth=1.2, zorder=3)
        ax.plot(
            curve.points["x"],
            curve.points["y"],
            color=hue,
            linestyle=_LINES[curve.kind],
            linewidth=2.4 if ours else 1.6,
            marker=shape,
            markersize=6.5 if ours else 5.5,
            markerfacecolor=_face(hue, curve.kind),
            markeredgewidth=1.2,
            zorder=6 if ours else 5,
            gid=f"{curve.kind} curve",
        )

    def _noisy(self, rows: pd.DataFrame) -> pd.DataFrame:
        return rows[good(rows, self.quantity.column) & (rows[self.x] > 0) & (rows["noise"] != "")]

    def _gaps(self, panel: _Panel) -> pd.DataFrame:
        rows = panel.rows[~good(panel.rows, self.quantity.column)]
        return rows[rows[self.x] > 0].drop_duplicates(["contender", self.x])

    def _draw_gap(self, ax: Axes, at: float, rank: int, contender: str) -> None:
        _, bottom, _, top = bounds(ax)
        ax.plot(
            [at],
            [(6 + rank * _GAP_STEP) / (top - bottom)],
            transform=ax.get_xaxis_transform(),
            color=SLOTS[self.slots[contender]][0],
            marker="x",
            markersize=5.5,
            markeredgewidth=1.7,
            gid="gap",
        )

    def _labels(self, panel: _Panel) -> list[Label]:
        """One for each line; kinds are named when there are several, models stand in italics."""
        several = len({curve.kind for curve in panel.curves}) > 1
        labels = []
        for curve in panel.curves:
            hue = SLOTS[self.slots[curve.contender]][0]
            name = f"{curve.name} ({curve.kind})" if several and curve.kind != LIVE else curve.name
            x, y = curve.points[["x", "y"]].iloc[-1]
            labels.append(Label(name, float(x), float(y), text_colour(hue), bold=hue == SLOTS[0][0]))
        return labels + [Label(name, *line[-1], INK, italic=True) for name, line in panel.models if line]

    # -- alt text

    def alt(self, title: str) -> str:
        shown = self.table[good(self.table, self.quantity.column)]
        what = (
            f"{title.rstrip('.')}. {self.quantity.name.capitalize()} against {self.x}, both axes logarithmic"
        )
        if shown.empty:
            return f"{what}: {NOTHING}.{missing(self.gap_notes)}"
        ends = dict.fromkeys(plain(end) for end in (shown[self.x].min(), shown[self.x].max()))
        same = conditions(self.table, (self.x, self.facet, self.down))
        sentences = [f"{what}, {self.x} {' to '.join(ends)}{', ' + same if same else ''}."]
        for kind in KINDS:
            found = []
            for panel in self.panels:
                curves = [curve for curve in panel.curves if curve.kind == kind]
                if curves:
                    ranked = self.quantity.less_is_better and self.quantity.ranked
                    find = _winners if ranked and kind != PUBLISHED else _ranges
                    lead = f"{panel.name}: " if panel.name else ""
                    found.append(lead + find(curves, self.x, self.quantity))
            if found:
                sentences.append(
                    sentence(f"{origin(shown[shown['kind'] == kind], kind)}: {'. '.join(found)}")
                )
        names = dict.fromkeys(name for panel in self.panels for name, _ in panel.models)
        if names:
            sentences.append(f"Thin lines: {', '.join(names)}.")
        return " ".join(sentences) + missing(self.gap_notes) + disturbed(self.noise_notes)


def _face(hue: str, kind: str) -> str:
    """What a marker is filled with: its colour when live, white when recorded, pale when published."""
    return {LIVE: hue, RECORDED: "white", PUBLISHED: tint(hue, 0.3)}[kind]


def _sample(kind: str) -> dict[str, Any]:
    return {
        "color": MUTED,
        "linestyle": _LINES[kind],
        "linewidth": 1.6,
        "marker": "o",
        "markersize": 5.5,
        "markerfacecolor": _face(MUTED, kind),
        "markeredgewidth": 1.2,
    }


# --- findings in words --------------------------------------------------------------------------------


def _winners(curves: list[_Curve], x: str, quantity: _Quantity) -> str:
    """Who is fastest where; a difference within the larger spread is a tie. ``copy`` is a yardstick only."""
    rivals = [curve for curve in curves if curve.contender != "copy"] or curves
    places = sorted({at for curve in rivals for at in curve.points["x"]})
    verdicts = [(_verdict(rivals, at), at) for at in places]
    runs = []
    for verdict, group in groupby(verdicts, key=lambda found: found[0]):
        ats = [plain(at) for _, at in group]
        runs.append(
            f"{verdict} " + (f"at {x} {ats[0]}" if len(ats) == 1 else f"from {x} {ats[0]} to {ats[-1]}")
        )
    last = sorted((p.y, c.name) for c in rivals for p in c.points[c.points["x"] == places[-1]].itertuples())
    values = [f"{name} {quantity.text(y)}" for y, name in last]
    return f"{shortlist(runs, 4)}; at {x} {plain(places[-1])} {shortlist(values, 4)}"


def _verdict(rivals: list[_Curve], at: float) -> str:
    here = []
    for curve in rivals:
        for p in curve.points[curve.points["x"] == at].itertuples():
            here.append((p.y, p.high - p.low if np.isfinite(p.high - p.low) else 0.0, curve.name))
    best, noise, _ = min(here)
    level = sorted({name for y, own, name in here if y - best <= max(own, noise)})
    if len(level) == 1:
        return f"{level[0]} fastest"
    return (
        f"{len(level)} contenders tie" if len(level) > 3 else f"{', '.join(level[:-1])} and {level[-1]} tie"
    )


def _ranges(curves: list[_Curve], x: str, quantity: _Quantity) -> str:
    """From where to where each curve goes; of a ratio also from which x on it stays above 1."""
    found = []
    for curve in curves:
        xs, ys = curve.points["x"].to_numpy(), curve.points["y"].to_numpy()
        text = f"{curve.name} {quantity.text(ys[0])} at {x} {plain(xs[0])}"
        if len(xs) > 1:
            text += f" to {quantity.text(ys[-1])} at {plain(xs[-1])}"
            below = np.nonzero(ys <= 1)[0]
            if not quantity.less_is_better and len(below):
                ended = below[-1] == len(ys) - 1
                text += (
                    ", not above 1 at the end" if ended else f", above 1 from {plain(xs[below[-1] + 1])} on"
                )
        found.append(text)
    return "; ".join(found)
