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

    @classmethod
    def of(cls, path: Path, identity: "Identity") -> "Stamp":
        """The stamp that outputs of this lesson, made now on this machine, deserve."""
        return cls(
            notebooks.code_hash(path),
            identity.device,
            identity.driver,
            identity.torch,
            identity.triton,
            date.today().isoformat(),
        )


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


def tape_states(directory: Path | None = None, tapes: Path = paths.RECORDED) -> dict[Path, State]:
    """Whether each lesson's tapes were made by its present code."""
    hashes = {notebooks.key(path.stem): notebooks.code_hash(path) for path in notebooks.find(directory)}
    found = sorted(tape for tape in tapes.glob("*/*.jsonl") if tape.name not in OTHER_TAPES)
    return {tape: _tape_state(tape, hashes) for tape in found}


def _tape_state(tape: Path, hashes: Mapping[str, str]) -> State:
    name, lesson = f"{tape.parent.name}/{tape.name}", tape.stem
    if lesson not in hashes:
        return State(name, "stale", "its lesson is not there")
    try:
        sources = {row.source for row in rows.read(tape)}
    except ValueError as error:
        return State(name, "stale", str(error))
    wanted = _source(lesson, hashes[lesson])
    if sources != {wanted}:
        return State(name, "stale", f"what it holds is not all from {wanted}")
    return State(name, "recorded", wanted)


def _source(lesson: str, code_hash: str) -> str:
    return f"{notebooks.key(lesson)}@{code_hash}"


def strip_stale(directory: Path | None = None, tapes: Path = paths.RECORDED) -> list[str]:
    """Remove stale outputs, with their stamp, and stale tapes; gives the names of what was stripped."""
    stripped = []
    for path in notebooks.find(directory):
        if state(path).status == "stale":
            notebook = notebooks.read(path)
            for _, cell in notebooks.code_cells(notebook):
                cell.outputs, cell.execution_count = [], None
            notebook.metadata.get("labkit", {}).pop("recorded", None)
            write(path, notebook)
            stripped.append(path.stem)
    for tape, found in tape_states(directory, tapes).items():
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
    work: Path | None = None,
) -> "execute.Result | None":
    """Execute a lesson at full size; when it passes, put its outputs and its tape into the tree.

    None when the present code is recorded on this device already, unless ``again``. A run that was cut
    short leaves its rows under ``work``, and the next one goes on from them. A failure leaves notebook and
    tape as they were.

    Raises:
        ValueError: for a lesson that was edited meanwhile, or whose marked cell shows nothing.
    """
    from labkit.runs import execute

    stamp = Stamp.of(path, identity)
    before = read_stamp(notebooks.read_json(path))
    if not again and state(path).status == "recorded" and before and before.device == stamp.device:
        return None
    folder = (work or unfinished()).resolve() / identity.slug
    tape = folder / f"{notebooks.key(path.stem)}@{stamp.hash}.jsonl"
    _prepare(tape, stamp, again)
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


def _prepare(tape: Path, stamp: Stamp, again: bool) -> None:
    """Keep of an earlier, unfinished run the rows that this machine, as it is now, would measure."""
    tape.parent.mkdir(parents=True, exist_ok=True)
    machine = (stamp.device, stamp.driver, stamp.torch, stamp.triton)
    try:
        found = [] if again else rows.read(tape)
    except ValueError:
        found = []  # a damaged tape is measured again, not trusted
    rows.write(tape, [r for r in found if (r.device, r.driver, r.torch, r.triton) == machine])


def _publish(path: Path, executed: Path, tape: Path, stamp: Stamp, folder: Path) -> None:
    notebook = notebooks.read(path)
    if notebooks.code_hash(path) != stamp.hash:
        raise ValueError(f"{path.stem} was edited while it was recorded: record it again")
    copy_outputs(notebook, notebooks.read(executed), stamp)
    silent = marked_cells_without_outputs(notebook)
    if silent:
        raise ValueError(f"{path.stem}: marked {MARK!r}, but shows nothing: cell {silent[0]}")
    source = _source(path.stem, stamp.hash)
    measured = [replace(row, kind=rows.RECORDED, source=source) for row in rows.read(tape)]
    kept = folder / f"{notebooks.key(path.stem)}.jsonl"
    if measured:
        rows.write(kept, measured)
    else:
        kept.unlink(missing_ok=True)
    write(path, notebook)


def copy_outputs(notebook: "NotebookNode", executed: "NotebookNode", stamp: Stamp) -> None:
    """Give a notebook the outputs that the same code cells have in an executed one, and their stamp.

    Everything else, the prose above all, stays as it is. ValueError for another number of code cells.
    """
    pairs = zip(notebooks.code_cells(notebook), notebooks.code_cells(executed), strict=True)
    for (_, cell), (_, ran) in pairs:
        cell.execution_count = ran.execution_count
        cell.outputs = without_widgets(ran.outputs)
    notebook.metadata.setdefault("labkit", {})["recorded"] = asdict(stamp)


def unfinished() -> Path:
    """Where recordings that were cut short keep their rows, in a folder for each kind of device."""
    return paths.BUILD / "record"


def record_roofs(measured: Path, identity: "Identity", tapes: Path = paths.RECORDED) -> None:
    """Keep the roofs that a machine measured, for those who read the lessons without it."""
    kept = [
        replace(row, kind=rows.RECORDED, source="labkit/measure/roofline.py") for row in rows.read(measured)
    ]
    rows.write(tapes / identity.slug / "roofs.jsonl", kept)


def write(path: Path, notebook: "NotebookNode") -> None:
    """Write a notebook as Jupyter does (sorted keys, one space): recording makes a small difference."""
    import nbformat

    paths.write_text(path, nbformat.writes(notebook).rstrip("\n") + "\n")


def banner(lesson: str, directory: Path | None = None) -> HTML:
    """One line for a lesson's first cell: where its saved outputs are from, and how figures are labelled."""
    kinds = "Every figure says whether it is live (this machine, now), recorded, or published."
    stamp = _stamp_to_show(lesson, directory)
    if stamp is None:
        origin = "No recorded outputs: what you see was made where the cells were run last."
    else:
        cards = len(_cards(lesson, stamp))
        several = f", on {cards} GPUs of this kind one after the other" if cards > 1 else ""
        origin = (
            f"As saved, the outputs were recorded on {stamp}{several}; cells that you run show your machine."
        )
    how = f" {html.escape(backend.sentence())}" if backend.reason else ""
    return HTML(f"<p><small>{html.escape(origin)}{how} {kinds}</small></p>")


def _cards(lesson: str, stamp: Stamp) -> set[str]:
    """The GPUs that measured its rows: more than one where a recording went on upon another machine."""
    from labkit import gpu  # torch comes with it; a lesson has it, `record --check` does without

    being_made = os.environ.get(rows.TAPE) if os.environ.get(STAMP_VARIABLE) else None
    tapes = [Path(being_made)] if being_made else paths.RECORDED.glob(f"*/{notebooks.key(lesson)}.jsonl")
    measured = (row for tape in tapes for row in rows.read_recorded(tape))
    cards = {row.card for row in measured if row.device == stamp.device and row.card}
    return cards | {gpu.card()} if being_made else cards


def _stamp_to_show(lesson: str, directory: Path | None) -> Stamp | None:
    being_made = os.environ.get(STAMP_VARIABLE)
    if being_made:
        return Stamp(**json.loads(being_made))
    path = notebooks.resolve(lesson, directory)
    return read_stamp(notebooks.read_json(path)) if state(path).status == "recorded" else None
