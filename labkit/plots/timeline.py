"""A timeline of what ran: the host's launches in one lane, the device's kernels in another, gaps visible."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from labkit.measure.rows import RECORDED
from labkit.plots import formatting, style
from labkit.plots.formatting import format_duration
from labkit.plots.style import MUTED, SMALL, Picture

if TYPE_CHECKING:  # drawing needs no torch
    from labkit.profiling.profiles import Profile

_MOST_EXPLAINED = 12
"""The most names that are explained below."""
_COLOURS = {"host": ("#D8D8D8", "#4A4A4A"), "device": ("#4D90FF", "#0048DC")}
"""Face and edge of a lane's boxes."""
_CHARACTER, _NUMBER = 6.0, 17.0
"""Points that a character of a name needs, and a number with its space."""
_AXIS_POINTS = 72 * (style.WIDTH - 1.0)
"""Width of the axes in points, about."""
Span = tuple[float, float]
"""From and to in microseconds after the first event."""


class _Box(NamedTuple):
    start: float
    end: float
    name: str
    row: int


class _Lane(NamedTuple):
    name: str
    boxes: list[_Box]
    """In order of time, each in the lowest row that is free."""
    rows: int

    @property
    def busy(self) -> list[Span]:
        """Stretches without a gap."""
        found: list[Span] = []
        for start, end, *_ in self.boxes:
            if found and start <= found[-1][1]:
                start, end = found[-1][0], max(found.pop()[1], end)
            found.append((start, end))
        return found

    @property
    def gaps(self) -> list[Span]:
        """Stretches between two events in which none runs."""
        return [(before[1], after[0]) for before, after in pairwise(self.busy)]


def _lanes(profile: "Profile") -> tuple[list[_Lane], float]:
    """The lane of the host and that of the device, and the end of the last event; all from the first one."""
    events: dict[str, Sequence[Any]] = {"host": profile.host, "device": profile.kernels}
    first = min((event.start_us for listed in events.values() for event in listed), default=0.0)
    lanes, last = [], 0.0
    for name, listed in events.items():
        boxes, row_ends = [], [-math.inf]
        for event in sorted(listed, key=lambda event: (event.start_us, -event.duration_us)):
            start = event.start_us - first
            end = start + event.duration_us
            row = next((row for row, row_end in enumerate(row_ends) if start >= row_end), len(row_ends))
            row_ends[row : row + 1] = [end]
            boxes.append(_Box(start, end, _kernel_name(event.name) if name == "device" else event.name, row))
            last = max(last, end)
        lanes.append(_Lane(name, boxes, len(row_ends)))
    return lanes, last


def _kernel_name(name: str) -> str:
    """A kernel's name without return type, namespaces, arguments and template parameters."""
    name = re.sub(r"^(void|static|__global__)\s+", "", name.strip())
    while (stripped := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = stripped
    return re.split(r"[<(]", name)[0].split("::")[-1].strip() or "unnamed"


def span_and_longest_gap(profile: "Profile") -> tuple[float, Span | None]:
    """Microseconds from the first event to the end of the last, and the longest gap between kernels.

    The gap is None where kernels leave none.
    """
    (_, device), whole = _lanes(profile)
    return whole, max(device.gaps, key=lambda gap: gap[1] - gap[0], default=None)


class _Axis(NamedTuple):
    """The part of the time axis that is seen, in microseconds after the first event."""

    start: float
    end: float

    @property
    def scale(self) -> float:
        """Points for each microsecond."""
        return _AXIS_POINTS / (self.end - self.start)

    def visible(self, start: float, end: float) -> Span:
        """What is seen of a stretch; its end is before its start where that is nothing."""
        return max(start, self.start), min(end, self.end)

    def fits(self, text: str, start: float, end: float) -> bool:
        """Whether text has room in what is seen of a stretch."""
        start, end = self.visible(start, end)
        return (end - start) * self.scale >= _CHARACTER * len(text) + 6

    def write(self, ax: Axes, text: str, start: float, end: float, y: float, **font: Any) -> None:
        """Text in the middle of what is seen of a stretch."""
        middle = sum(self.visible(start, end)) / 2
        ax.text(middle, y, text, size=SMALL, ha="center", va="center_baseline", **font)


@style.course_style()
def timeline(profile: "Profile", *, title: str, window: Span | None = None) -> Picture:
    """Two lanes against time in microseconds, from the first event: host launches, device kernels.

    A box is as long as its event; overlapping events stand in rows. A name that does not fit its box becomes
    a number, explained below. ``window`` zooms: from and to in microseconds from the first event; what lies
    across an edge is cut there, and lengths in words stay those of whole events. Boxes of a live profile are
    full, those of a recorded one pale with a dashed edge.

    Raises ValueError for a window that is empty or reversed.
    """
    lanes, whole = _lanes(profile)
    axis = _Axis(*(window or (0.0, whole * 1.01 or 1.0)))  # the last box shows its edge
    if not (math.isfinite(axis.start) and math.isfinite(axis.end) and axis.start < axis.end):
        raise ValueError(f"window: {window} is empty; it has to be (from, to) in microseconds, from < to")
    # What is seen. Each lane keeps its number of rows: zooming moves nothing up or down.
    seen = [
        lane._replace(boxes=[box for box in lane.boxes if box.start < axis.end and box.end > axis.start])
        for lane in lanes
    ]
    # Numbers, in order of appearance, for the names that do not fit into each of their boxes.
    tight = [
        (lane.name, box.name)
        for lane in seen
        for box in lane.boxes
        if not axis.fits(box.name, box.start, box.end)
    ]
    numbers = {key: i + 1 for i, key in enumerate(dict.fromkeys(tight))}
    explained = []
    for (lane_name, name), number in numbers.items():
        boxes = next(lane.boxes for lane in seen if lane.name == lane_name)
        durations = [box.end - box.start for box in boxes if box.name == name]
        total = format_duration(sum(durations))
        times = f"{len(durations)} calls, {total} in all" if len(durations) > 1 else total
        explained.append(f"{number}: {formatting.shorten(name, 60)}, {times}")
    if len(explained) > _MOST_EXPLAINED:
        explained[_MOST_EXPLAINED:] = [f"and {len(explained) - _MOST_EXPLAINED} more names"]
    source, summary, legend = "", "", []
    if whole:
        stamp = {
            "kind": profile.kind,
            "device": profile.device,
            "date": profile.date,
            "clock": "",
            "cache": "",
        }
        source = formatting.origin(pd.DataFrame([stamp]), profile.kind)
        summary = _summary(seen, axis, whole, window is not None)
        legend = [Patch(label=source, **_box_style("device", profile.kind))]
    height = sum(lane.rows + 0.9 for lane in lanes)
    figure = style.new_figure(
        title, 0.55 + 0.32 * height, subtitle=summary, legend=legend, footnotes=explained
    )
    ax = figure.add_subplot()
    ax.set(xlim=axis, ylim=(height, -0.15), xlabel="time (µs)")
    ax.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    ax.grid(axis="y", visible=False)
    if not (whole or window):
        ax.text(0.5, 0.5, formatting.NOTHING_MEASURED, transform=ax.transAxes, ha="center", color=MUTED)
    top, middles = 0.0, []
    for lane in seen:
        ax.axhspan(top, top + lane.rows, color=style.SHADES[0], zorder=0)
        below: list[tuple[float, float, str]] = []
        look = _box_style(lane.name, profile.kind)
        for start, end, name, row in lane.boxes:
            y = top + row + 0.5
            ax.broken_barh([(start, end - start)], (y - 0.4, 0.8), zorder=3, **look)
            number = numbers.get((lane.name, name), 0)
            if number > _MOST_EXPLAINED:
                continue
            text = name if axis.fits(name, start, end) else str(number)
            if axis.fits(text, start, end):
                axis.write(ax, text, start, end, y, zorder=5, gid="label")
            else:
                below.append((sum(axis.visible(start, end)) / 2, y + 0.4, text))
        _number_boxes(ax, below, top + lane.rows + 0.3, axis)
        middles.append(top + lane.rows / 2)
        top += lane.rows + 0.9
    for start, end in lanes[1].gaps:
        idle = f"{format_duration(end - start)} idle"
        if axis.fits(idle, start, end):
            y = middles[1] - lanes[1].rows / 2 + 0.5
            axis.write(ax, idle, start, end, y, color=MUTED, style="italic")
    ax.set_yticks(middles, [lane.name for lane in lanes], weight="bold", size="medium")
    ax.tick_params(axis="y", length=0)
    return Picture(figure, _alt_text(title, lanes, seen, axis, summary, source))


def _box_style(lane: str, kind: str) -> dict[str, Any]:
    """The boxes of a lane are full, or pale with a dashed edge when recorded."""
    face, edge = _COLOURS[lane]
    paler = {"facecolor": style.mix_with_white(face, 0.4), "linestyle": (0, (4, 2))}
    return {"facecolor": face, "edgecolor": edge, "linewidth": 0.8, **(paler if kind == RECORDED else {})}


def _number_boxes(ax: Axes, labels: list[tuple[float, float, str]], y: float, axis: _Axis) -> None:
    """Numbers below their boxes, moved right where two would meet; the first of each if too many.

    A label is the middle of a box, its foot, and the number.
    """

    def apart(labels: list[tuple[float, float, str]]) -> list[float]:
        xs: list[float] = []
        for x, *_ in labels:
            xs.append(max(x, xs[-1] + _NUMBER / axis.scale) if xs else x)
        return xs

    xs = apart(labels)
    if xs and xs[-1] > axis.end:
        labels = sorted({text: (x, foot, text) for x, foot, text in labels[::-1]}.values())
        xs = apart(labels)
    for (box_x, foot, text), x in zip(labels, xs, strict=True):
        leader = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
        how: dict[str, Any] = {"size": SMALL, "color": MUTED, "va": "top", "ha": "center", "gid": "label"}
        ax.annotate(text, (box_x, foot), (x, y), arrowprops=leader, annotation_clip=False, **how)


def _summary(seen: Sequence[_Lane], axis: _Axis, whole: float, is_zoomed: bool) -> str:
    host, device = seen
    busy = sum(end - start for start, end in (axis.visible(*span) for span in device.busy))
    counts = ", ".join(
        f"{len(lane.boxes)} {noun}{'' if len(lane.boxes) == 1 else 's'}"
        for lane, noun in ((device, "kernel"), (host, "host event"))
    )
    part, span = f"{counts} in {format_duration(whole)}", whole
    if is_zoomed:
        start, end = (f"{us:.1f}".removesuffix(".0") for us in axis)
        part, span = f"{start} to {end} µs of {format_duration(whole)}: {counts}", axis.end - axis.start
    return f"{part}; device busy {format_duration(busy) if busy else '0 µs'} ({100 * busy / span:.0f}%)"


def _alt_text(
    title: str, lanes: Sequence[_Lane], seen: Sequence[_Lane], axis: _Axis, summary: str, source: str
) -> str:
    if not summary:
        return f"{title.rstrip('.')}. Timeline of host and device: {formatting.NOTHING_MEASURED}."
    zoomed = ", zoomed in" if " of " in summary else ""
    totals: dict[str, float] = {}
    for start, end, name, _ in seen[1].boxes:
        totals[name] = totals.get(name, 0.0) + end - start
    longest = [
        f"{name} {format_duration(us)}" for name, us in sorted(totals.items(), key=lambda one: -one[1])
    ]
    kernels = f" Kernels by time: {formatting.first_items(longest, 4)}." if longest else ""
    gap = max((b - a for a, b in lanes[1].gaps if a < axis.end and b > axis.start), default=0.0)
    idle = f" Longest gap between kernels {format_duration(gap)}." if gap else ""
    what = f"{title.rstrip('.')}. Timeline of host and device{zoomed}"
    return f"{what}: {summary}.{kernels}{idle} {formatting.as_sentence(source)}"
