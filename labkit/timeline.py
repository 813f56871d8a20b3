"""A timeline of what ran: the host's launches in one lane, the device's kernels in another, gaps visible."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from labkit.drawing import (
    GRID,
    MUTED,
    SHADES,
    SMALL_SIZE,
    TEXT_SIZE,
    Page,
    Shown,
    bounds,
    figure_of,
    points,
    shorten,
    spread,
    text_width,
    write,
)
from labkit.provenance import NOTHING, digits, duration, shortlist


class Event(Protocol):
    """Something that took time, on the host or on the device."""

    @property
    def name(self) -> str: ...
    @property
    def start_us(self) -> float: ...
    @property
    def duration_us(self) -> float: ...


class Profile(Protocol):
    """What ran: events of the device and of the host on one clock."""

    @property
    def kernels(self) -> Sequence[Event]: ...
    @property
    def host(self) -> Sequence[Event]: ...


_ROW, _GAP, _NUMBERS = 24.0, 3.0, 20.0
_LISTED = 12
_LANES = {"host": ("#D8D8D8", "#4A4A4A"), "device": ("#4D90FF", "#0048DC")}
_INSIDE = "#1A1A1A"


def timeline(
    profile: Profile,
    *,
    title: str,
    span_us: float | None = None,
    note: str = "",
    alt: str | None = None,
) -> Shown:
    """Two lanes against time in microseconds, from the first event: host launches, device kernels.

    A box is as long as its event; overlapping events stand in rows. A name that does not fit its box becomes
    a number, explained below. ``span_us`` fixes the axis, to compare timelines; it is never less than the
    profile's own span. ``alt`` replaces the generated alt text.
    """
    events = [*profile.host, *profile.kernels]
    start = min((event.start_us for event in events), default=0.0)
    lanes = [_lane("host", profile.host, start), _lane("device", profile.kernels, start)]
    span = max((box.end for lane in lanes for box in lane.boxes), default=0.0)
    reach = max(span_us or 0.0, span * 1.01) or 1.0  # the last box shows its edge
    return Shown(_draw(lanes, span, reach, title, note), alt or _alt(lanes, span, title))


@dataclass(frozen=True)
class _Box:
    name: str
    start: float
    end: float
    row: int


@dataclass(frozen=True)
class _Lane:
    name: str
    boxes: list[_Box]

    @property
    def rows(self) -> int:
        return max((box.row + 1 for box in self.boxes), default=1)

    @property
    def busy(self) -> float:
        """Time in which at least one event runs."""
        return sum(end - start for start, end in self.runs())

    def runs(self) -> list[tuple[float, float]]:
        """Stretches without a gap."""
        found: list[tuple[float, float]] = []
        for box in self.boxes:
            if found and box.start <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], box.end))
            else:
                found.append((box.start, box.end))
        return found

    def gaps(self) -> list[tuple[float, float]]:
        """Stretches between two events in which none runs."""
        runs = self.runs()
        return [(before[1], after[0]) for before, after in pairwise(runs)]


def _lane(name: str, events: Sequence[Event], start: float) -> _Lane:
    """Events in order of time, each in the lowest row that is free."""
    boxes: list[_Box] = []
    ends: list[float] = []
    for event in sorted(events, key=lambda event: (event.start_us, -event.duration_us)):
        begin = event.start_us - start
        row = next((row for row, end in enumerate(ends) if begin >= end), len(ends))
        ends[row : row + 1] = [begin + event.duration_us]
        shown = short_name(event.name) if name == "device" else event.name
        boxes.append(_Box(shown, begin, begin + event.duration_us, row))
    return _Lane(name, boxes)


def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces, arguments and template parameters."""
    name = re.sub(r"^(void|static|__global__)\s+", "", name.strip())
    while (stripped := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = stripped
    return re.split(r"[<(]", name)[0].split("::")[-1].strip() or "unnamed"


def _draw(lanes: list[_Lane], span: float, reach: float, title: str, note: str) -> Figure:
    numbers = _numbered(lanes, reach)
    notes = [*_legend(lanes, numbers), *([note] if note else [])]
    height = sum(lane.rows * _ROW + _NUMBERS for lane in lanes) + 10
    page = Page(title, subtitle=_summary(lanes, span), notes=notes, panel_height=height, left=58, right=14)
    figure, (ax,) = page.draw()
    ax.set(xlim=(0, reach), ylim=(-height, 0), yticks=[])
    ax.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(lambda at, _: digits(at))
    ax.grid(axis="x", color=GRID, linewidth=0.7)
    left, bottom, right, top = bounds(ax)
    write(figure, (left + right) / 2, bottom - 34, "time (µs)", ha="center", va="bottom")
    if not any(lane.boxes for lane in lanes):
        ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", color=MUTED, size=TEXT_SIZE + 1)
    y = -6.0
    for lane in lanes:
        foot = y - lane.rows * _ROW
        write(figure, left - 8, top + (y + foot) / 2, lane.name, bold=True, ha="right", va="center")
        ax.add_patch(Rectangle((0, foot), reach, y - foot, color=SHADES[0], zorder=0))
        _draw_lane(ax, lane, y, numbers, (right - left) / reach)
        y = foot - _NUMBERS
    return figure


def _panel_width() -> float:
    return Page("", left=58, right=14).panel_width


def _numbered(lanes: list[_Lane], reach: float) -> dict[tuple[str, str], int]:
    """Numbers, in order of appearance, for the names that do not fit into each of their boxes."""
    scale = _panel_width() / reach
    names = [
        (lane.name, box.name)
        for lane in lanes
        for box in lane.boxes
        if (box.end - box.start) * scale < text_width(box.name, SMALL_SIZE) + 8
    ]
    return {key: i + 1 for i, key in enumerate(dict.fromkeys(names))}


def _legend(lanes: list[_Lane], numbers: dict[tuple[str, str], int]) -> list[str]:
    lines = []
    for (lane_name, name), number in list(numbers.items())[:_LISTED]:
        boxes = [box for lane in lanes if lane.name == lane_name for box in lane.boxes if box.name == name]
        times = duration(sum(box.end - box.start for box in boxes))
        count = f"{len(boxes)} calls, {times} in all" if len(boxes) > 1 else times
        lines.append(f"{number}: {shorten(name, 360, SMALL_SIZE)}, {count}")
    rest = len(numbers) - _LISTED
    return [*lines, f"and {rest} more names"] if rest > 0 else lines


def _draw_lane(ax: Axes, lane: _Lane, y: float, numbers: dict[tuple[str, str], int], scale: float) -> None:
    """Boxes with a name or a number; a number too wide for its box stands below, joined by a line."""
    left, _, _, top = bounds(ax)
    face, edge = _LANES[lane.name]
    below: list[tuple[float, float, str]] = []
    for box in lane.boxes:
        upper = y - box.row * _ROW - _GAP
        size = (box.end - box.start, _ROW - 2 * _GAP)
        ax.add_patch(
            Rectangle(
                (box.start, upper - size[1]), *size, facecolor=face, edgecolor=edge, linewidth=0.8, zorder=3
            )
        )
        middle = (box.start + box.end) / 2 * scale
        room = (box.end - box.start) * scale - 6
        number = numbers.get((lane.name, box.name))
        named = text_width(box.name, SMALL_SIZE) <= room
        if not named and (number is None or number > _LISTED):
            continue
        text = box.name if named else str(number)
        if text_width(text, SMALL_SIZE) <= room + 3:
            place = (left + middle, top + upper - size[1] / 2)
            write(
                figure_of(ax),
                *place,
                text,
                size=SMALL_SIZE,
                color=_INSIDE,
                ha="center",
                va="center",
                gid="label",
            )
        else:
            below.append((middle, upper - size[1], text))
    _write_gaps(ax, lane, y, scale)
    _write_below(ax, below, y - lane.rows * _ROW, scale)


def _write_gaps(ax: Axes, lane: _Lane, y: float, scale: float) -> None:
    left, _, _, top = bounds(ax)
    for start, end in lane.gaps():
        words = f"{duration(end - start)} idle"
        if lane.name == "device" and (end - start) * scale > text_width(words, SMALL_SIZE) + 12:
            place = (left + (start + end) / 2 * scale, top + y - _ROW / 2)
            write(
                figure_of(ax),
                *place,
                words,
                size=SMALL_SIZE,
                color=MUTED,
                italic=True,
                ha="center",
                va="center",
            )


def _write_below(ax: Axes, labels: list[tuple[float, float, str]], y: float, scale: float) -> None:
    left, _, right, top = bounds(ax)
    sizes = [text_width(text, SMALL_SIZE) + 5 for *_, text in labels]
    if sum(sizes) > right - left:  # too many to name each: the first of every number
        firsts = {text: i for i, (*_, text) in reversed(list(enumerate(labels)))}
        labels = [labels[i] for i in sorted(firsts.values())]
        sizes = [text_width(text, SMALL_SIZE) + 5 for *_, text in labels]
        if sum(sizes) > right - left:
            return
    centres = spread([x for x, *_ in labels], sizes, 0, right - left)
    width, height = points(figure_of(ax))
    for (x, foot, text), centre in zip(labels, centres, strict=True):
        path = [(left + x, top + foot), (left + x, top + y - 1), (left + centre, top + y - 6)]
        xs, ys = zip(*path, strict=True)
        leader = Line2D([v / width for v in xs], [v / height for v in ys], color=MUTED, linewidth=0.7)
        figure_of(ax).add_artist(leader)
        write(
            figure_of(ax),
            left + centre,
            top + y - 7,
            text,
            size=SMALL_SIZE,
            color=MUTED,
            ha="center",
            va="top",
            gid="label",
        )


def _summary(lanes: list[_Lane], span: float) -> str:
    host, device = lanes
    if not span:
        return ""
    share = f"{100 * device.busy / span:.0f}%"
    counts = f"{_count(device, 'kernel')}, {_count(host, 'host event')} in {duration(span)}"
    return f"{counts}; device busy {duration(device.busy) if device.busy else '0 µs'} ({share})"


def _count(lane: _Lane, noun: str) -> str:
    return f"{len(lane.boxes)} {noun}{'' if len(lane.boxes) == 1 else 's'}"


def _alt(lanes: list[_Lane], span: float, title: str) -> str:
    what = f"{title.rstrip('.')}. Timeline of host and device"
    if not span:
        return f"{what}: {NOTHING}."
    device = lanes[1]
    totals: dict[str, float] = {}
    for box in device.boxes:
        totals[box.name] = totals.get(box.name, 0.0) + box.end - box.start
    longest = [f"{name} {duration(time)}" for name, time in sorted(totals.items(), key=lambda item: -item[1])]
    gap = max((end - start for start, end in device.gaps()), default=0.0)
    kernels = f" Kernels by time: {shortlist(longest, 4)}." if longest else ""
    idle = f" Longest gap between kernels {duration(gap)}." if gap else ""
    return f"{what}: {_summary(lanes, span)}.{kernels}{idle}"
