"""What a timeline is made of: boxes in rows, the gaps between them, and the part of it that is looked at."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol


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


@dataclass(frozen=True)
class Span:
    """From and to in microseconds."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Box(Span):
    name: str
    row: int


@dataclass(frozen=True)
class View(Span):
    """What of a timeline the axis shows."""

    whole: float
    """The span of the timeline."""
    width: float
    """Of the panel, in points."""
    part: bool = False

    def cut(self, span: Span) -> Span:
        """What is seen of a span."""
        return Span(max(span.start, self.start), min(span.end, self.end))

    def shows(self, span: Span) -> bool:
        """Whether anything is seen of it."""
        return (span.end > self.start and span.start < self.end) or self.start < span.start < self.end

    def points(self, span: Span) -> tuple[float, float]:
        """Middle, from the left edge of the panel, and length of what is seen of a span."""
        seen = self.cut(span)
        scale = self.width / self.length
        return ((seen.start + seen.end) / 2 - self.start) * scale, seen.length * scale


@dataclass(frozen=True)
class Lane:
    name: str
    boxes: list[Box]
    runs: list[Span]
    """Stretches without a gap."""
    gaps: list[Span]
    """Stretches between two events in which none runs."""
    rows: int

    def within(self, view: View) -> "Lane":
        """What a view shows of the lane. The rows stay: zooming moves nothing up or down."""
        boxes = [box for box in self.boxes if view.shows(box)]
        runs = [view.cut(run) for run in self.runs if view.shows(run)]
        return replace(self, boxes=boxes, runs=runs, gaps=[gap for gap in self.gaps if view.shows(gap)])

    @property
    def busy(self) -> float:
        """Time in which at least one event runs."""
        return sum(run.length for run in self.runs)


def lanes_of(profile: Profile) -> list[Lane]:
    """The lane of the host and that of the device, from the first event of both."""
    start = min((event.start_us for event in [*profile.host, *profile.kernels]), default=0.0)
    return [_lane("host", profile.host, start), _lane("device", profile.kernels, start)]


def whole(lanes: Sequence[Lane]) -> float:
    """Microseconds from the first event to the end of the last; 0 without events."""
    return max((box.end for lane in lanes for box in lane.boxes), default=0.0)


def extent(profile: Profile) -> tuple[float, tuple[float, float] | None]:
    """The span of all events, and the longest gap between kernels as (from, to); microseconds.

    The gap is None where kernels leave none.
    """
    lanes = lanes_of(profile)
    longest = max(lanes[1].gaps, key=lambda gap: gap.end - gap.start, default=None)
    return whole(lanes), None if longest is None else (longest.start, longest.end)


def _lane(name: str, events: Sequence[Event], start: float) -> Lane:
    """Events in order of time, each in the lowest row that is free."""
    boxes: list[Box] = []
    ends: list[float] = []
    for event in sorted(events, key=lambda event: (event.start_us, -event.duration_us)):
        begin = event.start_us - start
        row = next((row for row, end in enumerate(ends) if begin >= end), len(ends))
        ends[row : row + 1] = [begin + event.duration_us]
        shown = short_name(event.name) if name == "device" else event.name
        boxes.append(Box(begin, begin + event.duration_us, shown, row))
    runs = _runs(boxes)
    gaps = [Span(before.end, after.start) for before, after in pairwise(runs)]
    return Lane(name, boxes, runs, gaps, max(len(ends), 1))


def _runs(boxes: list[Box]) -> list[Span]:
    found: list[Span] = []
    for box in boxes:
        if found and box.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, box.end))
        else:
            found.append(Span(box.start, box.end))
    return found


def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces, arguments and template parameters."""
    name = re.sub(r"^(void|static|__global__)\s+", "", name.strip())
    while (stripped := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = stripped
    return re.split(r"[<(]", name)[0].split("::")[-1].strip() or "unnamed"
