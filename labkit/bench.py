"""Runs the suites of `labkit bench`: every row is on the disk at once, so a run that was stopped goes on.

Until a run is complete its rows are in the user's cache, a file for each suite. The next run takes from
there what it would measure in the same way (labkit.measure.journal), if it starts within an hour after the
last row of any suite.
"""

import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from labkit import clocks, device, machine, peers, places, rows, suites, sweeps
from labkit.bench_plan import TUNE_S, Part, row_seconds, sources
from labkit.measure import journal
from labkit.measure.journal import Journal, Key
from labkit.rows import Row


@dataclass(frozen=True)
class Progress:
    """A row is there: which, of which suite, how many of how many, and about how many seconds are left."""

    suite: str
    row: Row
    done: int
    total: int
    left_s: float


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
    measured: list[Row] = field(default_factory=list)
    kept: int = 0
    """How many of them an earlier run measured."""

    def __post_init__(self) -> None:
        self._parts = {name: suites.parts(name, peers=self.with_peers) for name in self.names}
        every = [part for parts in self._parts.values() for part in parts]
        self._code = sources(every)
        self._known: dict[Key, Row] = {}
        self.total = sum(len(part.planned()) for part in every)
        """How many rows there will be."""
        self._left_s, self._spent_s = sum(part.seconds() for part in every), 0.0
        """Planned seconds of what is to be done, and of what this run has measured."""

    def run(self) -> None:
        """Measure what is not kept of an earlier run. Interrupted, the rows stay for the next one.

        Raises LostError and EditedError, and OSError where rows cannot be written; the rows before stay.
        """
        if self.again:
            self.forget()
        journal.drop_expired(folder().glob("*/*.jsonl"))
        for name, parts in self._parts.items():
            ways = {
                key: journal.way(self._code[key[:2]], one.peer and peers.installed(one.peer))
                for part in parts
                for key, one in part.planned().items()
            }
            self._known |= Journal(tape(name), ways, tape=True).kept
        self.kept = len(self._known)
        self._started = time.monotonic()
        for name, parts in self._parts.items():
            todo = {key[:2] for part in parts for key in part.planned() if key not in self._known}
            for part in parts:
                self._tune(part, todo)
                self._measure(name, part)

    def forget(self) -> None:
        """The run is complete and its rows are where they should be: the next one starts afresh."""
        for name in self.names:
            tape(name).unlink(missing_ok=True)

    def left_s(self) -> float:
        """About how long the rest takes; the plan alone counts until ten planned seconds are measured."""
        elapsed_s = time.monotonic() - self._started
        return max(self._left_s, 0.0) * (elapsed_s / self._spent_s if self._spent_s >= 10 else 1.0)

    def _passed(self, seconds: float, *, measured: bool) -> None:
        self._left_s -= seconds
        self._spent_s += seconds * measured

    def _measure(self, name: str, part: Part) -> None:
        compiled = {one.name: one.compiled for one in part.contenders}

        def heard(_done: int, _total: int, row: Row) -> None:
            if row.source != self._code[row.suite, row.contender]:
                rows.write(tape(name), (kept for kept in rows.read(tape(name)) if kept.key != row.key))
                raise EditedError(
                    f"{row.suite}: the code of {row.contender} was edited while it was measured"
                )
            self._passed(
                row_seconds(compiled[row.contender]), measured=self._known.get(journal.asked_key(row)) != row
            )
            self.measured.append(row)
            self.progress(Progress(name, row, len(self.measured), self.total, self.left_s()))
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
            self._passed(TUNE_S * len(part.tuned), measured=needed)


def tape(suite: str) -> Path:
    """Where the rows of a suite are until the run is complete."""
    return folder() / machine.identity().slug / f"{suite}.jsonl"


def folder() -> Path:
    """Where the rows of all suites are until the run is complete, in a folder for each kind of device."""
    return places.cache() / "bench"


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
        there = path.exists()
        if there and not path.is_file():
            raise OSError("it is not a plain file")
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from error


def write_csv(path: Path, measured: Iterable[Row]) -> None:
    """Rows as a table, a column for each axis of the shape; in one step."""
    table = rows.table(measured)
    places.write_text(path, table.drop(columns="shape").to_csv(index=False))
