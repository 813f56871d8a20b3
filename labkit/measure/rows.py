"""One measurement is one row; tapes and benchmarks are files of rows (JSON lines)."""

import errno
import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import paths

if TYPE_CHECKING:  # listing and checking tapes needs no table
    from labkit.measure.results import Results

LIVE, RECORDED, PUBLISHED = KINDS = ("live", "recorded", "published")
"""Measured here and now; read from a tape; taken from somebody's post."""
TAPE = "LABKIT_TAPE"
"""Names the tape of a lesson that is being recorded: its rows and profiles are kept there."""
LATER = {"noise": "", "card": "", "trace": None}
"""Fields that rows did not have from the beginning, and their values in rows without them."""


@dataclass(frozen=True)
class Row:
    """A measurement and everything needed to trust it. Times are microseconds per call."""

    suite: str
    contender: str
    direction: str
    dtype: str
    shape: dict[str, int]
    clock: str
    cache: str
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    runs: int = 0
    min_bytes: int = 0
    flops: int = 0
    copy_us: float | None = None
    relative_error: float | None = None
    kind: str = LIVE
    device: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    peer: str | None = None
    peer_version: str | None = None
    date: str = ""
    source: str = ""
    note: str = ""
    """Why there is no time (out of memory, an error, a wrong result); empty for a good row."""
    peak_bytes: int | None = None
    """Most memory in use at one time during one call, in bytes above what was in use before it: outputs and
    intermediates, not the inputs. For a backward pass, of forward and backward together."""
    noise: str = ""
    """What disturbed the measurement (labkit.measure.noise); empty for a quiet one, and for older ones."""
    card: str = ""
    """Which of the GPUs of its kind it was (gpu.card); empty for older rows."""
    trace: dict[str, Any] | None = None
    """Of a profile the kernels and the host's launches (labkit.profiling.traces); None for all other rows."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: {self.kind!r} is none of {', '.join(KINDS)}")

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies the measurement, whenever and wherever it was made."""
        return key(self.suite, self.contender, self.direction, self.dtype, self.shape, self.clock, self.cache)

    def age_s(self) -> float:
        """Seconds since it was measured; endless where its date does not say."""
        try:
            return (datetime.now(UTC) - datetime.fromisoformat(self.date)).total_seconds()
        except (ValueError, TypeError):  # no moment, or one without a time zone
            return math.inf

    @classmethod
    def from_json(cls, line: str) -> "Row":
        """Read one line of a tape; ValueError when a field is missing, unknown or of another type."""
        try:
            row = cls(**json.loads(line))
        except (TypeError, RecursionError, json.JSONDecodeError) as error:
            raise ValueError(f"not a row of the schema: {error}") from error
        for each in fields(cls):
            value = getattr(row, each.name)
            if not _fits(value, each.type):
                raise ValueError(f"not a row of the schema: {each.name} is {value!r}")
        return row

    def to_json(self) -> str:
        """One line of JSON; a field of LATER that is empty is not in it, as it was not once."""
        return json.dumps({name: value for name, value in vars(self).items() if value or name not in LATER})


def key(
    suite: str, contender: str, direction: str, dtype: str, shape: dict[str, int], clock: str, cache: str
) -> tuple[Any, ...]:
    """The :attr:`Row.key` that a row of these columns has."""
    return suite, contender, direction, dtype, tuple(sorted(shape.items())), clock, cache


def _fits(value: Any, kind: Any) -> bool:
    if kind == dict[str, int]:
        return isinstance(value, dict) and all(isinstance(size, int) for size in value.values())
    if kind == dict[str, Any] | None:
        return value is None or isinstance(value, dict)
    return isinstance(value, kind | int if kind == float | None else kind)


COLUMNS = [f.name for f in fields(Row) if f.name != "trace"]
"""The columns of a table of rows."""


def read(path: Path) -> list[Row]:
    """Rows of a JSON-lines file; empty when it does not exist. A torn last line is dropped.

    Raises:
        ValueError: for a file that is damaged, or of another schema.
    """
    if not path.exists():
        return []
    *complete, torn = path.read_text(encoding="utf-8").split("\n")
    found = [Row.from_json(line) for line in complete if line.strip()]
    with suppress(ValueError):  # a row cut off in the middle of a write: measured again on resume
        found += [Row.from_json(torn)] if torn.strip() else []
    return found


def readable(path: Path) -> list[Row]:
    """Rows of a file without the lines that are damaged or of another schema: these are measured again."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
        with suppress(ValueError):
            found.append(Row.from_json(line))
    return found


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file of rows in one step, so that a reader never sees half of it."""
    paths.write_text(path, "".join(row.to_json() + "\n" for row in rows))


def append(path: Path, row: Row) -> None:
    """Add one row in one write that has reached the disk before this returns; a torn last line is ended.

    OSError where the disk is full; then the file is what it was, not torn in its last line.
    """
    with paths.advice(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as stream:
            before = stream.seek(0, os.SEEK_END)
            torn = before and os.pread(stream.fileno(), 1, before - 1) != b"\n"
            line = b"\n" * bool(torn) + (row.to_json() + "\n").encode()
            try:
                if stream.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                os.fsync(stream.fileno())
            except OSError:
                stream.truncate(before)
                raise


def put(path: Path, row: Row) -> None:
    """Put a row into a file in one step, in the place of one of the same measurement."""
    write(path, [*(kept for kept in read(path) if kept.key != row.key), row])


def recorded(suite: str) -> list[Row]:
    """Rows of a suite, or of all suites below it, from the tapes of one recorded device.

    Tapes stand in ``labkit/data/recorded/<device>/<lesson>.jsonl``. Of several devices the first one by name
    that has the suite is taken, so that a table never mixes two machines. ValueError, which says what to do,
    for a tape that is damaged or of another schema.
    """
    for folder in sorted(paths.RECORDED.glob("*/")):
        found = [row for tape in sorted(folder.glob("*.jsonl")) for row in of_a_tape(tape)]
        found = [row for row in found if f"{row.suite}/".startswith(f"{suite}/")]
        if found:
            return found
    return []


def of_a_tape(tape: Path) -> list[Row]:
    """Rows of a recorded file; ValueError, which says what to do, for a damaged one or another schema."""
    if not tape.exists():
        return []
    is_now = tape.stat()
    try:
        return list(_parsed(tape, is_now.st_ino, is_now.st_mtime_ns, is_now.st_size))
    except ValueError as error:
        raise ValueError(
            f"{tape} is damaged or of another version of labkit ({error}). "
            "Put it back with `git restore`, or remove it: its figures are then not shown."
        ) from error


@lru_cache(maxsize=64)
def _parsed(tape: Path, *state: int) -> tuple[Row, ...]:
    """Read once in each state of the file: without a GPU every sweep looks for its rows in all of them."""
    return tuple(read(tape))


def table(rows: Iterable[Row], axes: Iterable[str] = ()) -> "Results":
    """Rows as a table: the columns of the schema, and one for each name in ``shape`` and in ``axes``."""
    from labkit.measure.results import Results  # pandas takes a while

    listed = list(rows)
    frame = Results([vars(row) for row in listed], columns=COLUMNS)
    for axis in dict.fromkeys([*axes, *(axis for row in listed for axis in row.shape)]):
        frame[axis] = [row.shape.get(axis) for row in listed]
    return frame
