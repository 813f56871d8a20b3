"""What a class guessed and solved: learners' files from folders and archives, as two tables.

These are files of learners, and may hold anything. They are read as data: nothing is unpacked, no link is
followed, sizes and numbers have limits, and texts are printed without control characters or markup.
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
from rich.table import Table
from rich.text import Text

from labkit import paths
from labkit.plots.formatting import TIMES_SIGN, format_number
from labkit.runs.report import say
from labkit.widgets import guesses

PLACES = re.compile(
    r"(?P<learner>.*?)/?(predictions/[^/]+\.json|"
    r"attempts/(?P<lesson>[^/]+)/(verdicts\.json|(?P<task>[^/]+)/\d+\.py))",
    re.DOTALL,
)
"""Where a learner's sealed guess, the verdicts of a lesson and each attempt at an exercise are kept."""
MOST_BYTES, MOST_ENTRIES, MOST_TOTAL = 64 * 1024, 200_000, 8 * 1024**3
"""Of one file; files of one source; bytes of one archive, unpacked."""
MOST_NAMED = 20
"""Skipped files that are named."""
DAMAGED = OSError, EOFError, RuntimeError, zlib.error, tarfile.TarError, zipfile.BadZipFile, ValueError
NOTHING = (
    "no guess and no verdict was found. A learner's are files predictions/*.json and "
    "attempts/*/verdicts.json: in ~/.cache/labkit, or the folder that LABKIT_CACHE names; on the hub of "
    "docs/jupyterhub.md in ~/labkit/results. When you copy these folders, keep their names."
)

File = tuple[str, bool, int, Callable[[], bytes]]
"""Its path, whether it is a regular file, its bytes, and what reads them."""


@dataclass
class Found:
    """Guesses and exercises, each a dict of columns, by what they are of; and what was skipped and why."""

    guesses: dict[str, dict[str, Any]] = field(default_factory=dict)
    tries: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def take(self, path: str, regular: bool, size: int, read: Callable[[], bytes]) -> None:
        """Count a file, if it is where learners' files are; an error says why it does not count."""
        place = PLACES.fullmatch(path)
        if place is None:
            return
        if not regular or size > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES // 1024} KiB" if regular else "no regular file")
        learner, lesson, task = (place[name] or "" for name in ("learner", "lesson", "task"))
        if task:
            self._try(learner, lesson, task)["tries"].add(path)
        elif lesson:
            solved = {name: each["status"] == "right" for name, each in json.loads(read()).items()}
            for name, right in solved.items():  # all of them or, where one is damaged, none
                self._try(learner, lesson, name)["solved"] = right
        else:
            entry = guesses.parse_guess_file(read().decode())
            if not 1e-9 <= entry.guess.value <= 1e12:
                raise ValueError(f"a guess of {entry.guess.value:g}")
            words = {"name": entry.name, "question": entry.question, "unit": entry.unit}
            words = {name: plain(each, 300) for name, each in words.items()}
            self.guesses[path] = words | vars(entry.guess)

    def _try(self, *key: str) -> dict[str, Any]:
        learner, lesson, exercise = (plain(each, 300) for each in key)
        blank = {"lesson": lesson, "exercise": exercise, "solved": False, "tries": set()}
        return self.tries.setdefault((learner, lesson, exercise), blank)

    def skip(self, path: str | Path, why: object) -> None:
        """Note what does not count, or not to its end, in words that are safe to print."""
        self.skipped.append(f"{plain(os.path.relpath(path), 200)}: {plain(str(why), 200)}")


def read(sources: Iterable[Path]) -> Found:
    """What folders and archives hold; what cannot be read is among those skipped."""
    found = Found()
    for source in dict.fromkeys(path.resolve() for path in sources):
        name, total = str(source), 0
        try:
            files = _in_folder(source, found) if source.is_dir() else _in_archive(source)
            for count, (name, regular, size, content) in enumerate(files):
                total += size
                if count == MOST_ENTRIES or (total > MOST_TOTAL and not source.is_dir()):
                    found.skip(source, "too large, not read to its end")
                    break
                try:
                    found.take(name, regular, size, content)
                except DAMAGED as error:
                    found.skip(name, getattr(error, "strerror", None) or error)
                except (TypeError, KeyError, AttributeError, RecursionError):
                    found.skip(name, "not what labkit writes there")
        except (*DAMAGED, RecursionError) as error:
            found.skip(source, f"no archive, or damaged ({error}); what comes before the damage is counted")
    return found


def _in_folder(top: Path, found: Found) -> Iterator[File]:
    """What is below a folder; one that cannot be read, as another user's, is among those skipped."""
    for folder, _, names in os.walk(top, onerror=lambda error: found.skip(error.filename, error.strerror)):
        for name in names:
            path = Path(folder, name)
            state = path.lstat()
            yield str(path), stat.S_ISREG(state.st_mode), state.st_size, path.read_bytes


def _in_archive(path: Path) -> Iterator[File]:
    """Members by their path below the archive's, so that none can pass for a file of another source."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            for info in packed.infolist():
                regular = not (info.is_dir() or stat.S_ISLNK(info.external_attr >> 16))
                yield _below(path, info.filename), regular, info.file_size, partial(packed.read, info)
        return
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            inside = archive.extractfile(member) if member.isreg() else None
            yield _below(path, member.name), member.isreg(), member.size, inside.read if inside else bytes


def _below(path: Path, name: str) -> str:
    return f"{path}{os.path.normpath('/' + name.lstrip('/'))}"


def plain(text: str, most: int) -> str:
    """A stranger's text on one line, without control characters, and at most so long."""
    text = "".join(sign for sign in " ".join(text.split()) if unicodedata.category(sign)[0] != "C")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def questions(found: Found) -> pd.DataFrame:
    """A line for each question, in the order in which a class met them. The median, and the 20th to 80th
    percentile, are of guesses that were sealed before the answer had been seen, on a logarithmic axis."""
    table = pd.DataFrame(
        found.guesses.values(), columns=["name", "question", "unit", "value", "sealed", "seen"]
    )
    lines = []
    for (_, question), group in table.groupby(["name", "question"], sort=False):
        fresh = np.log(group["value"][~group["seen"].astype(bool)].astype(float))
        low, median, high = np.exp(fresh.quantile([0.2, 0.5, 0.8]))
        unit = group["unit"].mode()[0]
        lines.append(
            [group["sealed"].min(), question, len(group), group["seen"].sum(), median, low, high, unit]
        )
    columns = ["sealed", "question", "guessed", "had seen", "median", "p20", "p80", "unit"]
    return pd.DataFrame(sorted(lines, key=lambda line: line[0]), columns=columns).drop(columns="sealed")


def exercises(found: Found) -> pd.DataFrame:
    """A line for each exercise: how many learners tried and solved it, and the median of their tries."""
    table = pd.DataFrame(found.tries.values(), columns=["lesson", "exercise", "solved", "tries"])
    table["tries"] = table["tries"].map(len)
    counts = {"tried": ("solved", "size"), "solved": ("solved", "sum"), "median tries": ("tries", "median")}
    return table.groupby(["lesson", "exercise"]).agg(**counts).reset_index()


def show(console: Console, found: Found, csv_path: Path | None = None) -> bool:
    """Print both tables and what was skipped, and write them to a file; whether there was anything."""
    tables = {"guesses": questions(found), "exercises": exercises(found)}
    for title, table in tables.items():
        if len(table):
            shown = Table(*table.columns, title=title)
            for row in table.itertuples(index=False):
                # Text: markup and the names of emoji are letters like any other.
                shown.add_row(*(Text(_word(value)) for value in row))
            console.print(shown, highlight=False)
    if found.skipped:
        say(console, f"Skipped: {len(found.skipped)}.")
        for line in found.skipped[:MOST_NAMED]:
            say(console, f"  {line}")
        if len(found.skipped) > MOST_NAMED:
            say(console, f"  and {len(found.skipped) - MOST_NAMED} more")
    if csv_path:
        whole = pd.concat([table.assign(kind=kind) for kind, table in tables.items()])
        paths.write_text(csv_path, whole.to_csv(index=False))
    return any(map(len, tables.values()))


def _word(value: Any) -> str:
    if isinstance(value, str):
        return TIMES_SIGN if value == "x" else plain(value, 300)
    return "none" if np.isnan(value) else format_number(float(value))
