"""One measurement is one row; tapes and benchmarks are files of rows (JSON lines).

A recording or a benchmark that was cut short is continued from its file (`resumed`). A row there is taken
instead of measuring if it has a time and would be measured again in the same way: the same measurement, with
the clock that was asked for, of the same code with the same device, driver and versions.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import paths

if TYPE_CHECKING:  # listing and checking tapes needs no table
    from labkit.measure.results import Results

LIVE, RECORDED, PUBLISHED = KINDS = ("live", "recorded", "published")
"""Measured here and now; read from a tape; taken from somebody's post."""
TAPE = "LABKIT_TAPE"
"""Environment variable: the tape of a lesson that is being recorded, where its rows and profiles go."""

Key = tuple[Any, ...]
"""What identifies a measurement, whenever and wherever it was made: a :attr:`Row.key`."""
Environment = tuple[str | None, ...]
"""Code, device and versions of a measurement."""


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
    """What a lesson's own meter returned (sweeps.custom_bytes); None for all other rows."""
    noise: str = ""
    """What disturbed the measurement (labkit.measure.noise); empty for a quiet one, and for older ones."""
    card: str = ""
    """Which of the GPUs of its kind it was (gpu.card); empty for older rows."""
    trace: dict[str, Any] | None = None
    """Of a profile the kernels and the host's launches, as labkit.profiling.recorded_profiles says; None for
    all other rows."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: {self.kind!r} is none of {', '.join(KINDS)}")

    @property
    def key(self) -> Key:
        """What identifies the measurement, whenever and wherever it was made."""
        return key(self.suite, self.contender, self.direction, self.dtype, self.shape, self.clock, self.cache)

    @property
    def asked_clock(self) -> str:
        """The clock that was asked for: "graph" for a call that was timed with events as a fallback."""
        # Relies on clocks._Sampler._capture_or_fall_back: only such a row has events, a time and a note.
        return "graph" if self.clock == "events" and self.note and self.median_us is not None else self.clock

    @property
    def asked_key(self) -> Key:
        """The key by the clock that was asked for."""
        return replace(self, clock=self.asked_clock).key

    @property
    def environment(self) -> Environment:
        """Code, device and versions that it was measured with."""
        return self.source, self.peer_version, self.device, self.driver, self.torch, self.triton

    @classmethod
    def from_json(cls, line: str) -> "Row":
        """Read one line of a tape; ValueError when it is no JSON, or a field is missing or unknown."""
        try:
            return cls(**json.loads(line))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a row of the schema: {error}") from error

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(vars(self))


def key(
    suite: str, contender: str, direction: str, dtype: str, shape: dict[str, int], clock: str, cache: str
) -> Key:
    """The :attr:`Row.key` that a row of these columns has."""
    return suite, contender, direction, dtype, tuple(sorted(shape.items())), clock, cache


COLUMNS = [f.name for f in fields(Row) if f.name != "trace"]
"""The columns of a table of rows."""


def read(path: Path) -> list[Row]:
    """Rows of a JSON-lines file; empty when it does not exist. A torn last line is dropped.

    Raises:
        ValueError: for a file that is damaged, or of another schema.
    """
    *complete, torn = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    found = [Row.from_json(line) for line in complete if line.strip()]
    with suppress(ValueError):  # a row cut off in the middle of a write: measured again on resume
        found.append(Row.from_json(torn))
    return found


def read_valid(path: Path) -> list[Row]:
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

    OSError where the disk is full.
    """
    line = row.to_json().encode() + b"\n"
    with paths.advice(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=len(line) + 1) as stream:
            end = stream.seek(0, os.SEEK_END)
            torn = end and os.pread(stream.fileno(), 1, end - 1) != b"\n"
            stream.write(b"\n" + line if torn else line)
            stream.flush()
            os.fsync(stream.fileno())


def replace_row(path: Path, row: Row) -> None:
    """Put a row into a file in one step, in the place of one of the same measurement."""
    write(path, [*(kept for kept in read(path) if kept.key != row.key), row])


def recorded_rows(suite: str) -> list[Row]:
    """Rows of a suite, or of all suites below it, from the tapes of one recorded device.

    Tapes stand in ``labkit/data/recorded/<device>/<lesson>.jsonl``. Of several devices the first one by name
    that has the suite is taken, so that a table never mixes two machines. ValueError, which says what to do,
    for a tape that is damaged or of another schema.
    """
    for folder in sorted(paths.RECORDED.glob("*/")):
        found = [row for tape in sorted(folder.glob("*.jsonl")) for row in read_recorded(tape)]
        found = [row for row in found if f"{row.suite}/".startswith(f"{suite}/")]
        if found:
            return found
    return []


def read_recorded(tape: Path) -> list[Row]:
    """Rows of a recorded file; ValueError, which says what to do, for a damaged one or another schema."""
    if not tape.exists():
        return []
    state = tape.stat()
    try:
        return list(_parsed(tape, state.st_ino, state.st_mtime_ns, state.st_size))
    except ValueError as error:
        raise ValueError(
            f"{tape} is damaged or of another version of labkit ({error}). "
            "Put it back with `git restore`, or remove it: its figures are then not shown."
        ) from error


@lru_cache(maxsize=64)
def _parsed(tape: Path, *state: int) -> tuple[Row, ...]:
    """Read once in each state of the file: without a GPU every sweep looks for its rows in all of them."""
    return tuple(read(tape))


def as_results(rows: Iterable[Row], axes: Iterable[str] = ()) -> "Results":
    """Rows as a table: the columns of the schema, and one for each name in ``shape`` and in ``axes``."""
    from labkit.measure.results import Results  # pandas takes a while

    listed = list(rows)
    frame = Results([vars(row) for row in listed], columns=COLUMNS)
    for axis in dict.fromkeys([*axes, *(axis for row in listed for axis in row.shape)]):
        frame[axis] = [row.shape.get(axis) for row in listed]
    return frame


# ---- runs that are continued -------------------------------------------------------------------------------


def resumed(tape: Path, wanted: Mapping[Key, Environment]) -> dict[Key, Row]:
    """The rows of a tape that a run need not measure, by their key; what it measures again leaves the tape.

    ``wanted`` has the present environment for each key that the run will measure. Rows of others stay.
    """
    found = [row for row in read_valid(tape) if row.median_us is not None or row.asked_key not in wanted]
    kept = {row.asked_key: row for row in found if row.environment == wanted.get(row.asked_key)}
    # A torn last line is not in the file any more, either.
    write(tape, [row for row in found if row.asked_key not in wanted or kept.get(row.asked_key) is row])
    return kept
