"""What a class guessed and solved: the files of learners in folders, as two tables.

The files are written by learners and may hold anything. They are read as data: no link is followed, no file
over 64 KiB is read, and texts are printed without control characters or markup.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from labkit.plots.formatting import TIMES_SIGN, format_number, shorten
from labkit.runs.console import print_table, say
from labkit.widgets import guesses

LEARNER_FILE = re.compile(
    r"(?s)(?P<learner>.*)/"
    r"(predictions/[^/]+\.json|attempts/(?P<lesson>[^/]+)/(verdicts\.json|(?P<exercise>[^/]+)/\d+\.py))"
)
"""Paths of a learner's sealed guess, of the verdicts of a lesson, and of each attempt at an exercise."""
MAX_FILE_BYTES = 64 * 1024
GUESS_COLUMNS = ["name", "question", "unit", "value", "sealed", "seen"]
EXERCISE_COLUMNS = ["learner", "lesson", "exercise", "attempt", "solved"]
NOTHING = (
    "no guess and no verdict was found. A learner's are files predictions/*.json and "
    "attempts/*/verdicts.json: in ~/.cache/labkit, or the folder that LABKIT_CACHE names; on the hub of "
    "docs/jupyterhub.md in ~/labkit/results. When you copy these folders, keep their names; "
    "unpack archives first."
)


@dataclass
class ClassFiles:
    """A row for each guess, and for each attempt and each verdict; what was skipped, and why."""

    guesses: list[tuple[Any, ...]] = field(default_factory=list)
    exercises: list[tuple[Any, ...]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def read(folders: Iterable[Path]) -> ClassFiles:
    """All learners' files in these folders, each once; files that cannot be read are among those skipped."""
    found = ClassFiles()
    for path in sorted({path for top in folders for path in top.resolve().rglob("*")}):
        match = LEARNER_FILE.fullmatch(str(path))
        if match is None:
            continue
        learner, lesson, exercise = (plain(match[name] or "") for name in ("learner", "lesson", "exercise"))
        try:
            if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError("no file, or too large a one")
            if exercise:
                found.exercises.append((learner, lesson, exercise, str(path), False))
            elif lesson:
                kept = json.loads(path.read_bytes())
                solved = {plain(name): each["status"] == "right" for name, each in kept.items()}
                found.exercises += [(learner, lesson, name, None, right) for name, right in solved.items()]
            else:
                file = guesses.parse_guess_file(path.read_text(encoding="utf-8"))
                texts = map(plain, (file.name, file.question, file.unit))
                found.guesses.append((*texts, file.guess.value, file.guess.sealed, file.guess.seen))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            found.skipped.append(f"{plain(os.path.relpath(path))}: not what labkit writes there")
    return found


def plain(text: str) -> str:
    """A learner's text on one line, without control characters, and at most 300 characters long."""
    return shorten("".join(sign if sign.isprintable() else " " for sign in text), 300)


def guess_table(found: ClassFiles) -> pd.DataFrame:
    """A row for each question, in the order in which the class met them.

    ``median``, ``p20`` and ``p80`` are of the guesses that were sealed before the answer had been seen. The
    percentiles are taken on a logarithmic axis.
    """
    table = pd.DataFrame(found.guesses, columns=GUESS_COLUMNS).sort_values("sealed")
    table["fresh"] = np.log(table["value"].astype(float)).mask(table["seen"].astype(bool))
    asked = table.groupby(["name", "question"], sort=False)
    made = asked.agg(**{"guessed": ("seen", "size"), "had seen": ("seen", "sum")})
    for name, share in {"median": 0.5, "p20": 0.2, "p80": 0.8}.items():
        made[name] = np.exp(asked["fresh"].quantile(share))
    made["unit"] = asked["unit"].agg(lambda units: units.mode()[0])
    return made.reset_index().drop(columns="name")


def exercise_table(found: ClassFiles) -> pd.DataFrame:
    """A row for each exercise: how many learners tried and solved it, and the median of their tries."""
    table = pd.DataFrame(found.exercises, columns=EXERCISE_COLUMNS).astype({"solved": bool})
    learners = table.groupby(["learner", "lesson", "exercise"])
    each = learners.agg(solved=("solved", "max"), tries=("attempt", "nunique"))
    counts = {"tried": ("solved", "size"), "solved": ("solved", "sum"), "median tries": ("tries", "median")}
    return each.groupby(["lesson", "exercise"]).agg(**counts).reset_index()


def print_tables(console: Console, found: ClassFiles) -> bool:
    """Print both tables and what was skipped; returns whether they hold a row."""
    tables = {"guesses": guess_table(found), "exercises": exercise_table(found)}
    for title, table in tables.items():
        print_table(console, table.map(_cell), title)
    if found.skipped:
        say(console, "\n  ".join([f"Skipped: {len(found.skipped)}.", *found.skipped]))
    return any(map(len, tables.values()))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return TIMES_SIGN if value == "x" else value
    return "none" if np.isnan(value) else shorten(format_number(float(value)), 12)
