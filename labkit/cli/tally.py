"""What a class guessed and solved: learners' files from folders and archives, as two tables.

The files are written by learners and may hold anything. They are read as data: nothing is unpacked, no link
is followed, sizes and numbers have limits, and texts are printed without control characters or markup.
"""

import json
import os
import re
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from labkit import paths
from labkit.plots.formatting import TIMES_SIGN, format_number, shorten
from labkit.runs.console import print_table, say
from labkit.widgets import guesses

LEARNER_FILE = re.compile(
    r"(?s)(?P<learner>.*?)/?"
    r"(predictions/[^/]+\.json|attempts/(?P<lesson>[^/]+)/(verdicts\.json|(?P<exercise>[^/]+)/\d+\.py))"
)
"""Paths of a learner's sealed guess, of the verdicts of a lesson, and of each attempt at an exercise."""
MAX_FILE_BYTES, MAX_FILES, MAX_ARCHIVE_BYTES = 64 * 1024, 200_000, 8 * 1024**3
"""Limits for one file, for the files of one source, and for one archive when unpacked."""
MAX_SKIPPED_SHOWN = 20
READ_ERRORS = OSError, EOFError, RuntimeError, zlib.error, tarfile.TarError, zipfile.BadZipFile, ValueError
GUESS_COLUMNS = ["file", "name", "question", "unit", "value", "sealed", "seen"]
EXERCISE_COLUMNS = ["learner", "lesson", "exercise", "attempt", "solved"]
NOTHING = (
    "no guess and no verdict was found. A learner's are files predictions/*.json and "
    "attempts/*/verdicts.json: in ~/.cache/labkit, or the folder that LABKIT_CACHE names; on the hub of "
    "docs/jupyterhub.md in ~/labkit/results. When you copy these folders, keep their names."
)


SourceFile = tuple[str, bool, int, Callable[[], bytes]]
"""A file of a folder or an archive: its path, whether it is a regular file, its bytes, its content."""


@dataclass
class ClassFiles:
    """A row for each guess, and for each attempt and each verdict; what was skipped, and why."""

    guesses: list[tuple[Any, ...]] = field(default_factory=list)
    exercises: list[tuple[Any, ...]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, path: str, regular: bool, size: int, content: Callable[[], bytes]) -> None:
        """Count a file, if its path is one of a learner's files. An error says why it does not count."""
        match = LEARNER_FILE.fullmatch(path)
        if match is None:
            return
        if not regular:
            raise ValueError("no regular file")
        if size > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES // 1024} KiB")
        learner, lesson, exercise = (plain(match[name] or "") for name in ("learner", "lesson", "exercise"))
        if exercise:
            self.exercises.append((learner, lesson, exercise, path, False))
        elif lesson:
            verdicts = json.loads(content()).items()
            self.exercises += [(learner, lesson, plain(e), None, v["status"] == "right") for e, v in verdicts]
        else:
            found = guesses.parse_guess_file(content().decode())
            value, words = found.guess.value, map(plain, (found.name, found.question, found.unit))
            if not 1e-9 <= value <= 1e12:
                raise ValueError(f"a guess of {value:g}")
            self.guesses.append((path, *words, value, found.guess.sealed, found.guess.seen))

    def skip(self, path: str | Path, why: object) -> None:
        """Note a file that is not counted, or not to its end, in words that are safe to print."""
        self.skipped.append(f"{plain(os.path.relpath(path))}: {plain(str(why))}")


def read(sources: Iterable[Path]) -> ClassFiles:
    """Everything that folders and archives hold; files that cannot be read are among those skipped."""
    found = ClassFiles()
    for source in dict.fromkeys(path.resolve() for path in sources):
        total = 0
        try:
            files = _folder(source, found) if source.is_dir() else _archive(source)
            for count, (path, regular, size, content) in enumerate(files):
                total += size
                if count == MAX_FILES or (total > MAX_ARCHIVE_BYTES and not source.is_dir()):
                    found.skip(source, "too large, not read to its end")
                    break
                try:
                    found.add(path, regular, size, content)
                except READ_ERRORS as error:
                    found.skip(path, getattr(error, "strerror", None) or error)
                except (TypeError, KeyError, AttributeError):
                    found.skip(path, "not what labkit writes there")
        except READ_ERRORS as error:
            found.skip(source, f"no archive, or damaged ({error}); what comes before the damage is counted")
    return found


def _folder(top: Path, found: ClassFiles) -> Iterator[SourceFile]:
    """The files below a folder; a folder that cannot be read, as another user's, is skipped."""
    for folder, _, names in os.walk(top, onerror=lambda error: found.skip(error.filename, error.strerror)):
        for path in (Path(folder, name) for name in names):
            state = path.lstat()
            yield str(path), stat.S_ISREG(state.st_mode), state.st_size, path.read_bytes


def _archive(path: Path) -> Iterator[SourceFile]:
    """The members of a zip or tar archive; none can pass for a file of another source by its path."""

    def below(name: str) -> str:
        return f"{path}{os.path.normpath('/' + name.lstrip('/'))}"

    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            for info in packed.infolist():
                regular = not (info.is_dir() or stat.S_ISLNK(info.external_attr >> 16))
                yield below(info.filename), regular, info.file_size, partial(packed.read, info)
        return
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            inside = archive.extractfile(member) if member.isreg() else None
            yield below(member.name), member.isreg(), member.size, inside.read if inside else bytes


def plain(text: str) -> str:
    """A learner's text on one line, without control characters, and at most 300 characters long."""
    line = " ".join(text.split())
    return shorten("".join(sign for sign in line if unicodedata.category(sign)[0] != "C"), 300)


def guess_table(found: ClassFiles) -> pd.DataFrame:
    """A row for each question, in the order in which the class met them.

    ``median``, ``p20`` and ``p80`` are of the guesses that were sealed before the answer had been seen. The
    percentiles are taken on a logarithmic axis.
    """
    table = pd.DataFrame(found.guesses, columns=GUESS_COLUMNS).drop_duplicates("file").sort_values("sealed")
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


def print_tables(console: Console, found: ClassFiles, csv_path: Path | None = None) -> bool:
    """Print both tables and what was skipped, and write them to a file; returns whether they hold a row."""
    tables = {"guesses": guess_table(found), "exercises": exercise_table(found)}
    for title, table in tables.items():
        print_table(console, table.map(_cell), title)
    if found.skipped:
        first = found.skipped[:MAX_SKIPPED_SHOWN]
        say(console, "\n  ".join([f"Skipped: {len(found.skipped)}.", *first]))
    if csv_path:
        both = pd.concat([table.assign(kind=kind) for kind, table in tables.items()])
        paths.write_text(csv_path, both.to_csv(index=False))
    return any(map(len, tables.values()))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return TIMES_SIGN if value == "x" else value
    return "none" if np.isnan(value) else format_number(float(value))
