"""What is kept of a full run of `labkit bench`: a file beside the tapes, and whether its code is the present
one. Where there is no such file, looking for it loads no lesson."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit import places, rows
from labkit.rows import Row
from labkit.runs.record import State

FILE = "bench.jsonl"
"""The last full run of a recorded device, beside its tapes."""


def recorded_file() -> Path | None:
    """The last full run of the first recorded device that has one."""
    return next(iter(sorted(places.RECORDED.glob(f"*/{FILE}"))), None)


def keep(measured: Iterable[Row]) -> list[Path]:
    """Put a full run in the place of the last one of each device that it has rows of; gives the files.

    Of what was measured twice on one kind of device the first is kept.
    """
    from labkit import machine

    taped: dict[str, dict[tuple[Any, ...], Row]] = {}
    for row in measured:
        taped.setdefault(machine.slug(row.device), {}).setdefault(row.key, replace(row, kind=rows.RECORDED))
    paths = [places.RECORDED / name / FILE for name in taped]
    for path, of_device in zip(paths, taped.values(), strict=True):
        rows.write(path, of_device.values())
    return paths


def states(tapes: Path) -> dict[Path, State]:
    """Whether each full run that is kept was measured with the present code, all suites of it.

    Only where there is one are the lessons loaded; ValueError where that fails.
    """
    found = sorted(tapes.glob(f"*/{FILE}"))
    if not found:
        return {}
    from labkit import bench_plan, suites

    parts = [part for name in suites.NAMES for part in suites.parts(name, peers=True)]
    code = bench_plan.sources(parts)
    return {path: _state(path, code) for path in found}


def _state(path: Path, code: Mapping[tuple[str, str], str]) -> State:
    name = f"{path.parent.name}/{path.name}"
    try:
        measured = rows.read(path)
    except ValueError as error:
        return State(name, "stale", str(error))
    reason = _reason(measured, code)
    return State(name, "stale", reason) if reason else State(name, "recorded", _origin(measured))


def _reason(measured: Sequence[Row], code: Mapping[tuple[str, str], str]) -> str:
    """Why rows are not those of a full run of this code; empty when they are."""
    if not measured:
        return "holds no rows"
    changed = {
        f"{row.contender} of {row.suite}"
        for row in measured
        if row.source != code.get((row.suite, row.contender))
    }
    if changed:
        more = f" and {len(changed) - 2} more" if len(changed) > 2 else ""
        return f"measured with other code: {', '.join(sorted(changed)[:2])}{more}"
    lacking = sorted({suite for suite, _ in code} - {row.suite for row in measured})
    return f"has no rows of {', '.join(lacking)}" if lacking else ""


def _origin(measured: Sequence[Row]) -> str:
    """Device, versions, those of the peers, and the last date."""
    from labkit.bench_compare import machines

    peers = sorted({f"{row.peer} {row.peer_version}" for row in measured if row.peer and row.peer_version})
    return ", ".join([machines(measured), *peers, max(row.date for row in measured)[:10]])
