"""What the command line prints while many jobs run: one display of all of them, or plain lines in a log."""

import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from labkit import jobs
from labkit.jobs import Job, Outcome
from labkit.reports import HEARTBEAT_S, say


class Report(Protocol):
    """Shows the progress of a run, from entering to leaving."""

    def __enter__(self) -> "Report": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

    def begins(self, wanted: Sequence[Job], kept: Sequence[Outcome]) -> None:
        """These are the jobs, and what an earlier run finished of them."""

    def update(self, running: Sequence[tuple[Job, str]]) -> None:
        """These have not ended; the text says on what one runs, and is empty for one that waits."""

    def ended(self, outcome: Outcome, again: bool) -> None:
        """A job has ended; ``again`` when it is tried once more."""


def report(console: Console) -> Report:
    """A display that is drawn over and over on a terminal; plain lines in a log."""
    return LiveReport(console) if console.is_terminal else LineReport(console)


class LineReport:
    """A line where a job begins or ends, and one for each running job every ten seconds."""

    def __init__(self, console: Console, every_s: float = HEARTBEAT_S) -> None:
        self._console, self._every_s = console, every_s
        self._known: set[str] = set()
        self._said = time.monotonic()

    def __enter__(self) -> "LineReport":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Nothing is held."""

    def begins(self, wanted: Sequence[Job], kept: Sequence[Outcome]) -> None:
        """Say what is kept, and what is to be done."""
        _begins(self._console, wanted, kept)

    def update(self, running: Sequence[tuple[Job, str]]) -> None:
        """Say what began, and where the others are, if it is time."""
        due = time.monotonic() - self._said >= self._every_s
        for job, where in running:
            if where and job.name not in self._known:
                self._known.add(job.name)
                say(self._console, f"{job.name}: started on {where}")
            elif where and due:
                say(self._console, f"{job.name} on {where}: {_reached(job)}")
        if due:
            self._said = time.monotonic()

    def ended(self, outcome: Outcome, again: bool) -> None:
        """Say how."""
        self._known.discard(outcome.job.name)
        say(self._console, _ended(outcome, again))


class LiveReport:
    """A bar for all jobs and one for each that runs; lines of jobs that have ended stand above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.fields[name]}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._all = self._bars.add_task("", name="all", total=None)
        self._of: dict[str, TaskID] = {}

    def __enter__(self) -> "LiveReport":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begins(self, wanted: Sequence[Job], kept: Sequence[Outcome]) -> None:
        """Say what is kept, and begin the bar of all."""
        _begins(self._console, wanted, kept)
        self._bars.update(self._all, total=len(wanted), completed=len(kept))

    def update(self, running: Sequence[tuple[Job, str]]) -> None:
        """Move the bars."""
        for job, where in running:
            if not where:
                continue
            if job.name not in self._of:
                self._of[job.name] = self._bars.add_task("starting", name=f"{job.name}, {where}", total=None)
            if reached := jobs.progress(job):
                done, total, text = reached
                self._bars.update(self._of[job.name], completed=done, total=total, description=text[:40])

    def ended(self, outcome: Outcome, again: bool) -> None:
        """The job's bar goes, a line about it comes."""
        if outcome.job.name in self._of:
            self._bars.remove_task(self._of.pop(outcome.job.name))
        self._bars.update(self._all, advance=not again)
        say(self._console, _ended(outcome, again))


def _begins(console: Console, wanted: Sequence[Job], kept: Sequence[Outcome]) -> None:
    if kept:
        names = ", ".join(outcome.job.name for outcome in kept)
        left = len(wanted) - len(kept)
        say(console, f"Continued: an earlier run finished {names}; {left} to do. --again does all of it.")


def _reached(job: Job) -> str:
    found = jobs.progress(job)
    return f"{found[0]} of {found[1]}, {found[2]}" if found else "starting"


def _ended(outcome: Outcome, again: bool) -> str:
    job = outcome.job
    on = f" on {outcome.device}" if outcome.device else ""
    if outcome.passed:
        return f"{job.name}: passed in {outcome.seconds:.1f} s{on}"
    why = f": {outcome.error}" if outcome.error else ""
    then = "; it is tried again" if again else ""
    return f"{job.name}: failed{on}{why}; see {os.path.relpath(job.log)}{then}"
