"""What `labkit bench` prints: progress and time left while it runs, then who has no time and why."""

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from labkit.bench import Progress
from labkit.plots.words import duration
from labkit.rows import Row
from labkit.runs.report import say

HEARTBEAT_S = 10.0
"""Without a terminal, a line is printed this often."""


class Report(Protocol):
    """Shows the progress of a benchmark, from entering to leaving."""

    def __enter__(self) -> "Report": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

    def __call__(self, progress: Progress) -> None:
        """A row is there."""


def report(console: Console) -> Report:
    """A live line on a terminal; a plain line now and then in a log."""
    return LiveReport(console) if console.is_terminal else LineReport(console)


class LiveReport:
    """A line that is drawn over and over, and gone in the end."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(
            TextColumn("{task.fields[suite]}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", suite="", left="", total=None)

    def __enter__(self) -> "LiveReport":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Show the row that is there."""
        self._bar.update(
            self._task,
            completed=progress.done,
            total=progress.total,
            suite=progress.suite,
            left=left(progress.left_s),
            description=line(progress.row)[:60],
        )


class LineReport:
    """A line at a suite's first row, and one for a row ten seconds or more after the last line."""

    def __init__(self, console: Console, every_s: float = HEARTBEAT_S) -> None:
        self._console, self._every_s = console, every_s
        self._suite, self._said = "", 0.0

    def __enter__(self) -> "LineReport":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Nothing is held."""

    def __call__(self, progress: Progress) -> None:
        """Say the row that is there, if it is time."""
        now = time.monotonic()
        if progress.suite == self._suite and now - self._said < self._every_s:
            return
        self._suite, self._said = progress.suite, now
        where = f"{progress.suite}: row {progress.done} of {progress.total}, {left(progress.left_s)}"
        say(self._console, f"{where}: {line(progress.row)}")


def left(seconds: float) -> str:
    """Time left as a person says it: ``about 40 s left``, ``about 3 min left``."""
    return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"


def line(row: Row) -> str:
    """A row in a few words."""
    time_ = "no time" if row.median_us is None else duration(row.median_us)
    sizes = " x ".join(map(str, row.shape.values()))
    return f"{row.contender}, {row.direction}, {row.dtype}, {sizes}: {time_}"


def results(measured: list[Row]) -> Table:
    """A line for each suite: its rows, and how many of them have no time."""
    table = Table()
    table.add_column("suite")
    for name in ("rows", "without a time"):
        table.add_column(name, justify="right")
    for suite in dict.fromkeys(row.suite for row in measured):
        found = [row for row in measured if row.suite == suite]
        table.add_row(suite, str(len(found)), str(sum(row.median_us is None for row in found)))
    return table
