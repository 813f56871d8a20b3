"""Guess first: a question with a logarithmic axis to drag a guess over, sealed until it is measured."""

import html
import math
from dataclasses import replace
from datetime import datetime
from typing import Any

import ipywidgets
from IPython.core.getipython import get_ipython
from IPython.display import display

from labkit import guess_figures, guesses, live
from labkit.claims import Measured, number
from labkit.guess_figures import GUESS
from labkit.guesses import Guess, Question
from labkit.plots import Picture
from labkit.plots.words import digits

BEFORE = "Guess before you read on."
_STEPS = 200
"""Places that the slider has; arrow keys move by one."""
_INSET = 6
"""Pixels by which the slider's rail is shorter than its widget, at each end."""

_asked: dict[str, Question] = {}


class Prediction:
    """A question, and the guess that was sealed for it."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.sealed: Guess | None = None
        self.panel: GuessPanel | None = None
        """The widgets, where somebody is there to use them."""

    def reveal(self, measured: Measured | float | None) -> None:
        """Show the sealed guess and the answer on one axis, and the factor between them.

        With None nothing was measured here, or what was asked for does not exist, and the guess stays
        sealed, as it does for an answer that a logarithmic axis has no place for. Without a sealed guess the
        answer is shown alone.
        """
        measured = None if number(measured) is None else measured
        said = guesses.verdict(self.question, self.sealed, measured)
        # JupyterLab puts the first line of a hidden output in its place: the question, and not the answer.
        question = f"{html.escape(self.question.text)}\n"
        if guesses.placed(measured) is None:
            _show_static(question + _verdict(said), f"{self.question.text}\n{said}")
            return
        shown = guess_figures.picture(self.question, self.sealed, measured)
        _show_static(question + _verdict(said) + shown._repr_html_(), f"{self.question.text}\n{said}")
        if self.panel is not None:
            self.panel.note_reveal()


def predict(
    name: str,
    question: str,
    *,
    low: float,
    high: float,
    unit: str = "",
    axis: str = "",
    sides: tuple[str, str] | None = None,
) -> Prediction:
    """Ask for a number between ``low`` and ``high``, guessed on a logarithmic axis; show it and return it.

    ``unit`` follows the number; "x" is written as a multiplication sign. For a crossover ``axis`` names what
    grows along the axis and ``sides`` what holds left and right of the guess. A sealed guess is kept on
    disk under its ``name``, and found again by the next kernel. Where nobody could press a button, the
    question and the empty axis are shown.

    Raises ValueError for an empty name or question, a range that a logarithmic axis cannot have, and a name
    that another question has already.
    """
    asked = Question(name, question, low, high, unit, axis, sides)
    before = _asked.setdefault(asked.slug, asked)
    if before.text != asked.text:
        raise ValueError(f"name: {name!r} already stands for another question, {before.text!r}")
    prediction = Prediction(asked)
    twin = live.Twin(*_static(asked, None))
    if live.interactive():
        prediction.panel = GuessPanel(prediction, twin)
        twin.show(prediction.panel.box)
    else:
        twin.show()
    return prediction


class GuessPanel:
    """The widgets of a question: an axis with the guess as a line over it, a slider, a number, buttons."""

    def __init__(self, prediction: Prediction, twin: live.Twin) -> None:
        self.prediction, self.question, self._twin = prediction, prediction.question, twin
        self.guess: float | None = None
        """The guess as it stands, sealed or not."""
        self._seen, self._linking = False, False
        shown, self._panel = guess_figures.empty(self.question, sides=False)
        self._size = shown.size
        self._build(shown)
        self._find()

    # --- what is there ----------------------------------------------------------------------------

    def _build(self, shown: Picture) -> None:
        asked, (left, _, right, _) = self.question, self._panel
        over = ipywidgets.Layout(grid_area="1 / 1 / 2 / 2", margin="0", width="100%", min_width="0")
        picture = ipywidgets.HTML(shown._repr_html_(), layout=over)
        self.line = ipywidgets.HTML(layout=over)
        low, high = math.log10(asked.low), math.log10(asked.high)
        beside = [f"calc({100 * share:.2f}% - {_INSET}px)" for share in (left, 1 - right)]
        self.slider = ipywidgets.FloatLogSlider(
            value=asked.low,
            min=low,
            max=high,
            step=(high - low) / _STEPS,
            readout=False,
            layout=ipywidgets.Layout(width="auto", margin=f"0 {beside[1]} 0 {beside[0]}"),
        )
        self.number = ipywidgets.Text(
            description="Your guess",
            placeholder="or type a number",
            layout=ipywidgets.Layout(width="260px"),
        )
        self.seal = ipywidgets.Button(description="Seal my guess", button_style="primary", disabled=True)
        self.again = ipywidgets.Button(description="Guess again")
        self.status = ipywidgets.HTML()
        width = f"{self._size[0]:.0f}px"
        grid = ipywidgets.GridBox(
            [picture, self.line], layout=ipywidgets.Layout(grid_template_columns="100%")
        )
        row = ipywidgets.HBox([self.number, self.seal, self.again, self.status])
        row.layout.flex_flow = "row wrap"
        self.box = ipywidgets.VBox(
            [ipywidgets.HTML(_heading(asked)), grid, self.slider, row],
            layout=ipywidgets.Layout(width=width, max_width="100%"),
        )
        self.slider.observe(self._slid, "value")
        self.number.observe(self._typed, "value")
        self.seal.on_click(lambda _: self._seal())
        self.again.on_click(lambda _: self._open_again())

    def _find(self) -> None:
        """Take up the guess that an earlier kernel, or this one, has sealed."""
        try:
            self.prediction.sealed = guesses.kept(self.question)
        except (OSError, ValueError) as error:
            self._draw(f"An earlier guess could not be read: {error}. Guess anew.")
            return
        found = self.prediction.sealed
        if found is not None:
            self.guess, self._seen = found.value, found.seen or found.revealed
            self._link()
            self._update_twin()
        self._draw()

    # --- what the learner does --------------------------------------------------------------------

    def _slid(self, change: dict[str, Any]) -> None:
        if not self._linking:
            # Two digits are as much as a hand means.
            self.guess = min(max(float(f"{change['new']:.1e}"), self.question.low), self.question.high)
            self._link(slider=False)
            self._draw()

    def _typed(self, change: dict[str, Any]) -> None:
        if self._linking or not change["new"].strip():
            return
        try:
            self.guess = self.question.parse(change["new"])
        except ValueError as error:
            self._draw(str(error))
            self.seal.disabled = True  # it would seal another number than the one that is read there
            return
        self._link(number=False)
        self._draw()

    def _link(self, *, slider: bool = True, number: bool = True) -> None:
        """Make slider and number show the guess, but for the one that a hand is on."""
        self._linking = True
        if number:
            self.number.value = "" if self.guess is None else digits(self.guess)
        if slider:
            self.slider.value = self.question.low if self.guess is None else self.guess
        self._linking = False

    def _seal(self) -> None:
        if self.guess is None:
            return
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self.prediction.sealed = Guess(self.guess, now, self._seen)
        self._link()
        self._draw(self._keep())
        self._update_twin()

    def _open_again(self) -> None:
        """Let the guess be moved; after the reveal a new round starts from the empty axis."""
        sealed, self.prediction.sealed = self.prediction.sealed, None
        if sealed is not None and sealed.revealed:
            self.guess = None
            self._link()
        trouble = ""
        try:
            guesses.forget(self.question)
        except OSError as error:
            trouble = f"The sealed guess could not be removed from disk: {error}"
        self._draw(trouble)
        self._update_twin()

    def note_reveal(self) -> None:
        """Remember that the answer has been seen."""
        self._seen = True
        sealed = self.prediction.sealed
        if sealed is not None and not sealed.revealed:
            self.prediction.sealed = replace(sealed, revealed=True)
            self._draw(self._keep())

    def _keep(self) -> str:
        """Write the sealed guess; a sentence where that fails."""
        assert self.prediction.sealed is not None
        try:
            guesses.keep(self.question, self.prediction.sealed)
        except OSError as error:
            return f"Sealed, but only until the kernel restarts; it could not be written: {error}"
        return ""

    # --- what is shown ----------------------------------------------------------------------------

    def _draw(self, trouble: str = "") -> None:
        sealed = self.prediction.sealed
        for control in (self.slider, self.number):
            control.disabled = sealed is not None
        self.seal.disabled = self.guess is None or sealed is not None
        self.seal.layout.display = "none" if sealed else None
        self.again.layout.display = None if sealed else "none"
        self.line.value = guess_figures.overlay(self.question, self.guess, self._panel, self._size)
        self.status.value = f'<span role="status">{html.escape(trouble or self._standing())}</span>'

    def _standing(self) -> str:
        if self.prediction.sealed is not None:
            return _sealed_words(self.question, self.prediction.sealed)
        if self.guess is None:
            return "Drag, or type a number."
        return f"{self.question.say(self.guess)}, not sealed yet."

    def _update_twin(self) -> None:
        self._twin.update(*_static(self.question, self.prediction.sealed))


# --- pieces of HTML -------------------------------------------------------------------------------


def _static(question: Question, sealed: Guess | None) -> tuple[str, str]:
    """The question without widgets, as HTML and as text."""
    if sealed is None:
        shown, words = guess_figures.empty(question)[0], BEFORE
    else:
        shown, words = guess_figures.picture(question, sealed, None), _sealed_words(question, sealed)
    return f"{_heading(question)}{shown._repr_html_()}<p>{html.escape(words)}</p>", f"{shown.alt}\n{words}"


def _heading(question: Question) -> str:
    # Not <h4>: the table of contents would list every question.
    style = "font-weight:600;line-height:1.4;margin:0.3em 0"
    return f'<div role="heading" aria-level="4" style="{style}">{html.escape(question.text)}</div>'


def _sealed_words(question: Question, sealed: Guess) -> str:
    return f"Sealed: {question.say(sealed.value)}, on {sealed.sealed[:16].replace('T', ' at ')}."


def _verdict(said: str) -> str:
    style = f"border-left:4px solid {GUESS};padding:0.2em 0.8em;margin:0.2em 0"
    return f'<div style="{style}">{html.escape(said)}</div>'


def _show_static(page: str, text: str) -> None:
    if get_ipython() is None:
        print(text)
    else:
        display({"text/html": page, "text/plain": text}, raw=True)
