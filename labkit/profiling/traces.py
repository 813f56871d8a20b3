"""Profiles on a tape: what the calls of a lesson launched when it was recorded, a row each.

Kernels that differ in their times alone share one description, so that a profile of a hundred launches stays
below 20 KB.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.measure import rows
from labkit.measure.rows import Row


@dataclass(frozen=True)
class KernelEvent:
    """A kernel, copy or fill on the device. Times in us, from the profile's first event."""

    name: str
    """Short enough for a plot; ``full_name`` is the compiler's."""
    full_name: str
    start_us: float
    duration_us: float
    stream: int
    grid: tuple[int, ...]
    """Blocks along x, y, z; empty for a copy or a fill."""
    block: tuple[int, ...]
    """Threads of a block along x, y, z."""


@dataclass(frozen=True)
class HostEvent:
    """Something the host did. Times in us, from the profile's first event."""

    name: str
    start_us: float
    duration_us: float


def pack(kernels: Sequence[KernelEvent], host: Sequence[HostEvent]) -> dict[str, Any]:
    """A profile's events as the ``trace`` of a row, times to the nanosecond, as the profiler has them."""
    described = [([k.name, k.full_name, k.stream, list(k.grid), list(k.block)], k) for k in kernels]
    return {"kernels": _shared(described), "host": _shared([([event.name], event) for event in host])}


def unpack(trace: Mapping[str, Any]) -> tuple[list[KernelEvent], list[HostEvent]]:
    """The kernels and the host's events of a row's ``trace``; ValueError for anything else."""
    try:
        kernels = [
            KernelEvent(name, full, start, took, stream, tuple(grid), tuple(block))
            for (name, full, stream, grid, block), start, took in _joined(trace["kernels"])
        ]
        return kernels, [HostEvent(name, start, took) for (name,), start, took in _joined(trace["host"])]
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"not a profile: {error!r}") from error


def _shared(events: Sequence[tuple[list[Any], KernelEvent | HostEvent]]) -> dict[str, Any]:
    """Each description once, and of each event the number of its description, start and duration."""
    what: list[list[Any]] = []
    when = []
    for description, event in events:
        if description not in what:
            what.append(description)
        when.append([what.index(description), round(event.start_us, 3), round(event.duration_us, 3)])
    return {"what": what, "when": when}


def _joined(shared: Mapping[str, Any]) -> list[tuple[list[Any], float, float]]:
    """The events that :func:`_shared` put apart."""
    return [(shared["what"][number], float(start), float(took)) for number, start, took in shared["when"]]


_named: set[tuple[str, str]] = set()
"""Tapes, and the names of the profiles that this process has put on them."""


def keep(name: str, trace: dict[str, Any], stamp: Mapping[str, Any]) -> None:
    """Put a profile on the tape of the lesson that is being recorded, in the place of one that an earlier,
    unfinished run put there; nothing where no lesson is recorded. ``stamp`` is `machine.stamp()`.

    Raises:
        ValueError: for a name that the lesson has used already: one of the two would be lost.
    """
    tape = os.environ.get(rows.TAPE)
    if not tape:
        return
    if (tape, name) in _named:
        raise ValueError(f"tape: {name!r} names another profile of this lesson")
    _named.add((tape, name))
    row = Row(
        suite=f"profile/{name}", contender="", direction="", dtype="", shape={}, clock="profiler", cache="",
        runs=1, trace=trace, **stamp,
    )  # fmt: skip
    rows.put(Path(tape), row)


def recorded(name: str) -> Row | None:
    """The profile of this name from the first recorded device, by name, that has it; None without one.

    ValueError for a tape that is damaged.
    """
    suite = f"profile/{name}"
    return next((row for row in rows.recorded(suite) if row.suite == suite), None)
