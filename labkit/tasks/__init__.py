"""The exercises' checkers: for each lesson a module ``labkit.tasks.<name>`` with its ``TASKS``.

Checkers run in a process of their own, where kernels are interpreted (``labkit.attempt``).
"""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass

from labkit.tasks.slips import Slip


@dataclass(frozen=True)
class Evidence:
    """What shows that an answer is right: a sentence, and how many checks it passed."""

    sentence: str
    passed: int


class Wrong(Exception):  # noqa: N818  # a verdict, not a failure of this code
    """An answer is wrong. ``reason`` is a short name for the mistake, ``observed`` a sentence, then hints.

    Hints are shown one more with each attempt, so they go from a question to nearly the answer.
    """

    def __init__(self, reason: str, observed: str, hints: tuple[str, ...]) -> None:
        super().__init__(observed)
        self.reason, self.observed, self.hints = reason, observed, hints


@dataclass(frozen=True)
class Task:
    """An exercise: who checks it, the name of what the learner hands in, and the untouched cell's digest."""

    title: str
    check: Callable[..., Evidence]
    answer: str
    """What the cell hands in: its last line is ``tasks.check("name", answer)``."""
    scaffold: str
    """`exercises.digest` of the cell as the lesson gives it."""
    slips: tuple[Slip, ...] = ()
    """What its exceptions mean, beside those of any exercise."""


def some(number: int, noun: str) -> str:
    """A number of things in words: "1 place", "2 places"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def whereabouts(problem: str) -> str:
    """What `checks.diagnose` says of places and numbers, a sentence's end.

    The pattern that it guesses at is left out: an exercise knows its wrong answers better.
    """
    return problem.split(". ")[0] + "."


def find(lesson: str) -> dict[str, Task]:
    """The exercises of a lesson, such as ``"01_launch_overhead"``; ValueError for one that has none."""
    name = re.sub(r"^[0-9]+_", "", lesson)
    # Not of every module here: one exercise has one of its own.
    if not name.isidentifier() or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise ValueError(f"lesson: there are no exercises for {lesson!r}")
    found: dict[str, Task] | None = getattr(importlib.import_module(f"{__name__}.{name}"), "TASKS", None)
    if found is None:
        raise ValueError(f"lesson: there are no exercises for {lesson!r}")
    return found
