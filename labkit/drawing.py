"""What every figure shares: colours, measured text, a page laid out in points, a picture with its alt text.

Figures are drawn with matplotlib's Agg canvas and never with pyplot, whose state is not safe in the
threads that panels draw from. Lengths are points (1/72 inch) unless a name says otherwise.
"""

import base64
import hashlib
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from numpy.typing import NDArray
from PIL import Image

from labkit import places

DPI = 120
"""Sharp at 125% zoom on a projector, and a third smaller in the notebook than 144."""
CSS_PIXELS_PER_POINT = 96 / 72
INK, MUTED, GRID, SHADES = "#1A1A1A", "#4A4A4A", "#D8D8D8", ("#F6F6F6", "#EBEBEB")
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 13.0, 10.5, 10.0
LINE = 1.32
"""Distance between two lines of text, in font sizes."""
MARGIN = 8.0

# --- colours --------------------------------------------------------------------------------------

SLOTS = (
    ("#C8321E", "o"),
    ("#0048DC", "s"),
    ("#CC8000", "^"),
    ("#1AA57D", "D"),
    ("#D53EA5", "v"),
    ("#4D90FF", "P"),
    ("#5C0088", "X"),
    ("#048128", "<"),
    ("#50003F", ">"),
    ("#5A5A5A", "p"),
)
"""Colour and marker: at least 3:1 against white, told apart with every common colour vision deficiency."""

HOUSE_SLOTS = {
    "labkit": 0,
    "nn.Linear": 1,
    "x*w+b eager": 2,
    "torch.compile": 3,
    "addcmul": 4,
    "cuBLAS": 6,
    "copy": 9,
    "Liger": 5,
    "fla": 7,
    "original": 8,
    "F.rms_norm": 1,
    "fla recurrent": 7,
    "fla chunk": 6,
    "accelerated-scan": 4,
    "loop": 2,
    "grouped Conv1d": 5,
    "baddbmm": 8,
    "bmm": 8,
    "einsum": 6,
    "vmap": 4,
    "grouped_mm": 1,
    "eager": 2,
    "CUDA graph": 7,
    "GraphedStep": 7,
    "make_graphed_callables": 6,
    "bare replay": 9,
    "Triton, a launch a block": 5,
    "labkit, one launch": 0,
    "labkit, a launch a block": 5,
    "labkit, GraphedStep": 7,
}
"""Slots of the contenders that the lessons know; two that share a slot do not meet in one figure."""


def slots(contenders: Iterable[str]) -> dict[str, int]:
    """A slot for each contender of one figure: its own where free, else the next; none twice up to nine.

    Known names choose first, so a stranger never takes a known contender's colour; and never ours.
    """
    names = sorted(dict.fromkeys(contenders), key=lambda name: (name not in HOUSE_SLOTS, name))
    taken: dict[str, int] = {}
    free: set[int] = set()
    for name in names:
        if free.isdisjoint(_preferred_slots(name)):
            free = set(range(len(SLOTS)))
        taken[name] = next(slot for slot in _preferred_slots(name) if slot in free)
        free.remove(taken[name])
    return taken


def _preferred_slots(name: str) -> list[int]:
    """The slots that it may have, the wanted one first; slot 0 is ours alone."""
    others = len(SLOTS) - 1
    wanted = HOUSE_SLOTS.get(name, 1 + hashlib.sha256(name.encode()).digest()[0] % others)
    if wanted == 0:
        return list(range(len(SLOTS)))
    return [1 + (wanted - 1 + step) % others for step in range(others)]


def colour(contender: str) -> str:
    """The colour that a contender has throughout the course, as ``#RRGGBB``."""
    return SLOTS[_preferred_slots(contender)[0]][0]


def marker(contender: str) -> str:
    """The marker that goes with a contender's colour."""
    return SLOTS[_preferred_slots(contender)[0]][1]


def contrast(first: str, second: str = "#FFFFFF") -> float:
    """Contrast ratio of two colours as WCAG 2 defines it, 1 to 21."""
    dark, light = sorted((_luminance(first), _luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(name: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(name)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def text_colour(name: str) -> str:
    """The colour, darkened until text in it is readable on white (4.5:1)."""
    while contrast(name) < 4.5:
        red, green, blue = to_rgb(name)
        name = to_hex((0.95 * red, 0.95 * green, 0.95 * blue))
    return name


def tint(name: str, share: float) -> str:
    """The colour mixed with white: ``share`` 1 is the colour, 0 white."""
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(name))
    return to_hex((red, green, blue))


# --- text -----------------------------------------------------------------------------------------


@cache
def text_width(text: str, size: float, bold: bool = False) -> float:
    """Width of one line of text."""
    renderer = RendererAgg(8, 8, DPI)
    width, _, _ = renderer.get_text_width_height_descent(text, _font(size, bold), ismath=False)
    return float(width) * 72 / DPI


def _font(size: float, bold: bool = False, italic: bool = False) -> FontProperties:
    return FontProperties(
        family="DejaVu Sans",
        size=size,
        weight="bold" if bold else "normal",
        style="italic" if italic else "normal",
    )


def wrap(text: str, width: float, size: float, bold: bool = False) -> list[str]:
    """Lines no wider than ``width``; one that is too long is cut, after a "_" if it can be."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size, bold) <= width:
            lines[-1] += f" {word}"
            continue
        while text_width(word, size, bold) > width and len(word) > 1:
            fits = max(n for n in range(1, len(word)) if n == 1 or text_width(word[:n], size, bold) <= width)
            fits = word.rfind("_", 1, fits) + 1 or fits
            lines.append(word[:fits])
            word = word[fits:]
        lines.append(word)
    return lines


def shorten(text: str, width: float, size: float) -> str:
    """The text, or as much of it as fits with an ellipsis."""
    if text_width(text, size) <= width:
        return text
    fits = (n for n in range(len(text), 0, -1) if text_width(text[:n].rstrip() + "…", size) <= width)
    return text[: next(fits, 1)].rstrip() + "…"


def write(
    figure: Figure,
    x: float,
    y: float,
    text: str,
    *,
    size: float = TEXT_SIZE,
    color: str = INK,
    bold: bool = False,
    italic: bool = False,
    **place: Any,
) -> Text:
    """Text at a position in points from the figure's lower left corner; a dollar sign is a dollar sign."""
    width, height = points(figure)
    drawn = figure.text(
        x / width, y / height, text, fontproperties=_font(size, bold, italic), color=color, **place
    )
    drawn.set_parse_math(False)
    return drawn


def points(figure: Figure) -> tuple[float, float]:
    """Width and height of a figure."""
    width, height = figure.get_size_inches()
    return float(width) * 72, float(height) * 72


# --- placing labels -------------------------------------------------------------------------------


def spread(targets: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres of labels along a line: as near to their targets as they can be without an overlap.

    The squared shifts are the least possible (pool adjacent violators), kept inside ``low`` .. ``high``.
    """
    order = sorted(range(len(targets)), key=lambda i: (targets[i], i))
    before = np.cumsum([0.0, *(sizes[i] for i in order)])
    offsets = [before[rank] + sizes[i] / 2 for rank, i in enumerate(order)]
    blocks: list[list[float]] = []  # sum of the wanted starts, number of labels
    for rank, i in enumerate(order):
        blocks.append([targets[i] - offsets[rank], 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    starts = [total / count for total, count in blocks for _ in range(int(count))]
    centres = [0.0] * len(targets)
    for rank, i in enumerate(order):
        start = max(low, min(starts[rank], high - before[-1]))
        centres[i] = float(start + offsets[rank])
    return centres


def stagger(
    centres: Sequence[float], widths: Sequence[float], low: float, high: float
) -> list[tuple[float, int]]:
    """Centre and row of labels above a plot: kept inside ``low`` .. ``high``, a row up where they collide."""
    ends: list[float] = []
    placed: dict[int, tuple[float, int]] = {}
    for i in sorted(range(len(centres)), key=lambda i: centres[i]):
        centre = min(max(centres[i], low + widths[i] / 2), max(high - widths[i] / 2, low + widths[i] / 2))
        left = centre - widths[i] / 2
        row = next((row for row, end in enumerate(ends) if left >= end), len(ends))
        ends[row : row + 1] = [centre + widths[i] / 2 + 6]
        placed[i] = (centre, row)
    return [placed[i] for i in range(len(centres))]


# --- the page -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """One line above the plot that says in words what a way of drawing means."""

    words: str
    sample: Mapping[str, Any]
    """How it is drawn: arguments of Line2D, or of Rectangle for a ``box``."""
    box: bool = False


@dataclass(frozen=True)
class Page:
    """A title, lines of keys, a grid of panels and footnotes, from top to bottom.

    ``left``, ``right``, ``above`` and ``below`` are what a panel needs around it for its labels.
    """

    title: str
    subtitle: str = ""
    keys: Sequence[Key] = ()
    notes: Sequence[str] = ()
    rows: int = 1
    columns: int = 1
    panel_height: float = 250.0
    left: float = 50.0
    right: float = 20.0
    above: float = 6.0
    below: float = 36.0
    width: float = 576.0

    @property
    def panel_width(self) -> float:
        """Width of the plotting area of one panel."""
        return (self.width - 2 * MARGIN - self.left) / self.columns - self.right

    def draw(self) -> tuple[Figure, list[Axes]]:
        """The figure with everything but the panels' contents, and the panels row by row."""
        room = self.width - 2 * MARGIN
        titles = wrap(self.title, room, TITLE_SIZE, bold=True)
        subtitles = wrap(self.subtitle, room, TEXT_SIZE)
        keys = [(key, wrap(key.words, room - 40, SMALL_SIZE)) for key in self.keys]
        notes = [line for note in self.notes for line in wrap(note, room, SMALL_SIZE)]
        key_lines = sum(len(lines) for _, lines in keys)
        head = LINE * (len(titles) * TITLE_SIZE + len(subtitles) * TEXT_SIZE + key_lines * SMALL_SIZE) + 6
        foot = LINE * len(notes) * SMALL_SIZE + (4 if notes else 0)
        pitch = self.panel_height + self.above
        height = 2 * MARGIN + head + self.rows * pitch + (self.rows - 1) * 12 + self.below + foot
        figure = Figure(figsize=(self.width / 72, height / 72), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)

        y = height - MARGIN
        for lines, size, color, bold in (
            (titles, TITLE_SIZE, INK, True),
            (subtitles, TEXT_SIZE, MUTED, False),
        ):
            for line in lines:
                write(figure, MARGIN, y, line, size=size, color=color, bold=bold, va="top")
                y -= LINE * size
        for key, lines in keys:
            self._sample(figure, key, y - SMALL_SIZE * 0.52)
            for line in lines:
                write(figure, MARGIN + 40, y, line, size=SMALL_SIZE, color=MUTED, va="top")
                y -= LINE * SMALL_SIZE
        for i, line in enumerate(reversed(notes)):
            write(
                figure,
                MARGIN,
                MARGIN + i * LINE * SMALL_SIZE,
                line,
                size=SMALL_SIZE,
                color=MUTED,
                va="bottom",
            )

        panels = []
        for row in range(self.rows):
            bottom = MARGIN + foot + self.below + (self.rows - 1 - row) * (pitch + 12)
            for column in range(self.columns):
                left = MARGIN + self.left + column * (self.panel_width + self.right)
                place = np.array([left, bottom, self.panel_width, self.panel_height])
                scale = np.array([self.width, height, self.width, height])
                panels.append(_plain_axes(figure, place / scale))
        return figure, panels

    def _sample(self, figure: Figure, key: Key, y: float) -> None:
        width, height = points(figure)
        if key.box:
            corner = ((MARGIN + 4) / width, (y - 3.5) / height)
            figure.add_artist(Rectangle(corner, 26 / width, 7 / height, **key.sample))
            return
        x = np.array([MARGIN + 3, MARGIN + 17, MARGIN + 31]) / width
        figure.add_artist(Line2D(x, np.full(3, y / height), markevery=[1], **key.sample))


def _plain_axes(figure: Figure, box: NDArray[np.float64]) -> Axes:
    axes = figure.add_axes((box[0], box[1], box[2], box[3]))
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set(color=MUTED, linewidth=0.9)
    axes.tick_params(which="both", color=MUTED, labelcolor=INK, labelsize=SMALL_SIZE, length=4, pad=3)
    axes.tick_params(which="minor", length=2)
    axes.set_axisbelow(True)
    return axes


def figure_of(axes: Axes) -> Figure:
    """The figure that a panel stands on."""
    assert isinstance(axes.figure, Figure)
    return axes.figure


def bounds(axes: Axes) -> tuple[float, float, float, float]:
    """Left, bottom, right and top of a panel, in points from the figure's lower left corner."""
    width, height = points(figure_of(axes))
    box = axes.get_position()
    return box.x0 * width, box.y0 * height, box.x1 * width, box.y1 * height


# --- the picture ----------------------------------------------------------------------------------


@cache
def _palette() -> NDArray[np.int64]:
    """White, greys, and every contender's colour with two paler steps for smooth edges and bands."""
    greys = ["#FFFFFF", INK, MUTED, GRID, *SHADES, *(tint(INK, share) for share in (0.75, 0.5, 0.25))]
    hues = [tint(hue, share) for hue, _ in SLOTS for share in (1, 0.6, 0.3, 0.16)]
    hues += [text_colour(hue) for hue, _ in SLOTS]
    return np.rint([np.multiply(to_rgb(name), 255) for name in greys + hues]).astype(np.int64)


def _in_house_colours(pixels: NDArray[np.uint8]) -> Image.Image:
    """The picture with each pixel in the nearest of the palette's colours: half the size, crisp hues.

    A palette fitted to the picture would spend itself on smooth edges and turn the white ground grey.
    """
    packed = pixels.astype(np.int64) @ np.array([65536, 256, 1])
    found, where = np.unique(packed, return_inverse=True)
    colours = np.stack([found >> 16, found >> 8 & 255, found & 255], axis=1)
    nearest = ((colours[:, None] - _palette()) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    image = Image.fromarray(nearest[where].reshape(packed.shape))
    image.putpalette(_palette().astype(np.uint8).tobytes())
    return image


@dataclass(frozen=True, repr=False)
class Shown:
    """A figure as a notebook shows it: a small WebP with alt text. Its plain text form is the alt text."""

    figure: Figure = field(compare=False)
    alt: str

    @cached_property
    def png(self) -> bytes:
        """The picture for a file: the same bytes for the same figure, in the few colours that figures use."""
        return self._encoded("png", optimize=True)

    @cached_property
    def webp(self) -> bytes:
        """The picture for a page: the same pixels in three fifths of the bytes."""
        return self._encoded("webp", lossless=True)

    def _encoded(self, kind: str, **options: Any) -> bytes:
        canvas = FigureCanvasAgg(self.figure)
        canvas.draw()
        out = io.BytesIO()
        _in_house_colours(np.asarray(canvas.buffer_rgba())[..., :3]).save(out, format=kind, **options)
        return out.getvalue()

    def save(self, path: str | Path) -> Path:
        """Write the PNG and return where it is."""
        path = Path(path)
        places.write_bytes(path, self.png)
        return path

    def _repr_html_(self) -> str:
        # alt of an Image display does not reach the page; alt of an <img> does, in JupyterLab and nbconvert.
        data = base64.b64encode(self.webp).decode()
        width = round(points(self.figure)[0] * CSS_PIXELS_PER_POINT)
        return (
            f'<img alt="{html.escape(self.alt, quote=True)}" width="{width}" '
            f'style="max-width:100%;height:auto" src="data:image/webp;base64,{data}">'
        )

    def __repr__(self) -> str:
        return self.alt
