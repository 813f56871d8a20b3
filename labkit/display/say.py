"""Guesses that are sealed, and claims that are evaluated."""

import html
import json
import math
import re
import string
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

import ipywidgets
from IPython.display import display

from labkit import notebooks, paths
from labkit.display.style import digits, interactive, show
from labkit.display.table import Measured, short
from labkit.measure import session

CLAIM_MIME = "application/vnd.labkit.claim+json"
HELD, NOT_HELD, OPEN = "held", "not held", "not measured"
LOOK = {HELD: ("✓", "#009E73"), NOT_HELD: ("✗", "#D55E00"), OPEN: ("○", "#0072B2")}
"""Okabe-Ito colours, told apart by colour-blind readers; the symbol and the word say the same."""
CLOSE = 1.25
"""A guess within this factor of the answer is close."""


# ---- claims ------------------------------------------------------------------------------------------------


def claim(sentence: str, value: Measured | float, holds: Callable[[float], bool]) -> None:
    """Show a sentence with a number, and whether it holds for the number that is shown.

    Args:
        sentence: with a field ``{value}`` (``{value:.1f}``) for the number.
        value: a number of a table, or a plain one (launches, bytes), which is the same on every device.
        holds: from the number to whether the sentence is true. Its bound comes from an argument.

    A number that was measured nowhere is shown as a dash. ValueError for a sentence without the field
    ``{value}``.
    """
    if {name for _, name, _, _ in string.Formatter().parse(sentence)} - {None} != {"value"}:
        raise ValueError(f"claim {sentence!r}: needs the field {{value}}, and no other")
    number = float(value)
    if math.isnan(number):
        status, where = OPEN, "nothing was measured here, and nothing is recorded"
        sentence = re.sub(r"\{value[^}]*\}", "—", sentence)
    else:
        status = HELD if holds(number) else NOT_HELD
        where = "counted, the same everywhere"
        if isinstance(value, Measured):
            where = f"{value.kind} on an {short(value.device)}"
        sentence = sentence.format(
            value=int(number) if number == int(number) and ":" not in sentence else number
        )
    symbol, colour = LOOK[status]
    page = (
        f'<div style="border-left:4px solid {colour};padding:0.2em 0.8em;margin:0.2em 0">'
        f'<span style="color:{colour}" aria-hidden="true">{symbol}</span> <strong>{status}</strong>: '
        f'{html.escape(sentence)} <small style="opacity:0.8">({html.escape(where)})</small></div>'
    )
    data = {"sentence": sentence, "value": None if math.isnan(number) else number, "status": status}
    show(page, f"{symbol} {status}: {sentence} ({where})", **{CLAIM_MIME: data})


# ---- guesses -----------------------------------------------------------------------------------------------


class Guess:
    """A number that is guessed before it is measured. ``answer(value)`` shows both."""

    def __init__(self, question: str, low: float, high: float, unit: str) -> None:
        if not 0 < low < high < math.inf:
            raise ValueError(f"low, high: {low} to {high} is no logarithmic axis; 0 < low < high")
        self.question, self.low, self.high, self.unit = question, low, high, unit
        lesson = session.current().lesson
        name = re.sub(r"[^a-z0-9]+", "-", question.lower()).strip("-")[:60]
        self._file = (
            paths.state() / "guesses" / (notebooks.key_of(lesson) if lesson else "none") / f"{name}.json"
        )
        self.sealed: float | None = None
        if interactive() and self._file.exists():
            with suppress(ValueError, KeyError, TypeError):  # a file that somebody has spoilt is no guess
                self.sealed = float(json.loads(self._file.read_text(encoding="utf-8"))["guess"])

    def _said(self, value: float) -> str:
        return digits(value) + ("\N{MULTIPLICATION SIGN}" if self.unit == "x" else f" {self.unit}".rstrip())

    def ask(self) -> None:
        """Show the question; to somebody who can press a button also a slider and a button that seals."""
        page = f"<p><strong>Guess before you read on.</strong> {html.escape(self.question)}</p>"
        show(page, f"Guess before you read on. {self.question}")
        if not interactive():
            return
        middle = math.sqrt(self.low * self.high)
        slider = ipywidgets.FloatLogSlider(
            value=self.sealed or middle, min=math.log10(self.low), max=math.log10(self.high), step=0.01,
            readout=False, layout={"width": "60%"}, disabled=self.sealed is not None,
        )  # fmt: skip
        said = ipywidgets.HTML(f"<b>{html.escape(self._said(slider.value))}</b>")
        name = "Seal" if self.sealed is None else "Sealed"
        button = ipywidgets.Button(description=name, button_style="primary", disabled=name == "Sealed")

        def moved(change: Any) -> None:
            said.value = f"<b>{html.escape(self._said(change['new']))}</b>"

        def seal(_: Any) -> None:
            self.sealed = slider.value
            kept = {"question": self.question, "guess": self.sealed, "sealed": datetime.now().isoformat()}
            paths.write_text(self._file, json.dumps(kept, indent=1) + "\n")
            slider.disabled = button.disabled = True
            button.description = "Sealed"

        slider.observe(moved, "value")
        button.on_click(seal)
        display(ipywidgets.HBox([slider, said, button], layout={"align_items": "center"}))

    def answer(self, value: Measured | float, where: str = "counted") -> None:
        """Show the answer beside the guess: how far apart they are, and where the answer is from.

        A measured value knows that; of a plain number ``where`` says it.
        """
        number = float(value)
        if math.isnan(number):
            said = "There is no answer here: nothing was measured, and nothing is recorded."
        else:
            where = f"{value.kind} on an {short(value.device)}" if isinstance(value, Measured) else where
            said = f"The answer is {self._said(number)} ({where})."
            if self.sealed is not None:
                off, way = (
                    max(self.sealed / number, number / self.sealed),
                    "high" if self.sealed > number else "low",
                )
                how = "That is close." if off <= CLOSE else f"That was {digits(off)} times too {way}."
                said += f" You guessed {self._said(self.sealed)}. {how}"
        show(
            f"<p>{html.escape(self.question)} <strong>{html.escape(said)}</strong></p>",
            f"{self.question} {said}",
        )


def guess(question: str, *, low: float, high: float, unit: str = "") -> Guess:
    """Ask for a number between ``low`` and ``high``, before it is measured; ``.answer(value)`` shows both.

    ``unit`` follows the number; "x" is written as a multiplication sign. A sealed guess is kept beside the
    learner's notebooks and can no longer be moved.
    """
    made = Guess(question, low, high, unit)
    made.ask()
    return made
