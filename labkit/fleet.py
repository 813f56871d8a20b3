"""A run of many jobs on an engine: what an earlier run finished is kept, what failed may be tried again."""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from labkit import jobs, places
from labkit.fleet_report import Report
from labkit.jobs import Job, Outcome


class Task(Protocol):
    """A job that was given to an engine."""

    @property
    def where(self) -> str:
        """On what it runs; empty as long as it waits."""

    def done(self) -> bool:
        """Whether it has ended."""

    def error(self) -> str:
        """Why it ended without a result, as the end of a sentence."""


class Engine(Protocol):
    """Takes jobs and works on them: the GPUs of this machine, or a cluster."""

    poll_s: float

    def start(self, wanted: Sequence[Job]) -> Sequence[Task]:
        """Queue jobs, prepared all at once: those that never start have nothing left of an older run."""

    def stop(self) -> None:
        """End what runs, and forget what waits."""


@dataclass
class Fleet:
    """Jobs, the engine that does them, and how they ended; also when the run was interrupted."""

    wanted: Sequence[Job]
    engine: Engine
    retries: int = 0
    """How often a job that failed is tried again."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def run(self, report: Report) -> None:
        """Do what no earlier run has finished. Interrupted, all workers are ended first."""
        self._take(self.wanted)
        report.begins(self.wanted, list(self.outcomes.values()))
        todo = [job for job in self.wanted if job.name not in self.outcomes]
        try:
            self._drive(todo, report)
        finally:
            self.engine.stop()
            self._take([replace(job, again=False) for job in todo])  # of one that had just finished

    def _take(self, given: Sequence[Job]) -> None:
        """Take what is finished already."""
        for job in given:
            if job.name not in self.outcomes and (found := jobs.kept(job)):
                self.outcomes[job.name] = found

    def _drive(self, todo: Sequence[Job], report: Report) -> None:
        left = {job.name: self.retries for job in todo}
        running = list(zip(todo, self.engine.start(todo), strict=True))
        while running:
            time.sleep(self.engine.poll_s)
            ended = [(job, task) for job, task in running if task.done()]
            running = [pair for pair in running if pair not in ended]
            failed = []
            for job, task in ended:
                outcome = _outcome(job, task.error())
                jobs.keep_roofs(job)
                again = not outcome.passed and left[job.name] > 0
                report.ended(outcome, again)
                if again:
                    left[job.name] -= 1
                    failed.append(replace(job, again=False, retry=True))  # from where it failed
                else:
                    self.outcomes[job.name] = outcome
            if failed:
                running += zip(failed, self.engine.start(failed), strict=True)
            report.update([(job, task.where) for job, task in running])

    @property
    def ended(self) -> list[Outcome]:
        """How the jobs ended that have ended, in the order in which they were wanted."""
        return [self.outcomes[job.name] for job in self.wanted if job.name in self.outcomes]

    @property
    def complete(self) -> bool:
        """Whether every job has passed."""
        return len(self.ended) == len(self.wanted) and all(outcome.passed for outcome in self.ended)

    def forget(self) -> None:
        """The run is complete and what it gave is where it should be: the next one starts afresh."""
        for job in self.wanted:
            jobs.forget(job)


def _outcome(job: Job, error: str) -> Outcome:
    """The worker's last word, or why there is none."""
    said = jobs.result(job)
    if said is not None:
        return said
    reached = jobs.progress(job)
    where = f" (at {reached[0]} of {reached[1]}: {reached[2]})" if reached else ""
    return Outcome(job, False, f"{error or 'its worker left no result'}{where}")


@contextmanager
def alone(kind: str, folder: Path | None = None) -> Iterator[None]:
    """ValueError while another run of the same command works in a folder, by default this clone's build."""
    folder = folder or places.BUILD / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / kind, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another `labkit {kind}` is running and writes the same files: wait until it has ended, "
                "or stop it"
            ) from error
        except OSError:  # a file system without locks, as Lustre can be: no run would ever start there
            pass
        yield
    finally:
        os.close(handle)
