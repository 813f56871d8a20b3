"""A tape: what a lesson measured on one device, a row a line.

It stands in ``labkit/data/recorded/<device>/<lesson>.jsonl``. Everything else is made from tapes: the outputs
of the notebooks, the pages and the slides.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from labkit import gpu, paths

SHOWN = "nvidia-h200"
"""The device whose tapes figures show where several have the lesson."""
FIELDS = ("dtype", "direction", "clock", "cache")
"""The columns of a row that say, beside its sizes, how it was measured."""

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """A measurement, and what is needed to trust it. Times are microseconds a call."""

    title: str
    """Of the race or sweep, or the name of a number of the lesson's own."""
    way: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    dtype: str = ""
    direction: str = ""
    clock: str = ""
    cache: str = ""
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    copy_us: float | None = None
    """A copy of as many bytes as the work needs, in the same run."""
    value: Any = None
    """Of ``lab.measured``: what the function returned."""
    note: str = ""
    """Why there is no time (out of memory, an error, a wrong result), or which clock took its place."""
    noise: str = ""
    """What disturbed the measurement; empty for a quiet one."""
    uses: tuple[str, ...] = ()
    """Where what was measured is defined: ``cell cheap``, ``solution affine``, ``labkit.kernels affine``, and
    ``work affine``."""
    stamp: str = ""
    """The hash of that (`labkit.measure.stamp`)."""
    device: str = ""
    card: str = ""
    """Which of the GPUs of its kind (gpu.card)."""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    date: str = ""

    @property
    def key(self) -> Key:
        """What identifies the measurement, whenever and wherever it was made."""
        axes = tuple(sorted(self.axes.items()))
        return self.title, self.way, axes, self.dtype, self.direction, self.clock, self.cache

    def to_json(self) -> str:
        """One line of JSON, without what is empty."""
        return json.dumps(
            {name: value for name, value in vars(self).items() if value not in (None, "", {}, ())}
        )


# ---- where a row is measured -------------------------------------------------------------------------------


@cache
def here() -> dict[str, str]:
    """The columns of a row that say on which device and with which versions this process measures.

    Without a GPU the device is "CPU, interpreted".
    """
    device, driver = "CPU, interpreted", ""
    if gpu.available():
        nvml = gpu.nvml()
        device = torch.cuda.get_device_properties(0).name
        driver = nvml.nvmlSystemGetDriverVersion() if nvml else "unknown"
    return {"device": device, "driver": driver, "torch": torch.__version__, "triton": triton.__version__}


def where_and_when() -> dict[str, Any]:
    """The columns of a row that say where it is measured, on which of the GPUs of its kind, and when."""
    return here() | {"date": datetime.now(UTC).isoformat(timespec="seconds"), "card": gpu.card()}


def folder_of(device: str) -> str:
    """The folder of a device's tapes: that of "NVIDIA H200" is nvidia-h200."""
    return "-".join(re.findall(r"[a-z0-9]+", device.lower()))


# ---- files -------------------------------------------------------------------------------------------------


def read(tape: Path) -> list[Row]:
    """The rows of a tape, none if it does not exist; ValueError, which says what to do, for a damaged one.

    A last line that was cut off while it was written is left out.
    """
    if not tape.exists():
        return []
    *lines, _ = tape.read_text(encoding="utf-8").split("\n")
    try:
        made = [json.loads(line) for line in lines]
        return [Row(**{**row, "uses": tuple(row.get("uses", ()))}) for row in made]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{tape} is damaged or of another version of labkit ({error}): put it back with `git restore`"
        ) from error


def append(tape: Path, row: Row) -> None:
    """Add a row, on the disk before this returns; OSError where that is full."""
    tape.parent.mkdir(parents=True, exist_ok=True)
    with tape.open("a", encoding="utf-8") as stream:
        stream.write(row.to_json() + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def write(tape: Path, rows: Iterable[Row]) -> None:
    """Replace a tape in one step."""
    paths.write_text(tape, "".join(row.to_json() + "\n" for row in rows))


def tapes(key: str) -> dict[str, Path]:
    """The tapes of a lesson (its name without the number) by device, the shown one first."""
    found = {
        tape.relative_to(paths.RECORDED).parts[0]: tape
        for tape in sorted(paths.RECORDED.glob(f"*/{key}.jsonl"))
    }
    return dict(sorted(found.items(), key=lambda each: each[0] != SHOWN))
