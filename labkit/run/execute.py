"""Executes a lesson with papermill and says what came of it: a notebook, a page, what held."""

import ast
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbconvert.exporters.html import HTMLExporter
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError
from papermill.inspection import inspect_notebook

from labkit import paths
from labkit.display.say import CLAIM_MIME, HELD, NOT_HELD
from labkit.lessons import notebooks

CHECK_MIME = "application/vnd.labkit.check+json"
CELL_LIMIT_S = 600.0
"""Seconds for one cell, if nothing else is said."""
TRACEBACK_LINES = 12
KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool}
"""The kinds that a lesson's parameter may be declared with."""
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


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
) -> Result:
    """Execute a lesson into ``output`` and an HTML page beside it; the lesson itself is left as it is.

    A failing cell ends the lesson and is part of the result. ``bar`` shows papermill's progress bar on
    standard error.

    Raises:
        ValueError: before anything runs, for parameters that the lesson does not declare.
    """
    name, values = notebooks.name_of(path), check_parameters(path, parameters or {})
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
                parameters=values,
                kernel_name="python3",
                language="python",
                progress_bar=bar and shown,
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
    page = output.with_suffix(".html")
    paths.write_text(page, to_html(executed, path))
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
        notebook_path=output,
        html_path=page,
    )


def to_html(notebook: NotebookNode, path: Path) -> str:
    """A notebook as one HTML page, titled with its heading, with the pictures that lie beside ``path``."""
    title = notebooks.title(notebook) or path.stem
    resources = {"metadata": {"name": title, "path": str(path.parent)}}
    page, _ = HTMLExporter(language_code="en", embed_images=True).from_notebook_node(notebook, resources)
    return str(page)


def _outputs(notebook: NotebookNode, mime: str) -> Iterator[dict[str, Any]]:
    for _, cell in notebooks.code_cells(notebook):
        yield from (output.data[mime] for output in cell.outputs if mime in output.get("data", {}))


def _numbered(executed: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """The code cells with their numbers in the lesson; the cell of given parameters is number 0."""
    injected = False
    for number, cell in notebooks.code_cells(executed):
        injected = injected or "injected-parameters" in notebooks.tags(cell)
        yield (0 if "injected-parameters" in notebooks.tags(cell) else number - injected), cell


def _failure(executed: NotebookNode, error: PapermillExecutionError) -> Failure:
    """The cell that raised an exception."""
    failed = (n for n, cell in _numbered(executed) if any(o.output_type == "error" for o in cell.outputs))
    plain = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # terminal colours
    lines = plain.sub("", "\n".join(error.traceback)).rstrip().split("\n")
    message = f"{error.ename}: {plain.sub('', error.evalue)}"
    return Failure(next(failed), error.source, message, "\n".join(lines[-TRACEBACK_LINES:]))


def _ended(executed: NotebookNode, error: Exception, limit_s: float) -> Failure:
    """The cell that took too long, or in which the kernel's process ended: the last one that was begun."""
    begun = [each for each in _numbered(executed) if each[1].metadata.papermill.start_time]
    number, cell = begun[-1]
    message = "the process of the lesson ended in the middle of this cell"
    if isinstance(error, CellTimeoutError):
        message = f"stopped: the limit for one cell is {limit_s:g} s"
    return Failure(number, cell.source, message, "")


# ---- parameters --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """A parameter as a lesson's cell tagged ``parameters`` declares it: ``width: int = 160  # help``."""

    name: str
    kind: str
    default: Any
    """Of its kind."""
    help: str


def declared_parameters(path: Path) -> dict[str, Parameter]:
    """The parameters that a lesson declares; ValueError for one without a kind or with a wrong default."""
    notebook = notebooks.read(path)
    notebook.metadata.setdefault("kernelspec", {"name": "python3", "language": "python"})
    found: dict[str, Parameter] = {}
    for name, declared in inspect_notebook(notebook).items():
        kind: str = declared["inferred_type_name"]
        default: Any = declared["default"]
        with suppress(ValueError, SyntaxError):  # left as text, which is refused below
            default = ast.literal_eval(default)
        if kind not in KINDS or type(default) is not KINDS[kind]:
            raise ValueError(
                f"{path.stem}, parameter {name}: declared as {kind} with the default {default!r}, but has to "
                f"be one of {', '.join(KINDS)}, with a default of this kind"
            )
        found[name] = Parameter(name, kind, default, declared["help"])
    return found


def check_parameters(path: Path, given: Mapping[str, str]) -> dict[str, int | float | bool]:
    """Values for a lesson's parameters, from text; ValueError for whatever the lesson does not declare.

    papermill writes names into the code as they stand, so only declared names, which Python has parsed as
    identifiers, get there.
    """
    declared = declared_parameters(path)
    for name in given:
        if name not in declared:
            known = ", ".join(f"{p.name} ({p.kind})" for p in declared.values()) or "none"
            raise ValueError(f"{path.stem} has no parameter {name!r}; it declares: {known}")
    return {name: _converted(path, declared[name], text) for name, text in given.items()}


def _converted(path: Path, parameter: Parameter, text: str) -> int | float | bool:
    """The value of a parameter that is given as text. An int whose default is above 0 is a size: so is it."""
    is_size = parameter.kind == "int" and int(parameter.default) > 0
    with suppress(ValueError, KeyError, OverflowError):  # the sentence below says it better than int() does
        value = TRUTH[text.lower()] if parameter.kind == "bool" else KINDS[parameter.kind](text)
        if math.isfinite(value) and (value > 0 or not is_size):
            return value
    wanted = {"int": "a whole number", "float": "a finite number", "bool": "true or false"}[parameter.kind]
    said = f"{text[:40]!r} is not {wanted}{' above 0' * is_size}"
    raise ValueError(f"{path.stem}, parameter {parameter.name}: {said}")
