"""Runs the suites of `labkit bench`: every row is on the disk at once, so a run that was stopped goes on.

Until a run is complete its rows are in the user's cache, a file for each suite. The next run takes from there
what the same code measured on the same machine, if the last row is no older than an hour. Files may hold rows
of earlier runs, too: two hours without a row are between two runs.
"""

import os
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labkit import clocks, device, machine, peers, places, rows, suites, sweeps
from labkit.bench_plan import TUNE_S, Part, row_seconds
from labkit.rows import Row


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


class EditedError(RuntimeError):
    """The code of a contender was edited while it was measured: a row does not say what it is of."""


class LostError(RuntimeError):
    """The GPU takes no more work from this process."""


@dataclass
class Bench:
    """A run of some suites. ``measured`` holds the rows so far, in order, also when the run was stopped.

    Making one loads the lessons; ValueError where that fails.
    """

    names: Sequence[str]
    with_peers: bool = False
    again: bool = False
    progress: Callable[[Progress], None] = lambda _: None
    kept_s: float = sweeps.RESUME_WITHIN_S
    """How old the last row of a stopped run may be for the run to go on, in seconds."""
    measured: list[Row] = field(default_factory=list)
    kept: int = 0
    """How many of them an earlier run measured."""

    def __post_init__(self) -> None:
        self._planned = {name: suites.parts(name, peers=self.with_peers) for name in self.names}
        every = [part for parts in self._planned.values() for part in parts]
        self._code = {(part.suite, one.name): sweeps.code(one) for part in every for one in part.contenders}
        self.total = sum(len(part.rows()) for part in every)
        """How many rows there will be."""
        self._left = TimeLeft(sum(part.seconds() for part in every))

    def run(self) -> None:
        """Measure what is not kept of an earlier run. Interrupted, the rows stay for the next one.

        Raises LostError and EditedError, and OSError where rows cannot be written; the rows before stay.
        """
        if self.again:
            self.forget()
        kept = _last_run((row for name in self.names for row in sweeps.readable(tape(name))), self.kept_s)
        known = {name: self._known(name, kept) for name in self.names}
        self.kept = sum(map(len, known.values()))
        self._left.start()
        for name, parts in self._planned.items():
            rows.write(tape(name), known[name].values())
            todo = {key[:2] for part in parts for key in part.planned() if key not in known[name]}
            for part in parts:
                self._tune(part, todo)
                self._measure(name, part, known[name])

    def forget(self) -> None:
        """The run is complete and its rows are where they should be: the next one starts afresh."""
        for name in self.names:
            tape(name).unlink(missing_ok=True)

    def _known(self, name: str, kept: Container[str]) -> dict[tuple[Any, ...], Row]:
        """Rows of these dates that would be measured now in the same way, by their key as planned."""
        here = machine.identity()
        parts = self._planned[name]
        wanted = {
            key: one for part in parts for key, (one, *_) in zip(part.planned(), part.rows(), strict=True)
        }
        found = {}
        for row in sweeps.readable(tape(name)):
            key = _planned_key(row)
            one = wanted.get(key)
            if one is None or row.median_us is None or row.date not in kept:
                continue
            measured = row.device, row.driver, row.torch, row.triton, row.peer_version, row.source
            peer = one.peer and peers.installed(one.peer)
            if measured == (here.device, here.driver, here.torch, here.triton, peer, self._code[key[:2]]):
                found[key] = row
        return found

    def _measure(self, name: str, part: Part, known: Mapping[tuple[Any, ...], Row]) -> None:
        compiled = {one.name: one.compiled for one in part.contenders}

        def heard(_done: int, _total: int, row: Row) -> None:
            if row.source != self._code[row.suite, row.contender]:
                rows.write(tape(name), (kept for kept in rows.read(tape(name)) if kept.key != row.key))
                raise EditedError(
                    f"{row.suite}: the code of {row.contender} was edited while it was measured"
                )
            self._left.passed(
                row_seconds(compiled[row.contender]), measured=known.get(_planned_key(row)) != row
            )
            self.measured.append(row)
            self.progress(Progress(name, row, len(self.measured), self.total, self._left.seconds()))
            if row.median_us is None and device.is_lost():
                raise LostError(f"{row.suite}: the GPU is lost after {row.contender}: {row.note}")

        for options in part.runs():
            try:
                sweeps.run(
                    part.suite, part.contenders, part.shapes, progress=heard, tape=tape(name), **options
                )
            except RuntimeError as error:
                if isinstance(error, LostError | EditedError) or not device.is_lost():
                    raise
                raise LostError(f"{part.suite}: the GPU is lost: {clocks.describe(error)}") from error

    def _tune(self, part: Part, todo: Container[tuple[str, str]]) -> None:
        """Let peers that tune themselves do so, if there is anything to measure of them."""
        for one in part.tuners():
            needed = (part.suite, one.name) in todo
            if needed:
                # What fails here fails again when it is measured, and is a note.
                with clocks.gpu_turn(), suppress(Exception):
                    peers.tune([one], part.tuned)
            self._left.passed(TUNE_S * len(part.tuned), measured=needed)


def tape(suite: str) -> Path:
    """Where the rows of a suite are until the run is complete."""
    return folder() / f"{machine.identity().slug}-{suite}.jsonl"


def folder() -> Path:
    """Where the rows of all suites are until the run is complete."""
    return places.cache() / "bench"


def _planned_key(row: Row) -> tuple[Any, ...]:
    """The row's key by the clock that was asked for."""
    return replace(row, clock=sweeps.asked_clock(row)).key


def _last_run(measured: Iterable[Row], within_s: float) -> set[str]:
    """The dates of a stopped run's rows: the last no older than this, and before it none for twice as long.

    Twice, because a run that goes on has its own first row some time after it began.
    """
    ages = {row.date: row.age_s() for row in measured}
    found: set[str] = set()
    reached_s = 0.0
    for date, age_s in sorted(ages.items(), key=lambda dated: dated[1]):
        if age_s - reached_s >= (2 * within_s if found else within_s):
            break
        found.add(date)
        reached_s = max(age_s, 0.0)  # a clock may have been set back
    return found


def gaps(measured: Iterable[Row]) -> list[str]:
    """Who has no time and why, a line for each contender and reason: how many rows, of which suites."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in measured:
        if row.median_us is None:
            found.setdefault((row.contender, row.note), []).append(row.suite.removeprefix("bench/"))
    return [
        f"{contender}, {len(where)} {'row' if len(where) == 1 else 'rows'} of "
        f"{', '.join(dict.fromkeys(where))}: {note or 'no reason given'}"
        for (contender, note), where in found.items()
    ]


def check_writable(path: Path) -> None:
    """ValueError unless a file can be written at ``path``; nothing is left behind."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a plain file")
        if not path.parent.is_dir():
            raise OSError(f"there is no folder {path.parent}")
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
