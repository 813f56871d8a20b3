"""A butterfly: the lanes of a warp add up their values by ``shfl.sync.bfly``; each ends with the total."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike, NDArray

from labkit.drawing import (
    INK,
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
    text_colour,
    text_width,
    tint,
    write,
)

LANES = (2, 4, 8, 16, 32)
"""Numbers of lanes that such a reduction goes over."""
_RED, _GREY = SLOTS[0][0], tint(INK, 0.5)
_EXCHANGE: dict[str, Any] = {"color": _GREY, "linewidth": 0.7}
_PITCHES = {16: 18.0, 32: 15.0}
_PITCH = 27.0
"""Height of a lane, with 16 and 32 of them and with fewer; whole pixels, so that rows look alike."""
_COLUMN_PITCH = 160.0
"""Columns stand no further apart than this."""
_LINES = 48.0
"""The least room for the lines between two columns; numbers that would leave less are left out."""
_PADDING, _LABEL_GAP = 6.0, 8.0
_LISTED = 8
"""The most numbers that the alt text lists one by one."""
_WHAT = "shfl.sync.bfly: in each round a lane adds the sum of its partner, lane XOR distance"


@dataclass(frozen=True)
class Reduction:
    """What each lane holds at the start, row 0, and after each round."""

    distances: tuple[int, ...]
    """Of the rounds, n/2 down to 1."""
    sums: NDArray[np.float64]
    """Rounds + 1 rows of lanes."""

    @property
    def lanes(self) -> int:
        return self.sums.shape[1]

    def partners(self, distance: int) -> NDArray[np.int64]:
        """The lane that each lane adds in a round."""
        return np.arange(self.lanes) ^ distance

    def path(self, lane: int) -> list[list[int]]:
        """For each row, the lanes whose sums end up in ``lane``: all of them at first, it alone at last."""
        found = {lane}
        rows = [sorted(found)]
        for distance in reversed(self.distances):
            found |= {at ^ distance for at in found}
            rows.append(sorted(found))
        return rows[::-1]


def reduction(values: ArrayLike) -> Reduction:
    """Simulates the rounds: one value a lane, and in each round every lane adds that of its partner.

    Raises ValueError unless there are 2, 4, 8, 16 or 32 values, all finite.
    """
    held = np.asarray(values, dtype=np.float64)
    if held.ndim != 1:
        raise ValueError(f"values: they are of shape {held.shape}; give one number for each lane")
    lanes = len(held)
    if lanes not in LANES:
        raise ValueError(f"values: there are {lanes}; the lanes have to be a power of two, 2 to 32")
    for lane in np.flatnonzero(~np.isfinite(held)):
        raise ValueError(f"values: that of lane {lane} is {held[lane]}, not a finite number")
    distances = tuple(lanes >> step for step in range(1, lanes.bit_length()))
    rows = [held]
    for distance in distances:
        rows.append(rows[-1] + rows[-1][np.arange(lanes) ^ distance])
    return Reduction(distances, np.stack(rows))


def butterfly(
    values: ArrayLike, title: str, *, lane: int = 0, note: str = "", alt: str | None = None
) -> Shown:
    """A sum across the lanes of a warp: a column of lanes for the start and after each round, XOR n/2 to 1.

    ``values`` are what the lanes start with, 2, 4, 8, 16 or 32 of them; the sums are computed. Lines go from
    each lane to itself and to its partner; those on the path into ``lane`` are red. Numbers so wide that the
    lines have no room are left to the alt text, which ``alt`` replaces.

    Raises ValueError for another number of values, a value that is not finite, and a lane that is not there.
    """
    found = reduction(values)
    if not 0 <= lane < found.lanes:
        raise ValueError(f"lane: {lane} is not there; the lanes are 0 to {found.lanes - 1}")
    figure = _Butterfly(found, lane)
    return Shown(figure.draw(title, note), alt or figure.alt(title))


def _number(value: float) -> str:
    """Whole numbers to a million as they are, others to four digits."""
    whole = value == round(value) and abs(value) < 1e6
    return (f"{value:.0f}" if whole else f"{value:.4g}").replace("-", "\N{MINUS SIGN}")


def _listed(numbers: Sequence[float]) -> str:
    words = [_number(number) for number in numbers]
    return ", ".join(words if len(words) <= _LISTED else [*words[:3], "…", words[-1]])


def _between(first: int, last: int) -> str:
    return f"lanes {first} {'and' if last == first + 1 else 'to'} {last}"


@dataclass
class _Butterfly:
    found: Reduction
    lane: int

    def __post_init__(self) -> None:
        lanes = self.found.lanes
        self.path = self.found.path(self.lane)
        self.pitch = _PITCHES.get(lanes, _PITCH)
        self.cell = min(self.pitch - 2, 20.0)
        self.look: dict[str, Any] = {"color": _RED, "linewidth": 1.2 if lanes == 32 else 1.8}
        widths = [text_width(_number(value), SMALL_SIZE) for value in self.found.sums.flat]
        least = max(1.3 * self.cell, text_width("total", SMALL_SIZE))
        self.cell_width = max(max(widths) + _PADDING, least)
        self.side = text_width("lane", SMALL_SIZE) + _LABEL_GAP
        room = Page("", left=self.side, right=self.side).panel_width
        rounds = len(self.found.distances)
        self.numbered = (room - self.cell_width) / rounds - self.cell_width >= _LINES
        if not self.numbered:
            self.cell_width = least

    def draw(self, title: str, note: str) -> Figure:
        lanes = self.found.lanes
        page = Page(
            title,
            subtitle=_WHAT,
            keys=[
                Key(f"the path into lane {self.lane}", self.look),
                Key("the same for every other lane: all of them end with the total", _EXCHANGE),
            ],
            notes=[note] if note else [],
            panel_height=lanes * self.pitch,
            left=self.side,
            right=self.side,
            above=22,
            below=4,
        )
        figure, (ax,) = page.draw()
        ax.set(xlim=(0, page.panel_width), ylim=(-page.panel_height, 0))
        ax.set_axis_off()
        rounds = len(self.found.distances)
        apart = min((page.panel_width - self.cell_width) / rounds, _COLUMN_PITCH)
        first = (page.panel_width - rounds * apart) / 2
        columns = [first + step * apart for step in range(rounds + 1)]
        self._draw_lines(ax, columns)
        for step, x in enumerate(columns):
            self._draw_cells(ax, step, x)
        self._draw_labels(ax, columns)
        return figure

    def _y(self, lane: int) -> float:
        return -(lane + 0.5) * self.pitch

    def _draw_lines(self, ax: Axes, columns: Sequence[float]) -> None:
        """From each lane to itself and to its partner, those of the path on top."""
        half = self.cell_width / 2
        kinds: dict[bool, list[list[tuple[float, float]]]] = {False: [], True: []}
        for step, distance in enumerate(self.found.distances):
            left, right = columns[step] + half, columns[step + 1] - half
            for into, partner in enumerate(self.found.partners(distance)):
                ends = [[(left, self._y(source)), (right, self._y(into))] for source in (into, int(partner))]
                kinds[into in self.path[step + 1]] += ends
        for on_path, look, gid in ((False, _EXCHANGE, "exchange"), (True, self.look, "path")):
            lines = LineCollection(
                kinds[on_path],
                colors=look["color"],
                linewidths=look["linewidth"],
                zorder=2 + on_path,
                gid=gid,
            )
            ax.add_collection(lines, autolim=False)

    def _draw_cells(self, ax: Axes, step: int, x: float) -> None:
        left, _, _, top = bounds(ax)
        for lane, value in enumerate(self.found.sums[step]):
            on_path = lane in self.path[step]
            corner = (x - self.cell_width / 2, self._y(lane) - self.cell / 2)
            ax.add_patch(
                Rectangle(
                    corner,
                    self.cell_width,
                    self.cell,
                    facecolor=tint(_RED, 0.16) if on_path else SHADES[0],
                    edgecolor=_RED if on_path else _GREY,
                    linewidth=1.2 if on_path else 0.7,
                    zorder=4,
                    clip_on=False,
                    gid="path cell" if on_path else "cell",
                )
            )
            if self.numbered:
                write(
                    figure_of(ax),
                    left + x,
                    top + self._y(lane),
                    _number(value),
                    size=SMALL_SIZE,
                    ha="center",
                    va="center_baseline",
                    gid="value",
                )

    def _draw_labels(self, ax: Axes, columns: Sequence[float]) -> None:
        """The lanes' numbers on both sides, and above the columns what happens between them."""
        left, _, _, top = bounds(ax)
        figure, half = figure_of(ax), self.cell_width / 2 + _LABEL_GAP
        heading = top + 0.5 * SMALL_SIZE
        for x, align in ((columns[0] - half, "right"), (columns[-1] + half, "left")):
            write(figure, left + x, heading, "lane", size=SMALL_SIZE, color=MUTED, ha=align, gid="heading")
            for lane in range(self.found.lanes):
                chosen = lane == self.lane
                write(
                    figure,
                    left + x,
                    top + self._y(lane),
                    str(lane),
                    size=SMALL_SIZE,
                    color=text_colour(_RED) if chosen else MUTED,
                    bold=chosen,
                    ha=align,
                    va="center_baseline",
                    gid="lane",
                )
        for x, text in ((columns[0], "start"), (columns[-1], "total")):
            write(figure, left + x, heading, text, size=SMALL_SIZE, ha="center", gid="heading")
        for distance, before, after in zip(self.found.distances, columns, columns[1:], strict=False):
            middle = left + (before + after) / 2
            text = f"XOR {distance}"
            write(figure, middle, heading, text, size=TEXT_SIZE, bold=True, ha="center", gid="heading")

    def alt(self, title: str) -> str:
        lanes = self.found.lanes
        start, *rounds = self.found.sums
        told = [
            f"{title.rstrip('.')}. A butterfly over {lanes} lanes, {_WHAT}.",
            f"Start, {_between(0, lanes - 1)}: {_listed(start)}.",
        ]
        for distance, sums in zip(self.found.distances, rounds, strict=True):
            where = f"repeating every {distance} lanes" if distance > 1 else "every lane"
            told.append(f"After XOR {distance}, {where}: {_listed(sums[:distance])}.")
        steps = ["all lanes"]
        for distance, on_path in zip(self.found.distances[:-1], self.path[1:], strict=False):
            steps.append(f"after XOR {distance} {_between(on_path[0], on_path[-1])}")
        steps.append(f"after XOR 1 lane {self.lane} alone")
        told.append(f"In red the path into lane {self.lane}: {', '.join(steps)}.")
        return " ".join(told)
