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
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from labkit import paths
from labkit.display.style import interactive
from labkit.measure.results import Measured, number
from labkit.plots import Picture
from labkit.plots.formatting import TIMES_SIGN, format_number
from labkit.plots.style import INK, WIDTH, course_style
from labkit.widgets.static import StaticCopy

Answer = Measured | float | None
CLOSE_FACTOR = 1.25
"""A guess within this factor of the answer is close."""
PROMPT = "Guess before you read on."
GUESS_COLOUR = "#5C0088"
_AXIS_POSITION = (0.03, 0.26, 0.94, 0.38)
"""Left, bottom, width, height in the picture."""
_KINDS = dict(live=("measured on", "-"), recorded=("recorded on", "--"), published=("published for", ":"))
"""What is said of a number of this kind, and how its line is drawn."""


@dataclass(frozen=True)
class Question:
    """What is asked, and the logarithmic axis, ``low`` to ``high``, that the answer is guessed on.

    ``unit`` follows the number; "x" is written as a multiplication sign.
    """

    name: str
    text: str
    low: float
    high: float
    unit: str = ""

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
        return paths.state() / "guesses" / f"{self.slug}.json"

    def with_unit(self, value: float) -> str:
        """A value with its unit: ``12×``, ``3 µs``, ``1200``."""
        return format_number(value) + (TIMES_SIGN if self.unit == "x" else f" {self.unit}".rstrip())


@dataclass(frozen=True)
class SealedGuess:
    """A guess that can no longer be moved."""

    value: float
    sealed: str
    """When it was sealed, in ISO format."""
    seen: bool = False
    """Whether the learner had seen the answer before."""
    revealed: bool = False
    """Whether the learner has seen the answer since."""


@dataclass(frozen=True)
class GuessFile:
    """What the file of a sealed guess holds."""

    name: str
    question: str
    guess: SealedGuess
    unit: str = ""


# --- on disk ----------------------------------------------------------------------------------------


def save_guess(question: Question, guess: SealedGuess | None) -> None:
    """Write a sealed guess where :func:`saved_guess` finds it; None removes the file.

    Raises OSError where the folder cannot be written.
    """
    if guess is None:
        question.path.unlink(missing_ok=True)
        return
    content = GuessFile(question.name, question.text, guess, question.unit)
    paths.write_text(question.path, json.dumps(asdict(content), indent=1) + "\n")


def saved_guess(question: Question) -> SealedGuess | None:
    """The sealed guess of an earlier kernel; None without one, or when the question has changed since.

    Raises ValueError for a file that holds something else, OSError for one that cannot be read.
    """
    if not question.path.exists():
        return None
    try:
        saved = parse_guess_file(question.path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{question.path} holds no guess") from error
    fits = saved.question == question.text and question.low <= saved.guess.value <= question.high
    return saved.guess if fits else None


def parse_guess_file(text: str) -> GuessFile:
    """What :func:`save_guess` wrote; ValueError for any other text."""
    try:
        content = json.loads(text, parse_int=float)
        guess = SealedGuess(**content.pop("guess"))
        parsed = GuessFile(**content, guess=guess)
        values = (parsed.name, parsed.question, parsed.unit, guess.sealed, guess.seen, guess.revealed)
        if [type(value) for value in values] != [str, str, str, str, bool, bool]:
            raise TypeError("a field is of another type")
        if type(guess.value) is not float or not 0 < guess.value < math.inf:
            raise ValueError("the guess is no positive number")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("text: it is no guess") from error
    return parsed


# --- in words, and in a picture ---------------------------------------------------------------------


def _on_axis(measured: Answer) -> float | None:
    """The plain number; None where there is none, or none that a logarithmic axis has a place for."""
    value = number(measured)
    return value if value is not None and 0 < value < math.inf else None


def verdict(question: Question, guess: SealedGuess | None, measured: Answer) -> str:
    """Guess and answer as sentences: how far apart they are as a factor, and where the answer comes from."""
    truth, source = _on_axis(measured), "The answer"
    guessed = question.with_unit(guess.value) if guess else ""
    if truth is None:
        return "There is no answer here" + (f"; your guess of {guessed} stays sealed." if guess else ".")
    if isinstance(measured, Measured):
        source = f"{_KINDS[measured.kind][0].capitalize()} {measured.device}"
    answer = f"{source}: {question.with_unit(truth)}"
    if guess is None:
        return f"No guess was sealed. {answer}."
    off, way = max(guess.value / truth, truth / guess.value), "high" if guess.value > truth else "low"
    distance = "right"
    if off > CLOSE_FACTOR:
        distance = f"{format_number(off)} times too {way}"
    elif off >= 1.01:
        distance = f"close, {100 * abs(guess.value / truth - 1):.0f}% too {way}"
    who = "Having seen the answer, you" if guess.seen else "You"
    return f"{who} guessed {guessed}. {answer}. Your guess was {distance}."


@course_style()
def guess_picture(question: Question, guess: float | None, measured: Answer, said: str) -> Picture:
    """The axis with guess and answer, as far as there are any, and the way between them shaded.

    ``said`` ends the alt text.
    """
    figure, truth = Figure(figsize=(WIDTH, 1.1)), _on_axis(measured)
    axes = figure.add_axes(_AXIS_POSITION)
    marks = []
    if guess is not None:
        marks.append((guess, f"your guess {question.with_unit(guess)}", GUESS_COLOUR, "-"))
    if truth is not None:
        how, stroke = _KINDS[measured.kind] if isinstance(measured, Measured) else ("answer", "-")
        marks.append((truth, f"{how.split()[0]} {question.with_unit(truth)}", INK, stroke))
    low, high = question.low, question.high
    if truth is not None:
        low, high = min(low, truth / 1.2), max(high, truth * 1.2)
    axes.set(xscale="log", xlim=(low, high), yticks=[])
    if len(marks) == 2:
        axes.axvspan(*sorted(value for value, *_ in marks), color=GUESS_COLOUR, alpha=0.12, lw=0)
    lines = [axes.axvline(x, label=label, color=colour, ls=ls, lw=2.5) for x, label, colour, ls in marks]
    axes.legend(handles=lines, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, labelcolor="linecolor")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,), numticks=14))
    times = TIMES_SIGN if question.unit == "x" else ""
    axes.xaxis.set_major_formatter(lambda value, _: format_number(value) + times)
    axes.xaxis.set_minor_locator(NullLocator())
    reach = f"from {question.with_unit(question.low)} to {question.with_unit(question.high)}"
    return Picture(figure, f"{question.text} A logarithmic axis {reach}. {said}")


# --- the widget -------------------------------------------------------------------------------------


def guess(name: str, question: str, *, low: float, high: float, unit: str = "") -> "GuessWidget":
    """Ask for a number between ``low`` and ``high``, guessed on a logarithmic axis; show it and return it.

    ``unit`` follows the number; "x" is written as a multiplication sign. A sealed guess is kept on disk
    under its ``name``, and found again by the next kernel. Where nobody could press a button, the question
    and the empty axis are shown.

    Raises ValueError for an empty name or question, and a range that a logarithmic axis cannot have.
    """
    return GuessWidget(Question(name, question, low, high, unit))


class GuessWidget:
    """A question that is shown, the guess that is sealed for it, and its widgets where somebody is there."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.guess: float | None = None
        """The guess as it stands, sealed or not."""
        self.sealed: SealedGuess | None = None
        self.widget: ipywidgets.VBox | None = None
        self._seen = False
        """Whether the learner has seen the answer."""
        self._static, trouble = StaticCopy(), ""
        if interactive():
            try:
                self.sealed = saved_guess(question)
            except (OSError, ValueError) as error:
                trouble = f"An earlier guess could not be read: {error}. Guess anew."
            if self.sealed is not None:
                self.guess, self._seen = self.sealed.value, self.sealed.seen or self.sealed.revealed
            self._build()
        self._show_state(trouble)
        self._static.show(self.widget)

    def reveal(self, measured: Answer) -> None:
        """Show the sealed guess and the answer on one axis, and the factor between them.

        With None nothing was measured here, or what was asked for does not exist, and the guess stays
        sealed, as it does for an answer that a logarithmic axis has no place for. Without a sealed guess the
        answer is shown alone.
        """
        said, known = verdict(self.question, self.sealed, measured), _on_axis(measured) is not None
        style = f"border-left:4px solid {GUESS_COLOUR};padding:0.2em 0.8em;margin:0.2em 0"
        # JupyterLab puts the first line of a hidden output in its place: the question, and not the answer.
        page = f'{html.escape(self.question.text)}\n<div style="{style}">{html.escape(said)}</div>'
        if known:
            guessed = self.sealed.value if self.sealed else None
            page += guess_picture(self.question, guessed, measured, said)._repr_html_()
        StaticCopy(page, f"{self.question.text}\n{said}").show()
        if known and self.widget is not None:
            self._seen = True
            if self.sealed is not None and not self.sealed.revealed:
                self._seal(replace(self.sealed, revealed=True))

    def _build(self) -> None:
        self.picture, self.status = ipywidgets.HTML(), ipywidgets.HTML()
        # A text, because a number's field cannot be empty, and a number that stands there leads the guess.
        self.number = ipywidgets.Text(placeholder="a number", description="Your guess")
        self.number.layout.width = "200px"
        self.number.value = "" if self.guess is None else f"{self.guess:g}"
        self.number.observe(self._on_move, "value")
        self.seal = ipywidgets.Button(description="Seal my guess", button_style="primary")
        self.again = ipywidgets.Button(description="Guess again")
        self.seal.on_click(self._on_seal)
        self.again.on_click(self._on_guess_again)
        row = ipywidgets.HBox([self.number, self.seal, self.again, self.status])
        row.layout.flex_flow = "row wrap"
        layout = {"width": f"{96 * WIDTH:.0f}px", "max_width": "100%"}
        heading = ipywidgets.HTML(self._heading())
        self.widget = ipywidgets.VBox([heading, self.picture, row], layout=layout)

    def _heading(self) -> str:
        # Not <h4>: the table of contents would list every question.
        style = "font-weight:600;line-height:1.4;margin:0.3em 0"
        return f'<div role="heading" aria-level="4" style="{style}">{html.escape(self.question.text)}</div>'

    def _on_move(self, change: dict[str, Any]) -> None:
        try:
            typed = float(change["new"])
        except ValueError:
            typed = math.nan
        self.guess = typed if self.question.low <= typed <= self.question.high else None
        self._show_widgets()

    def _on_seal(self, _: Any) -> None:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        if self.guess is not None:
            self._seal(SealedGuess(self.guess, now, self._seen))

    def _on_guess_again(self, _: Any) -> None:
        """Let the guess be moved; after the reveal a new round starts from the empty axis."""
        if self._seen:
            self.number.value = ""
        self._seal(None)

    def _seal(self, guess: SealedGuess | None) -> None:
        """Seal a guess, or with None unseal it, here and on disk."""
        self.sealed, trouble = guess, ""
        try:
            save_guess(self.question, guess)
        except OSError as error:
            trouble = f"This lasts only until the kernel restarts; it could not be written: {error}"
        self._show_state(trouble)

    def _show_state(self, trouble: str = "") -> None:
        """Show what is sealed now, in the widgets and in their static copy."""
        guessed, said = (self.sealed.value, self._state()) if self.sealed else (None, PROMPT)
        picture = guess_picture(self.question, guessed, None, said)._repr_html_()
        page = f"{self._heading()}{picture}<p>{html.escape(said)}</p>"
        self._static.update(page, f"{self.question.text}\n{said}")
        if self.widget is not None:
            self._show_widgets(trouble)

    def _show_widgets(self, trouble: str = "") -> None:
        self.number.disabled = self.sealed is not None
        self.seal.disabled = self.guess is None or self.sealed is not None
        self.again.disabled = self.sealed is None
        self.picture.value = guess_picture(self.question, self.guess, None, self._state())._repr_html_()
        self.status.value = f'<span role="status">{html.escape(trouble or self._state())}</span>'

    def _state(self) -> str:
        if self.sealed is not None:
            when = self.sealed.sealed[:16].replace("T", " at ")
            return f"Sealed: {self.question.with_unit(self.sealed.value)}, on {when}."
        if self.guess is None:
            ends = format_number(self.question.low), self.question.with_unit(self.question.high)
            return f"Type a number from {ends[0]} to {ends[1]}."
        return f"{self.question.with_unit(self.guess)}, not sealed yet."
