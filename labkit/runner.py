"""Executes a lesson from start to end in a kernel of its own, and says what came out of it.

papermill fills in parameters and walks the cells; what it lacks is added here: limits on time and output,
errors for cells that hang or kill their kernel, a kernel that never outlives the run, counted claims and
checks, and an HTML page.
"""

import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipykernel.kernelspec
import papermill
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbconvert.exporters.html import HTMLExporter
from nbformat import NotebookNode
from nbformat.v4 import new_output
from papermill.engines import Engine, NotebookExecutionManager, papermill_engines
from papermill.exceptions import PapermillExecutionError

from labkit import claims, lessons, places, queue_line
from labkit.limited_client import LimitedClient

CHECK_MIME = "application/vnd.labkit.check+json"
CELL_LIMIT_S = 600.0
TRACEBACK_LINES = 12
INJECTED = "injected-parameters"
ENGINE = "labkit"


@dataclass(frozen=True)
class Progress:
    """A code cell is about to run: the ``cell``-th of ``cells``, ``seconds`` after the lesson began."""

    lesson: str
    cell: int
    cells: int
    line: str
    seconds: float


@dataclass(frozen=True)
class Failure:
    """What ended a lesson. ``cell`` counts the lesson's code cells from 1; 0 is its given parameters."""

    cell: int
    source: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Result:
    """What executing a lesson gave."""

    lesson: str
    seconds: float
    checks_passed: int
    claims_held: int
    claims_not_held: int
    claims_need_gpu: int
    failure: Failure | None
    notebook_path: Path
    html_path: Path

    @property
    def passed(self) -> bool:
        """Whether every cell ran to its end."""
        return self.failure is None


def execute(
    path: Path,
    output: Path,
    parameters: Mapping[str, str] | None = None,
    progress: Callable[[Progress], None] | None = None,
    *,
    cell_limit_s: float = CELL_LIMIT_S,
    limit_s: float = math.inf,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Execute a lesson into ``output`` and an HTML page beside it; the lesson itself is left as it is.

    A failing cell ends the lesson and is part of the result. ValueError, before anything runs, for
    parameters that the lesson does not declare. Whatever interrupts the run, its kernel is killed.
    """
    values = lessons.check_parameters(path, parameters or {})
    notebook = lessons.read(path)
    watch = _Watch(path.stem, len(list(lessons.code_cells(notebook))), progress, cell_limit_s, limit_s)
    failure = None
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # it repeats errors that the result has
    with tempfile.TemporaryDirectory() as folder, places.replacing(output) as draft:
        watch.queue = Path(folder, "queue")
        given = {**kernel_environment(), queue_line.FILE: str(watch.queue), **(environment or {})}
        try:
            papermill.execute_notebook(
                notebook,
                str(draft).replace("{", "{{").replace("}", "}}"),  # papermill formats paths
                parameters=values,
                engine_name=ENGINE,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                request_save_on_cell_execute=False,  # once, at the end, is enough and quicker
                watch=watch,
                environment=given,
                folder=path.parent.resolve(),
            )
        except PapermillExecutionError as error:
            failure = _failure(lessons.read(draft), error)
    seconds = time.perf_counter() - watch.began
    executed = lessons.read(output)
    page = output.with_suffix(".html")
    places.write_text(page, to_html(executed, path.stem))
    statuses = [data["status"] for data in _outputs(executed, claims.MIME)]
    return Result(
        lesson=path.stem,
        seconds=seconds,
        checks_passed=sum(data["passed"] for data in _outputs(executed, CHECK_MIME)),
        claims_held=statuses.count(claims.HELD),
        claims_not_held=statuses.count(claims.NOT_HELD),
        claims_need_gpu=statuses.count(claims.NEEDS_GPU),
        failure=failure,
        notebook_path=output,
        html_path=page,
    )


def kernel_environment() -> dict[str, str]:
    """The environment of a lesson's kernel: this checkout's labkit, inline figures, nobody there."""
    return {
        **os.environ,
        "PYTHONPATH": places.python_path(),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "LABKIT_HEADLESS": "1",  # nobody presses buttons: panels run by themselves (labkit.live)
    }


def to_html(notebook: NotebookNode, name: str) -> str:
    """A notebook as one HTML page, titled with the notebook's heading (``name`` if it has none)."""
    resources = {"metadata": {"name": lessons.title(notebook) or name}}
    page, _ = HTMLExporter(language_code="en").from_notebook_node(notebook, resources=resources)
    return str(page)


def _outputs(notebook: NotebookNode, mime: str) -> list[dict[str, Any]]:
    outputs = (output for _, cell in lessons.code_cells(notebook) for output in cell.outputs)
    return [output.data[mime] for output in outputs if mime in output.get("data", {})]


def _failure(executed: NotebookNode, error: PapermillExecutionError) -> Failure:
    number = 0
    for _, cell in lessons.code_cells(executed):
        number += INJECTED not in lessons.tags(cell)
        if any(output.output_type == "error" for output in cell.outputs):
            break
    lines = plain("\n".join(error.traceback)).rstrip().split("\n")
    message = f"{error.ename}: {plain(error.evalue)}"
    return Failure(number, error.source, message, "\n".join(lines[-TRACEBACK_LINES:]))


def plain(text: str) -> str:
    """Text without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


class _Watch:
    """Follows a run: reports each cell, and knows how long it may take."""

    def __init__(
        self,
        lesson: str,
        cells: int,
        progress: Callable[[Progress], None] | None,
        cell_limit_s: float,
        limit_s: float,
    ) -> None:
        self.lesson, self.cells, self.progress = lesson, cells, progress
        self.cell_limit_s, self.limit_s = cell_limit_s, limit_s
        self.began = time.perf_counter()
        self.number = 0
        self.cell: NotebookNode | None = None
        self.queue: Path | None = None
        """The file in which the kernel says how long the queue for the GPU is, while it waits there."""
        self.waited = ""
        """What that was when a cell came to its limit."""

    def cell_starts(self, cell: NotebookNode, cell_index: int) -> None:
        self.cell = cell
        self.number += INJECTED not in lessons.tags(cell)
        if self.progress is not None:
            lines = [line for line in cell.source.splitlines() if line.strip()]
            seconds = time.perf_counter() - self.began
            self.progress(Progress(self.lesson, self.number, self.cells, lines[0], seconds))

    def limit(self, cell: NotebookNode) -> float:
        """Seconds for a cell, never zero: to nbclient, that would mean for ever."""
        left = self.limit_s - (time.perf_counter() - self.began)
        return max(0.01, min(self.cell_limit_s, left))

    def explain(self, error: Exception) -> str:
        """What ended a cell that could not report it itself."""
        if not isinstance(error, CellTimeoutError):
            return f"{error}: the process of the lesson ended in the middle of this cell"
        waited = f"; it was {self.waited}" if self.waited else ""
        if time.perf_counter() - self.began >= self.limit_s:
            return f"stopped in this cell: the lesson's limit is {self.limit_s:g} s{waited}"
        return f"stopped: the limit for one cell is {self.cell_limit_s:g} s{waited}"

    def times_out(self) -> None:
        """A cell has come to its limit."""
        with suppress(FileNotFoundError):  # it never waited
            self.waited = self.queue.read_text(encoding="utf-8") if self.queue else ""


class _ThisInterpreter(KernelSpecManager):
    """Starts kernels with the Python that runs labkit, whatever "python3" is elsewhere on the machine."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(
            resource_dir=ipykernel.kernelspec.RESOURCES,
            **ipykernel.kernelspec.get_kernel_dict(),
        )


class _Client(LimitedClient):
    """That client under a watch."""

    def __init__(self, *given: Any, watch: _Watch, **options: Any) -> None:
        super().__init__(*given, **options)
        self._watch = watch

    async def _async_handle_timeout(
        self, timeout: int, cell: NotebookNode | None = None
    ) -> dict[str, Any] | None:
        self._watch.times_out()  # before the kernel is ended, and with that its wait for the GPU
        return await super()._async_handle_timeout(timeout, cell)


class _Engine(Engine):
    """Runs the cells of a papermill notebook under a watch."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: NotebookExecutionManager,
        kernel_name: str,
        *,
        watch: _Watch,
        environment: dict[str, str],
        folder: Path,
        **_papermill: Any,
    ) -> None:
        manager = AsyncKernelManager(kernel_name=kernel_name, kernel_spec_manager=_ThisInterpreter())
        client = _Client(
            nb_man,
            km=manager,
            kernel_name=kernel_name,
            log=logging.getLogger("papermill"),
            watch=watch,
            timeout_func=watch.limit,
            on_cell_execute=watch.cell_starts,
            iopub_timeout=60,  # a flood of output arrives long after its cell has ended
            record_timing=False,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns that it listens on localhost
            shutdown_kernel="immediate",
        )
        try:
            client.execute(cleanup_kc=True, env=environment, cwd=str(folder))
        except (CellTimeoutError, DeadKernelError, RuntimeError) as error:
            # no cell has begun when the kernel itself did not start: then it is told at the first one
            cell = watch.cell or next(cell for _, cell in lessons.code_cells(nb_man.nb))
            name, reason = type(error).__name__, watch.explain(error)
            # The kernel was interrupted first, and what it may have said to that explains nothing.
            cell.outputs = [output for output in cell.outputs if output.output_type != "error"]
            cell.outputs.append(new_output("error", ename=name, evalue=reason, traceback=[reason]))


papermill_engines.register(ENGINE, _Engine)
