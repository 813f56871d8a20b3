"""Names at the ends of curves: beside the end where there is room, else in a column with leaders."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from labkit.drawing import TEXT_SIZE, bounds, figure_of, points, spread, text_width, wrap, write

Points = NDArray[np.float64]
"""Positions on the page, one row each."""

LABEL_WIDTH = 118.0
LEADER = 16.0
"""Between a panel and the column of labels."""


@dataclass(frozen=True)
class Label:
    """A name at the end of a curve."""

    text: str
    x: float
    y: float
    """Where its curve ends, in the panel's data."""
    colour: str
    bold: bool = False
    italic: bool = False

    @property
    def lines(self) -> list[str]:
        """The name, broken where it is long."""
        return wrap(self.text, LABEL_WIDTH, TEXT_SIZE, self.bold)

    @property
    def width(self) -> float:
        """Of the widest line."""
        # Italics lean over the width that upright text has.
        return max(text_width(line, TEXT_SIZE, self.bold) for line in self.lines) + (2 if self.italic else 0)

    @property
    def height(self) -> float:
        """Of all lines, with the space to the next label."""
        return len(self.lines) * TEXT_SIZE * 1.18 + 3


def _on_page(ax: Axes, xs: Any, ys: Any) -> Points:
    """Data of a logarithmic panel as points on the page, one row each."""
    left, bottom, right, top = bounds(ax)
    (x0, x1), (y0, y1) = np.log(ax.get_xlim()), np.log(ax.get_ylim())
    across = left + (np.log(np.asarray(xs, dtype=float)) - x0) / (x1 - x0) * (right - left)
    up = bottom + (np.log(np.asarray(ys, dtype=float)) - y0) / (y1 - y0) * (top - bottom)
    return np.stack([across, up], axis=-1)


def ink(ax: Axes, lines: Iterable[tuple[Any, Any]]) -> Points:
    """Points on the page, close together, along lines of data (xs, ys) that no label must cover."""
    dense = [
        a + (b - a) * np.linspace(0, 1, 2 + int(np.hypot(*(b - a)) / 3))[:, None]
        for line in (_on_page(ax, *line) for line in lines)
        for a, b in zip(line, [*line[1:], line[-1]], strict=True)
    ]
    return np.concatenate(dense) if dense else np.empty((0, 2))


def place_labels(ax: Axes, labels: list[Label], taken: Points) -> None:
    """Inside the panel where a curve ends early and there is room, else in the column on its right."""
    left, bottom, right, top = bounds(ax)
    column = []
    for label in labels:
        x, y = _on_page(ax, label.x, label.y)
        w, h = label.width, label.height
        spots = (
            (x + 8, y),
            (x + 6, y + h * 0.8),
            (x + 6, y - h * 0.8),
            (x - w / 2, y + h * 0.9),
            (x - w / 2, y - h * 0.9),
        )
        inside = [
            (at, centre)
            for at, centre in spots
            if x < right - 30
            and left < at
            and at + w < right
            and bottom + 4 < centre - h / 2
            and centre + h / 2 < top
            and not _covers(taken, at, centre, w, h)
        ]
        if not inside:
            column.append(label)
            continue
        at, centre = inside[0]
        _write_label(ax, label, at, centre)
        edge = [(at + i * w / 8, centre + j * h / 2) for i in range(9) for j in (-1, 0, 1)]
        taken = np.concatenate([taken, edge])
    ends = [_on_page(ax, label.x, label.y) for label in column]
    centres = spread([end[1] for end in ends], [label.height for label in column], bottom - 4, top + 4)
    width, height = points(figure_of(ax))
    for label, (x, y), centre in zip(column, ends, centres, strict=True):
        _write_label(ax, label, right + LEADER, centre)
        path = np.array([(min(x + 5, right + 3), y), (right + 3, y), (right + LEADER - 3, centre)])
        leader = Line2D(
            path[:, 0] / width, path[:, 1] / height, color=label.colour, linewidth=0.7, alpha=0.75
        )
        figure_of(ax).add_artist(leader)


def _covers(taken: Points, at: float, centre: float, width: float, height: float) -> bool:
    x, y = taken[:, 0], taken[:, 1]
    return bool(np.any((x > at - 4) & (x < at + width + 4) & (np.abs(y - centre) < height / 2 + 3)))


def _write_label(ax: Axes, label: Label, at: float, centre: float) -> None:
    write(
        figure_of(ax),
        at,
        centre,
        "\n".join(label.lines),
        color=label.colour,
        bold=label.bold,
        italic=label.italic,
        va="center",
        linespacing=1.18,
        gid="label",
    )
