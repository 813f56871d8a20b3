"""Puts what workers made where it belongs: one process, in the order of the jobs, each file in one step.

Tapes are by device, a file for each lesson, so two kinds of device have two. Of the notebook itself there is
one: it shows the first variant that was asked for.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit import lessons, places, profile_tapes, record, recorded_roofs, rows
from labkit.jobs import Job, Outcome
from labkit.rows import Row


def recordings(ended: Iterable[Outcome]) -> tuple[list[Path], list[Path]]:
    """Put recorded lessons, their tapes and the roofs of each device into the tree.

    Gives the notebooks that have new outputs, and the lessons whose code was edited since: these are left
    out, with their tapes.
    """
    shown: list[Path] = []
    edited: list[Path] = []
    settled: set[Path] = set()
    recorded = [outcome for outcome in ended if outcome.passed]
    for outcome in recorded:
        path = Path(outcome.job.subject)
        if not outcome.detail:  # it was recorded already, and the notebook shows that
            settled.add(path)
        elif not _keep(outcome.job, path, show=path not in settled):
            edited.append(path)
        elif path not in settled:
            settled.add(path)
            shown.append(path)
    roofs([outcome.job for outcome in recorded])
    return shown, list(dict.fromkeys(edited))


def _keep(job: Job, path: Path, *, show: bool) -> bool:
    """Keep a worker's tapes of a lesson and, to ``show`` them, its outputs; False if the code was edited."""
    present, made = lessons.read(path), lessons.read(job.home / path.name)
    stamp = record.read_stamp(made)
    if stamp is None or stamp.hash != lessons.code_hash(path):
        return False
    _tapes(job, lessons.key(path.stem))
    if show:  # the outputs only: prose may have been edited meanwhile
        record.fill(present, made, stamp)
        record.write(path, present)
    return True


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
    """Keep the roofs that these jobs had, by the kind of device."""
    found: dict[str, list[list[Row]]] = {}
    for job in done:
        for path in sorted((job.home / "recorded").glob(f"*/{recorded_roofs.FILE}")):
            sets = found.setdefault(path.parent.name, [])
            sets += [one for one in recorded_roofs.sets(rows.read(path)) if one not in sets]
    for device, sets in found.items():
        recorded_roofs.add(places.RECORDED / device, *sets, unfinished=record.unfinished() / device)


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
