"""Which code made the outputs that a lesson has, on which device: stamped in the notebook, fresh or stale."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from labkit.lessons import notebooks

MARK = "# NBVAL_CHECK_OUTPUT"
"""Begins a cell whose output is the same on every device."""
STAMP_VARIABLE = "LABKIT_STAMP"
"""Tells the kernel of a lesson that is being recorded its stamp."""


@dataclass(frozen=True)
class Stamp:
    """Which code made a lesson's outputs, where and when; kept as ``labkit.recorded`` in its metadata."""

    hash: str
    device: str
    driver: str
    torch: str
    triton: str
    date: str

    def __str__(self) -> str:
        return f"{self.device}, driver {self.driver}, torch {self.torch}, triton {self.triton}, {self.date}"


@dataclass(frozen=True)
class RecordingState:
    """What is recorded for a lesson, or on a tape."""

    name: str
    status: Literal["recorded", "stale", "no outputs"]
    detail: str


def read_stamp(notebook: Mapping[str, Any]) -> Stamp | None:
    """The stamp of a notebook's outputs, if it has one."""
    kept = notebook["metadata"].get("labkit", {}).get("recorded")
    return Stamp(**kept) if kept else None


def recording_state(path: Path) -> RecordingState:
    """Whether a lesson's outputs are there, and made by its present code."""
    notebook = notebooks.read_json(path)
    stamp = read_stamp(notebook)
    if stamp is None:
        if any(cell["outputs"] for _, cell in notebooks.code_cells(notebook)):
            return RecordingState(path.stem, "stale", "has outputs that nothing vouches for")
        return RecordingState(path.stem, "no outputs", "")
    current = notebooks.code_hash(path)
    if stamp.hash != current:
        return RecordingState(path.stem, "stale", f"outputs are of code {stamp.hash}, the code is {current}")
    if silent := marked_cells_without_outputs(notebook):
        listed = ", ".join(map(str, silent))
        return RecordingState(path.stem, "stale", f"marked cells without outputs: {listed}")
    return RecordingState(path.stem, "recorded", str(stamp))


def marked_cells_without_outputs(notebook: Mapping[str, Any]) -> list[int]:
    """Numbers of the cells whose outputs are to be compared, but that have none to compare with."""
    cells = notebooks.code_cells(notebook)
    return [number for number, cell in cells if MARK in cell["source"] and not cell["outputs"]]


def tape_source(path: Path) -> str:
    """What the rows on a lesson's tape name as their source: the lesson and the hash of its code."""
    return f"{notebooks.lesson_key(path.stem)}@{notebooks.code_hash(path)}"
