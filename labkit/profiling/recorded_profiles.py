"""Profiles on a tape: one row for each profile of a recorded lesson.

``Row.trace`` of such a row has two keys: ``kernels`` and ``host``. Under each, ``what`` lists descriptions
(of a kernel: name and full name; of a host event: name), and ``when`` lists the events
(index of the description, start and duration in us). Kernels that differ only in their times share one
description, so that a profile of a hundred launches stays below 20 KB.
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
    """A name short enough for a plot; ``full_name`` is the compiler's."""
    full_name: str
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class HostEvent:
    """Something the host did. Times in us, from the profile's first event."""

    name: str
    start_us: float
    duration_us: float


def encode(kernels: Sequence[KernelEvent], host: Sequence[HostEvent]) -> dict[str, Any]:
    """The events of a profile as the ``trace`` of a row, with times to the nanosecond."""
    described = [([k.name, k.full_name], k) for k in kernels]
    return {"kernels": _shared(described), "host": _shared([([event.name], event) for event in host])}


def _shared(events: Sequence[tuple[list[Any], KernelEvent | HostEvent]]) -> dict[str, Any]:
    """Each description once; of each event the index of its description, its start and its duration."""
    what: list[list[Any]] = []
    when = []
    for description, event in events:
        if description not in what:
            what.append(description)
        when.append([what.index(description), round(event.start_us, 3), round(event.duration_us, 3)])
    return {"what": what, "when": when}


def decode(trace: Mapping[str, Any]) -> tuple[list[KernelEvent], list[HostEvent]]:
    """The kernels and the host's events of a row's ``trace``; ValueError for anything else."""

    def described(shared: Mapping[str, Any]) -> list[tuple[list[Any], float, float]]:
        return [(shared["what"][index], float(start), float(took)) for index, start, took in shared["when"]]

    try:
        kernels = [
            KernelEvent(name, full_name, start, took)
            for (name, full_name), start, took in described(trace["kernels"])
        ]
        return kernels, [HostEvent(name, start, took) for (name,), start, took in described(trace["host"])]
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"not a profile: {error!r}") from error


_written: set[tuple[str, str]] = set()
"""Tapes, and the names of the profiles that this process has written to them."""


def write_profile(name: str, trace: dict[str, Any], stamp: Mapping[str, Any]) -> None:
    """Write a profile to the tape of the lesson that is being recorded; do nothing if none is recorded.

    A profile of this name that an earlier, unfinished run left there is replaced. ``stamp`` is
    `machine.row_columns()`. Raises ValueError if this run has used the name already: one of the two would be
    lost.
    """
    tape = os.environ.get(rows.TAPE)
    if not tape:
        return
    if (tape, name) in _written:
        raise ValueError(f"tape: {name!r} names another profile of this lesson")
    _written.add((tape, name))
    row = Row(
        suite=f"profile/{name}", contender="", direction="", dtype="", shape={}, clock="profiler", cache="",
        runs=1, trace=trace, **stamp,
    )  # fmt: skip
    rows.replace_row(Path(tape), row)


def recorded_profile(name: str) -> Row | None:
    """The recorded profile of this name, from the first device in alphabetical order that has it, or None.

    Raises ValueError if a tape is damaged.
    """
    suite = f"profile/{name}"
    return next((row for row in rows.recorded_rows(suite) if row.suite == suite), None)
