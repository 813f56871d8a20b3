"""Recorded outputs: what a lesson showed on a GPU, kept in its notebook and its tapes, stamped with its code.

A lesson has one tape on each device, a file of rows. A stamp names the hash of the lesson's code, the device
and the versions. Outputs or tapes whose code has changed since are stale: `recording_state` and
`tape_states` find them, `strip_stale` removes them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import paths
from labkit.lessons import notebooks
from labkit.lessons.stamps import (
    MARK,
    STAMP_VARIABLE,
    RecordingState,
    Stamp,
    marked_cells_without_outputs,
    read_stamp,
    recording_state,
    tape_source,
)
from labkit.measure import rows
from labkit.runs.exclusive import exclusive
from labkit.widgets import claims

if TYPE_CHECKING:  # `record --check` does without these, which load slowly
    from nbformat import NotebookNode

    from labkit.measure.machine import MachineInfo
    from labkit.runs import execute

CELL_LIMIT_S = 15 * 60.0
"""Seconds that a cell of a lesson that is recorded may take: one may compile for minutes on a slow host."""
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
SILENCED = ("TypedStorage is deprecated", "Attempting to run cuBLAS", "RNN module weights are not part")
"""How warnings begin: of max-autotune, of a backward pass that comes first, of cuDNN with weights apart."""
OTHER_TAPES = ("bench.jsonl", "roofs.jsonl")
"""What else lies beside the tapes."""


def without_widgets(outputs: "Sequence[NotebookNode]") -> "list[NotebookNode]":
    """Outputs without widget views, which show an error on a page without a kernel; static copies stay."""
    return [output for output in outputs if WIDGET_VIEW not in output.get("data", {})]


def tape_states(tapes: Path = paths.RECORDED) -> dict[Path, RecordingState]:
    """Whether each lesson's tapes were made by its present code."""
    wanted = {notebooks.lesson_key(path.stem): tape_source(path) for path in notebooks.find()}
    found = sorted(tape for tape in tapes.glob("*/*.jsonl") if tape.name not in OTHER_TAPES)
    return {tape: _tape_state(tape, wanted.get(tape.stem)) for tape in found}


def _tape_state(tape: Path, wanted: str | None) -> RecordingState:
    name = f"{tape.parent.name}/{tape.name}"
    if wanted is None:
        return RecordingState(name, "stale", "its lesson is not there")
    try:
        sources = {row.source for row in rows.read(tape)}
    except ValueError as error:
        return RecordingState(name, "stale", str(error))
    if sources != {wanted}:
        return RecordingState(name, "stale", f"what it holds is not all from {wanted}")
    return RecordingState(name, "recorded", wanted)


def strip_stale(tapes: Path, benchmarks: Mapping[Path, RecordingState]) -> list[str]:
    """Remove stale outputs, with their stamp, stale tapes and stale benchmarks; gives the names of all."""
    stripped = []
    for path in notebooks.find():
        if recording_state(path).status == "stale":
            notebook = notebooks.read(path)
            for _, cell in notebooks.code_cells(notebook):
                cell.outputs, cell.execution_count = [], None
            notebook.metadata.get("labkit", {}).pop("recorded", None)
            write(path, notebook)
            stripped.append(path.stem)
    for tape, found in {**tape_states(tapes), **benchmarks}.items():
        if found.status == "stale":
            tape.unlink()
            stripped.append(found.name)
    return stripped


def record(
    path: Path, identity: "MachineInfo", tapes: Path, *, again: bool = False, bar: bool = False
) -> "execute.Result | None":
    """Execute a lesson at full size; when it passes, put its outputs and its tape into the tree.

    None when the present code is recorded on this device already, unless ``again``. A run that was cut
    short leaves its rows under build/record, and the next one goes on from them. A failure leaves notebook
    and tape as they were.

    Raises:
        ValueError: for a lesson that was edited meanwhile, or whose marked cell shows nothing.
    """
    from labkit.runs import execute

    before = read_stamp(notebooks.read_json(path))
    on_this_device = before is not None and before.device == identity.device
    if not again and on_this_device and recording_state(path).status == "recorded":
        return None
    versions = identity.device, identity.driver, identity.torch, identity.triton
    stamp = Stamp(notebooks.code_hash(path), *versions, date.today().isoformat())
    folder = unfinished(identity)
    tape = folder / f"{tape_source(path)}.jsonl"
    # Keep rows of an unfinished run if device, driver, torch and triton are the same.
    same = attrgetter("device", "driver", "torch", "triton")
    kept = [] if again else rows.read_valid(tape)
    rows.write(tape, [row for row in kept if same(row) == same(stamp)])
    with exclusive(f"record-{path.stem}"):
        output, environment = folder / path.name, recording_environment(tape, stamp)
        result = execute.execute(path, output, cell_limit_s=CELL_LIMIT_S, bar=bar, environment=environment)
    if result.passed:
        _publish(path, result.notebook_path, tape, stamp, tapes / identity.slug)
        tape.unlink(missing_ok=True)
    return result


def recording_environment(tape: Path, stamp: Stamp) -> dict[str, str]:
    """Environment variables for the kernel that executes a lesson for its recording."""
    return {
        claims.RECORDING: "1",
        rows.TAPE: str(tape),
        STAMP_VARIABLE: json.dumps(asdict(stamp)),
        # What PyTorch says of its own code, with a path of the machine: no output of the lesson.
        "PYTHONWARNINGS": ",".join(f"ignore:{begin}:UserWarning" for begin in SILENCED),
    }


def _publish(path: Path, executed: Path, tape: Path, stamp: Stamp, folder: Path) -> None:
    """Copy outputs into the notebook, whose prose stays as it is, and rows to the tape in ``folder``."""
    notebook = notebooks.read(path)
    if notebooks.code_hash(path) != stamp.hash:
        raise ValueError(f"{path.stem} was edited while it was recorded: record it again")
    pairs = zip(notebooks.code_cells(notebook), notebooks.code_cells(notebooks.read(executed)), strict=True)
    for (_, cell), (_, ran) in pairs:
        cell.execution_count = ran.execution_count
        cell.outputs = without_widgets(ran.outputs)
    notebook.metadata.setdefault("labkit", {})["recorded"] = asdict(stamp)
    silent = marked_cells_without_outputs(notebook)
    if silent:
        raise ValueError(f"{path.stem}: marked {MARK!r}, but shows nothing: cell {silent[0]}")
    measured = [replace(row, kind=rows.RECORDED, source=tape_source(path)) for row in rows.read(tape)]
    kept = folder / f"{notebooks.lesson_key(path.stem)}.jsonl"
    if measured:
        rows.write(kept, measured)
    else:
        kept.unlink(missing_ok=True)
    write(path, notebook)


def unfinished(identity: "MachineInfo") -> Path:
    """The folder in which recordings on this kind of device that were cut short keep their rows."""
    return paths.BUILD / "record" / identity.slug


def record_roofs(measured: Path, identity: "MachineInfo", tapes: Path = paths.RECORDED) -> None:
    """Keep the roofs that a machine measured, for those who read the lessons without it."""
    source = "labkit/measure/roofline.py"
    kept = [replace(row, kind=rows.RECORDED, source=source) for row in rows.read(measured)]
    rows.write(tapes / identity.slug / "roofs.jsonl", kept)


def write(path: Path, notebook: "NotebookNode") -> None:
    """Write a notebook as Jupyter does (sorted keys, one space): recording makes a small difference."""
    import nbformat

    paths.write_text(path, nbformat.writes(notebook).rstrip("\n") + "\n")
