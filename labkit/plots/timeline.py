"""A timeline of what ran: the host's launches in one lane, the device's kernels in another, gaps visible."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from labkit.plots.style import MUTED, SHADES, SMALL, WIDTH, Picture, box_key, sheet, styled, tint
from labkit.plots.words import NOTHING, cut, duration, origin, sentence, shortlist
from labkit.rows import RECORDED

_LISTED = 12
"""The most names that are explained below."""
_HUES = {"host": ("#D8D8D8", "#4A4A4A"), "device": ("#4D90FF", "#0048DC")}
_CHARACTER, _NUMBER = 6.0, 17.0
"""Points that a character of a name needs, and a number with its space."""
_PANEL = 72 * (WIDTH - 1.0)
"""Width of the axes in points, about."""


class Event(Protocol):
    """Something that took time, on the host or on the device."""

    @property
    def name(self) -> str: ...
    @property
    def start_us(self) -> float: ...
    @property
    def duration_us(self) -> float: ...


class Profile(Protocol):
    """What ran, on which device and when: events of the device and of the host on one clock."""

    @property
    def kernels(self) -> Sequence[Event]: ...
    @property
    def host(self) -> Sequence[Event]: ...
    @property
    def kind(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def date(self) -> str: ...


Span = tuple[float, float]
"""From and to in microseconds, from the first event on."""


@dataclass(frozen=True)
class _Box:
    start: float
    end: float
    name: str
    row: int


@dataclass(frozen=True)
class _Lane:
    name: str
    boxes: list[_Box]
    rows: int

    @property
    def runs(self) -> list[Span]:
        """Stretches without a gap."""
        found: list[Span] = []
        for box in self.boxes:
            if found and box.start <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], box.end))
            else:
                found.append((box.start, box.end))
        return found

    @property
    def gaps(self) -> list[Span]:
        """Stretches between two events in which none runs."""
        return [(before[1], after[0]) for before, after in pairwise(self.runs)]

    def busy(self, start: float, end: float) -> float:
        """Time in the window in which at least one event runs."""
        return sum(max(0.0, min(b, end) - max(a, start)) for a, b in self.runs)


def _lanes(profile: Profile) -> tuple[_Lane, _Lane]:
    """The lane of the host and that of the device."""
    first = min((event.start_us for event in [*profile.host, *profile.kernels]), default=0.0)
    return _lane("host", profile.host, first), _lane("device", profile.kernels, first)


def _lane(name: str, events: Sequence[Event], first: float) -> _Lane:
    """Events in order of time, each in the lowest row that is free."""
    boxes, ends = [], [-math.inf]
    for event in sorted(events, key=lambda event: (event.start_us, -event.duration_us)):
        start = event.start_us - first
        row = next((row for row, end in enumerate(ends) if start >= end), len(ends))
        ends[row : row + 1] = [start + event.duration_us]
        shown = _short(event.name) if name == "device" else event.name
        boxes.append(_Box(start, start + event.duration_us, shown, row))
    return _Lane(name, boxes, len(ends))


def _short(name: str) -> str:
    """A kernel's name without return type, namespaces, arguments and template parameters."""
    name = re.sub(r"^(void|static|__global__)\s+", "", name.strip())
    while (stripped := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = stripped
    return re.split(r"[<(]", name)[0].split("::")[-1].strip() or "unnamed"


def _whole(lanes: Sequence[_Lane]) -> float:
    return max((box.end for lane in lanes for box in lane.boxes), default=0.0)


def extent(profile: Profile) -> tuple[float, Span | None]:
    """The span of all events, and the longest gap between kernels as (from, to); microseconds.

    The gap is None where kernels leave none.
    """
    lanes = _lanes(profile)
    return _whole(lanes), max(lanes[1].gaps, key=lambda gap: gap[1] - gap[0], default=None)


@styled
def timeline(
    profile: Profile,
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
    lanes = _lanes(profile)
    whole = _whole(lanes)
    start, end = 0.0, max(span_us or 0.0, whole * 1.01) or 1.0  # the last box shows its edge
    if window is not None:
        if span_us is not None:
            raise ValueError("window, span_us: each of them fixes the axis; give one")
        start, end = window
        if not (math.isfinite(start) and math.isfinite(end) and start < end):
            raise ValueError(f"window: {window} is empty; it has to be (from, to) in microseconds, from < to")
    seen = [[box for box in lane.boxes if box.start < end and box.end > start] for lane in lanes]
    scale = _PANEL / (end - start)
    # Numbers, in order of appearance, for the names that do not fit into each of their boxes.
    tight = [
        (lane.name, box.name)
        for lane, boxes in zip(lanes, seen, strict=True)
        for box in boxes
        if (min(box.end, end) - max(box.start, start)) * scale < _CHARACTER * len(box.name) + 8
    ]
    numbers = {key: i + 1 for i, key in enumerate(dict.fromkeys(tight))}

    summary = _summary(lanes, seen, (start, end), whole, window is not None)
    stamp = {"kind": profile.kind, "device": profile.device, "date": profile.date, "clock": "", "cache": ""}
    words = origin(pd.DataFrame([stamp]), profile.kind) if whole else ""
    height = sum(lane.rows + 0.9 for lane in lanes)
    figure = sheet(
        title,
        0.55 + 0.32 * height,
        subtitle=summary,
        keys=[box_key(words, **_look("device", profile.kind))] if words else [],
        notes=[*_explained(lanes, seen, numbers), note],
    )
    ax = figure.add_subplot()
    ax.set(xlim=(start, end), ylim=(height, -0.15), xlabel="time (µs)")
    ax.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    ax.grid(axis="y", visible=False)
    if window is None and not whole:
        ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", color=MUTED)
    top, places = 0.0, []
    for lane, boxes in zip(lanes, seen, strict=True):
        ax.axhspan(top, top + lane.rows, color=SHADES[0], zorder=0)
        look = _look(lane.name, profile.kind)
        for box in boxes:
            ax.broken_barh([(box.start, box.end - box.start)], (top + box.row + 0.1, 0.8), zorder=3, **look)
        _write_names(ax, lane, boxes, numbers, top, (start, end))
        if lane.name == "device":
            _write_gaps(ax, lane.gaps, top, (start, end))
        places.append(top + lane.rows / 2)
        top += lane.rows + 0.9
    ax.set_yticks(places, [lane.name for lane in lanes], weight="bold", size="medium")
    ax.tick_params(axis="y", length=0)
    return Picture(figure, alt or _alt(title, lanes, seen, summary, words, window is not None))


def _look(lane: str, kind: str) -> dict[str, Any]:
    """How the boxes of a lane are drawn: full, or pale with a dashed edge."""
    face, edge = _HUES[lane]
    recorded = kind == RECORDED
    return {
        "facecolor": tint(face, 0.4) if recorded else face,
        "edgecolor": edge,
        "linestyle": (0, (4, 2)) if recorded else "-",
        "linewidth": 0.8,
    }


def _write_names(
    ax: Axes, lane: _Lane, boxes: list[_Box], numbers: dict[tuple[str, str], int], top: float, window: Span
) -> None:
    """Names and numbers in their boxes; a number too wide for its box stands below, joined by a line."""
    scale = _PANEL / (window[1] - window[0])
    below: list[tuple[float, float, str]] = []
    for box in boxes:
        left, right = max(box.start, window[0]), min(box.end, window[1])
        room, number = (right - left) * scale, numbers.get((lane.name, box.name), 0)
        text = (
            box.name if _CHARACTER * len(box.name) + 8 <= room else str(number) if number <= _LISTED else ""
        )
        middle, y = (left + right) / 2, top + box.row + 0.5
        if text and room >= _CHARACTER * len(text) + 3:
            ax.text(middle, y, text, size=SMALL, ha="center", va="center_baseline", zorder=5, gid="label")
        elif text:
            below.append((middle, y + 0.4, text))
    if len(below) * _NUMBER > _PANEL:  # too many to number each: the first of every number
        below = [
            below[[text for *_, text in below].index(text)] for text in dict.fromkeys(t for *_, t in below)
        ]
    last = -math.inf
    for middle, y, text in sorted(below):
        at = max(middle, last + _NUMBER / scale)
        last = at
        ax.annotate(
            text,
            (middle, y),
            (at, top + lane.rows + 0.3),
            va="top",
            ha="center",
            size=SMALL,
            color=MUTED,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0},
            gid="label",
        )


def _write_gaps(ax: Axes, gaps: list[Span], top: float, window: Span) -> None:
    scale = _PANEL / (window[1] - window[0])
    for start, end in gaps:
        left, right = max(start, window[0]), min(end, window[1])
        words = f"{duration(end - start)} idle"
        if (right - left) * scale > _CHARACTER * len(words) + 10:
            place = {"ha": "center", "va": "center_baseline"}
            ax.text((left + right) / 2, top + 0.5, words, size=SMALL, color=MUTED, style="italic", **place)


def _explained(
    lanes: Sequence[_Lane], seen: list[list[_Box]], numbers: dict[tuple[str, str], int]
) -> list[str]:
    """What the numbers stand for, with the number of calls and their time."""
    lines = []
    for (where, name), number in list(numbers.items())[:_LISTED]:
        boxes = seen[[lane.name for lane in lanes].index(where)]
        took = [box.end - box.start for box in boxes if box.name == name]
        times = duration(sum(took))
        lines.append(
            f"{number}: {cut(name, 60)}, {f'{len(took)} calls, {times} in all' if took[1:] else times}"
        )
    rest = len(numbers) - _LISTED
    return [*lines, f"and {rest} more names"] if rest > 0 else lines


def _summary(lanes: Sequence[_Lane], seen: list[list[_Box]], window: Span, whole: float, part: bool) -> str:
    if not whole:
        return ""
    busy = lanes[1].busy(*window)
    span = window[1] - window[0] if part else whole
    counts = ", ".join(
        f"{len(boxes)} {noun}{'' if len(boxes) == 1 else 's'}"
        for boxes, noun in zip(seen[::-1], ("kernel", "host event"), strict=True)
    )
    start, end = (f"{us:.1f}".removesuffix(".0") for us in window)
    lead = f"{start} to {end} µs of {duration(whole)}: {counts}" if part else f"{counts} in {duration(whole)}"
    return f"{lead}; device busy {duration(busy) if busy else '0 µs'} ({100 * busy / span:.0f}%)"


def _alt(
    title: str, lanes: Sequence[_Lane], seen: list[list[_Box]], summary: str, words: str, part: bool
) -> str:
    what = f"{title.rstrip('.')}. Timeline of host and device{', zoomed in' if part else ''}"
    if not summary:
        return f"{what}: {NOTHING}."
    totals: dict[str, float] = {}
    for box in seen[1]:
        totals[box.name] = totals.get(box.name, 0.0) + box.end - box.start
    longest = [f"{name} {duration(time)}" for name, time in sorted(totals.items(), key=lambda item: -item[1])]
    runs = sorted((box.start, box.end) for box in seen[1])
    starts = [gap for gap in lanes[1].gaps if runs and gap[1] > runs[0][0] and gap[0] < runs[-1][1]]
    gap = max((b - a for a, b in starts), default=0.0)
    kernels = f" Kernels by time: {shortlist(longest, 4)}." if longest else ""
    idle = f" Longest gap between kernels {duration(gap)}." if gap else ""
    return f"{what}: {summary}.{kernels}{idle} {sentence(words)}"
