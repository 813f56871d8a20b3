"""The profiles that a recorded device left, each a row of a tape.

``Row.trace`` of such a row has two keys: ``kernels`` and ``host``. Under each, ``what`` lists descriptions
(of a kernel: name and full name; of a host event: name), and ``when`` lists the events
(index of the description, start and duration in us).
"""

from collections.abc import Mapping
from dataclasses import dataclass
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


def recorded_profile(name: str) -> Row | None:
    """The recorded profile of this name, from the first device in alphabetical order that has it, or None.

    Raises ValueError if a tape is damaged.
    """
    suite = f"profile/{name}"
    return next((row for row in rows.recorded_rows(suite) if row.suite == suite), None)
