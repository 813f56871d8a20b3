"""The two figures of the course: bars for a race, curves for a sweep."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from labkit.display import style
from labkit.display.style import INK, MUTED, WIDTH, Picture, Style

BAR = 0.31
"""Height of a row of bars, in inches."""
LINE = 0.19
"""Height of a line of small text, in inches."""
AXIS = "time per call (lower is better)"
FAR = 4
"""Groups of bars whose longest ones are that many times apart have a scale each."""
FEW_POINTS = 9
"""Up to so many points of a curve have each a tick of its own."""
TICK_WIDTH = 0.07
"""Of the axis: what a tick's number needs."""
LETTERS = 104
"""Letters of small text in a line as wide as a figure."""


@dataclass(frozen=True)
class Bar:
    """A bar of a race. ``floor`` is the time of a copy of the same bytes, ``note`` why there is no value."""

    name: str
    value: float | None
    look: Style
    live: bool
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """A curve of a sweep: points (x, value, low, high), sorted by x. Published ones have no line."""

    name: str
    points: list[tuple[float, float, float, float]]
    look: Style
    kind: str
    """live, recorded or published."""


def _figure(
    title: str, height: float, lines: Sequence[str], right: float = 0.99
) -> tuple[Figure, Axes, float]:
    """A figure with a title and small lines above axes of a height in inches; and how high it is in all."""
    small = [part for line in lines for part in wrap(line, LETTERS)]
    head = 0.42 + LINE * len(small)
    total = head + height
    figure = Figure(figsize=(WIDTH, total))
    figure.text(0.012, 1 - 0.1 / total, title, va="top", size=13, weight="bold")
    figure.text(0.012, 1 - 0.38 / total, "\n".join(small), va="top", size=10, color=MUTED, linespacing=1.3)
    axes = figure.add_axes((0.3, 0.5 / total, right - 0.3, (height - 0.55) / total))
    return figure, axes, total


def _end(bar: Bar) -> float:
    """How far to the right anything of a bar is drawn."""
    return max(bar.value or 0, bar.high or 0, bar.floor or 0)


def _weight(bar: Bar) -> str:
    return "bold" if bar.look.bold else "normal"


def _draw(axes: Axes, bar: Bar, value: float, y: int, scale: float) -> None:
    """A bar at a height, with its whiskers, its tick and its value beside it; all lengths times ``scale``."""
    axes.barh(
        y,
        scale * value,
        0.66,
        facecolor=bar.look.colour if bar.live else style.pale(bar.look.colour, 0.35),
        edgecolor=bar.look.colour,
        linestyle="-" if bar.live else (0, (4, 2)),
        linewidth=1.2,
        zorder=3,
    )
    if bar.low is not None and bar.high is not None:
        whisker = [scale * bar.low, scale * bar.high]
        axes.plot(whisker, [y, y], color=INK, linewidth=1.3, marker="|", zorder=5)
    if bar.floor:
        at = [scale * bar.floor], [y]
        axes.plot(*at, color=INK, marker="|", markersize=19, markeredgewidth=1.8, zorder=6)
    end = (scale * _end(bar), y)
    beside: Any = dict(textcoords="offset points", va="center", weight=_weight(bar))
    axes.annotate(style.duration(value), end, (6, 0), **beside)


@style.course_style()
def bars(title: str, groups: Mapping[str, Sequence[Bar]], lines: Sequence[str]) -> Picture:
    """Bars from zero under headings; whiskers from p20 to p80, a tick where a copy of the same bytes ends.

    Groups whose times are far apart have a scale each, or the short bars could not be compared. ``lines`` say
    where the numbers are from. Live bars are full, recorded ones pale with a dashed edge.
    """
    rows = sum(len(group) + bool(name) for name, group in groups.items())
    every = [bar for group in groups.values() for bar in group]
    ticked = any(bar.floor for bar in every)
    if ticked:
        lines = [
            *lines,
            "Black tick: the time of a copy of the bytes that have to be read and written, each once.",
        ]
    if any(bar.low for bar in every):
        pale = "Pale bars are recorded. " if len({bar.live for bar in every}) > 1 else ""
        lines = [*lines, f"{pale}Whiskers reach from the 20th to the 80th percentile."]
    figure, axes, _ = _figure(title, 0.75 + BAR * rows, lines, right=0.96)
    ends = {heading: max(map(_end, group), default=0) or 1.0 for heading, group in groups.items()}
    longest = max(ends.values(), default=1.0)
    apart = longest > FAR * min(ends.values(), default=1.0)
    axes.set(xlim=(0, 1.17 * longest), ylim=(rows - 0.5, -0.5), xlabel=AXIS)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: style.duration(x, longest) if x else "0"))
    axes.grid(axis="y", visible=False)
    if apart:
        axes.set(xticks=[], xlabel=f"{AXIS}, each group on a scale of its own")
    y, names, said = 0, [], []
    for heading, group in groups.items():
        scale = longest / ends[heading] if apart else 1.0
        if heading:
            axes.text(-0.42, y, heading, transform=axes.get_yaxis_transform(), weight="bold", va="center")
            y += 1
        for bar in group:
            names.append((y, bar.name, _weight(bar)))
            if bar.value is None:
                axes.text(0.01 * longest, y, f"no time: {bar.note}", va="center", color=MUTED)
            else:
                _draw(axes, bar, bar.value, y, scale)
            outcome = style.duration(bar.value) if bar.value else bar.note
            said.append(f"{heading} {bar.name} {outcome}".strip())
            y += 1
    axes.set_yticks([at for at, *_ in names], [name for _, name, _ in names])
    axes.tick_params(axis="y", length=0)
    for label, (_, _, weight) in zip(axes.get_yticklabels(), names, strict=True):
        label.set_fontweight(weight)
    return Picture(figure, f"{title}: {'; '.join(said)}. {' '.join(lines)}")


@dataclass
class Panel:
    """What one figure of curves shows: the curves, thin lines by name, and the axis's name."""

    curves: list[Curve]
    x: str
    quantity: str
    better: str
    written: Callable[[float], str]
    floors: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    span: Sequence[float] = ()
    """Sizes that the axis has to include, though nothing is measured there yet."""


@style.course_style()
def curves(title: str, panel: Panel, lines: Sequence[str]) -> Picture:
    """Curves over a logarithmic axis, with bands from p20 to p80. ``lines`` say where the numbers are from.

    Live curves are solid with full markers, recorded ones dashed with hollow markers, published ones full
    markers alone. Where curves lie on each other the earlier one is wider, and shows beneath the later one.
    """
    shown = [curve for curve in panel.curves if curve.points]
    figure, axes, total = _figure(title, 3.9, lines, right=0.7)
    axes.set_position((0.145, 0.55 / total, 0.555, 3.3 / total))
    axes.set(
        xscale="log", yscale="log", xlabel=panel.x, ylabel=f"{panel.quantity}\n({panel.better} is better)"
    )
    handles, kinds = [], {curve.kind for curve in shown}
    for number, curve in enumerate(shown):
        at, value, low, high = zip(*curve.points, strict=True)
        width = 1.8 if curve.look.bold else max(1.4, 3.2 - 0.6 * number)
        dashes: Any = {"live": "-", "recorded": (0, (3, 1)), "published": "none"}[curve.kind]
        face = "white" if curve.kind == "recorded" else curve.look.colour
        size = 9.5 if curve.look.marker == "*" or curve.kind == "published" else 6.5
        look: dict[str, Any] = dict(
            color=curve.look.colour, linestyle=dashes, linewidth=width, marker=curve.look.marker,
            markersize=size, markerfacecolor=face, zorder=4 + number,
        )  # fmt: skip
        axes.fill_between(at, low, high, color=curve.look.colour, alpha=0.15, linewidth=0)
        axes.plot(at, value, **look)
        label = f"{curve.name} ({curve.kind})" if len(kinds) > 1 and curve.kind != "live" else curve.name
        handles.append(Line2D([], [], label="\n".join(wrap(label, 20)), **look))
    for number, (name, points) in enumerate(panel.floors.items()):
        thin: dict[str, Any] = dict(color=INK, linewidth=1.0, linestyle=("-", ":", "--", "-.")[number % 4])
        thin["zorder"] = 4 + len(shown)  # seen on the broad curves, too
        axes.plot(*zip(*points, strict=True), **thin)
        handles.append(Line2D([], [], label="\n".join(wrap(name, 20)), **thin))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.72, (0.55 + 3.3) / total),
    )
    _limits(axes, panel, shown)
    if not shown:
        axes.text(0.5, 0.5, "nothing measured yet", transform=axes.transAxes, ha="center", color=MUTED)
    ends = [_ends(curve, panel) for curve in shown]
    return Picture(figure, f"{title}: {'; '.join(ends) or 'nothing measured yet'}. {' '.join(lines)}")


def _ends(curve: Curve, panel: Panel) -> str:
    """Where a curve begins and ends, in words."""
    (first, begin, *_), *_, (last, end, *_) = (*curve.points, curve.points[-1])
    return f"{curve.name} {panel.written(begin)} at {panel.x} {first:g}, {panel.written(end)} at {last:g}"


def _apart(xs: Iterable[float]) -> list[float]:
    """Of the points those, from the last one down, whose ticks have room beside each other."""
    ordered = sorted(set(xs), reverse=True)
    room = TICK_WIDTH * math.log(ordered[0] / ordered[-1])
    kept = ordered[:1]
    for x in ordered[1:]:
        if math.log(kept[-1] / x) > room:
            kept.append(x)
    return kept


def _limits(axes: Axes, panel: Panel, shown: Iterable[Curve]) -> None:
    """The ends and ticks of both axes. Those of x are at the points, or at powers of two for many points."""
    xs = [*panel.span, *(point[0] for curve in shown for point in curve.points)]
    ys = [value for curve in shown for point in curve.points for value in point[1:]] or [1.0, 100.0]
    ys += [y for points in panel.floors.values() for _, y in points]
    low, high = min(ys), max(ys)
    pad = max((high / low) ** 0.06, (8 / (high / low)) ** 0.5)
    axes.set_ylim(low / pad, high * pad)
    if xs:
        few = len(set(xs)) <= FEW_POINTS
        axes.xaxis.set_major_locator(FixedLocator(_apart(xs)) if few else LogLocator(2, numticks=9))
        # A point far beyond the last power of two gets the next one as a tick.
        end = max(xs) if few or math.log2(max(xs)) % 1 < 0.3 else 2 ** math.ceil(math.log2(max(xs)))
        axes.set_xlim(min(xs) / 1.15, end * 1.15)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    steps = (1, 2, 3, 4, 5, 7) if high / low < 8 else (1, 2, 5) if high / low < 200 else (1,)
    axes.yaxis.set_major_locator(LogLocator(10, steps))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: panel.written(y)))
    axes.yaxis.set_minor_formatter(NullFormatter())
