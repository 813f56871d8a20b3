"""One measurement is one row; a tape is a file of rows (JSON lines)."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import paths

if TYPE_CHECKING:  # listing and checking tapes needs no table
    from labkit.measure.results import Results

LIVE, RECORDED, PUBLISHED = KINDS = ("live", "recorded", "published")
"""Measured here and now; read from a tape; taken from somebody's post."""


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
    """The library behind a contender, and its version: on older rows only, as no sweep names one."""
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
    def asked_clock(self) -> str:
        """The clock that was asked for: "graph" for a call that was timed with events as a fallback."""
        # Relies on clocks._Sampler: only a call that no graph can hold has events, a time and a note.
        return "graph" if self.clock == "events" and self.note and self.median_us is not None else self.clock

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies the measurement, whenever and wherever it was made."""
        how = (self.direction, self.dtype, self.asked_clock, self.cache)
        return self.suite, self.contender, *how, tuple(sorted(self.shape.items()))

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


COLUMNS = [f.name for f in fields(Row) if f.name != "trace"]
"""The columns of a table of rows."""


def read(path: Path) -> list[Row]:
    """Rows of a JSON-lines file; none when it does not exist.

    Raises ValueError for a file that is damaged, or of another schema.
    """
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [Row.from_json(line) for line in lines if line.strip()]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file of rows in one step, so that a reader never sees half of it."""
    paths.write_text(path, "".join(row.to_json() + "\n" for row in rows))


def recorded_rows(suite: str) -> list[Row]:
    """Rows of a suite, or of all suites below it, from the old lessons' tapes of one recorded device.

    They stand in ``labkit/data/recorded/<device>/old/<lesson>.jsonl``. Of several devices the first one by
    name that has the suite is taken, so that a table never mixes two machines. ValueError, which says what to
    do, for a tape that is damaged or of another schema.
    """
    for folder in sorted(paths.RECORDED.glob("*/old")):
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
