"""Recordings: what a lesson measures on a GPU becomes its tape, and what a tape shows its saved outputs."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from nbformat import NotebookNode, writes

from labkit import notebooks, paths
from labkit.measure import tape
from labkit.measure.session import OPTIONS
from labkit.run import execute

CELL_LIMIT_S = 15 * 60.0
"""Seconds that a cell may take while it is recorded: one may compile for minutes on a slow host."""
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def record(path: Path) -> execute.Result:
    """Execute a lesson on this GPU, and put what it measured on its tape for this kind of device.

    Rows of the same code, device and versions are taken from the tape, and not measured again. A recording
    that was cut short has left its rows in build/record, and the next one goes on from them. One that fails
    leaves the tape as it was.
    """
    key, device = notebooks.key_of(path), tape.folder_of(tape.here()["device"])
    unfinished = paths.BUILD / "record" / device / f"{key}.jsonl"
    before = unfinished.with_suffix(".before")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(unfinished.with_suffix(".lock")):
        tape.write(before, [*tape.read(before), *tape.read(unfinished)])
        unfinished.unlink(missing_ok=True)
        result = _executed({"record": str(unfinished)}, path, unfinished.with_suffix(".ipynb"))
        if result.passed:
            measured = {row.key: row for row in tape.read(unfinished)}
            if measured:
                tape.write(paths.RECORDED / device / f"{key}.jsonl", measured.values())
            before.unlink()
            unfinished.unlink(missing_ok=True)
    return result


def _executed(options: dict[str, str], path: Path, output: Path) -> execute.Result:
    """Execute a lesson in a session with these options."""
    os.environ[OPTIONS] = json.dumps(options)
    try:
        return execute.execute(path, output, CELL_LIMIT_S)
    finally:
        del os.environ[OPTIONS]


def stale() -> Iterator[str]:
    """A line for each row on a tape that was measured with other code than is there now."""
    for path in notebooks.find():
        for device, found in tape.tapes(notebooks.key_of(path)).items():
            for row in tape.read(found):
                if row.stamp != tape.stamp_of(path, row.uses):
                    sizes = ", ".join(f"{axis} {size}" for axis, size in row.axes.items())
                    what = ", ".join(filter(None, (row.title, row.way, sizes, row.dtype, row.clock)))
                    yield f"{path.stem} on {device}: {what}"


# ---- rendering ---------------------------------------------------------------------------------------------


def rendered(path: Path, device: str = "") -> tuple[NotebookNode, execute.Result]:
    """A lesson with the outputs that it shows without a GPU, from a device's tape (default: the shown one).

    The notebook on the disk is left as it is, and so are the outputs where a cell fails. Streams of a cell
    are joined, and what is another thing in each execution (widgets, times, execution data) is left out.
    """
    notebook = notebooks.read(path)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[paths.STATE_VARIABLE] = str(Path(folder) / paths.STATE)  # nobody's answers are shown
        try:
            result = _executed({"device": device}, path, Path(folder) / path.name)
        finally:
            del os.environ[paths.STATE_VARIABLE]
        made = notebooks.read(Path(folder) / path.name)
    if result.failure:
        return notebook, result
    joined = CoalesceStreamsPreprocessor()
    for cell, ran in zip(notebook.cells, made.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = without_widgets(ran.outputs), ran.execution_count
            for output in cell.outputs:
                if "metadata" in output:
                    output.metadata = {}
            joined.preprocess_cell(cell, {}, 0)  # how a kernel cuts its text is chance
    notebook.metadata.pop("widgets", None)
    return notebook, result


def without_widgets(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Outputs without widget views, which show an error on a page without a kernel; static copies stay."""
    return [output for output in outputs if WIDGET_VIEW not in output.get("data", {})]


def render(path: Path) -> execute.Result:
    """Save what a lesson shows without a GPU as its notebook's outputs; one that fails stays as it was."""
    before = path.read_text(encoding="utf-8")
    notebook, result = rendered(path)
    if path.read_text(encoding="utf-8") != before:
        raise ValueError(f"{path.stem} was edited while it was rendered: render it again")
    if result.passed:
        paths.write_text(path, writes(notebook).rstrip("\n") + "\n")
    return result
