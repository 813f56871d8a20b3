"""What is kept of a learner's answers below `paths.state()`: every attempt, the last verdicts."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock

from labkit import notebooks, paths

STATES = {"solved": "✓ solved", "tried": "✗ tried", "open": "○ open"}


def folder(lesson: str, state: Path | None = None) -> Path:
    """Where a lesson's attempts are: by its name without the number, which may change."""
    return (state or paths.state()) / "attempts" / notebooks.key_of(notebooks.resolve(lesson))


def attempt_files(lesson: str, exercise: str, state: Path | None = None) -> list[Path]:
    """The files of a learner's attempts at an exercise, in their order."""
    return sorted(file for file in (folder(lesson, state) / exercise).glob("*.py") if file.stem.isdigit())


def read(lesson: str, state: Path | None = None) -> dict[str, str]:
    """The status of each exercise that was tried; empty where somebody has spoilt the file by hand."""
    kept: Any = None
    with suppress(FileNotFoundError, ValueError):
        kept = json.loads((folder(lesson, state) / "verdicts.json").read_text(encoding="utf-8"))
    return {name: str(status) for name, status in kept.items()} if isinstance(kept, dict) else {}


def keep(lesson: str, exercise: str, status: str) -> None:
    """Keep the status of an exercise: of its last verdict, "right" if one was so, or "not attempted"."""
    file = folder(lesson) / "verdicts.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):  # another session of the same lesson keeps its own
        paths.write_text(file, json.dumps({**read(lesson), exercise: status}, indent=1))


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
            status = records.get(name, "not attempted")
            found = "solved" if status == "right" else "tried" if status != "not attempted" else "open"
            rows.append({"lesson": lesson, "exercise": name, "state": STATES[found], "tries": tries})
    return pd.DataFrame(rows, columns=["lesson", "exercise", "state", "tries"])
