"""Profiles on disk: what the calls of a lesson launched when it was recorded, beside the lesson's tape.

A list in JSON, one profile a line. Kernels that differ in their times alone share one description, so that
a profile of a hundred launches stays below 20 KB. torch is not imported: checking a checkout needs no GPU.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit import places
from labkit.rows import KINDS, LIVE

SUFFIX = ".profiles.json"
"""Not .jsonl, which is what tapes of rows end in."""
TAPE = "LABKIT_TAPE"
"""Names the tape of a lesson that is being recorded; its profiles are kept beside it."""


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


@dataclass(frozen=True)
class Kept:
    """One profile under its name, with the device, the versions, the date and the code that it is of."""

    name: str
    kernels: list[KernelEvent] = field(default_factory=list)
    host: list[HostEvent] = field(default_factory=list)
    kind: str = LIVE
    device: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    date: str = ""
    card: str = ""
    source: str = ""

    @classmethod
    def from_json(cls, given: Any) -> "Kept":
        """The profile that :meth:`to_json` wrote; ValueError for anything else."""
        try:
            stamp = dict(given)
            kernels = [
                KernelEvent(name, full, *_times(start, took), stream, tuple(grid), tuple(block))
                for (name, full, stream, grid, block), start, took in _joined(stamp.pop("kernels"))
            ]
            host = [
                HostEvent(name, *_times(start, took)) for (name,), start, took in _joined(stamp.pop("host"))
            ]
            kept = cls(**stamp, kernels=kernels, host=host)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a profile: {error!r}") from error
        words = [stamp.values(), *((event.name,) for event in host)]
        words += [(kernel.name, kernel.full_name) for kernel in kernels]
        numbers = [(kernel.stream, *kernel.grid, *kernel.block) for kernel in kernels]
        for values, wanted in ((words, str), (numbers, int)):
            wrong = [value for found in values for value in found if not isinstance(value, wanted)]
            if wrong:
                raise ValueError(f"not a profile: {wrong[0]!r} should be of type {wanted.__name__}")
        if kept.kind not in KINDS:
            raise ValueError(f"not a profile: its kind {kept.kind!r} is none of {', '.join(KINDS)}")
        return kept

    def to_json(self) -> dict[str, Any]:
        """Plain values; times to the nanosecond, as the profiler has them."""
        stamp = {name: value for name, value in vars(self).items() if name not in ("kernels", "host")}
        kernels = [([k.name, k.full_name, k.stream, list(k.grid), list(k.block)], k) for k in self.kernels]
        return {**stamp, "kernels": _shared(kernels), "host": _shared([([e.name], e) for e in self.host])}


def _shared(events: Sequence[tuple[list[Any], KernelEvent | HostEvent]]) -> dict[str, Any]:
    """Each description once, and of each event the number of its description, start and duration."""
    what: list[list[Any]] = []
    when = []
    for description, event in events:
        if description not in what:
            what.append(description)
        when.append([what.index(description), round(event.start_us, 3), round(event.duration_us, 3)])
    return {"what": what, "when": when}


def _joined(shared: dict[str, Any]) -> list[tuple[list[Any], float, float]]:
    """The events that :func:`_shared` put apart."""
    numbered = dict(enumerate(shared["what"]))  # a list would take a negative number
    return [(numbered[number], start, took) for number, start, took in shared["when"]]


def _times(start: Any, took: Any) -> tuple[float, float]:
    if not (math.isfinite(start) and math.isfinite(took) and took >= 0):
        raise ValueError(f"{start!r}, {took!r} are no start and duration")
    return start, took


def beside(tape: Path) -> Path:
    """The file with the profiles of the lesson that a tape is of."""
    return tape.with_suffix(SUFFIX)


def read(path: Path) -> list[Kept]:
    """The profiles of a file; none when it does not exist. ValueError naming it when it is damaged."""
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, list):
            raise ValueError("not a list of profiles")
        return [Kept.from_json(given) for given in found]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write(path: Path, profiles: Iterable[Kept]) -> None:
    """Replace a file of profiles in one step; a profile is one line of it."""
    lines = [json.dumps(kept.to_json(), separators=(",", ":")) for kept in profiles]
    places.write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")


def keep(kept: Kept) -> None:
    """Add a profile to the lesson that is being recorded; nothing where none is.

    ValueError for a name that the lesson has used already: one of the two would be lost.
    """
    tape = os.environ.get(TAPE)
    if not tape:
        return
    path = beside(Path(tape))
    others = read(path)
    if kept.name in [other.name for other in others]:
        raise ValueError(f"tape: {kept.name!r} names another profile of this lesson")
    write(path, [*others, kept])


def recorded(name: str) -> Kept | None:
    """The profile of this name from the first recorded device, by name, that has it; None without one."""
    for path in sorted(places.RECORDED.glob(f"*/*{SUFFIX}")):
        for kept in read(path):
            if kept.name == name:
                return kept
    return None
