"""What every figure shares: style, colours of contenders, a sheet with words around the axes, a picture.

Figures are drawn with matplotlib's Agg canvas and never with pyplot, whose state is not safe in the threads
that panels draw from.
"""

import base64
import html
import io
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend_handler import HandlerLine2D
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

from labkit import paths
from labkit.measure.rows import LIVE, PUBLISHED, RECORDED

INK, MUTED, SHADES = "#1A1A1A", "#4A4A4A", ("#F6F6F6", "#EBEBEB")
TITLE, SMALL = 13.0, 10.0
"""Font sizes in points; all other text has the style's own."""
WIDTH = 8.0
"""Of a figure, in inches; 96 pixels of a page each."""
_LINE = 0.185
"""Height of a line of small text, in inches."""
_CHARACTERS = 12.5
"""So many characters of small text fit into an inch."""
_STYLE = Path(__file__).with_name("labkit.mplstyle")
_DRAWING = threading.RLock()


@contextmanager
def drawing() -> Iterator[None]:
    """Within it, or within a function that it decorates, the style of the course holds.

    One thread at a time: matplotlib's settings belong to the process.
    """
    with _DRAWING, matplotlib.rc_context(fname=_STYLE):
        yield


# --- colours --------------------------------------------------------------------------------------


class Look(NamedTuple):
    """How a contender looks in one figure."""

    hue: str
    marker: str
    strong: bool = False
    """Whether it stands out: labkit's own and the learner's kernel do."""

    def curve(self, kind: str) -> dict[str, Any]:
        """How its curve of a kind is drawn."""
        size = 5.5 if not self.strong else 9.0 if self.marker == "*" else 6.5
        how = {"marker": self.marker, "markersize": size, "zorder": 5 + self.strong + (self == LEARNERS)}
        return {**how, "linewidth": 2.6 if self.strong else 1.6, **line_look(self.hue, kind)}


OURS, LEARNERS = Look("#C8321E", "o", True), Look("#5C0088", "*", True)
_HUES = ("#0048DC", "#CC8000", "#1AA57D", "#D53EA5", "#50003F", "#4D90FF", "#5A5A5A", "#048128")
OTHERS = [Look(hue, marker) for hue, marker in zip(_HUES, "s^Dv>Pp<", strict=True)]
"""Neighbours are far apart for every common colour vision deficiency; each has 3:1 against white."""
_KNOWN = {
    name: look
    for look, names in (
        (OURS, ("labkit", "labkit, one launch")),
        (LEARNERS, ("your kernel", "the solution")),
        (OTHERS[0], ("nn.Linear", "F.rms_norm", "grouped_mm", "cuBLAS")),
        (OTHERS[1], ("eager", "x*w+b eager", "loop")),
        (OTHERS[2], ("torch.compile",)),
        (OTHERS[3], ("addcmul", "accelerated-scan", "make_graphed_callables")),
        (OTHERS[4], ("original",)),
        (OTHERS[5], ("Liger", "fla", "GraphedStep")),
        (OTHERS[6], ("copy",)),
    )
    for name in names
}


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each name of one figure, the one that it has throughout the course where that is free.

    No two are alike up to eight names besides labkit's and the learner's, whose looks no other name gets.
    """
    taken: dict[str, Look] = {}
    for name in sorted(dict.fromkeys(names), key=lambda name: name not in _KNOWN):  # known ones choose first
        wanted = [_KNOWN[name]] if name in _KNOWN else [OURS] if name.startswith("labkit") else []
        free = [look for look in (*wanted, *OTHERS) if look not in taken.values()]
        taken[name] = free[0] if free else OTHERS[len(taken) % len(OTHERS)]
    return taken


def colour(contender: str) -> str:
    """The colour that a contender has where it stands alone, as ``#RRGGBB``."""
    return looks([contender])[contender].hue


def tint(name: str, share: float) -> str:
    """The colour mixed with white: ``share`` 1 is the colour, 0 white."""
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(name))
    return to_hex((red, green, blue))


def text_colour(name: str) -> str:
    """The colour, darkened so that text in it is readable on white."""
    red, green, blue = (0.78 * part for part in to_rgb(name))
    return to_hex((red, green, blue))


# --- live, recorded, published ----------------------------------------------------------------------

LINES: dict[str, Any] = {LIVE: "-", RECORDED: (0, (4.5, 2.2)), PUBLISHED: "none"}
_EDGES: dict[str, Any] = {LIVE: "-", RECORDED: (0, (4, 2)), PUBLISHED: (0, (1, 1.5))}
_FILLS = {LIVE: 1.0, RECORDED: 0.3, PUBLISHED: 0.0}
RINGED: dict[str, Any] = {
    **{"color": INK, "linestyle": "none", "marker": "o", "markersize": 12.0},
    **{"markerfacecolor": "none", "markeredgewidth": 1.0},
}
"""Around what was disturbed, whatever its kind: the fill of the marker inside says that."""


def line_look(hue: str, kind: str) -> dict[str, Any]:
    """A curve: solid with filled markers when live, dashed and hollow when recorded, else markers alone."""
    face = {LIVE: hue, RECORDED: "white", PUBLISHED: tint(hue, 0.3)}[kind]
    return {"color": hue, "linestyle": LINES[kind], "markerfacecolor": face}


def bar_look(hue: str, kind: str) -> dict[str, Any]:
    """A bar: full when live, pale with a dashed edge when recorded, hollow and dotted when published."""
    face = tint(hue, _FILLS[kind])
    return {"facecolor": face, "edgecolor": hue, "linestyle": _EDGES[kind], "linewidth": 1.2}


# --- the sheet ------------------------------------------------------------------------------------

Key = tuple[str, Artist]
"""One line above the axes: what a way of drawing means, and a sample of it."""


def line_key(words: str, **sample: Any) -> Key:
    """A key with a line, or a marker."""
    return words, Line2D([], [], **sample)


def box_key(words: str, **sample: Any) -> Key:
    """A key with a box."""
    return words, Patch(**sample)


def sheet(
    title: str,
    height: float,
    *,
    subtitle: str = "",
    keys: Sequence[Key] = (),
    notes: Iterable[str] = (),
    width: float = WIDTH,
) -> Figure:
    """An empty figure with its words; what is added to it is laid out in ``height`` inches below them."""
    room = int((width - 0.25) * _CHARACTERS)
    titles, subtitles = wrap(title, int(room * 0.7)), wrap(subtitle, room)
    words = ["\n".join(wrap(said, room - 7)) for said, _ in keys]
    feet = [line for note in notes for line in wrap(note, room)]
    key_lines = sum(1 + said.count("\n") for said in words)
    head = 0.16 + 0.25 * len(titles) + _LINE * (len(subtitles) + key_lines)
    foot = _LINE * len(feet) + (0.1 if feet else 0.02)
    whole = head + height + foot
    engine = ConstrainedLayoutEngine(rect=(0.004, foot / whole, 0.992, height / whole))
    figure = Figure(figsize=(width, whole), layout=engine)
    x, y = 0.11 / width, whole - 0.1
    above: dict[str, Any] = {"va": "top", "in_layout": False, "linespacing": 1.25}
    figure.text(x, y / whole, "\n".join(titles), size=TITLE, weight="bold", **above)
    y -= 0.25 * len(titles)
    figure.text(x, y / whole, "\n".join(subtitles), size=SMALL, color=MUTED, **above)
    y -= _LINE * len(subtitles) + 0.015
    if keys:
        legend = figure.legend(
            [sample for _, sample in keys],
            words,
            loc="upper left",
            bbox_to_anchor=(x, y / whole),
            handler_map={Line2D: HandlerLine2D(numpoints=1)},
        )
        legend.set_in_layout(False)
    below: dict[str, Any] = {"va": "bottom", "in_layout": False, "linespacing": 1.25}
    figure.text(x, 0.07 / whole, "\n".join(feet), size=SMALL, color=MUTED, **below)
    return figure


def note(ax: Axes, text: str, x: float, y: float, right: float, up: float, **how: Any) -> None:
    """Text some points right of and above a place; ``across`` and ``along`` say in which coordinates it is.

    They are "data" or "axes fraction", which is what they are if not given.
    """
    across, along = how.pop("across", "axes fraction"), how.pop("along", "axes fraction")
    how = {"size": SMALL, "annotation_clip": False, **how}
    ax.annotate(text, (x, y), (right, up), xycoords=(across, along), textcoords="offset points", **how)


# --- the picture ----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Picture:
    """A figure as a notebook shows it: a small WebP with alt text. Its plain text form is the alt text."""

    figure: Figure = field(compare=False)
    alt: str

    @property
    def size(self) -> tuple[float, float]:
        """Width and height on a page, in CSS pixels."""
        width, height = self.figure.get_size_inches()
        return 96 * float(width), 96 * float(height)

    @cached_property
    def png(self) -> bytes:
        """The picture for a file: the same bytes for the same figure."""
        return self._encoded("png", optimize=True)

    @cached_property
    def webp(self) -> bytes:
        """The picture for a page: the same pixels in fewer bytes."""
        return self._encoded("webp", lossless=True)

    @cached_property
    def _pixels(self) -> Image.Image:
        """Drawn once, for laying a figure out a second time may move it; in few colours, for a small file."""
        canvas = FigureCanvasAgg(self.figure)
        with drawing():
            canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        return picture.quantize(256, method=Image.Quantize.MEDIANCUT)  # keeps the colours of areas

    def _encoded(self, kind: str, **options: Any) -> bytes:
        out = io.BytesIO()
        self._pixels.save(out, format=kind, **options)
        return out.getvalue()

    def save(self, path: str | Path) -> Path:
        """Write the PNG and return where it is."""
        path = Path(path)
        paths.write_bytes(path, self.png)
        return path

    def _repr_html_(self) -> str:
        # alt of an Image display does not reach the page; alt of an <img> does, in JupyterLab and nbconvert.
        data = base64.b64encode(self.webp).decode()
        return (
            f'<img alt="{html.escape(self.alt, quote=True)}" width="{round(self.size[0])}" '
            f'style="max-width:100%;height:auto" src="data:image/webp;base64,{data}">'
        )

    def __repr__(self) -> str:
        return self.alt
