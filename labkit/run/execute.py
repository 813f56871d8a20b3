"""Executes a lesson with papermill and says what came of it: a notebook, and what held."""

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

from labkit import notebooks, paths
from labkit.display.say import CLAIM_MIME, HELD, NOT_HELD
from labkit.measure.correctness import CHECK_MIME

TRACEBACK_LINES = 12


@dataclass(frozen=True)
class Failure:
    """What ended a lesson. ``cell`` counts the lesson's code cells from 1."""

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
    path: Path
    """The executed notebook."""

    @property
    def passed(self) -> bool:
        """Whether every cell ran to its end."""
        return self.failure is None


def execute(path: Path, output: Path, cell_limit_s: float, bar: bool = True) -> Result:
    """Execute a lesson into ``output``; the lesson itself is left as it is.

    A failing cell ends the lesson and is part of the result. Meanwhile papermill's progress bar is on
    standard error, if ``bar``.
    """
    name = notebooks.name_of(path)
    terminal = sys.stderr.isatty()
    shown = {"desc": name, "mininterval": 0.1 if terminal else 10.0, "leave": not terminal}
    os.environ["LABKIT_HEADLESS"] = "1"  # nobody presses buttons: panels run by themselves
    os.environ["PYTHONPATH"] = paths.python_path()  # this checkout's labkit
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # it repeats errors that the result has
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it tells of tasks that an interruption ends
    failure, began = None, time.perf_counter()
    with paths.replacing(output) as draft:
        try:
            papermill.execute_notebook(
                notebooks.read(path),
                str(draft).replace("{", "{{").replace("}", "}}"),  # papermill formats paths
                kernel_name="python3",
                language="python",
                progress_bar=shown if bar else False,
                # options of nbclient
                execution_timeout=cell_limit_s,
                timeout_func=lambda _cell: cell_limit_s,  # the other option takes whole seconds only
                resources={"metadata": {"path": str(path.parent.resolve())}},  # where the kernel works
                record_timing=False,
                extra_arguments=[
                    "--IPKernelApp.log_level=CRITICAL"
                ],  # it warns of localhost, and when it is ended
                iopub_timeout=60,  # a flood of output arrives long after its cell has ended
            )
        except PapermillExecutionError as error:
            failure = _failure(notebooks.read(draft), error)
        except (CellTimeoutError, DeadKernelError) as error:
            failure = _ended(notebooks.read(draft), error, cell_limit_s)
    executed = notebooks.read(output)
    claimed = [(data["status"], data["sentence"]) for data in _outputs(executed, CLAIM_MIME)]
    statuses = [status for status, _ in claimed]
    return Result(
        lesson=name,
        seconds=time.perf_counter() - began,
        checks_passed=sum(data["passed"] for data in _outputs(executed, CHECK_MIME)),
        claims_held=statuses.count(HELD),
        claims_need_gpu=sum(status not in (HELD, NOT_HELD) for status in statuses),
        not_held=tuple(sentence for status, sentence in claimed if status == NOT_HELD),
        failure=failure,
        path=output,
    )


def _outputs(notebook: NotebookNode, mime: str) -> Iterator[dict[str, Any]]:
    for _, cell in notebooks.code_cells(notebook):
        yield from (output.data[mime] for output in cell.outputs if mime in output.get("data", {}))


def _failure(executed: NotebookNode, error: PapermillExecutionError) -> Failure:
    """The cell that raised an exception."""
    cells = notebooks.code_cells(executed)
    failed = (n for n, cell in cells if any(o.output_type == "error" for o in cell.outputs))
    plain = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # terminal colours
    lines = plain.sub("", "\n".join(error.traceback)).rstrip().split("\n")
    message = f"{error.ename}: {plain.sub('', error.evalue)}"
    return Failure(next(failed), error.source, message, "\n".join(lines[-TRACEBACK_LINES:]))


def _ended(executed: NotebookNode, error: Exception, limit_s: float) -> Failure:
    """The cell that took too long, or in which the kernel's process ended: the last one that was begun."""
    begun = [each for each in notebooks.code_cells(executed) if each[1].metadata.papermill.start_time]
    number, cell = begun[-1]
    message = "the process of the lesson ended in the middle of this cell"
    if isinstance(error, CellTimeoutError):
        message = f"stopped: the limit for one cell is {limit_s:g} s"
    return Failure(number, cell.source, message, "")
