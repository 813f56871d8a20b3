"""Puts what workers made where it belongs: one process, in the order of the jobs, each file in one step.

Tapes are by device, a file for each lesson, so two kinds of device have two. Of the notebook itself there is
one: it shows the first variant that was asked for.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit import lessons, places, profile_tapes, record, rows
from labkit.jobs import Job, Outcome
from labkit.rows import Row

ROOFS = "roofs.jsonl"


def recordings(ended: Iterable[Outcome]) -> list[Path]:
    """Put recorded lessons, their tapes and the roofs of each device into the tree; gives the notebooks.

    A lesson that was edited since is left out, with its tapes.
    """
    shown: list[Path] = []
    recorded = [outcome for outcome in ended if outcome.passed]
    roofs([outcome.job for outcome in recorded])
    for outcome in recorded:
        path = Path(outcome.job.subject)
        made = outcome.job.home / path.name
        if not outcome.detail or not made.exists():
            continue  # it was recorded already
        stamp = record.read_stamp(lessons.look(made))
        if stamp is None or stamp.hash != lessons.code_hash(path):
            continue
        _tapes(outcome.job, path.stem)
        if path not in shown:
            places.write_text(path, made.read_text(encoding="utf-8"))
            shown.append(path)
    return shown


def _tapes(job: Job, lesson: str) -> None:
    """The lesson's tapes of the worker's device; one that has nothing to hold is not there."""
    for folder in sorted((job.home / "recorded").glob("*/")):
        for suffix in (".jsonl", profile_tapes.SUFFIX):
            made, kept = (place / f"{lesson}{suffix}" for place in (folder, places.RECORDED / folder.name))
            if made.exists():
                places.write_text(kept, made.read_text(encoding="utf-8"))
            else:
                kept.unlink(missing_ok=True)


def roofs(done: Sequence[Job]) -> None:
    """Keep the roofs of each device that the first of these jobs on it had."""
    found = [path for job in done for path in sorted((job.home / "recorded").glob(f"*/{ROOFS}"))]
    first = {path.parent.name: path for path in reversed(found)}
    for device, path in sorted(first.items()):
        places.write_text(places.RECORDED / device / ROOFS, path.read_text(encoding="utf-8"))


def measured(wanted: Iterable[Job]) -> list[Row]:
    """The rows of suites, in the order of the jobs; of one that was cut short those before."""
    return [row for job in wanted for row in rows.read(job.home / "rows.jsonl")]


def lacking(found: Sequence[Row]) -> str:
    """A device that has no rows of a suite that another one measured, as a sentence; empty without one."""
    suites = {row.suite for row in found}
    for device in dict.fromkeys(row.device for row in found):
        missing = suites - {row.suite for row in found if row.device == device}
        if missing:
            return f"{device} has no rows of {', '.join(sorted(missing))}"
    return ""
