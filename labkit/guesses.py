"""Guesses at a number before it is measured: the question, the sealed guess on disk, the verdict in words."""

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from labkit import places
from labkit.claims import Measured
from labkit.plots.words import TIMES, digits, factor, named

CLOSE = 1.25
"""A guess within this factor is close."""


@dataclass(frozen=True)
class Question:
    """What is asked, and the logarithmic axis, ``low`` to ``high``, that the answer is guessed on.

    ``unit`` follows the number ("x" is written as a multiplication sign); ``axis`` names what is guessed
    when it is a size, as "width"; ``sides`` says what holds left and right of the guess.
    """

    name: str
    text: str
    low: float
    high: float
    unit: str = ""
    axis: str = ""
    sides: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if not self.slug:
            raise ValueError(f"name: {self.name!r} has no letter or digit to name a file by")
        if not self.text.strip():
            raise ValueError("question: it is empty")
        for name, value in (("low", self.low), ("high", self.high)):
            if not on_log_axis(value):
                raise ValueError(f"{name}: {value} cannot stand on a logarithmic axis; it has to be above 0")
        if self.low >= self.high:
            raise ValueError(f"high: {self.high} has to be above low, which is {self.low}")
        if self.sides is not None and (len(self.sides) != 2 or not all(side.strip() for side in self.sides)):
            raise ValueError(f"sides: {self.sides!r} has to be two texts, left and right of the guess")

    @property
    def slug(self) -> str:
        """The name in letters, digits and dashes; empty when it has none of them."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def number(self, value: float) -> str:
        """A value with its unit: ``12×``, ``3 µs``, ``1200``."""
        return factor(value) if self.unit == "x" else f"{digits(value)} {self.unit}".strip()

    def say(self, value: float) -> str:
        """A value that explains itself: ``width 1200`` where the axis has a name."""
        return named(self.axis, self.number(value)) if self.axis else self.number(value)

    def place(self, value: float) -> float:
        """Where a value stands on the axis, 0 at its left end and 1 at its right."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def parse(self, text: str) -> float:
        """The number that somebody typed, with or without unit; ValueError in a sentence for the learner."""
        bare = text.strip().lower().removesuffix((self.unit or TIMES).lower()).removesuffix(TIMES).strip()
        try:
            value = float(bare)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise ValueError(f"“{text.strip()}” is not a number; write it like 12 or 0.5.")
        if not self.low <= value <= self.high:
            reach = f"{self.say(self.low)} to {self.say(self.high)}"
            raise ValueError(f"{text.strip()} lies outside the axis, {reach}.")
        return value


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


def on_log_axis(value: float) -> bool:
    """Whether a logarithmic axis has a place for this value."""
    return math.isfinite(value) and value > 0


# --- on disk --------------------------------------------------------------------------------------


def path(question: Question) -> Path:
    """The file that keeps the sealed guess."""
    return places.cache() / "predictions" / f"{question.slug}.json"


def keep(question: Question, guess: Guess) -> None:
    """Write a sealed guess where :func:`kept` finds it; OSError where that folder cannot be written."""
    entry = Entry(question.name, question.text, guess, question.unit, question.axis)
    places.write_text(path(question), json.dumps(asdict(entry), indent=1) + "\n")


def forget(question: Question) -> None:
    """Remove the sealed guess."""
    path(question).unlink(missing_ok=True)


def kept(question: Question) -> Guess | None:
    """The sealed guess of an earlier kernel; None without one, or when the question has changed since.

    Raises ValueError for a file that holds something else, OSError for one that cannot be read.
    """
    try:
        text = path(question).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        entry = parse(text)
    except ValueError as error:
        raise ValueError(f"{path(question)} holds no guess") from error
    fits = entry.question == question.text and question.low <= entry.guess.value <= question.high
    return entry.guess if fits else None


def parse(text: str) -> Entry:
    """What :func:`keep` wrote, now or in an older version; ValueError for any other text."""
    try:
        content = json.loads(text, parse_int=float)
        words = [content["name"], content["question"], content.get("unit", ""), content.get("axis", "")]
        guess = Guess(**content["guess"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("text: it is no guess") from error
    if not (
        all(isinstance(word, str) for word in [*words, guess.sealed])
        and isinstance(guess.value, float)
        and on_log_axis(guess.value)
        and all(isinstance(flag, bool) for flag in (guess.seen, guess.revealed))
    ):
        raise ValueError("text: it is no guess")
    name, question, unit, axis = words
    return Entry(name, question, guess, unit, axis)


# --- in words -------------------------------------------------------------------------------------


def verdict(question: Question, guess: Guess | None, measured: Measured | float | None) -> str:
    """Guess and answer as sentences: how far apart they are as a factor, and where the answer comes from."""
    truth = placed(measured)
    mine = question.say(guess.value) if guess else ""
    if measured is None or truth is None:
        missing = "There is no answer here"
        if measured is not None:
            number = measured.value if isinstance(measured, Measured) else measured
            missing = f"{_source(measured)}: {number:g}, which has no place on a logarithmic axis"
        return f"{missing}; your guess of {mine} stays sealed." if guess else f"{missing}."
    answer = f"{_source(measured)}: {question.say(truth)}"
    if guess is None:
        return f"No guess was sealed. {answer}."
    who = "Having seen the answer, you" if guess.seen else "You"
    return f"{who} guessed {mine}. {answer}. Your guess was {distance(guess.value, truth)}."


def distance(guess: float, truth: float) -> str:
    """How far a guess is from the truth: ``close, 8% too high`` or ``11.8 times too high``."""
    off = max(guess / truth, truth / guess)
    if off < 1.01:
        return "right"
    way = "high" if guess > truth else "low"
    if off <= CLOSE:
        return f"close, {100 * abs(guess / truth - 1):.0f}% too {way}"
    return f"{digits(off)} times too {way}"


def placed(measured: Measured | float | None) -> float | None:
    """The bare number; None where there is none, or none that a logarithmic axis has a place for."""
    number = measured.value if isinstance(measured, Measured) else measured
    return number if number is not None and on_log_axis(number) else None


def _source(measured: Measured | float) -> str:
    if not isinstance(measured, Measured):
        return "The answer"
    words = {"live": "Measured on", "recorded": "Recorded on", "published": "Published for"}[measured.kind]
    return f"{words} {measured.device}" if measured.device else words.split()[0]
