"""What all figures share: the look, a style for each way, numbers in words, and a picture with alt text."""

import base64
import html
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import matplotlib
from IPython.core.getipython import get_ipython
from IPython.display import display
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from labkit import paths

INK, MUTED = "#1A1A1A", "#4A4A4A"
WIDTH = 8.0
"""Width of a figure in inches; an inch is 96 pixels of a page."""
STYLE_FILE = paths.PACKAGE / "display" / "course.mplstyle"


@contextmanager
def course_style() -> Iterator[None]:
    """The style of the course, as a context or as a decorator of a function that draws."""
    with matplotlib.rc_context(fname=STYLE_FILE):
        yield


class Style(NamedTuple):
    """Colour and marker of a way. The learner's kernel and labkit's stand out."""

    colour: str
    marker: str
    bold: bool = False


LEARNERS, OURS, FLOOR = Style("#5C0088", "*", True), Style("#C8321E", "o", True), Style("#8A8A8A", "|")
FIXED = {"your kernel": LEARNERS, "the solution": LEARNERS, "labkit": OURS, "copy": FLOOR}
PALETTE = [
    Style(colour, marker)
    for colour, marker in zip(
        ("#0048DC", "#CC8000", "#1AA57D", "#D53EA5", "#50003F", "#4D90FF", "#5A5A5A", "#048128"),
        "s^Dv>Pp<",
        strict=True,
    )
]
"""Neighbours differ for every common colour vision deficiency; each has a contrast of 3:1 with white."""


def style_of(way: str, known: dict[str, Style]) -> Style:
    """The style of a way; ``known`` are those of the lesson so far: a colour means one way in all of it."""
    if way in FIXED:
        return FIXED[way]
    if way not in known:
        free = [each for each in PALETTE if each not in known.values()]
        known[way] = free[0] if free else PALETTE[len(known) % len(PALETTE)]
    return known[way]


def pale(colour: str, share: float) -> str:
    """``share`` of the colour and the rest white."""
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def duration(us: float, like: float | None = None) -> str:
    """Microseconds with three digits, in the unit that suits them, or in ``like``'s: ``6.7 µs``."""
    units = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"), (1e-3, "ns"))
    scale, unit = next((each for each in units if (like or us) >= each[0] * 0.9995), units[-1])
    return f"{digits(us / scale)} {unit}"


def digits(value: float) -> str:
    """Three significant digits, never in powers of ten: ``0.25``, ``33.3``, ``16384``."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def times(value: float) -> str:
    """A ratio: ``2.5×``."""
    return f"{digits(value)}\N{MULTIPLICATION SIGN}"


# ---- the page ----------------------------------------------------------------------------------------------


def interactive() -> bool:
    """Whether a person may be looking at this kernel's cells: in JupyterLab, Notebook 7, VS Code or Colab.

    papermill, nbconvert and plain Python have nobody who could press a button. LABKIT_HEADLESS=1 says so,
    LABKIT_HEADLESS=0 the contrary.
    """
    chosen = os.environ.get("LABKIT_HEADLESS")
    if chosen:
        return chosen == "0"
    if get_ipython() is None:
        return False
    # Jupyter's server names the session of every kernel that a front end opens; VS Code starts its own;
    # Kaggle also runs whole notebooks, as a batch.
    if "COLAB_RELEASE_TAG" in os.environ or os.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Interactive":
        return True
    return "JPY_SESSION_NAME" in os.environ or any(name.startswith("VSCODE_") for name in os.environ)


def show(page: str, text: str, **more: Any) -> None:
    """Show HTML in a notebook, with a text for whoever cannot; print the text elsewhere."""
    if get_ipython() is None:
        print(text)
    else:
        display({"text/html": page, "text/plain": text, **more}, raw=True)


@dataclass(frozen=True, repr=False)
class Picture:
    """A figure as a notebook shows it, with alt text in two sentences, which is also its plain text."""

    figure: Figure = field(compare=False)
    alt: str

    def _repr_html_(self) -> str:
        picture = io.BytesIO()
        with course_style():
            self.figure.savefig(picture, format="webp", pil_kwargs={"lossless": True})
        # of an Image display the alt text does not reach the page, of an <img> it does
        data = base64.b64encode(picture.getvalue()).decode()
        width = round(96 * self.figure.get_figwidth())  # CSS pixels
        alt = html.escape(self.alt, quote=True)
        look = "max-width:100%;height:auto"
        return f'<img alt="{alt}" width="{width}" style="{look}" src="data:image/webp;base64,{data}">'

    def __repr__(self) -> str:
        return self.alt
