"""A timeline of what ran: the host's launches in one lane, the device's kernels in another, gaps visible."""

import math
from typing import Any, Protocol

import pandas as pd
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
    Key,
    Page,
    Shown,
    bounds,
    figure_of,
    points,
    shorten,
    spread,
    text_width,
    tint,
    write,
)
from labkit.lanes import Lane, View, lanes_of, whole
from labkit.lanes import Profile as Events
from labkit.provenance import NOTHING, duration, origin, sentence, shortlist
from labkit.rows import RECORDED

_ROW, _GAP, _NUMBERS = 24.0, 3.0, 20.0
_LISTED = 12
_LANES = {"host": ("#D8D8D8", "#4A4A4A"), "device": ("#4D90FF", "#0048DC")}
_INSIDE = "#1A1A1A"
_PALE = 0.4
"""Share of its colour that a recorded box is filled with."""


class Profile(Events, Protocol):
    """What ran, on which device and when."""

    @property
    def kind(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def date(self) -> str: ...


def timeline(
    profile: Profile,
    *,
    title: str,
    span_us: float | None = None,
    window: tuple[float, float] | None = None,
    note: str = "",
    alt: str | None = None,
) -> Shown:
    """Two lanes against time in microseconds, from the first event: host launches, device kernels.

    A box is as long as its event; overlapping events stand in rows. A name that does not fit its box becomes
    a number, explained below. ``span_us`` fixes the axis, to compare timelines; it is never less than the
    profile's own span. ``window`` zooms: from and to in microseconds from the first event; what lies across
    an edge is cut there, and lengths in words stay those of whole events. Boxes of a live profile are full,
    those of a recorded one pale with a dashed edge. ``alt`` replaces the generated alt text.

    Raises ValueError for a window that is empty or reversed, or given together with ``span_us``.
    """
    lanes = lanes_of(profile)
    span = whole(lanes)
    if window is None:
        # The last box shows its edge.
        view = View(0.0, max(span_us or 0.0, span * 1.01) or 1.0, span, _panel_width())
    else:
        if span_us is not None:
            raise ValueError("window, span_us: each of them fixes the axis; give one")
        if not (math.isfinite(window[0]) and math.isfinite(window[1]) and window[0] < window[1]):
            raise ValueError(f"window: {window} is empty; it has to be (from, to) in microseconds, from < to")
        view = View(*window, span, _panel_width(), part=True)
        lanes = [lane.within(view) for lane in lanes]
    words = _origin(profile) if span else ""
    figure = _draw(lanes, view, title, note, profile.kind, words)
    return Shown(figure, alt or _alt(lanes, view, title, words))


def _origin(profile: Profile) -> str:
    """Where a profile is from, in the words of every other figure."""
    stamp = {"kind": profile.kind, "device": profile.device, "date": profile.date, "clock": "", "cache": ""}
    return origin(pd.DataFrame([stamp]), profile.kind)


def _look(lane: str, kind: str) -> dict[str, Any]:
    """How the boxes of a lane are drawn: full, or pale with a dashed edge."""
    face, edge = _LANES[lane]
    recorded = kind == RECORDED
    return {
        "facecolor": tint(face, _PALE) if recorded else face,
        "edgecolor": edge,
        "linestyle": (0, (4, 2)) if recorded else "-",
        "linewidth": 0.8,
    }


def _draw(lanes: list[Lane], view: View, title: str, note: str, kind: str, words: str) -> Figure:
    numbers = _numbered(lanes, view)
    notes = [*_legend(lanes, numbers), *([note] if note else [])]
    height = sum(lane.rows * _ROW + _NUMBERS for lane in lanes) + 10
    page = Page(
        title,
        subtitle=_summary(lanes, view),
        keys=[Key(words, _look("device", kind), box=True)] if words else [],
        notes=notes,
        panel_height=height,
        left=58,
        right=14,
    )
    figure, (ax,) = page.draw()
    ax.set(xlim=(view.start, view.end), ylim=(-height, 0), yticks=[])
    ax.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    step = ax.get_xticks()[1] - ax.get_xticks()[0]
    places = max(0, -math.floor(math.log10(step) + 1e-9))  # 1234.2 to 1234.8 differ in the fifth digit
    ax.xaxis.set_major_formatter(lambda at, _: f"{at:.{places}f}")
    ax.grid(axis="x", color=GRID, linewidth=0.7)
    left, bottom, right, top = bounds(ax)
    write(figure, (left + right) / 2, bottom - 34, "time (µs)", ha="center", va="bottom")
    if not view.part and not any(lane.boxes for lane in lanes):
        ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", color=MUTED, size=TEXT_SIZE + 1)
    y = -6.0
    for lane in lanes:
        foot = y - lane.rows * _ROW
        write(figure, left - 8, top + (y + foot) / 2, lane.name, bold=True, ha="right", va="center")
        ax.add_patch(Rectangle((view.start, foot), view.length, y - foot, color=SHADES[0], zorder=0))
        _draw_lane(ax, lane, y, numbers, view, _look(lane.name, kind))
        y = foot - _NUMBERS
    return figure


def _panel_width() -> float:
    return Page("", left=58, right=14).panel_width


def _numbered(lanes: list[Lane], view: View) -> dict[tuple[str, str], int]:
    """Numbers, in order of appearance, for the names that do not fit into each of their boxes."""
    names = [
        (lane.name, box.name)
        for lane in lanes
        for box in lane.boxes
        if view.points(box)[1] < text_width(box.name, SMALL_SIZE) + 8
    ]
    return {key: i + 1 for i, key in enumerate(dict.fromkeys(names))}


def _legend(lanes: list[Lane], numbers: dict[tuple[str, str], int]) -> list[str]:
    lines = []
    for (lane_name, name), number in list(numbers.items())[:_LISTED]:
        boxes = [box for lane in lanes if lane.name == lane_name for box in lane.boxes if box.name == name]
        times = duration(sum(box.length for box in boxes))
        count = f"{len(boxes)} calls, {times} in all" if len(boxes) > 1 else times
        lines.append(f"{number}: {shorten(name, 360, SMALL_SIZE)}, {count}")
    rest = len(numbers) - _LISTED
    return [*lines, f"and {rest} more names"] if rest > 0 else lines


def _draw_lane(
    ax: Axes, lane: Lane, y: float, numbers: dict[tuple[str, str], int], view: View, look: dict[str, Any]
) -> None:
    """Boxes with a name or a number; a number too wide for its box stands below, joined by a line."""
    left, _, _, top = bounds(ax)
    below: list[tuple[float, float, str]] = []
    for box in lane.boxes:
        upper = y - box.row * _ROW - _GAP
        size = (box.length, _ROW - 2 * _GAP)
        ax.add_patch(Rectangle((box.start, upper - size[1]), *size, **look, zorder=3))
        middle, room = view.points(box)
        room -= 6
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
    _write_gaps(ax, lane, y, view)
    _write_below(ax, below, y - lane.rows * _ROW)


def _write_gaps(ax: Axes, lane: Lane, y: float, view: View) -> None:
    left, _, _, top = bounds(ax)
    for gap in lane.gaps:
        words = f"{duration(gap.length)} idle"
        middle, room = view.points(gap)
        if lane.name == "device" and room > text_width(words, SMALL_SIZE) + 12:
            place = (left + middle, top + y - _ROW / 2)
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


def _write_below(ax: Axes, labels: list[tuple[float, float, str]], y: float) -> None:
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


def _summary(lanes: list[Lane], view: View) -> str:
    host, device = lanes
    if not view.whole:
        return ""
    span = view.length if view.part else view.whole
    share = f"{100 * device.busy / span:.0f}%"
    counts = f"{_count(device, 'kernel')}, {_count(host, 'host event')}"
    if view.part:
        counts = f"{_at(view.start)} to {_at(view.end)} µs of {duration(view.whole)}: {counts}"
    else:
        counts += f" in {duration(view.whole)}"
    return f"{counts}; device busy {duration(device.busy) if device.busy else '0 µs'} ({share})"


def _at(us: float) -> str:
    """A point in time, to a tenth."""
    return f"{us:.1f}".removesuffix(".0")


def _count(lane: Lane, noun: str) -> str:
    return f"{len(lane.boxes)} {noun}{'' if len(lane.boxes) == 1 else 's'}"


def _alt(lanes: list[Lane], view: View, title: str, words: str) -> str:
    what = f"{title.rstrip('.')}. Timeline of host and device{', zoomed in' if view.part else ''}"
    if not view.whole:
        return f"{what}: {NOTHING}."
    device = lanes[1]
    totals: dict[str, float] = {}
    for box in device.boxes:
        totals[box.name] = totals.get(box.name, 0.0) + box.length
    longest = [f"{name} {duration(time)}" for name, time in sorted(totals.items(), key=lambda item: -item[1])]
    gap = max((gap.length for gap in device.gaps), default=0.0)
    kernels = f" Kernels by time: {shortlist(longest, 4)}." if longest else ""
    idle = f" Longest gap between kernels {duration(gap)}." if gap else ""
    return f"{what}: {_summary(lanes, view)}.{kernels}{idle} {sentence(words)}"
