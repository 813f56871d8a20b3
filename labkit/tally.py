"""What a class guessed: the sealed guesses of many learners, from folders and archives, in one table.

These are files of learners, and may hold anything. They are read as data: nothing is unpacked, no link is
followed, sizes and numbers have limits, and texts are printed without control characters or markup.
"""

import gzip
import os
import posixpath
import re
import statistics
import tarfile
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from labkit.plots.words import digits
from labkit.widgets import guesses
from labkit.widgets.guesses import Question

GUESS = re.compile(r"(.{0,4000}/predictions)/([a-z0-9-]{1,250})\.json", re.DOTALL)
"""The path of a learner's guess, as :attr:`guesses.Question.path` is, and no longer than paths can be."""
DIGITS = re.compile(rb"\d{300}")
"""More than a file's name can have: tarfile's search in a header takes the square of their number."""
AXIS = 1e-9, 1e12
"""A guess beyond is none: the ends of an axis are not in the file, and longer numbers spoil the table."""
MOST_BYTES = 64 * 1024
"""Of one file, and of what stands before it in an archive."""
MOST_UNPACKED = 8 * 1024**3
"""Bytes of one archive that are looked at, unpacked."""
MOST_ENTRIES = 200_000
"""Files and folders of one source that are looked at."""
MOST_GUESSES = 20_000
MOST_ROWS = 100
"""Questions in the table: those that most have guessed."""
MOST_NAMED = 20
"""Skipped files that are named."""
TRUSTING = ValueError, ArithmeticError, LookupError, RecursionError
"""What tarfile raises for headers that nobody but an attacker writes."""
DAMAGED = OSError, EOFError, zlib.error, tarfile.TarError, *TRUSTING
NOTHING = (
    "no guess was found. A learner's guesses are files predictions/*.json: in ~/.cache/labkit, or the folder "
    "that LABKIT_CACHE names; on the hub of docs/jupyterhub.md in ~/labkit/results. When you copy the folder "
    "predictions, keep its name."
)

File = tuple[str, bool, Callable[[], bytes]]
"""Its path, whether it is a regular file, and what reads it, one byte beyond the limit at most."""


@dataclass(frozen=True)
class Sealed:
    """A learner's guess, with texts that are safe to print."""

    question: Question
    value: float
    seen: bool
    at: float
    """When, in seconds since 1970."""


@dataclass
class Tally:
    """The guesses by learner's folder and slug, and what was skipped, in words that are safe to print."""

    guesses: dict[tuple[str, str], Sealed] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def skip(self, path: str, why: object) -> None:
        """Note what is not counted, or not to its end."""
        self.skipped.append(f"{plain(os.path.relpath(path), 200)}: {plain(str(why), 200)}")

    def take(self, path: str, regular: bool, read: Callable[[], bytes]) -> None:
        """Count a file, if it is where guesses are."""
        place = GUESS.fullmatch(path)
        if place is None:
            return
        if not regular:
            self.skip(path, "no regular file")
            return
        if len(self.guesses) == MOST_GUESSES:
            self.skip(path, f"there are {MOST_GUESSES} guesses before it")
            return
        try:
            content = read()
        except OSError as error:
            self.skip(path, error.strerror or error)
            return
        if len(content) > MOST_BYTES:
            self.skip(path, f"larger than {MOST_BYTES // 1024} KiB")
            return
        try:
            self.guesses[place[1], place[2]] = _sealed(content)
        except (ValueError, OverflowError, OSError):  # the last two from dates that no clock shows
            self.skip(path, "no guess")


def read(sources: Iterable[Path]) -> Tally:
    """The guesses in folders and archives; what cannot be read is among those skipped."""
    found = Tally()
    for source in sources:
        path = os.path.realpath(source)
        files = _in_folder(path, found.skip) if os.path.isdir(path) else _in_archive(path)
        try:
            for count, file in enumerate(files):
                if count == MOST_ENTRIES:
                    found.skip(path, f"only its first {MOST_ENTRIES} entries were looked at")
                    break
                found.take(*file)
        except DAMAGED as error:
            damage = f"no tar archive, or damaged ({error}); what comes before the damage is counted"
            found.skip(path, getattr(error, "strerror", None) or damage)
    return found


def plain(text: str, most: int) -> str:
    """A stranger's text on one line, without control characters, and at most so long."""
    text = "".join(sign for sign in " ".join(text.split()) if unicodedata.category(sign)[0] != "C")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _sealed(content: bytes) -> Sealed:
    entry = guesses.parse(content.decode("utf-8"))
    name, text = plain(entry.name, 100), plain(entry.question, 300)
    question = Question(name, text, *AXIS, plain(entry.unit, 20), plain(entry.axis, 20))
    if not question.low <= entry.guess.value <= question.high:
        raise ValueError(f"content: a guess of {entry.guess.value:g}")
    at = datetime.fromisoformat(entry.guess.sealed).timestamp()
    return Sealed(question, entry.guess.value, entry.guess.seen, at)


# --- files ----------------------------------------------------------------------------------------


def _in_folder(top: str, skip: Callable[[str, object], None]) -> Iterator[File]:
    """Everything below a folder, one after the other: there may be more than fits into memory."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    yield entry.path, entry.is_file(follow_symlinks=False), partial(_read, entry.path)
        except OSError as error:
            skip(folder, error.strerror)


def _read(path: str) -> bytes:
    # A link or a pipe may have taken the file's place since it was looked at.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(handle, MOST_BYTES + 1)
    finally:
        os.close(handle)


def _in_archive(path: str) -> Iterator[File]:
    with open(path, "rb") as raw:
        packed = raw.peek(2)[:2] == b"\x1f\x8b"
        stream: Any = _Careful(gzip.GzipFile(fileobj=raw) if packed else raw)
        archive: Any = tarfile.TarFile(fileobj=stream, encoding="utf-8")
        while (member := archive.next()) is not None:
            # As a path below the archive's own, so that no archive can name a file of another one.
            name = path + posixpath.normpath("/" + member.name.lstrip("/"))
            regular = member.isreg() and not member.issparse()
            yield name, regular, partial(stream.content, member.size)
            archive.members.clear()  # it would keep them all
            stream.left = MOST_BYTES
        if stream.last != bytes(tarfile.BLOCKSIZE):  # which tarfile takes for the end as well
            raise tarfile.ReadError("it ends too early")


class _Careful:
    """A stream that goes forward only, and not for ever, whatever a header asks for."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.tell = stream, stream.tell
        self.left = MOST_BYTES
        """What may still be read to find the next member."""
        self.last = b""
        """What was read for that last."""

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.left or self.tell() > MOST_UNPACKED:
            raise tarfile.ReadError(f"{size} bytes more in a header")
        self.left -= size
        self.last = self._stream.read(size)
        if DIGITS.search(self.last):
            raise tarfile.ReadError("digits without an end in a header")
        return self.last

    def seek(self, offset: int) -> None:
        if not self.tell() <= offset <= MOST_UNPACKED:
            raise tarfile.ReadError(f"byte {offset} is behind, or beyond the limit of {MOST_UNPACKED}")
        self._stream.seek(offset)

    def content(self, size: int) -> bytes:
        """The data of the member that was found last, one byte beyond the limit at most."""
        return self._stream.read(min(max(size, 0), MOST_BYTES + 1))


# --- in words -------------------------------------------------------------------------------------


def questions(found: Tally) -> list[list[Sealed]]:
    """The guesses by question, in the order in which a class met them; the most guessed of too many."""
    grouped: dict[tuple[str, str], list[Sealed]] = {}
    for (_, slug), sealed in sorted(found.guesses.items()):
        grouped.setdefault((slug, sealed.question.text), []).append(sealed)
    most = sorted(grouped.values(), key=len, reverse=True)[:MOST_ROWS]
    return sorted(most, key=lambda group: statistics.median(sealed.at for sealed in group))


def table(found: Tally) -> Table:
    """A line for each question: how many guessed, who had seen the answer, what the others guessed."""
    shown = Table()
    shown.add_column("question", overflow="fold")
    for name in ("guessed", "had seen\nthe answer", "median", "20th to 80th\npercentile"):
        shown.add_column(name, justify="right", overflow="fold")
    for group in questions(found):
        question = _asked(group)
        fresh = [sealed.value for sealed in group if not sealed.seen]
        seen = len(group) - len(fresh)
        spread = _spread(question, fresh) if fresh else ("none", "")
        # Text: markup and the names of emoji are letters like any other.
        shown.add_row(*map(Text, (question.text, str(len(group)), str(seen), *spread)))
    return shown


def _asked(group: list[Sealed]) -> Question:
    """The question with the unit that most files have, of those that have one."""
    units = Counter((q.unit, q.axis) for q in (sealed.question for sealed in group) if q.unit or q.axis)
    ((unit, axis), _), *_ = units.most_common(1) or [(("", ""), 0)]
    return replace(group[0].question, unit=unit, axis=axis)


def _spread(question: Question, values: list[float]) -> tuple[str, str]:
    """Median and middle, on the logarithmic axis on which they were guessed."""
    low, median, high = np.exp(np.quantile(np.log(values), (0.2, 0.5, 0.8)))
    return question.say(median), f"{digits(low)} to {question.number(high)}"


def summary(found: Tally) -> list[str]:
    """How many guesses are in the table, and what was skipped, in sentences."""
    said = []
    if found.guesses:
        learners = len({folder for folder, _ in found.guesses})
        rows = len({(slug, sealed.question.text) for (_, slug), sealed in found.guesses.items()})
        said.append(f"Guesses: {len(found.guesses)}; learners' folders that hold them: {learners}.")
        if rows > MOST_ROWS:
            said.append(f"Questions: {rows}; the table has the {MOST_ROWS} that most have guessed.")
    if found.skipped:
        said.append(f"Skipped: {len(found.skipped)}.")
        said += [f"  {line}" for line in found.skipped[:MOST_NAMED]]
        if len(found.skipped) > MOST_NAMED:
            said.append(f"  and {len(found.skipped) - MOST_NAMED} more")
    return said
