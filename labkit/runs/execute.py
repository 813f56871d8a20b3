"""Executes a lesson from start to end and says what came out of it: a notebook, a page, what held.

papermill does the work. Added is what it lacks: a cap on what a cell leaves in the notebook, a kernel that
is this Python whatever "python3" is elsewhere on the machine, and a sentence where a cell hangs or its kernel
dies.
"""

import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipykernel.kernelspec
import papermill
import zmq
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbconvert.exporters.html import HTMLExporter
from nbformat import NotebookNode
from nbformat.v4 import new_output
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines
from papermill.exceptions import PapermillExecutionError

from labkit import paths
from labkit.lessons import notebooks
from labkit.widgets import claims

CHECK_MIME = "application/vnd.labkit.check+json"
CELL_LIMIT_S = 600.0
"""Seconds for one cell, if nothing else is said."""
ENGINE = "labkit"
INJECTED = "injected-parameters"
TRACEBACK_LINES = 12
TEXT_LIMIT, DATA_LIMIT = 200_000, 5_000_000
"""Characters of text, and of figures and other displays, that one cell may leave in the notebook."""
CUT = "\n[labkit: the rest of this cell's output was left out]\n"


@dataclass(frozen=True)
class Failure:
    """What ended a lesson. ``cell`` counts the lesson's code cells from 1; 0 is its given parameters."""

    cell: int
    source: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Result:
    """What executing a lesson gave: its name, the seconds it took, what held, and where it is written."""

    lesson: str
    seconds: float
    checks_passed: int
    claims_held: int
    claims_need_gpu: int
    not_held: tuple[str, ...]
    """The claims that did not hold, as sentences."""
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
    *,
    cell_limit_s: float = CELL_LIMIT_S,
    bar: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Execute a lesson into ``output`` and an HTML page beside it; the lesson itself is left as it is.

    A failing cell ends the lesson and is part of the result. ``bar`` shows papermill's progress bar on
    standard error. ``environment`` is added to the kernel's.

    Raises:
        ValueError: before anything runs, for parameters that the lesson does not declare.
    """
    values = notebooks.check_parameters(path, parameters or {})  # papermill executes names that it is given
    terminal = sys.stderr.isatty()
    shown = {"desc": path.stem, "mininterval": 0.1 if terminal else 10.0, "leave": not terminal}
    kernel = {
        **os.environ,
        "PYTHONPATH": paths.python_path(),  # this checkout's labkit
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "LABKIT_HEADLESS": "1",  # nobody presses buttons: panels run by themselves (widgets.static)
    }
    failure, began = None, time.perf_counter()
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # it repeats errors that the result has
    with paths.replacing(output) as draft:
        try:
            papermill.execute_notebook(
                notebooks.read(path),
                str(draft).replace("{", "{{").replace("}", "}}"),  # papermill formats paths
                parameters=values,
                engine_name=ENGINE,
                kernel_name="python3",
                language="python",
                progress_bar=bar and shown,
                request_save_on_cell_execute=False,  # once, at the end, is enough and quicker
                execution_timeout=cell_limit_s,
                environment={**kernel, **(environment or {})},
                folder=str(path.parent.resolve()),
            )
        except PapermillExecutionError as error:
            failure = _failure(notebooks.read(draft), error)
    executed = notebooks.read(output)
    page = output.with_suffix(".html")
    paths.write_text(page, to_html(executed, path.stem))
    claimed = [(data["status"], data["sentence"]) for data in _outputs(executed, claims.MIME)]
    statuses = [status for status, _ in claimed]
    return Result(
        lesson=path.stem,
        seconds=time.perf_counter() - began,
        checks_passed=sum(data["passed"] for data in _outputs(executed, CHECK_MIME)),
        claims_held=statuses.count(claims.HELD),
        claims_need_gpu=statuses.count(claims.NEEDS_GPU),
        not_held=tuple(sentence for status, sentence in claimed if status == claims.NOT_HELD),
        failure=failure,
        notebook_path=output,
        html_path=page,
    )


def to_html(notebook: NotebookNode, name: str) -> str:
    """A notebook as one HTML page, titled with the notebook's heading (``name`` if it has none)."""
    resources = {"metadata": {"name": notebooks.title(notebook) or name, "path": str(paths.NOTEBOOKS)}}
    exporter = HTMLExporter(language_code="en", embed_images=True)
    page, _ = exporter.from_notebook_node(notebook, resources=resources)
    return str(page)


def _outputs(notebook: NotebookNode, mime: str) -> list[dict[str, Any]]:
    outputs = (output for _, cell in notebooks.code_cells(notebook) for output in cell.outputs)
    return [output.data[mime] for output in outputs if mime in output.get("data", {})]


def _failure(executed: NotebookNode, error: PapermillExecutionError) -> Failure:
    cells = [cell for _, cell in notebooks.code_cells(executed)]
    failed = [any(output.output_type == "error" for output in cell.outputs) for cell in cells].index(True)
    number = sum(INJECTED not in notebooks.tags(cell) for cell in cells[: failed + 1])
    plain = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # terminal colours
    lines = plain.sub("", "\n".join(error.traceback)).rstrip().split("\n")
    message = f"{error.ename}: {plain.sub('', error.evalue)}"
    return Failure(number, error.source, message, "\n".join(lines[-TRACEBACK_LINES:]))


# ---- papermill's engine and client -------------------------------------------------------------------------


class _ThisPython(KernelSpecManager):
    """Starts kernels with the Python that runs labkit."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        kernel = ipykernel.kernelspec.get_kernel_dict()
        return KernelSpec(resource_dir=ipykernel.kernelspec.RESOURCES, **kernel)


class _Client(PapermillNotebookClient):
    """papermill's client with a cap on the output of each cell."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._used: Counter[tuple[int, bool]] = Counter()
        """Characters that a cell has shown, by its index and whether they are text."""

    def process_message(
        self, msg: dict[str, Any], cell: NotebookNode, cell_index: int
    ) -> NotebookNode | None:
        fits = self._fits(msg["msg_type"], msg["content"], cell_index)
        made = super().process_message(msg, cell, cell_index) if fits else None
        if made is not None and made.output_type == "stream":
            # How a kernel cuts its text is chance. (nbclient's own option joins pieces across figures.)
            before = cell.outputs[-2] if len(cell.outputs) > 1 else NotebookNode()
            if before.get("name") == made.name:
                before.text += cell.outputs.pop().text
        # An Output widget's state went back on the shell's socket, and such a send can take the wake-up of a
        # reply that comes meanwhile: the cell would never end. Asking for the events wakes it again.
        self.kc.shell_channel.socket.get(zmq.EVENTS)
        return made

    def _fits(self, kind: str, content: dict[str, Any], cell: int) -> bool:
        """Whether a message is kept. The first one beyond a limit is cut and says so."""
        text = kind == "stream"
        if kind == "clear_output":
            self._used[cell, True] = self._used[cell, False] = 0
        elif kind == "error":  # its end is always told
            content["evalue"] = content["evalue"][:2000]
            content["traceback"] = ["\n".join(content["traceback"])[-20_000:]]
        if kind not in ("stream", "display_data", "execute_result"):
            return True
        size = len(content["text"]) if text else sum(len(str(shown)) for shown in content["data"].values())
        limit, before = TEXT_LIMIT if text else DATA_LIMIT, self._used[cell, text]
        self._used[cell, text] += size
        if before <= limit < before + size:
            cut = {"text": content["text"][: limit - before] + CUT} if text else {"data": {"text/plain": CUT}}
            content.update(cut)
        return before <= limit


class _Engine(NBClientEngine):
    """papermill's engine with that client, and a sentence for a cell that could not report its own end."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: NotebookExecutionManager, kernel_name: str, **options: Any
    ) -> None:
        limit_s: float = options["execution_timeout"]
        # the first cell stands for a kernel that does not even start
        running = [next(cell for _, cell in notebooks.code_cells(nb_man.nb))]
        client = _Client(
            nb_man,
            km=AsyncKernelManager(kernel_name=kernel_name, kernel_spec_manager=_ThisPython()),
            kernel_name=kernel_name,
            log=logging.getLogger("papermill"),
            timeout_func=lambda _cell: limit_s,  # the other option takes whole seconds only
            on_cell_execute=lambda cell, cell_index: running.append(cell),
            iopub_timeout=60,  # a flood of output arrives long after its cell has ended
            record_timing=False,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns that it listens on localhost
            shutdown_kernel="immediate",
        )
        try:
            client.execute(cleanup_kc=True, env=options["environment"], cwd=options["folder"])
        except (CellTimeoutError, DeadKernelError, RuntimeError) as error:
            reason = f"{error}: the process of the lesson ended in the middle of this cell"
            if isinstance(error, CellTimeoutError):
                reason = f"stopped: the limit for one cell is {limit_s:g} s"
            # The kernel was interrupted first, and what it may have said to that explains nothing.
            outputs = [output for output in running[-1].outputs if output.output_type != "error"]
            said = new_output("error", ename=type(error).__name__, evalue=reason, traceback=[reason])
            running[-1].outputs = [*outputs, said]
        except KeyboardInterrupt:
            # The kernel's group got the signal, too. Tasks of this client may find it dead while they are
            # cleared away, and asyncio would print each one's traceback below the sentence of the command.
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            raise


papermill_engines.register(ENGINE, _Engine)
