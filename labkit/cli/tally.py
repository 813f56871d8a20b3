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
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from labkit import paths
from labkit.plots.formatting import TIMES_SIGN, format_number
from labkit.runs.console import say
from labkit.widgets import guesses

LEARNER_FILE = re.compile(
    r"(?P<learner>.*?)/?(predictions/[^/]+\.json|"
    r"attempts/(?P<lesson>[^/]+)/(verdicts\.json|(?P<task>[^/]+)/\d+\.py))",
    re.DOTALL,
)
"""Paths of a learner's sealed guess, of the verdicts of a lesson, and of each attempt at an exercise."""
MAX_FILE_BYTES, MAX_FILES, MAX_ARCHIVE_BYTES = 64 * 1024, 200_000, 8 * 1024**3
"""Limits for one file, for the files of one source, and for one archive when unpacked."""
MAX_SKIPPED_SHOWN = 20
READ_ERRORS = OSError, EOFError, RuntimeError, zlib.error, tarfile.TarError, zipfile.BadZipFile, ValueError
NOTHING = (
    "no guess and no verdict was found. A learner's are files predictions/*.json and "
    "attempts/*/verdicts.json: in ~/.cache/labkit, or the folder that LABKIT_CACHE names; on the hub of "
    "docs/jupyterhub.md in ~/labkit/results. When you copy these folders, keep their names."
)


class SourceFile(NamedTuple):
    """A file of a folder or an archive: its path, whether it is a regular file, its bytes, its content."""

    path: str
    regular: bool
    size: int
    read: Callable[[], bytes]


@dataclass
class ClassResults:
    """All guesses, by file; all exercises, by learner, lesson and exercise; what was skipped, and why."""

    guesses: dict[str, dict[str, Any]] = field(default_factory=dict)
    exercises: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def add(self, file: SourceFile) -> None:
        """Count a file, if its path is one of a learner's files. An error says why it does not count."""
        match = LEARNER_FILE.fullmatch(file.path)
        if match is None:
            return
        if not file.regular:
            raise ValueError("no regular file")
        if file.size > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES // 1024} KiB")
        learner, lesson, task = (match[name] or "" for name in ("learner", "lesson", "task"))
        if task:
            self._exercise(learner, lesson, task)["tries"].add(file.path)
        elif lesson:
            solved = {name: each["status"] == "right" for name, each in json.loads(file.read()).items()}
            for name, right in solved.items():  # all verdicts of a file or, where one is damaged, none
                self._exercise(learner, lesson, name)["solved"] = right
        else:
            entry = guesses.parse_guess_file(file.read().decode())
            if not 1e-9 <= entry.guess.value <= 1e12:
                raise ValueError(f"a guess of {entry.guess.value:g}")
            words = {"name": entry.name, "question": entry.question, "unit": entry.unit}
            self.guesses[file.path] = {k: plain(v, 300) for k, v in words.items()} | vars(entry.guess)

    def _exercise(self, learner: str, lesson: str, exercise: str) -> dict[str, Any]:
        key = plain(learner, 300), plain(lesson, 300), plain(exercise, 300)
        new = {"lesson": key[1], "exercise": key[2], "solved": False, "tries": set()}
        return self.exercises.setdefault(key, new)

    def skip(self, path: str | Path, why: object) -> None:
        """Note a file that is not counted, or not to its end, in words that are safe to print."""
        self.skipped.append(f"{plain(os.path.relpath(path), 200)}: {plain(str(why), 200)}")


def read(sources: Iterable[Path]) -> ClassResults:
    """Everything that folders and archives hold; files that cannot be read are among those skipped."""
    found = ClassResults()
    for source in dict.fromkeys(path.resolve() for path in sources):
        total = 0
        try:
            for count, file in enumerate(_folder(source, found) if source.is_dir() else _archive(source)):
                total += file.size
                if count == MAX_FILES or (total > MAX_ARCHIVE_BYTES and not source.is_dir()):
                    found.skip(source, "too large, not read to its end")
                    break
                try:
                    found.add(file)
                except READ_ERRORS as error:
                    found.skip(file.path, getattr(error, "strerror", None) or error)
                except (TypeError, KeyError, AttributeError, RecursionError):
                    found.skip(file.path, "not what labkit writes there")
        except (*READ_ERRORS, RecursionError) as error:
            found.skip(source, f"no archive, or damaged ({error}); what comes before the damage is counted")
    return found


def _folder(top: Path, found: ClassResults) -> Iterator[SourceFile]:
    """The files below a folder; a folder that cannot be read, as another user's, is skipped."""
    for folder, _, names in os.walk(top, onerror=lambda error: found.skip(error.filename, error.strerror)):
        for path in (Path(folder, name) for name in names):
            state = path.lstat()
            yield SourceFile(str(path), stat.S_ISREG(state.st_mode), state.st_size, path.read_bytes)


def _archive(path: Path) -> Iterator[SourceFile]:
    """The members of a zip or tar archive; none can pass for a file of another source by its path."""

    def below(name: str) -> str:
        return f"{path}{os.path.normpath('/' + name.lstrip('/'))}"

    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            for info in packed.infolist():
                regular = not (info.is_dir() or stat.S_ISLNK(info.external_attr >> 16))
                yield SourceFile(below(info.filename), regular, info.file_size, partial(packed.read, info))
        return
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            inside = archive.extractfile(member) if member.isreg() else None
            yield SourceFile(
                below(member.name), member.isreg(), member.size, inside.read if inside else bytes
            )


def plain(text: str, most: int) -> str:
    """A learner's text on one line, without control characters, and at most ``most`` characters long."""
    text = "".join(sign for sign in " ".join(text.split()) if unicodedata.category(sign)[0] != "C")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def guess_table(found: ClassResults) -> pd.DataFrame:
    """A row for each question, in the order in which the class met them.

    ``median``, ``p20`` and ``p80`` are of the guesses that were sealed before the answer had been seen. The
    percentiles are taken on a logarithmic axis.
    """
    columns = ["name", "question", "unit", "value", "sealed", "seen"]
    table = pd.DataFrame(found.guesses.values(), columns=columns).sort_values("sealed", kind="stable")
    lines = []
    for (_, question), group in table.groupby(["name", "question"], sort=False):
        fresh = np.log(group["value"][~group["seen"].astype(bool)].astype(float))
        low, median, high = np.exp(fresh.quantile([0.2, 0.5, 0.8]))
        lines.append([question, len(group), group["seen"].sum(), median, low, high, group["unit"].mode()[0]])
    return pd.DataFrame(lines, columns=["question", "guessed", "had seen", "median", "p20", "p80", "unit"])


def exercise_table(found: ClassResults) -> pd.DataFrame:
    """A row for each exercise: how many learners tried and solved it, and the median of their tries."""
    table = pd.DataFrame(found.exercises.values(), columns=["lesson", "exercise", "solved", "tries"])
    table["tries"] = table["tries"].map(len)
    counts = {"tried": ("solved", "size"), "solved": ("solved", "sum"), "median tries": ("tries", "median")}
    return table.groupby(["lesson", "exercise"]).agg(**counts).reset_index()


def print_tables(console: Console, found: ClassResults, csv_path: Path | None = None) -> bool:
    """Print both tables and what was skipped, and write them to a file; returns whether they hold a row."""
    tables = {"guesses": guess_table(found), "exercises": exercise_table(found)}
    for title, table in tables.items():
        if len(table):
            printed = Table(*table.columns, title=title)
            for row in table.itertuples(index=False):
                printed.add_row(*(Text(_cell(value)) for value in row))  # Text: nothing in it is markup
            console.print(printed, highlight=False)
    if found.skipped:
        say(console, f"Skipped: {len(found.skipped)}.")
        for line in found.skipped[:MAX_SKIPPED_SHOWN]:
            say(console, f"  {line}")
        if len(found.skipped) > MAX_SKIPPED_SHOWN:
            say(console, f"  and {len(found.skipped) - MAX_SKIPPED_SHOWN} more")
    if csv_path:
        both = pd.concat([table.assign(kind=kind) for kind, table in tables.items()])
        paths.write_text(csv_path, both.to_csv(index=False))
    return any(map(len, tables.values()))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return TIMES_SIGN if value == "x" else plain(value, 300)
    return "none" if np.isnan(value) else format_number(float(value))
