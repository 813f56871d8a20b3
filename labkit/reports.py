"""What the command line prints while lessons run and when they have run."""

import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from labkit import runner

HEARTBEAT_S = 10.0
"""Without a terminal, a line is printed this often."""


class Report(Protocol):
    """Shows the progress of one lesson, from entering to leaving."""

    def __enter__(self) -> "Report": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

    def __call__(self, progress: runner.Progress) -> None:
        """A cell is about to run."""


def report(console: Console) -> Report:
    """A live line on a terminal; a plain line now and then in a log."""
    return LiveReport(console) if console.is_terminal else LineReport(console)


class LiveReport:
    """A line that is drawn over and over, and gone in the end."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.fields[lesson]}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", lesson="", total=None)

    def __enter__(self) -> "LiveReport":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, progress: runner.Progress) -> None:
        """Show the cell that is about to run."""
        self._bar.update(
            self._task,
            completed=progress.cell,
            total=progress.cells,
            lesson=progress.lesson,
            description=progress.line[:40],
        )


class LineReport:
    """A line at a lesson's first cell, and one every ten seconds from then on."""

    def __init__(self, console: Console, every_s: float = HEARTBEAT_S) -> None:
        self._console, self._every_s = console, every_s
        self._latest: tuple[runner.Progress, float] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "LineReport":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def __call__(self, progress: runner.Progress) -> None:
        """Note the cell that is about to run."""
        first = self._latest is None
        self._latest = (progress, time.perf_counter())
        if first:
            say(self._console, f"{progress.lesson}: cell 1 of {progress.cells}")

    def _beat(self) -> None:
        while not self._stop.wait(self._every_s):
            if self._latest is not None:
                progress, since = self._latest
                seconds = progress.seconds + time.perf_counter() - since
                where = f"{progress.lesson}: cell {progress.cell} of {progress.cells}"
                say(self._console, f"{where}, {seconds:.0f} s: {progress.line}")


def say(console: Console, text: str) -> None:
    """Print text as it is: nothing in it is markup, and lines are not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def failure(console: Console, lesson: str, failed: runner.Failure) -> None:
    """Print which cell failed, its source, and how."""
    where = f"cell {failed.cell}" if failed.cell else "the given parameters"
    console.print(f"[bold red]{escape(lesson)} failed in {where}:[/]", highlight=False, soft_wrap=True)
    for line in failed.source.splitlines():
        say(console, f"    {line}")
    say(console, failed.traceback)
    if failed.message not in failed.traceback:
        say(console, failed.message)


def results(found: Iterable[runner.Result], unfinished: Iterable[str] = ()) -> Table:
    """One line for each lesson: whether it passed, how long it took, what held; or that it did not finish."""
    table = Table()
    table.add_column("lesson", overflow="fold")
    table.add_column("result")
    for name in ("seconds", "checks\npassed", "claims\nheld", "claims\nnot held", "claims that\nneed a GPU"):
        table.add_column(name, justify="right")
    for result in found:
        outcome = "[green]passed[/]" if result.passed else "[bold red]failed[/]"
        counts = (result.checks_passed, result.claims_held, result.claims_not_held, result.claims_need_gpu)
        table.add_row(escape(result.lesson), outcome, f"{result.seconds:.1f}", *map(str, counts))
    for lesson in unfinished:
        table.add_row(escape(lesson), "not finished")
    return table
