"""Recorded outputs: what a lesson showed on a GPU, kept in its notebook and its tapes, stamped with its code.

A lesson has one tape on each device, a file of rows. A stamp names the hash of the lesson's code, the device
and the versions. Outputs or tapes whose code has changed since are stale: `state` and `tape_states` find
them, `strip_stale` removes them.
"""

import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock
from IPython.display import HTML

from labkit import backend, paths
from labkit.lessons import notebooks
from labkit.measure import rows
from labkit.widgets import claims

if TYPE_CHECKING:  # every lesson shows a banner; only one that is recorded needs these, which load slowly
    from nbformat import NotebookNode

    from labkit.measure.machine import Identity
    from labkit.runs import execute

CELL_LIMIT_S = 15 * 60.0
"""Seconds that a cell of a lesson that is recorded may take: one may compile for minutes on a slow host."""
MARK = "# NBVAL_CHECK_OUTPUT"
STAMP_VARIABLE = "LABKIT_STAMP"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
OTHER_TAPES = ("bench.jsonl", "roofs.jsonl")
"""What else lies beside the tapes."""


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
class State:
    """What is recorded for a lesson, or on a tape."""

    name: str
    status: Literal["recorded", "stale", "no outputs"]
    detail: str


def read_stamp(notebook: Mapping[str, Any]) -> Stamp | None:
    """The stamp of a notebook's outputs, if it has one."""
    kept = notebook["metadata"].get("labkit", {}).get("recorded")
    return Stamp(**kept) if kept else None


def state(path: Path) -> State:
    """Whether a lesson's outputs are there, and made by its present code."""
    notebook = notebooks.read_json(path)
    stamp = read_stamp(notebook)
    shown = any(cell["outputs"] for _, cell in notebooks.code_cells(notebook))
    if stamp is None and not shown:
        return State(path.stem, "no outputs", "")
    if stamp is None:
        return State(path.stem, "stale", "has outputs that nothing vouches for")
    current = notebooks.code_hash(path)
    if stamp.hash != current:
        return State(path.stem, "stale", f"outputs are of code {stamp.hash}, the code is {current}")
    silent = marked_cells_without_outputs(notebook)
    if silent:
        return State(path.stem, "stale", f"marked cells without outputs: {', '.join(map(str, silent))}")
    return State(path.stem, "recorded", str(stamp))


def without_widgets(outputs: "Sequence[NotebookNode]") -> "list[NotebookNode]":
    """Outputs for a page without a kernel: a widget's view would be an error message, its picture stays."""
    return [output for output in outputs if WIDGET_VIEW not in output.get("data", {})]


def marked_cells_without_outputs(notebook: Mapping[str, Any]) -> list[int]:
    """Numbers of the cells whose outputs are to be compared, but that have none to compare with."""
    cells = notebooks.code_cells(notebook)
    return [number for number, cell in cells if MARK in cell["source"] and not cell["outputs"]]


def tape_states(tapes: Path = paths.RECORDED) -> dict[Path, State]:
    """Whether each lesson's tapes were made by its present code."""
    wanted = {notebooks.key(path.stem): source(path) for path in notebooks.find()}
    found = sorted(tape for tape in tapes.glob("*/*.jsonl") if tape.name not in OTHER_TAPES)
    return {tape: _tape_state(tape, wanted.get(tape.stem)) for tape in found}


def _tape_state(tape: Path, wanted: str | None) -> State:
    name = f"{tape.parent.name}/{tape.name}"
    if wanted is None:
        return State(name, "stale", "its lesson is not there")
    try:
        sources = {row.source for row in rows.read(tape)}
    except ValueError as error:
        return State(name, "stale", str(error))
    if sources != {wanted}:
        return State(name, "stale", f"what it holds is not all from {wanted}")
    return State(name, "recorded", wanted)


def source(path: Path) -> str:
    """What the rows on a lesson's tape name as their source: the lesson and the hash of its code."""
    return f"{notebooks.key(path.stem)}@{notebooks.code_hash(path)}"


def strip_stale(tapes: Path = paths.RECORDED) -> list[str]:
    """Remove stale outputs, with their stamp, and stale tapes; gives the names of what was stripped."""
    stripped = []
    for path in notebooks.find():
        if state(path).status == "stale":
            notebook = notebooks.read(path)
            for _, cell in notebooks.code_cells(notebook):
                cell.outputs, cell.execution_count = [], None
            notebook.metadata.get("labkit", {}).pop("recorded", None)
            write(path, notebook)
            stripped.append(path.stem)
    for tape, found in tape_states(tapes).items():
        if found.status == "stale":
            tape.unlink()
            stripped.append(found.name)
    return stripped


def record(
    path: Path,
    identity: "Identity",
    *,
    again: bool = False,
    bar: bool = False,
    tapes: Path = paths.RECORDED,
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
    if not again and state(path).status == "recorded" and before and before.device == identity.device:
        return None
    machine = (identity.device, identity.driver, identity.torch, identity.triton)
    stamp = Stamp(notebooks.code_hash(path), *machine, date.today().isoformat())
    folder = unfinished(identity)
    tape = folder / f"{source(path)}.jsonl"
    # of an earlier, unfinished run those rows count that this machine, as it is now, would measure
    kept = [] if again else rows.readable(tape)
    rows.write(tape, [row for row in kept if (row.device, row.driver, row.torch, row.triton) == machine])
    environment = {
        claims.RECORDING: "1",
        rows.TAPE: str(tape),
        STAMP_VARIABLE: json.dumps(asdict(stamp)),
        # max-autotune sets off this deprecation in PyTorch's own code: no output of the lesson
        "PYTHONWARNINGS": "ignore:TypedStorage is deprecated:UserWarning",
    }
    result = execute.execute(
        path, folder / path.name, cell_limit_s=CELL_LIMIT_S, bar=bar, environment=environment
    )
    if result.passed:
        _publish(path, result.notebook_path, tape, stamp, tapes / identity.slug)
        tape.unlink(missing_ok=True)
    return result


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
    measured = [replace(row, kind=rows.RECORDED, source=source(path)) for row in rows.read(tape)]
    kept = folder / f"{notebooks.key(path.stem)}.jsonl"
    if measured:
        rows.write(kept, measured)
    else:
        kept.unlink(missing_ok=True)
    write(path, notebook)


def unfinished(identity: "Identity") -> Path:
    """The folder in which recordings on this kind of device that were cut short keep their rows."""
    return paths.BUILD / "record" / identity.slug


def record_roofs(measured: Path, identity: "Identity", tapes: Path = paths.RECORDED) -> None:
    """Keep the roofs that a machine measured, for those who read the lessons without it.

    Earlier ones stay that rows in ``tapes``, or of unfinished recordings, were measured with.
    """
    from labkit.measure import roofline  # with torch, which a banner does not need

    found = rows.read(measured)
    kept = [replace(row, kind=rows.RECORDED, source="labkit/measure/roofline.py") for row in found]
    folder = unfinished(identity)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "roofs.lock"):  # several lessons may be recorded at once, each on its GPU
        roofline.add_recorded(tapes / identity.slug, kept, unfinished=folder)


def write(path: Path, notebook: "NotebookNode") -> None:
    """Write a notebook as Jupyter does (sorted keys, one space): recording makes a small difference."""
    import nbformat

    paths.write_text(path, nbformat.writes(notebook).rstrip("\n") + "\n")


def banner(lesson: str) -> HTML:
    """One line for a lesson's first cell: where its saved outputs are from, and how figures are labelled.

    The GPUs that measured are more than one where a recording went on upon another machine.
    """
    path, being_made = notebooks.resolve(lesson), os.environ.get(STAMP_VARIABLE)
    stamp = Stamp(**json.loads(being_made)) if being_made else None
    if not being_made and state(path).status == "recorded":
        stamp = read_stamp(notebooks.read_json(path))
    origin = "No recorded outputs: what you see was made where the cells were run last."
    if stamp:
        from labkit import gpu  # torch comes with it; a lesson has it, `record --check` does without

        tapes = paths.RECORDED.glob(f"*/{notebooks.key(lesson)}.jsonl")
        found = [Path(os.environ[rows.TAPE])] if being_made else tapes
        measured = [row for tape in found for row in rows.of_a_tape(tape) if row.device == stamp.device]
        cards = {*(row.card for row in measured if row.card), *([gpu.card()] if being_made else [])}
        several = f", on {len(cards)} GPUs of this kind one after the other" if len(cards) > 1 else ""
        origin = (
            f"As saved, the outputs were recorded on {stamp}{several}; cells that you run show your machine."
        )
    how = f" {html.escape(backend.sentence())}" if backend.reason else ""
    kinds = "Every figure says whether it is live (this machine, now), recorded, or published."
    return HTML(f"<p><small>{html.escape(origin)}{how} {kinds}</small></p>")
