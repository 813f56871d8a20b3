"""What all figures share: the style, the contenders' colours, the text around the axes, and `Picture`.

Figures are drawn with matplotlib's Agg canvas and never with pyplot, whose state is not safe in the threads
that panels draw from.
"""

import base64
import html
import io
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from labkit import paths
from labkit.measure.rows import LIVE, PUBLISHED, RECORDED

INK, MUTED, SHADES = "#1A1A1A", "#4A4A4A", ("#F6F6F6", "#EBEBEB")
TITLE, SMALL = 13.0, 10.0
"""Font sizes in points; all other text has the size that course.mplstyle sets."""
WIDTH = 8.0
"""Width of a figure in inches; an inch is 96 pixels of a page."""
LINE_HEIGHT = 0.185
"""Height of a line of small text, in inches."""
_CHARACTERS_PER_INCH = 12.5
"""Characters of small text that fit into an inch."""
_STYLE_FILE = paths.PACKAGE / "display" / "course.mplstyle"
_DRAWING = threading.RLock()


@contextmanager
def course_style() -> Iterator[None]:
    """Apply the style of the course, as a context or as a decorator of a function that draws.

    Only one thread at a time can be inside: matplotlib's settings belong to the process.
    """
    with _DRAWING, matplotlib.rc_context(fname=_STYLE_FILE):
        yield


# --- contenders: colour and marker ------------------------------------------------------------------


class ContenderStyle(NamedTuple):
    """Colour and marker of a contender in one figure."""

    colour: str
    marker: str
    emphasised: bool = False
    """Drawn with thicker lines and bold text: labkit's own kernel and the learner's."""

    def curve(self, kind: str) -> dict[str, Any]:
        """Keyword arguments of ``Axes.plot`` for the contender's curve of measurements of a kind."""
        look = {"marker": self.marker, "zorder": 5, **line_style(self.colour, kind)}
        if self.emphasised:
            is_learners = self.marker == "*"  # drawn on top of all others
            look |= {"linewidth": 2.6, "markersize": 9.0 if is_learners else 6.5, "zorder": 6 + is_learners}
        return look


OURS, LEARNERS = ContenderStyle("#C8321E", "o", True), ContenderStyle("#5C0088", "*", True)
_COLOURS = ("#0048DC", "#CC8000", "#1AA57D", "#D53EA5", "#50003F", "#4D90FF", "#5A5A5A", "#048128")
PALETTE = [ContenderStyle(colour, marker) for colour, marker in zip(_COLOURS, "s^Dv>Pp<", strict=True)]
"""Neighbours differ for every common colour vision deficiency; each has a contrast of 3:1 with white."""


@cache
def _usual_styles() -> dict[str, ContenderStyle]:
    """The style of each contender that has the same one in all lessons."""
    colours = json.loads((paths.DATA / "contender_colours.json").read_text(encoding="utf-8"))
    by_colour = {style.colour: style for style in PALETTE}
    ours = {"labkit": OURS, "your kernel": LEARNERS, "the solution": LEARNERS}
    return ours | {name: by_colour[colour] for name, colour in colours.items()}


def contender_styles(contenders: Iterable[str]) -> dict[str, ContenderStyle]:
    """A style for each contender of one figure, its usual one where no other contender has taken that.

    Up to eight contenders, besides labkit's and the learner's, get different styles. The styles `OURS` and
    `LEARNERS` are given to no other contender.
    """
    usual = _usual_styles()
    styles: dict[str, ContenderStyle] = {}
    for name in sorted(dict.fromkeys(contenders), key=lambda name: name not in usual):
        preferred = usual.get(name, OURS if name.startswith("labkit") else PALETTE[0])
        free = [style for style in (preferred, *PALETTE) if style not in styles.values()]
        styles[name] = free[0] if free else PALETTE[len(styles) % len(PALETTE)]
    return styles


def mix_with_white(colour: str, share: float) -> str:
    """``share`` of the colour and the rest white: 1 is the colour, 0 is white."""
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))


# --- kinds: live, recorded, published ---------------------------------------------------------------

LINE_STYLES: dict[str, Any] = {LIVE: "-", RECORDED: (0, (4.5, 2.2)), PUBLISHED: "none"}
_EDGES: dict[str, Any] = {LIVE: "-", RECORDED: (0, (4, 2)), PUBLISHED: (0, (1, 1.5))}
_FILLS = {LIVE: 1.0, RECORDED: 0.3, PUBLISHED: 0.0}
NOISE_RING: dict[str, Any] = dict(
    color=INK, linestyle="none", marker="o", markersize=12.0, markerfacecolor="none", markeredgewidth=1.0
)
"""Drawn around the marker of a disturbed point, whose fill still shows the kind."""


def line_style(colour: str, kind: str) -> dict[str, Any]:
    """A curve is solid with filled markers when live, dashed and hollow when recorded, else markers alone."""
    face = {LIVE: colour, RECORDED: "white", PUBLISHED: mix_with_white(colour, 0.3)}[kind]
    return {"color": colour, "linestyle": LINE_STYLES[kind], "markerfacecolor": face}


def bar_style(colour: str, kind: str) -> dict[str, Any]:
    """A bar is full when live, pale with a dashed edge when recorded, hollow and dotted when published."""
    face = mix_with_white(colour, _FILLS[kind])
    return {"facecolor": face, "edgecolor": colour, "linestyle": _EDGES[kind], "linewidth": 1.2}


# --- the text around the axes -----------------------------------------------------------------------


def new_figure(
    title: str,
    height: float,
    *,
    subtitle: str = "",
    legend: Sequence[Artist] = (),
    footnotes: Iterable[str] = (),
    width: float = WIDTH,
) -> Figure:
    """A figure with a title, a subtitle and a legend above its axes, and with footnotes below them.

    ``legend`` holds artists with labels, a line of text each. ``height`` is that of the axes in inches.
    """
    characters = int((width - 0.25) * _CHARACTERS_PER_INCH)
    titles, subtitle = wrap(title, int(characters * 0.7)), fill(subtitle, characters)
    labels = [fill(str(artist.get_label()), characters - 7) for artist in legend]
    notes = [line for note in footnotes for line in wrap(note, characters)]
    key_lines = sum(len(text.splitlines()) for text in (subtitle, *labels))
    head = 0.2 + 0.25 * len(titles) + LINE_HEIGHT * key_lines
    foot = 0.1 + LINE_HEIGHT * len(notes)
    total = head + height + foot
    engine = ConstrainedLayoutEngine(rect=(0.004, foot / total, 0.992, height / total))
    figure = Figure(figsize=(width, total), layout=engine)
    x, y = 0.11 / width, 1 - 0.1 / total
    figure.text(x, y, "\n".join(titles), va="top", size=TITLE, weight="bold", in_layout=False)
    y -= (0.25 * len(titles) + 0.015) / total
    key = figure.legend(legend, labels, title=subtitle, loc="upper left", bbox_to_anchor=(x, y))
    key.set(alignment="left", in_layout=False)
    figure.text(x, 0.07 / total, "\n".join(notes), va="bottom", size=SMALL, color=MUTED, in_layout=False)
    return figure


# --- the picture ------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Picture:
    """A figure as a notebook shows it: a small WebP with alt text. Its plain text form is the alt text."""

    figure: Figure = field(compare=False)
    alt: str

    @cached_property
    def png(self) -> bytes:
        """The picture for a file."""
        return self._encoded("png", optimize=True)

    @cached_property
    def webp(self) -> bytes:
        """The picture for a page: the same pixels in fewer bytes."""
        return self._encoded("webp", lossless=True)

    def _encoded(self, kind: str, **options: Any) -> bytes:
        out = io.BytesIO()
        with course_style():
            self.figure.savefig(out, format=kind, pil_kwargs=options)
        return out.getvalue()

    def save(self, path: str | Path) -> Path:
        """Write the PNG and return its path."""
        path = Path(path)
        with paths.replacing(path) as beside:
            beside.write_bytes(self.png)
        return path

    def _repr_html_(self) -> str:
        # alt of an Image display does not reach the page; alt of an <img> does, in JupyterLab and nbconvert.
        data = base64.b64encode(self.webp).decode()
        width = round(96 * self.figure.get_figwidth())  # CSS pixels
        return (
            f'<img alt="{html.escape(self.alt, quote=True)}" width="{width}" '
            f'style="max-width:100%;height:auto" src="data:image/webp;base64,{data}">'
        )

    def __repr__(self) -> str:
        return self.alt
