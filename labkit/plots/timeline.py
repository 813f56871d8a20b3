"""A timeline of what ran: the host's launches in one lane, the device's kernels in another, gaps visible."""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from labkit.measure.rows import RECORDED
from labkit.plots import style, words
from labkit.plots.style import MUTED, SMALL, Picture
from labkit.plots.words import duration

if TYPE_CHECKING:  # drawing needs no torch
    from labkit.profiling.profiles import Profile

_LISTED = 12
"""The most names that are explained below."""
_HUES = {"host": ("#D8D8D8", "#4A4A4A"), "device": ("#4D90FF", "#0048DC")}
_CHARACTER, _NUMBER = 6.0, 17.0
"""Points that a character of a name needs, and a number with its space."""
_PANEL = 72 * (style.WIDTH - 1.0)
"""Width of the axes in points, about."""
Span = tuple[float, float]
"""From and to in microseconds, from the first event on."""


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
    def runs(self) -> list[Span]:
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
        return [(before[1], after[0]) for before, after in pairwise(self.runs)]


def _lanes(profile: "Profile") -> tuple[list[_Lane], float]:
    """The lane of the host and that of the device, and the end of the last event; all from the first one."""
    events: dict[str, Sequence[Any]] = {"host": profile.host, "device": profile.kernels}
    first = min((event.start_us for lane in events.values() for event in lane), default=0.0)
    lanes = []
    for name, listed in events.items():
        boxes, ends = [], [-math.inf]
        for event in sorted(listed, key=lambda event: (event.start_us, -event.duration_us)):
            start, end = event.start_us - first, event.start_us - first + event.duration_us
            row = next((row for row, until in enumerate(ends) if start >= until), len(ends))
            ends[row : row + 1] = [end]
            boxes.append(_Box(start, end, _short(event.name) if name == "device" else event.name, row))
        lanes.append(_Lane(name, boxes, len(ends)))
    return lanes, max((box.end for lane in lanes for box in lane.boxes), default=0.0)


def _short(name: str) -> str:
    """A kernel's name without return type, namespaces, arguments and template parameters."""
    name = re.sub(r"^(void|static|__global__)\s+", "", name.strip())
    while (stripped := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = stripped
    return re.split(r"[<(]", name)[0].split("::")[-1].strip() or "unnamed"


def extent(profile: "Profile") -> tuple[float, Span | None]:
    """The span of all events, and the longest gap between kernels as (from, to); microseconds.

    The gap is None where kernels leave none.
    """
    (_, device), whole = _lanes(profile)
    return whole, max(device.gaps, key=lambda gap: gap[1] - gap[0], default=None)


@style.drawing()
def timeline(
    profile: "Profile",
    *,
    title: str,
    span_us: float | None = None,
    window: Span | None = None,
    note: str = "",
    alt: str | None = None,
) -> Picture:
    """Two lanes against time in microseconds, from the first event: host launches, device kernels.

    A box is as long as its event; overlapping events stand in rows. A name that does not fit its box becomes
    a number, explained below. ``span_us`` fixes the axis, to compare timelines; it is never less than the
    profile's own span. ``window`` zooms: from and to in microseconds from the first event; what lies across
    an edge is cut there, and lengths in words stay those of whole events. Boxes of a live profile are full,
    those of a recorded one pale with a dashed edge. ``alt`` replaces the generated alt text.

    Raises ValueError for a window that is empty or reversed, or given together with ``span_us``.
    """
    lanes, whole = _lanes(profile)
    start, end = window or (0.0, max(span_us or 0.0, whole * 1.01) or 1.0)  # the last box shows its edge
    if window and span_us is not None:
        raise ValueError("window, span_us: each of them fixes the axis; give one")
    if not (math.isfinite(start) and math.isfinite(end) and start < end):
        raise ValueError(f"window: {window} is empty; it has to be (from, to) in microseconds, from < to")
    # The rows stay: zooming moves nothing up or down.
    seen = [
        lane._replace(boxes=[box for box in lane.boxes if box.start < end and box.end > start])
        for lane in lanes
    ]
    scale = _PANEL / (end - start)
    # Numbers, in order of appearance, for the names that do not fit into each of their boxes.
    tight = [
        (lane.name, box.name)
        for lane in seen
        for box in lane.boxes
        if not _fits(box.name, box, start, end, scale)
    ]
    numbers = {key: i + 1 for i, key in enumerate(dict.fromkeys(tight))}
    explained = []
    for (where, name), count in numbers.items():
        took = [b.end - b.start for lane in seen for b in lane.boxes if (lane.name, b.name) == (where, name)]
        times = f"{len(took)} calls, {duration(sum(took))} in all" if took[1:] else duration(took[0])
        explained.append(f"{count}: {words.cut(name, 60)}, {times}")
    if len(explained) > _LISTED:
        explained[_LISTED:] = [f"and {len(explained) - _LISTED} more names"]
    summary = _summary(seen, (start, end), whole, window is not None) if whole else ""
    stamp = {"kind": profile.kind, "device": profile.device, "date": profile.date, "clock": "", "cache": ""}
    source = words.origin(pd.DataFrame([stamp]), profile.kind) if whole else ""
    height = sum(lane.rows + 0.9 for lane in lanes)
    keys = [style.box_key(source, **_look("device", profile.kind))] if source else []
    figure = style.sheet(title, 0.55 + 0.32 * height, subtitle=summary, keys=keys, notes=[*explained, note])
    ax = figure.add_subplot()
    ax.set(xlim=(start, end), ylim=(height, -0.15), xlabel="time (µs)")
    ax.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    ax.grid(axis="y", visible=False)
    if not (whole or window):
        ax.text(0.5, 0.5, words.NOTHING, transform=ax.transAxes, ha="center", color=MUTED)
    top, places = 0.0, []
    for lane in seen:
        ax.axhspan(top, top + lane.rows, color=style.SHADES[0], zorder=0)
        below: list[tuple[float, float, str]] = []
        for box in lane.boxes:
            look = _look(lane.name, profile.kind)
            ax.broken_barh([(box.start, box.end - box.start)], (top + box.row + 0.1, 0.8), zorder=3, **look)
            number = numbers.get((lane.name, box.name), 0)
            if number > _LISTED:
                continue
            text = str(number) if number and not _fits(box.name, box, start, end, scale) else box.name
            middle, y = (max(box.start, start) + min(box.end, end)) / 2, top + box.row + 0.5
            if _fits(text, box, start, end, scale):
                ax.text(middle, y, text, size=SMALL, ha="center", va="center_baseline", zorder=5, gid="label")
            else:
                below.append((middle, y + 0.4, text))
        _number(ax, below, top + lane.rows + 0.3, scale, end)
        places.append(top + lane.rows / 2)
        top += lane.rows + 0.9
    for gap in lanes[1].gaps:
        said, box = f"{duration(gap[1] - gap[0])} idle", _Box(*gap, "", 0)
        if _fits(said, box, start, end, scale):
            at = (max(gap[0], start) + min(gap[1], end)) / 2
            ax.text(
                at,
                places[1] - lanes[1].rows / 2 + 0.5,
                said,
                size=SMALL,
                color=MUTED,
                style="italic",
                ha="center",
                va="center_baseline",
            )
    ax.set_yticks(places, [lane.name for lane in lanes], weight="bold", size="medium")
    ax.tick_params(axis="y", length=0)
    return Picture(figure, alt or _alt(title, lanes, seen, (start, end), summary, source))


def _fits(text: str, box: _Box, start: float, end: float, scale: float) -> bool:
    """Whether text has room in what is seen of a box."""
    return (min(box.end, end) - max(box.start, start)) * scale >= _CHARACTER * len(text) + 6


def _look(lane: str, kind: str) -> dict[str, Any]:
    """How the boxes of a lane are drawn: full, or pale with a dashed edge."""
    face, edge = _HUES[lane]
    paler = {"facecolor": style.tint(face, 0.4), "linestyle": (0, (4, 2))} if kind == RECORDED else {}
    return {"facecolor": face, "edgecolor": edge, "linewidth": 0.8, **paler}


def _number(ax: Axes, labels: Sequence[tuple[float, float, str]], y: float, scale: float, end: float) -> None:
    """Numbers below their boxes, moved right where two would meet; the first of each if too many."""
    step = _NUMBER / scale

    def spread(labels: Iterable[tuple[float, float, str]]) -> list[float]:
        places: list[float] = []
        for at, *_ in labels:
            places.append(max(at, places[-1] + step) if places else at)
        return places

    places = spread(labels)
    if places and places[-1] > end:
        labels = list({text: (at, foot, text) for at, foot, text in labels[::-1]}.values())[::-1]
        labels, places = sorted(labels), spread(sorted(labels))
    for (at, foot, text), place in zip(labels, places, strict=True):
        leader = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
        how: dict[str, Any] = {"size": SMALL, "color": MUTED, "va": "top", "ha": "center", "gid": "label"}
        ax.annotate(text, (at, foot), (place, y), arrowprops=leader, annotation_clip=False, **how)


def _summary(seen: Sequence[_Lane], window: Span, whole: float, part: bool) -> str:
    host, device = seen
    busy = sum(min(b, window[1]) - max(a, window[0]) for a, b in device.runs)
    span = window[1] - window[0] if part else whole
    counts = f"{_count(device, 'kernel')}, {_count(host, 'host event')}"
    start, end = (f"{us:.1f}".removesuffix(".0") for us in window)
    lead = f"{start} to {end} µs of {duration(whole)}: {counts}" if part else f"{counts} in {duration(whole)}"
    return f"{lead}; device busy {duration(busy) if busy else '0 µs'} ({100 * busy / span:.0f}%)"


def _count(lane: _Lane, noun: str) -> str:
    return f"{len(lane.boxes)} {noun}{'' if len(lane.boxes) == 1 else 's'}"


def _alt(
    title: str, lanes: Sequence[_Lane], seen: Sequence[_Lane], window: Span, summary: str, source: str
) -> str:
    if not summary:
        return f"{title.rstrip('.')}. Timeline of host and device: {words.NOTHING}."
    zoomed = ", zoomed in" if " of " in summary else ""
    totals: dict[str, float] = {}
    for start, end, name, _ in seen[1].boxes:
        totals[name] = totals.get(name, 0.0) + end - start
    longest = [f"{name} {duration(us)}" for name, us in sorted(totals.items(), key=lambda item: -item[1])]
    kernels = f" Kernels by time: {words.shortlist(longest, 4)}." if longest else ""
    gap = max((b - a for a, b in lanes[1].gaps if a < window[1] and b > window[0]), default=0.0)
    idle = f" Longest gap between kernels {duration(gap)}." if gap else ""
    what = f"{title.rstrip('.')}. Timeline of host and device{zoomed}"
    return f"{what}: {summary}.{kernels}{idle} {words.sentence(source)}"
