"""What is kept of a learner's answers below `paths.state()`: every attempt, the last verdicts."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from filelock import FileLock

from labkit import notebooks, paths

STATES = {"solved": "✓ solved", "tried": "✗ tried", "open": "○ open"}


@dataclass
class ExerciseRecord:
    """What is kept of an exercise: "right" if it was so once, else the last verdict; wrong answers since."""

    status: str = "not attempted"
    wrong: list[list[str]] = field(default_factory=list)
    """Of each, the digest and the name of its mistake."""
    when: str = ""
    hints: int = 0
    """How many were asked for since it was right."""


def folder(lesson: str, state: Path | None = None) -> Path:
    """Where a lesson's attempts are: by its name without the number, which may change."""
    return (state or paths.state()) / "attempts" / notebooks.key_of(notebooks.resolve(lesson))


def attempt_files(lesson: str, exercise: str, state: Path | None = None) -> list[Path]:
    """The files of a learner's attempts at an exercise, in their order."""
    return sorted(file for file in (folder(lesson, state) / exercise).glob("*.py") if file.stem.isdigit())


def read(lesson: str, state: Path | None = None) -> dict[str, ExerciseRecord]:
    """By exercise; empty where nothing is kept, and where somebody has spoilt the file by hand."""
    with suppress(FileNotFoundError, ValueError, TypeError, AttributeError):
        kept = json.loads((folder(lesson, state) / "verdicts.json").read_text(encoding="utf-8"))
        return {name: ExerciseRecord(**each) for name, each in kept.items()}
    return {}


@contextmanager
def updated(lesson: str, exercise: str) -> Iterator[ExerciseRecord]:
    """What is kept of an exercise, to be changed inside; nobody else changes the lesson's verdicts then."""
    file = folder(lesson) / "verdicts.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        records = read(lesson)
        yield records.setdefault(exercise, ExerciseRecord())
        paths.write_text(file, json.dumps({name: vars(each) for name, each in records.items()}, indent=1))


def table(lessons: Iterable[Path] | None = None, state: Path | None = None) -> pd.DataFrame:
    """A row for each exercise of these lessons (default: all of them): lesson, exercise, state, tries.

    An exercise is solved if a verdict on it was right, tried if there was another one, else open.
    ``state`` is the ``.labkit`` of a learner's folder, that of this process if left out.
    """
    rows = []
    for path in notebooks.find() if lessons is None else lessons:
        lesson = notebooks.name_of(path)
        records = read(lesson, state)
        for _, cell in notebooks.code_cells(notebooks.read_json(path)):
            if notebooks.EXERCISE not in notebooks.tags(cell):
                continue
            name = notebooks.exercise_of(cell)
            tries = len(attempt_files(lesson, name, state))
            status = records.get(name, ExerciseRecord()).status
            found = "solved" if status == "right" else "tried" if status != "not attempted" else "open"
            rows.append({"lesson": lesson, "exercise": name, "state": STATES[found], "tries": tries})
    return pd.DataFrame(rows, columns=["lesson", "exercise", "state", "tries"])
