"""A job is one lesson or suite that a process of its own works on; its folder holds what the two sides share.

The side that asks writes ``job.json``. The worker writes everything else, so no two processes write one
file: ``progress.json``, ``result.json`` in the end, and what it measured. A folder stays until its run is
complete, and the next run takes from it what the same code has finished.
"""

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from labkit import lessons, places


@dataclass(frozen=True)
class Job:
    """What a worker has to do, and where."""

    kind: str
    """The command: run, record or bench."""
    subject: str
    """The lesson's file, or the suite's name."""
    options: dict[str, Any]
    key: str = ""
    """Changes with whatever decides about the result: see `key`."""
    variant: str = ""
    """Which of the kinds of device that were asked for; empty where there is one kind."""
    device: str = ""
    """What chooses its device and its software, in words."""
    installed: list[str] = field(default_factory=list)
    """The versions of torch and triton where it was asked for; a container may have others."""
    again: bool = False
    retry: bool = False
    """It has failed in this run and is tried once more."""
    build: str = field(default_factory=lambda: str(places.BUILD))
    cache: str = field(default_factory=lambda: str(places.cache()))
    """Where the user keeps roofs: a worker takes along what is known."""

    @property
    def name(self) -> str:
        """The lesson or suite as messages, logs and folders call it."""
        subject = Path(self.subject).stem
        return f"{subject}@{_as_file_name(self.variant)}" if self.variant else subject

    @property
    def home(self) -> Path:
        """The job's folder."""
        return Path(self.build) / "workers" / self.kind / self.name

    @property
    def file(self) -> Path:
        """What tells its worker all of it."""
        return self.home / "job.json"

    @property
    def log(self) -> Path:
        """What the worker says."""
        return Path(self.build) / "logs" / self.kind / f"{self.name}.log"

    @classmethod
    def read(cls, path: Path) -> "Job":
        """The job of a ``job.json``."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Outcome:
    """How a job ended. ``detail`` is what its command makes of it."""

    job: Job
    passed: bool
    error: str = ""
    """Why there is no result, in a sentence; empty where the worker came to its end."""
    device: str = ""
    seconds: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)


def _as_file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "=.-" else "-" for letter in text)


def keyed(job: Job) -> Job:
    """The job with its key."""
    return replace(job, key=key(job))


def key(job: Job) -> str:
    """12 hex digits that change with the package's code, that of the lessons a job needs, and its options.

    They change, too, with what chooses its device, and with what was installed where it was asked for. So in
    its worker, which takes these two from the job, only the code can make a difference. A suite may need
    every lesson; a lesson needs itself and those that its code names.
    """
    subject = Path(job.subject)
    folder = Path(job.options["notebooks"]) if job.kind == "bench" else subject.parent
    digest = hashlib.sha256()
    for path in sorted([*(places.CHECKOUT / "labkit").rglob("*.py"), *(folder / "solutions").glob("*.py")]):
        digest.update(path.read_bytes())
    needed = lessons.find(folder)
    if job.kind != "bench":
        code = "\n".join(cell["source"] for _, cell in lessons.code_cells(lessons.look(subject)))
        needed = [subject, *(path for path in needed if path.stem in code)]
    codes = [lessons.code_hash(path) for path in needed]
    asked = [job.kind, job.subject, job.options, job.device, job.installed]
    digest.update(json.dumps([codes, asked], sort_keys=True).encode())
    return digest.hexdigest()[:12]


def installed() -> list[str]:
    """The versions of torch and triton here, empty for one that is not."""
    return [_version(name) for name in ("torch", "triton")]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def kept(job: Job) -> Outcome | None:
    """What an earlier run finished of this job, if its key is the same."""
    found = result(job)
    return found if found and found.passed and not job.again else None


def prepare(job: Job) -> None:
    """Make the folder ready for a worker: its file is there, and what an earlier worker said is gone.

    Unfinished work stays: ``cache`` and ``work``, in which the worker finds the rows of an earlier one, and
    the rows that one gave, if they are of the same key, until the worker replaces them. So does the log of a
    job that is tried once more.
    """
    if job.again:
        forget(job)
    said = ["result.json", "progress.json"]
    if _prepared_key(job) != job.key:
        said.append("rows.jsonl")
    for name in said:
        (job.home / name).unlink(missing_ok=True)
    shutil.rmtree(job.home / "recorded", ignore_errors=True)
    if not job.retry:
        job.log.unlink(missing_ok=True)
    places.write_text(job.file, json.dumps(asdict(job), indent=1))


def _prepared_key(job: Job) -> str | None:
    """The key of the worker that was here before; None without one."""
    try:
        return Job.read(job.file).key
    except (OSError, ValueError, TypeError):
        return None


def forget(job: Job) -> None:
    """The run is complete, and what the job gave is where it should be."""
    shutil.rmtree(job.home, ignore_errors=True)


def keep_roofs(job: Job) -> None:
    """Give the user's cache the roofs that a worker measured and nobody had: they belong to a device."""
    for path in sorted((job.home / "cache" / "roofs").glob("*.jsonl")):
        known = Path(job.cache) / "roofs" / path.name
        with suppress(OSError):  # the next worker measures them again: no reason to end those that run now
            if not known.exists():
                places.write_text(known, path.read_text(encoding="utf-8"))


def say_progress(job: Job, done: int, total: int, text: str) -> None:
    """Tell the other side how far the worker is."""
    places.write_text(job.home / "progress.json", json.dumps([done, total, text]))


def progress(job: Job) -> tuple[int, int, str] | None:
    """Done, of how many, and what; None before the worker has said so."""
    try:
        done, total, text = json.loads((job.home / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return done, total, text


def finish(outcome: Outcome) -> None:
    """The worker's last word."""
    said = {name: value for name, value in vars(outcome).items() if name != "job"}
    said["key"] = outcome.job.key
    places.write_text(outcome.job.home / "result.json", json.dumps(said, indent=1))


def result(job: Job) -> Outcome | None:
    """The worker's last word; None without one, or with one about other code."""
    try:
        said = json.loads((job.home / "result.json").read_text(encoding="utf-8"))
        return Outcome(job, **said) if said.pop("key") == job.key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
