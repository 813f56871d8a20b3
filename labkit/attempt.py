"""Judges answers to exercises, in a process where Triton interprets and no GPU is seen.

So a verdict is the same on every machine. ``exercises`` calls ``prepare`` once in a process, which takes
seconds, and ``judge_file`` in a fork of it for each answer (``labkit.child``).
"""

import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit import child, codegen, lessons
from labkit.tasks import Task, Wrong, find, slips

MEMORY = 8 * 2**30
"""Bytes that the process of an answer may allocate; those of the course need one."""


def environment() -> Mapping[str, str]:
    """The same on every machine: Triton interprets, no GPU is seen, nobody presses buttons."""
    return os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "LABKIT_HEADLESS": "1",
        "MPLBACKEND": "Agg",
    }


def prepare(lesson: str, compiler: child.Forkserver) -> None:
    """Load the lesson's setup and kernel cells; what compiles for this process's forks is given."""
    codegen.use(compiler)
    lessons.load(lesson)


def judge_file(lesson: str, name: str, file: Path) -> dict[str, Any]:
    """The finding for an answer to an exercise of a lesson, from the file that it is in."""
    namespace = vars(lessons.load(lesson))  # again: the notebook may have been saved meanwhile
    return judge(lesson, namespace, name, find(lesson)[name], file)


def traced(file: Path, trace: str) -> str:
    """The answer's innermost line in the traceback of a process, "line 3: ..."; "" where there is none."""
    found = re.search(rf'File "{re.escape(str(file))}", line (\d+) in', trace)
    if found is None:
        return ""
    number = int(found[1])
    return f"line {number}: {file.read_text(encoding='utf-8').splitlines()[number - 1].strip()}"


class _HandedIn(BaseException):
    """Leaves the cell at its check; not an Exception, which the cell itself might catch."""

    def __init__(self, answers: tuple[Any, ...]) -> None:
        self.answers = answers


class _Desk:
    """Stands for ``tasks`` in the cell."""

    def __init__(self, lesson: str, name: str) -> None:
        self._lesson, self._name = lesson, name

    def check(self, name: str, *answers: Any) -> None:
        if name == self._name:
            raise _HandedIn(answers)

    def solution(self, name: str) -> None:
        """Nothing to show here; the learner's notebook shows it."""

    def answer(self, name: str) -> Any:
        """The solution's function: the learner's own lives in the notebook."""
        from labkit import exercises  # which needs IPython, and only this does

        return exercises.of(self._lesson).answer(name)


def judge(lesson: str, namespace: dict[str, Any], name: str, task: Task, file: Path) -> dict[str, Any]:
    """Run a cell's source from its file, in a copy of ``namespace``, and check what it hands in.

    The finding: ``status`` right (with evidence, passed), wrong (reason, observed, hints), raised (observed,
    where, reason, hints) or unchecked.
    """
    try:
        answers = _run(lesson, namespace, name, file)
        if answers is None:
            return {"status": "unchecked"}
        evidence = task.check(*answers)
    except Wrong as wrong:
        finding = {"status": "wrong", "reason": wrong.reason, "observed": wrong.observed}
        return finding | {"hints": list(wrong.hints)}
    except BaseException as error:  # SystemExit too: whatever it is, the learner's code raised it
        return _raised(error, file, task, namespace)
    return {"status": "right", "evidence": evidence.sentence, "passed": evidence.passed}


def _run(lesson: str, namespace: dict[str, Any], name: str, file: Path) -> tuple[Any, ...] | None:
    """What the cell hands in; None when it ends without a check."""
    # A module by this name: Triton, inspect and dataclasses look the source up through it.
    title = f"labkit_attempt_{name}"
    module = ModuleType(title)
    module.__dict__.update(
        namespace | {"__name__": title, "__file__": str(file), "tasks": _Desk(lesson, name)}
    )
    sys.modules[title] = module
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)
    except _HandedIn as handed:
        return handed.answers
    return None


def _raised(error: BaseException, file: Path, task: Task, namespace: dict[str, Any]) -> dict[str, Any]:
    """The finding for an exception, with hints at what it usually means."""
    observed, where = _message(error), _where(error, file)
    slip = slips.explain(task.slips, observed, where)
    missing = re.search(r"'(\w+)'", observed)
    facts = {
        "name": missing[1] if missing else "it",
        "seen": ", ".join(_seen(error, file, namespace)) or "none of yours",
        "given": ", ".join(_given(namespace)),
    }
    hints = [hint.format_map(facts) for hint in slip.hints]
    return {"status": "raised", "observed": observed, "where": where, "reason": slip.reason, "hints": hints}


def _seen(error: BaseException, file: Path, namespace: dict[str, Any]) -> list[str]:
    """The answer's own names at its line that was running."""
    for one in reversed(list(_chain(error))):
        frames = [frame for frame, _ in traceback.walk_tb(one.__traceback__)]
        own = [frame for frame in frames if frame.f_code.co_filename == str(file)]
        if own:
            names = [name for name in own[-1].f_locals if not name.startswith("_")]
            return names if own[-1].f_code.co_name != "<module>" else [n for n in names if n not in namespace]
    return []


def _given(namespace: dict[str, Any]) -> list[str]:
    """What the lesson has for the cell: modules from elsewhere, and its own functions and kernels."""

    def fits(value: Any) -> bool:
        if isinstance(value, ModuleType):
            return not value.__name__.startswith("labkit")
        return getattr(getattr(value, "fn", value), "__module__", None) == namespace["__name__"]

    return sorted(name for name, value in namespace.items() if not name.startswith("_") and fits(value))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it, the last one first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _message(error: BaseException) -> str:
    cause = list(_chain(error))[-1] if type(error).__name__ == "InterpreterError" else error
    text = str(cause)
    if isinstance(cause, MemoryError):
        text = f"it needed more memory than the {MEMORY / 2**30:.0f} GB that it may have"
    if len(text) > 500:
        text = text[:500] + "..."
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _where(error: BaseException, file: Path) -> str:
    """The answer's own line that was running, "line 3: ..."; empty when none of its lines was."""
    for one in reversed(list(_chain(error))):
        if isinstance(one, SyntaxError) and one.filename == str(file):
            return f"line {one.lineno}: {(one.text or '').strip()}"
        frames = [frame for frame in traceback.extract_tb(one.__traceback__) if frame.filename == str(file)]
        if frames:
            return f"line {frames[-1].lineno}: {frames[-1].line}"
    return ""
