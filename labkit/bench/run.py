"""Runs suites: every row is on the disk at once, so a run that was stopped goes on.

Until a run is complete its rows are in the user's cache, a file for each suite. The next run takes from
there what it would measure in the same way (labkit.measure.rows), if it starts within an hour after the
last row of any suite.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from labkit import gpu, paths
from labkit.bench.benchmark import TUNE_S, Benchmark, row_seconds
from labkit.measure import clocks, lock, machine, rows, sweeps
from labkit.measure.rows import Journal, Key, Row
from labkit.plots.formatting import format_duration
from labkit.runs.console import say
from labkit.workloads import peers

HEARTBEAT_S = 10.0
"""Without a terminal, a line is printed this often."""


@dataclass(frozen=True)
class Progress:
    """A row is there: which, of which suite, how many of how many, and about how many seconds are left."""

    suite: str
    row: Row
    done: int
    total: int
    left_s: float

    @property
    def left(self) -> str:
        """``about 40 s left``, ``about 3 min left``."""
        in_seconds = self.left_s < 90
        return f"about {self.left_s:.0f} s left" if in_seconds else f"about {self.left_s / 60:.0f} min left"

    def __str__(self) -> str:
        row = self.row
        spent = "no time" if row.median_us is None else format_duration(row.median_us)
        sizes = " x ".join(map(str, row.shape.values()))
        return f"{row.contender}, {row.direction}, {row.dtype}, {sizes}: {spent}"


class CodeEditedError(click.ClickException):
    """The code of a contender was edited while it was measured: a row does not say what it is of."""


class GpuLostError(click.ClickException):
    """The GPU takes no more work from this process."""


@dataclass
class Run:
    """A run of the parts of some suites, by the suite's name. ``measured`` holds the rows so far, in order,
    also when the run was stopped."""

    suites: Mapping[str, Sequence[Benchmark]]
    again: bool = False
    progress: Callable[[Progress], None] = lambda _: None
    measured: list[Row] = field(default_factory=list)
    kept: int = 0
    """How many of them an earlier run measured."""

    def __post_init__(self) -> None:
        every = [part for parts in self.suites.values() for part in parts]
        self._code = sources(every)
        self._known: dict[Key, Row] = {}
        self.total = sum(len(part.planned()) for part in every)
        """How many rows there will be."""
        self._left_s, self._spent_s = sum(part.seconds() for part in every), 0.0
        """Planned seconds of what is to be done, and of what this run has measured."""

    def run(self) -> None:
        """Measure what is not kept of an earlier run. Interrupted, the rows stay for the next one.

        Raises GpuLostError, CodeEditedError, and OSError where rows cannot be written; the rows before stay.
        """
        if self.again:
            self.forget()
        rows.drop_expired((paths.cache() / "bench").glob("*/*.jsonl"))
        for name, parts in self.suites.items():
            ways = {
                key: machine.conditions(self._code[key[:2]], one.peer and peers.installed(one.peer))
                for part in parts
                for key, one in part.planned().items()
            }
            self._known |= Journal(tape(name), ways, tape=True).kept
        self.kept = len(self._known)
        self._started = time.monotonic()
        for name, parts in self.suites.items():
            for part in parts:
                self._tune(part)
                self._measure(name, part)

    def forget(self) -> None:
        """The run is complete and its rows are where they should be: the next one starts afresh."""
        for name in self.suites:
            tape(name).unlink(missing_ok=True)

    def _passed(self, seconds: float, *, measured: bool) -> None:
        self._left_s -= seconds
        self._spent_s += seconds * measured

    def _measure(self, name: str, part: Benchmark) -> None:
        contenders = {one.name: one for one in part.contenders}

        def heard(_done: int, _total: int, row: Row) -> None:
            where = f"{row.suite}: {{}} {row.contender}"
            if row.source != self._code[row.suite, row.contender]:
                rows.write(tape(name), (kept for kept in rows.read(tape(name)) if kept.key != row.key))
                raise CodeEditedError(
                    f"{row.suite}: the code of {row.contender} was edited while it was measured"
                )
            known = self._known.get(row.asked_key) == row
            self._passed(row_seconds(contenders[row.contender]), measured=not known)
            self.measured.append(row)
            # the plan alone counts until ten planned seconds are measured
            pace = (time.monotonic() - self._started) / self._spent_s if self._spent_s >= 10 else 1.0
            left_s = max(self._left_s, 0.0) * pace
            self.progress(Progress(name, row, len(self.measured), self.total, left_s))
            if row.median_us is None and gpu.is_lost():
                raise GpuLostError(where.format("the GPU is lost after") + f": {row.note}")

        for options in part.runs():
            try:
                sweeps.run(
                    part.suite, part.contenders, part.shapes, progress=heard, tape=tape(name), **options
                )
            except RuntimeError as error:
                if not gpu.is_lost():
                    raise
                raise GpuLostError(f"{part.suite}: the GPU is lost: {clocks.describe(error)}") from error

    def _tune(self, part: Benchmark) -> None:
        """Let peers that tune themselves do so, if there is anything to measure of them."""
        todo = {one.name for key, one in part.planned().items() if key not in self._known}
        contenders, shapes = part.tuning()
        for one in contenders:
            if one.name in todo:
                # What fails here fails again when it is measured, and is a note.
                with lock.gpu_lock(), suppress(Exception):
                    peers.tune([one], shapes)
            self._passed(TUNE_S * len(shapes), measured=one.name in todo)


def sources(parts: Iterable[Benchmark]) -> dict[tuple[str, str], str]:
    """The source that a row measured now would name, by suite and contender."""
    return {(part.suite, one.name): sweeps.code(one) for part in parts for one in part.contenders}


def tape(name: str) -> Path:
    """Where the rows of a suite are until the run is complete, in a folder for each kind of device."""
    return paths.cache() / "bench" / machine.identity().slug / f"{name}.jsonl"


@contextmanager
def shown(console: Console) -> Iterator[Callable[[Progress], None]]:
    """What shows a run's progress: on a terminal a line that is drawn over and over, in a log a line at a
    suite's first row and for a row ten seconds or more after the last line."""
    if console.is_terminal:
        columns = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("suite", "left", "row")]
        bar = Bar(
            columns[0],
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            *columns[1:],
            console=console,
            transient=True,
        )
        with bar:
            task = bar.add_task("", suite="starting", left="", row="", total=None)
            yield lambda now: bar.update(
                task, completed=now.done, total=now.total, suite=now.suite, left=now.left, row=str(now)[:60]
            )
        return
    said: dict[str, Any] = {"suite": "", "at": 0.0}

    def line(now: Progress) -> None:
        at = time.monotonic()
        if now.suite != said["suite"] or at - said["at"] >= HEARTBEAT_S:
            said.update(suite=now.suite, at=at)
            say(console, f"{now.suite}: row {now.done} of {now.total}, {now.left}: {now}")

    yield line
