"""Runs the suites of `labkit bench`: every row is on the disk at once, so a run that was stopped goes on.

Until a run is complete its rows are in the user's cache, a file for each suite. The next run takes from there
what the same code measured on the same machine, if the last row is no older than an hour.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from labkit import machine, peers, places, rows, suites, sweeps
from labkit.bench_plan import TUNE_S, Part, row_seconds
from labkit.rows import Row

FILE = "bench.jsonl"
"""The last full run of a recorded device, beside its tapes."""


@dataclass(frozen=True)
class Progress:
    """A row is there: which, of which suite, how many of how many, and about how many seconds are left."""

    suite: str
    row: Row
    done: int
    total: int
    left_s: float


@dataclass
class TimeLeft:
    """Seconds that are left, from the plan and from how fast it has gone so far."""

    planned_s: float
    now: Callable[[], float] = time.monotonic
    _spent_s: float = 0.0
    _started: float | None = None

    def passed(self, seconds: float, *, measured: bool) -> None:
        """So much of the plan is done; without ``measured`` it was done in an earlier run."""
        self.planned_s -= seconds
        self._spent_s += seconds * measured

    def start(self) -> None:
        """Measuring begins."""
        self._started = self.now()

    def seconds(self) -> float:
        """About how long the rest takes; the plan alone counts until ten planned seconds are done."""
        if self._started is None or self._spent_s < 10:
            return max(self.planned_s, 0.0)
        return max(self.planned_s, 0.0) * (self.now() - self._started) / self._spent_s


@dataclass
class Bench:
    """A run of some suites. ``measured`` holds the rows so far, in order, also when the run was stopped."""

    names: Sequence[str]
    with_peers: bool = False
    again: bool = False
    progress: Callable[[Progress], None] = lambda _: None
    measured: list[Row] = field(default_factory=list)
    kept: int = 0
    """How many of them an earlier run measured."""

    def run(self) -> None:
        """Measure what is not kept of an earlier run. Interrupted, the rows stay for the next one."""
        if self.again:
            self.forget()
        planned = {name: suites.parts(name, peers=self.with_peers) for name in self.names}
        self._left = TimeLeft(sum(part.seconds() for parts in planned.values() for part in parts))
        self._total = sum(len(part.rows()) for parts in planned.values() for part in parts)
        known = {name: self._known(name, parts) for name, parts in planned.items()}
        self.kept = sum(map(len, known.values()))
        self._left.start()
        for name, parts in planned.items():
            rows.write(tape(name), known[name])
            earlier = {row.key: row for row in known[name]}
            for part in parts:
                self._measure(name, part, earlier)

    def forget(self) -> None:
        """The run is complete and its rows are where they should be: the next one starts afresh."""
        for name in self.names:
            tape(name).unlink(missing_ok=True)

    def _known(self, name: str, parts: Iterable[Part]) -> list[Row]:
        """Rows of a stopped run that would be measured now in the same way."""
        if not _recent():
            return []
        here = machine.identity()
        by = {(part.suite, one.name): one for part in parts for one in part.contenders}
        found = []
        for row in sweeps.readable(tape(name)):
            one = by.get((row.suite, row.contender))
            same = (row.device, row.driver, row.torch, row.triton) == (
                here.device, here.driver, here.torch, here.triton,
            )  # fmt: skip
            if one and same and row.median_us is not None and row.source == sweeps.code(one):
                found += [row] if row.peer_version == (one.peer and peers.installed(one.peer)) else []
        return found

    def _measure(self, name: str, part: Part, earlier: dict[tuple[object, ...], Row]) -> None:
        here = [row for row in earlier.values() if row.suite == part.suite]
        self._tune(part, {row.contender for row in here})
        compiled = {one.name: one.compiled for one in part.contenders}

        def heard(_done: int, _total: int, row: Row) -> None:
            self._left.passed(row_seconds(compiled[row.contender]), measured=earlier.get(row.key) != row)
            self.measured.append(row)
            self.progress(Progress(name, row, len(self.measured), self._total, self._left.seconds()))

        for options in part.runs():
            sweeps.run(part.suite, part.contenders, part.shapes, progress=heard, tape=tape(name), **options)

    def _tune(self, part: Part, done: set[str]) -> None:
        """Let peers that tune themselves do so, unless an earlier run has measured them."""
        for one in part.tuners():
            if one.name not in done:
                with suppress(Exception):  # what fails here fails again when it is measured, and is a note
                    peers.tune([one], part.tuned)
            self._left.passed(TUNE_S * len(part.tuned), measured=one.name not in done)


def tape(suite: str) -> Path:
    """Where the rows of a suite are until the run is complete."""
    return _folder() / f"{machine.identity().slug}-{suite}.jsonl"


def _folder() -> Path:
    return places.cache() / "bench"


def _recent() -> bool:
    """Whether the last row of any suite was measured within the last hour."""
    times = [path.stat().st_mtime for path in _folder().glob("*.jsonl")]
    return bool(times) and time.time() - max(times) < sweeps.RESUME_WITHIN_S


def gaps(measured: Iterable[Row]) -> list[str]:
    """Who has no time and why, a line for each contender and reason, with how many rows that makes."""
    found: dict[tuple[str, str], int] = {}
    for row in measured:
        if row.median_us is None:
            found[row.contender, row.note] = found.get((row.contender, row.note), 0) + 1
    return [
        f"{contender}, {count} {'row' if count == 1 else 'rows'}: {note or 'no reason given'}"
        for (contender, note), count in found.items()
    ]


def recorded_file() -> Path | None:
    """The last full run of the first recorded device that has one."""
    return next(iter(sorted(places.RECORDED.glob(f"*/{FILE}"))), None)


def keep(measured: Iterable[Row]) -> Path:
    """Put a full run in the place of this device's last one; gives its file."""
    path = places.RECORDED / machine.identity().slug / FILE
    rows.write(path, [replace(row, kind=rows.RECORDED) for row in measured])
    return path


def check_writable(path: Path) -> None:
    """ValueError unless a file can be written at ``path``; nothing is left behind."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} cannot be written: it is not a plain file")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from error


def write_csv(path: Path, measured: Iterable[Row]) -> None:
    """Rows as a table, a column for each axis of the shape; in one step."""
    table = rows.table(measured)
    places.write_text(path, table.drop(columns="shape").to_csv(index=False))
