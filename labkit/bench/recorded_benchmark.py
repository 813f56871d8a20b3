"""The full run that is kept beside the tapes, and whether its code is the present one.

`python -m docs.benchmark` makes docs/benchmark.md, its picture, and the README's lines of it. Where no run is
kept, looking for it loads neither torch nor a lesson.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.lessons.stamps import RecordingState
from labkit.measure import rows
from labkit.measure.rows import Row

FILE = "bench.jsonl"


def keep(measured: Iterable[Row]) -> list[Path]:
    """Put a full run in the place of the last one of each device that it has rows of; gives the files.

    Of what was measured twice on one kind of device the first is kept.
    """
    from labkit.measure import machine

    taped: dict[Path, dict[tuple[Any, ...], Row]] = {}
    for row in measured:
        path = paths.RECORDED / machine.slug(row.device) / FILE
        taped.setdefault(path, {}).setdefault(row.key, replace(row, kind=rows.RECORDED))
    for path, of_device in taped.items():
        rows.write(path, of_device.values())
    return list(taped)


def take_up(names: Iterable[str]) -> None:
    """Let suites go on from the run that is kept: what is of the present code, device and versions stays.

    A suite that was stopped goes on from its own rows.
    """
    from labkit.bench import run
    from labkit.measure import machine

    kept = rows.read_valid(paths.RECORDED / machine.identity().slug / FILE)
    for name in names:
        of_suite = [row for row in kept if f"{row.suite}/".startswith(f"bench/{name}/")]
        if of_suite and not run.tape(name).exists():
            rows.write(run.tape(name), [replace(row, kind=rows.LIVE) for row in of_suite])


def states(tapes: Path) -> dict[Path, RecordingState]:
    """Whether each run that is kept was measured with the present code, and which suites it lacks.

    ValueError where a suite cannot be made.
    """
    found = sorted(tapes.glob(f"*/{FILE}"))
    if not found:
        return {}
    code = present_code()
    return {path: _state(path, code) for path in found}


def not_measured(measured: Iterable[Row], code: Iterable[tuple[str, str]]) -> str:
    """A sentence with the suites of ``present_code`` that a run has no rows of; empty where it has all."""
    lacking = {suite for suite, _ in code} - {row.suite for row in measured}
    return f"Not measured: {', '.join(sorted(lacking))}." if lacking else ""


def present_code() -> dict[tuple[str, str], str]:
    """What a row measured now would name as its source, by suite and contender."""
    from labkit.bench import run, suites

    return run.sources(part for name in suites.SUITES for part in suites.parts(name, peers=True))


def _state(path: Path, code: dict[tuple[str, str], str]) -> RecordingState:
    from labkit.bench import report

    name = f"{path.parent.name}/{path.name}"
    try:
        measured = report.read(path)
    except ValueError as error:
        return RecordingState(name, "stale", str(error))
    edited = {f"{r.contender} of {r.suite}" for r in measured if r.source != code.get((r.suite, r.contender))}
    if edited:
        first_two = ", ".join(sorted(edited)[:2])
        return RecordingState(name, "stale", f"{len(edited)} contenders with other code: {first_two}")
    detail = f"{report.origin(measured)} {not_measured(measured, code)}"
    return RecordingState(name, "recorded", detail.strip())
