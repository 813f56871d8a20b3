"""Guess first: a number is guessed on a logarithmic axis, and sealed on disk until it is measured."""

import html
import json
import math
import re
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import ipywidgets
import traitlets
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from labkit import paths
from labkit.measure.results import Measured, number
from labkit.plots import Picture
from labkit.plots.style import INK, WIDTH, drawing
from labkit.plots.words import TIMES, digits, named
from labkit.widgets.static import Twin, interactive

CLOSE = 1.25
"""A guess within this factor is close."""
BEFORE = "Guess before you read on."
COLOUR = "#5C0088"
"""Of a guess."""
MARGIN = 0.03
"""Left and right of the axis, as a share of the picture: the slider stands below it, place by place."""
STEPS = 200
"""Places that the slider has; arrow keys move by one."""
_LOOK = {"live": ("measured on", "-"), "recorded": ("recorded on", "--"), "published": ("published for", ":")}
"""What is said of a number of this kind, and how its line is drawn."""

_asked: "dict[str, Question]" = {}


@dataclass(frozen=True)
class Question:
    """What is asked, and the logarithmic axis, ``low`` to ``high``, that the answer is guessed on.

    ``unit`` follows the number; "x" is written as a multiplication sign. ``axis`` names what is guessed when
    it is a size, as in files of older versions.
    """

    name: str
    text: str
    low: float
    high: float
    unit: str = ""
    axis: str = ""

    def __post_init__(self) -> None:
        if not self.slug:
            raise ValueError(f"name: {self.name!r} has no letter or digit to name a file by")
        if not self.text.strip():
            raise ValueError("question: it is empty")
        if not 0 < self.low < self.high < math.inf:
            raise ValueError(f"low, high: {self.low} to {self.high} is no logarithmic axis; 0 < low < high")

    @property
    def slug(self) -> str:
        """The name in letters, digits and dashes; empty when it has none of them."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def path(self) -> Path:
        """The file that keeps the sealed guess."""
        return paths.cache() / "predictions" / f"{self.slug}.json"

    def number(self, value: float) -> str:
        """A value with its unit: ``12×``, ``3 µs``, ``1200``."""
        return digits(value) + (TIMES if self.unit == "x" else f" {self.unit}".rstrip())

    def say(self, value: float) -> str:
        """A value that explains itself: ``width 1200`` where the axis has a name."""
        return named(self.axis, self.number(value)) if self.axis else self.number(value)


@dataclass(frozen=True)
class Guess:
    """A sealed guess."""

    value: float
    sealed: str
    """When, in ISO format."""
    seen: bool = False
    """Whether the answer had been seen before."""
    revealed: bool = False
    """Whether it has been seen since."""


@dataclass(frozen=True)
class Entry:
    """What a file on disk holds; those of older versions have no ``unit`` and no ``axis``."""

    name: str
    question: str
    guess: Guess
    unit: str = ""
    axis: str = ""


# --- on disk --------------------------------------------------------------------------------------


def keep(question: Question, guess: Guess | None) -> None:
    """Write a sealed guess where :func:`kept` finds it, or with None remove what is there.

    OSError where that folder cannot be written.
    """
    if guess is None:
        question.path.unlink(missing_ok=True)
        return
    entry = Entry(question.name, question.text, guess, question.unit, question.axis)
    paths.write_text(question.path, json.dumps(asdict(entry), indent=1) + "\n")


def kept(question: Question) -> Guess | None:
    """The sealed guess of an earlier kernel; None without one, or when the question has changed since.

    Raises ValueError for a file that holds something else, OSError for one that cannot be read.
    """
    if not question.path.exists():
        return None
    try:
        entry = parse(question.path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{question.path} holds no guess") from error
    fits = entry.question == question.text and question.low <= entry.guess.value <= question.high
    return entry.guess if fits else None


def parse(text: str) -> Entry:
    """What :func:`keep` wrote, now or in an older version; ValueError for any other text."""
    try:
        content = json.loads(text, parse_int=float)
        made = Entry(**content | {"guess": Guess(**content["guess"])})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError("text: it is no guess") from error
    value, words = made.guess.value, [made.name, made.question, made.unit, made.axis, made.guess.sealed]
    typed = all(isinstance(word, str) for word in words) and isinstance(value, float)
    flags = isinstance(made.guess.seen, bool) and isinstance(made.guess.revealed, bool)
    if not (typed and flags and 0 < value < math.inf):
        raise ValueError("text: it is no guess")
    return made


# --- in words, and in a picture -------------------------------------------------------------------


def _placed(measured: Measured | float | None) -> float | None:
    """The bare number; None where there is none, or none that a logarithmic axis has a place for."""
    value = number(measured)
    return value if value is not None and 0 < value < math.inf else None


def verdict(question: Question, guess: Guess | None, measured: Measured | float | None) -> str:
    """Guess and answer as sentences: how far apart they are as a factor, and where the answer comes from."""
    source, plain, truth = "The answer", number(measured), _placed(measured)
    if isinstance(measured, Measured):
        source = f"{_LOOK[measured.kind][0].capitalize()} {measured.device}"
    mine = question.say(guess.value) if guess else ""
    if truth is None:
        nowhere = f"{source}: {plain}, which has no place on a logarithmic axis"
        missing = "There is no answer here" if plain is None else nowhere
        return f"{missing}; your guess of {mine} stays sealed." if guess else f"{missing}."
    answer = f"{source}: {question.say(truth)}"
    if guess is None:
        return f"No guess was sealed. {answer}."
    who = "Having seen the answer, you" if guess.seen else "You"
    return f"{who} guessed {mine}. {answer}. Your guess was {_distance(guess.value, truth)}."


def _distance(guess: float, truth: float) -> str:
    """How far a guess is from the truth: ``close, 8% too high`` or ``11.8 times too high``."""
    off, way = max(guess / truth, truth / guess), "high" if guess > truth else "low"
    if off < 1.01:
        return "right"
    share = f"close, {100 * abs(guess / truth - 1):.0f}%"
    return f"{share if off <= CLOSE else f'{digits(off)} times'} too {way}"


@drawing()
def axis(question: Question, guess: float | None, measured: Measured | float | None, said: str) -> Picture:
    """The axis with guess and answer, as far as there are any, and the way between them shaded.

    ``said`` ends the alt text.
    """
    figure, truth = Figure(figsize=(WIDTH, 1.1)), _placed(measured)
    axes = figure.add_axes((MARGIN, 0.26, 1 - 2 * MARGIN, 0.38))
    reached = [question.low, question.high, *([] if truth is None else [truth / 1.2, truth * 1.2])]
    low, high = min(reached), max(reached)
    axes.set(xscale="log", xlim=(low, high), yticks=[])
    marks = []
    if guess is not None:
        marks.append((guess, f"your guess {question.number(guess)}", COLOUR, "-"))
    if truth is not None:
        how, stroke = _LOOK[measured.kind] if isinstance(measured, Measured) else ("answer", "-")
        marks.append((truth, f"{how.split()[0]} {question.number(truth)}", INK, stroke))
    if len(marks) == 2:
        axes.axvspan(*sorted(value for value, *_ in marks), color=COLOUR, alpha=0.12, lw=0)
    for row, (value, words, colour, stroke) in enumerate(marks):
        axes.axvline(value, color=colour, ls=stroke, lw=2.5)
        share = math.log(value / low) / math.log(high / low)
        aligned = "left" if share < 0.1 else "right" if share > 0.9 else "center"
        axes.annotate(  # a row each: two that are close do not meet
            words, (value, 1), (0, 2 + 13 * row), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha=aligned, color=colour,
        )  # fmt: skip
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,), numticks=14))
    axes.xaxis.set_major_formatter(lambda value, _: digits(value) + TIMES * (question.unit == "x"))
    axes.xaxis.set_minor_locator(NullLocator())
    reach = f"from {question.say(question.low)} to {question.say(question.high)}"
    return Picture(figure, f"{question.text} A logarithmic axis {reach}. {said}")


# --- asked, sealed, revealed ----------------------------------------------------------------------


def guess(name: str, question: str, *, low: float, high: float, unit: str = "") -> "Asked":
    """Ask for a number between ``low`` and ``high``, guessed on a logarithmic axis; show it and return it.

    ``unit`` follows the number; "x" is written as a multiplication sign. A sealed guess is kept on disk
    under its ``name``, and found again by the next kernel. Where nobody could press a button, the question
    and the empty axis are shown.

    Raises ValueError for an empty name or question, a range that a logarithmic axis cannot have, and a name
    that another question has already.
    """
    asked = Question(name, question, low, high, unit)
    before = _asked.setdefault(asked.slug, asked)
    if before.text != asked.text:
        raise ValueError(f"name: {name!r} already stands for another question, {before.text!r}")
    return Asked(asked)


class Asked:
    """A question that is shown, the guess that is sealed for it, and its widgets where somebody is there."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.guess: float | None = None
        """The guess as it stands, sealed or not."""
        self.sealed: Guess | None = None
        self.widget: ipywidgets.VBox | None = None
        self._seen = False
        self._twin, trouble = Twin(), ""
        if interactive():
            try:
                self.sealed = kept(question)
            except (OSError, ValueError) as error:
                trouble = f"An earlier guess could not be read: {error}. Guess anew."
            if self.sealed is not None:
                self.guess, self._seen = self.sealed.value, self.sealed.seen or self.sealed.revealed
            self._build()
        self._settle(trouble)
        self._twin.show(self.widget)

    def reveal(self, measured: Measured | float | None) -> None:
        """Show the sealed guess and the answer on one axis, and the factor between them.

        With None nothing was measured here, or what was asked for does not exist, and the guess stays
        sealed, as it does for an answer that a logarithmic axis has no place for. Without a sealed guess the
        answer is shown alone.
        """
        said, known = verdict(self.question, self.sealed, measured), _placed(measured) is not None
        style = f"border-left:4px solid {COLOUR};padding:0.2em 0.8em;margin:0.2em 0"
        # JupyterLab puts the first line of a hidden output in its place: the question, and not the answer.
        page = f'{html.escape(self.question.text)}\n<div style="{style}">{html.escape(said)}</div>'
        if known:
            mine = None if self.sealed is None else self.sealed.value
            page += axis(self.question, mine, measured, said)._repr_html_()
        Twin(page, f"{self.question.text}\n{said}").show()
        if known and self.widget is not None:
            self._seen = True
            if self.sealed is not None and not self.sealed.revealed:
                self.sealed = replace(self.sealed, revealed=True)
                self._settle(self._keep())

    def _build(self) -> None:
        asked = self.question
        low, high = math.log10(asked.low), math.log10(asked.high)
        self.picture, self.status = ipywidgets.HTML(), ipywidgets.HTML()
        self.slider = ipywidgets.FloatLogSlider(min=low, max=high, step=(high - low) / STEPS, readout=False)
        self.number = ipywidgets.BoundedFloatText(min=asked.low, max=asked.high, description="Your guess")
        self.slider.value = self.number.value = asked.low if self.guess is None else self.guess
        # Two digits are as much as a hand on a slider means; what is typed stays as it is.
        both = (lambda slid: float(f"{slid:.1e}"), lambda typed: typed)
        traitlets.link((self.slider, "value"), (self.number, "value"), both)
        self.number.observe(self._moved, "value")
        self.seal = ipywidgets.Button(description="Seal my guess", button_style="primary")
        self.again = ipywidgets.Button(description="Guess again")
        self.seal.on_click(self._seal)
        self.again.on_click(self._open_again)
        row = ipywidgets.HBox([self.number, self.seal, self.again, self.status])
        self.widget = ipywidgets.VBox([ipywidgets.HTML(self._heading()), self.picture, self.slider, row])
        # A slider's rail is 6 pixels shorter than its widget, at each end.
        self.slider.layout.margin = f"0 calc({100 * MARGIN:.0f}% - 6px)"
        self.slider.layout.width, self.number.layout.width = "auto", "200px"
        row.layout.flex_flow, row.layout.align_items = "row wrap", "center"
        self.widget.layout.width, self.widget.layout.max_width = f"{96 * WIDTH:.0f}px", "100%"

    def _heading(self) -> str:
        # Not <h4>: the table of contents would list every question.
        style = "font-weight:600;line-height:1.4;margin:0.3em 0"
        return f'<div role="heading" aria-level="4" style="{style}">{html.escape(self.question.text)}</div>'

    def _moved(self, change: dict[str, Any]) -> None:
        self.guess = change["new"]
        self._draw()

    def _seal(self, _: Any) -> None:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self.sealed = Guess(self.number.value, now, self._seen)
        self._settle(self._keep())

    def _open_again(self, _: Any) -> None:
        """Let the guess be moved; after the reveal a new round starts from the empty axis."""
        self.sealed = None
        if self._seen:
            self.number.value, self.guess = self.question.low, None
        self._settle(self._keep())

    def _keep(self) -> str:
        """Have the disk hold what is sealed; a sentence where that fails."""
        try:
            keep(self.question, self.sealed)
        except OSError as error:
            return f"This lasts only until the kernel restarts; it could not be written: {error}"
        return ""

    def _settle(self, trouble: str = "") -> None:
        """Show what is sealed now, in the widgets and in their twin."""
        mine = None if self.sealed is None else self.sealed.value
        words = BEFORE if self.sealed is None else self._standing()
        picture = axis(self.question, mine, None, words)._repr_html_()
        page = f"{self._heading()}{picture}<p>{html.escape(words)}</p>"
        self._twin.update(page, f"{self.question.text}\n{words}")
        if self.widget is not None:
            self._draw(trouble)

    def _draw(self, trouble: str = "") -> None:
        self.slider.disabled = self.number.disabled = self.sealed is not None
        self.seal.disabled = self.guess is None
        self.seal.layout.display = "none" if self.sealed else None
        self.again.layout.display = None if self.sealed else "none"
        self.picture.value = axis(self.question, self.guess, None, self._standing())._repr_html_()
        self.status.value = f'<span role="status">{html.escape(trouble or self._standing())}</span>'

    def _standing(self) -> str:
        if self.sealed is not None:
            when = self.sealed.sealed[:16].replace("T", " at ")
            return f"Sealed: {self.question.say(self.sealed.value)}, on {when}."
        if self.guess is None:
            return "Drag, or type a number."
        return f"{self.question.say(self.guess)}, not sealed yet."
