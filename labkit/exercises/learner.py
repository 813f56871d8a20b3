"""A learner's own copy of the lessons: a folder to work in, which nothing writes over.

``labkit lab`` makes it. Beside the notebooks it has a folder ``.labkit``: the learner's answers, verdicts and
guesses, and in ``.labkit/handed_out`` each lesson as it was when the learner got it.
"""

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock

from labkit import notebooks, paths

STATES = {"solved": "✓ solved", "tried": "✗ tried", "open": "○ open"}


def open_folder(folder: Path) -> list[str]:
    """Copy the lessons that are not there yet into a learner's folder; a sentence for each thing to know.

    A copy that the learner has not changed follows the published lesson. One that the learner has changed
    stays, and a sentence says how to get the new version. ValueError for a folder of the course itself.
    """
    if folder.resolve() in (paths.NOTEBOOKS.resolve(), paths.CHECKOUT.resolve()):
        raise ValueError(f"{folder}: the published lessons are there; name a folder of your own")
    added, said = [], []
    for lesson in notebooks.find():
        mine, before = _places(folder, lesson)
        text = handed_out(lesson)
        untouched = before.exists() and mine.exists() and before.read_bytes() == mine.read_bytes()
        if not mine.exists():
            added.append(notebooks.name_of(lesson))
        elif not untouched:
            if before.exists() and before.read_text(encoding="utf-8") != text:
                name = notebooks.name_of(lesson)
                said.append(
                    f"{name} has changed since you got it: `labkit reset {name}` gives you the new one."
                )
            continue
        paths.write_text(mine, text)
        paths.write_text(before, text)
        if (images := lesson.parent / "images").exists():
            shutil.copytree(images, mine.parent / "images", dirs_exist_ok=True)
    if added:
        said.insert(0, f"Copied into {os.path.relpath(folder)}: {', '.join(added)}.")
    return said


def _places(folder: Path, lesson: Path) -> tuple[Path, Path]:
    """Where a lesson lies in a learner's folder, and where it is kept as it was handed out."""
    name = f"{notebooks.name_of(lesson)}.ipynb"
    return folder / name, folder / paths.STATE / "handed_out" / name


def handed_out(lesson: Path) -> str:
    """A lesson as a learner gets it: the text of the notebook, without outputs."""
    notebook = json.loads(lesson.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def reset(folder: Path, lesson: str) -> tuple[Path, Path | None]:
    """Put a fresh copy of a lesson into a learner's folder, and forget the verdicts on its exercises.

    Returns the fresh file, and the name that the learner's own file has now, None where there was none.
    ValueError for an unknown lesson.
    """
    published = notebooks.resolve(lesson)
    (mine, before), aside = _places(folder, published), None
    if mine.exists():
        aside = mine.rename(mine.with_name(f"{mine.stem}.before-{datetime.now():%Y-%m-%d-%H%M%S-%f}.ipynb"))
    for path in (mine, before):
        paths.write_text(path, handed_out(published))
    (attempts(lesson, folder / paths.STATE) / "verdicts.json").unlink(missing_ok=True)
    return mine, aside


# ---- answers and verdicts ----------------------------------------------------------------------------------


def attempts(lesson: str, state: Path | None = None) -> Path:
    """Where a lesson's attempts are: by its name without the number, which may change."""
    return (state or paths.state()) / "attempts" / notebooks.key_of(notebooks.resolve(lesson))


def attempt_files(lesson: str, exercise: str, state: Path | None = None) -> list[Path]:
    """The files of a learner's attempts at an exercise, in their order."""
    return sorted(file for file in (attempts(lesson, state) / exercise).glob("*.py") if file.stem.isdigit())


def read(lesson: str, state: Path | None = None) -> dict[str, str]:
    """The status of each exercise that was tried; empty where somebody has spoilt the file by hand."""
    kept: Any = None
    with suppress(FileNotFoundError, ValueError):
        kept = json.loads((attempts(lesson, state) / "verdicts.json").read_text(encoding="utf-8"))
    return {name: str(status) for name, status in kept.items()} if isinstance(kept, dict) else {}


def keep(lesson: str, exercise: str, status: str) -> None:
    """Keep the status of an exercise: of its last verdict, "right" if one was so, or "not attempted"."""
    file = attempts(lesson) / "verdicts.json"
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
