"""Exercises: the learner's cell, judged in a process of its own; verdict, hints, solution.

``tasks = exercises.of("01_launch_overhead")``; then a cell that writes a function ends with
``tasks.check("mask", double_kernel)``. Its source is read from the notebook's input and judged beside the
lesson's setup and kernel cells, so the verdict is the same on every machine, and nothing that the answer does
reaches this process.
"""

import hashlib
import importlib.util
import io
import sys
import tokenize
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from labkit import attempt, child, codegen, lessons, places
from labkit.tasks import Task, find
from labkit.verdicts import Status, Verdict, solution_html

LIMIT_S = 60.0
"""Seconds that an answer may take."""
OFFERED_FROM = 3
"""The attempt from which on the verdict holds the solution; ``Tasks.solution`` shows it at any time."""


def of(lesson: str, *, solve: bool = False, limit_s: float = LIMIT_S) -> "Tasks":
    """The exercises of a lesson, by its file's name without the suffix.

    With ``solve`` the solutions are judged in place of the cells, and one that is not right is an
    AssertionError. Without, no answer is ever an error. ValueError for a lesson without exercises.
    """
    return Tasks(lesson, find(lesson), solve, limit_s)


def digest(source: str) -> str:
    """12 hex digits of a cell's source that do not change with comments and white space."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    words = [token.string for token in tokens if token.type not in skipped]
    return hashlib.sha256(" ".join(words).strip().encode()).hexdigest()[:12]


@cache
def judge(lesson: str) -> child.Forkserver:
    """The process that judges this session's answers to a lesson's exercises; it loads the lesson at once."""
    environment, compiler = attempt.environment(), codegen.server()
    return child.Forkserver(attempt.prepare, lesson, environment=environment, uses=(compiler,))


class Tasks:
    """The exercises of one lesson in this session."""

    def __init__(self, lesson: str, tasks: dict[str, Task], solve: bool, limit_s: float) -> None:
        self._lesson, self._tasks, self._solve, self._limit_s = lesson, tasks, solve, limit_s
        self._right: dict[str, Any] = {}
        """The learner's own answers whose last verdict was right."""
        _carry_over(lesson)

    def check(self, name: str, answer: Any) -> None:
        """Judge the cell that this call stands in, and show the verdict.

        ``answer`` is what the cell wrote: kept for ``answer()`` if it's right. ValueError for an unknown
        name, RuntimeError outside a notebook.
        """
        task = self._task(name)
        if self._solve:
            verdict = self._judged(name, f"{self._solution(name)}\n", self._folder(name) / "solution.py", 0)
        else:
            verdict = self._verdict(name, _current_cell())
            self._right.pop(name, None)
            if verdict.status == "right":
                self._right[name] = answer
        _show(verdict.mimebundle(), str(verdict))
        if self._solve and verdict.status != "right":
            raise AssertionError(f"the solution of {task.title!r} has to be right: {verdict}")

    def solution(self, name: str) -> None:
        """Show the solution of an exercise."""
        source = self._solution(name)
        _show({"text/plain": source, "text/html": solution_html(source)}, source)

    def answer(self, name: str) -> Any:
        """The learner's own function if this session's last verdict on it was right, else the solution's."""
        if name in self._right:
            return self._right[name]
        return getattr(_solutions(self._lesson), self._task(name).answer)

    def _task(self, name: str) -> Task:
        if name not in self._tasks:
            known = ", ".join(self._tasks)
            raise ValueError(f"name: {self._lesson} has no exercise {name!r}; it has {known}")
        return self._tasks[name]

    def _solution(self, name: str) -> str:
        """The solution's source, with the check that the cell ends with."""
        task = self._task(name)
        cell = solution_cells(self._lesson)[name]
        return f'{cell}\n\n\ntasks.check("{name}", {task.answer})'

    def _folder(self, name: str) -> Path:
        return _attempts(self._lesson) / name

    def _verdict(self, name: str, source: str) -> Verdict:
        task = self._task(name)
        if digest(source) == task.scaffold:
            sentence = (
                "Complete the cell and run it (Shift+Enter): it says what is wrong, "
                "with a hint more each time."
            )
            return Verdict(name, task.title, "not attempted", sentence)
        file, attempt = _keep(self._folder(name), source)
        return self._run(name, file, attempt)

    def _judged(self, name: str, source: str, file: Path, attempt: int) -> Verdict:
        places.write_text(file, source)
        return self._run(name, file, attempt)

    def _run(self, name: str, file: Path, attempt: int) -> Verdict:
        return self._explained(name, self._finding(name, file), attempt)

    def _finding(self, name: str, file: Path) -> dict[str, Any]:
        """What ``attempt.judge_file`` finds, or the status stopped, crashed or interrupted, with where."""
        show = partial(print, end="", flush=True)
        limits = {"seconds": self._limit_s, "memory": attempt.MEMORY, "show": show}
        try:
            run = judge(self._lesson).run
            found: dict[str, Any] = run(attempt.judge_file, self._lesson, name, file, **limits)
        except (TimeoutError, KeyboardInterrupt, child.ChildError) as error:
            if isinstance(error, child.ChildError) and error.raised:
                return {"status": "raised", "observed": _NOT_LOADED.format(error, self._lesson)}
            kind = {TimeoutError: "stopped", KeyboardInterrupt: "interrupted", child.ChildError: "crashed"}
            where = attempt.traced(file, "\n".join(getattr(error, "__notes__", ())))
            return {"status": kind[type(error)], "observed": str(error), "where": where}
        return found

    def _explained(self, name: str, finding: dict[str, Any], attempt: int) -> Verdict:
        """A finding as the learner sees it."""
        status, sentence = _STATUS[finding["status"]]
        hints = tuple(finding.get("hints", _HINTS.get(finding["status"], ())))
        offered = status != "right" and attempt >= OFFERED_FROM
        return Verdict(
            name,
            self._task(name).title,
            status,
            sentence.format(limit=self._limit_s, **finding),
            attempt=attempt,
            reason=finding.get("reason", ""),
            where=finding.get("where", ""),
            hints=hints[:attempt],
            hints_left=len(hints[attempt:]),
            solution=self._solution(name) if offered else "",
            passed=finding.get("passed", 0),
        )


_NOT_LOADED = (
    "The lesson's own cells of kernels, as they were last saved, do not run by themselves: {}\n"
    "Undo what you changed there, or restart from a fresh copy of {}."
)
_STATUS: dict[str, tuple[Status, str]] = {
    "right": ("right", "{evidence}"),
    "wrong": ("wrong", "{observed}"),
    "raised": ("error", "{observed}"),
    "unchecked": ("error", "The cell came to its end without calling its check."),
    "stopped": (
        "stopped",
        "It was still running after {limit:g} s, and was ended. Nothing of your notebook is lost.",
    ),
    "crashed": (
        "crashed",
        "The process that ran your code is gone: {observed}. Nothing of your notebook is lost.",
    ),
    "interrupted": ("interrupted", "You stopped it. Nothing of your notebook is lost."),
}
_HINTS: dict[str, tuple[str, ...]] = {
    "unchecked": (
        "Which line of the cell hands in your answer?",
        "The cell's last line was tasks.check(...), as the lesson gives it: put it back.",
    ),
    "stopped": (
        "Does a loop never end? The line that was running, where it could be told, stands above.",
        "Print what the loop's condition depends on, inside the loop: what is printed appears above.",
    ),
    "crashed": (
        "Did a load or store go to a wild address? Every place has to be inside its tensor, or masked.",
        "Look at the places that `at` holds in the last program, and at the mask of each load and store.",
    ),
}
"""Those of an answer that came to another end than a verdict or an exception."""


def _show(bundle: dict[str, Any], text: str) -> None:
    if get_ipython() is None:
        print(text)
    else:
        display(bundle, raw=True)


def _current_cell() -> str:
    shell = get_ipython()
    if shell is None:
        raise RuntimeError("tasks.check reads the cell that it stands in: run it in a notebook")
    return str(shell.user_ns["In"][-1])


def _attempts(lesson: str) -> Path:
    """Where a lesson's attempts are kept: by its name without the number, which may change."""
    return places.cache() / "attempts" / lessons.key(lesson)


def _carry_over(lesson: str) -> None:
    """Attempts of the time when the lesson had another number, or its folder one."""
    here = _attempts(lesson)
    for numbered in here.parent.glob(f"[0-9][0-9]_{here.name}"):
        if not here.exists():
            with suppress(OSError):  # a cache that cannot be written: they stay where they are
                numbered.rename(here)


def _keep(folder: Path, source: str) -> tuple[Path, int]:
    """Write an attempt's source to a new file, before it is run; the file and the attempt's number."""
    with places.advice(folder):
        folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(file.stem) for file in folder.glob("*.py") if file.stem.isdigit()]
    number = max(numbers, default=0) + 1
    file = folder / f"{number:04}.py"
    with places.advice(file), open(file, "x", encoding="utf-8") as stream:  # never over another one
        try:
            stream.write(source)
            stream.flush()
        except OSError:
            file.unlink()  # half of it would count as an attempt
            raise
    return file, number


def solution_cells(lesson: str) -> dict[str, str]:
    """The solutions' sources of a lesson by exercise."""
    return lessons.solution_cells(lessons.resolve(lesson))


def _solutions(lesson: str) -> ModuleType:
    """The file of solutions as a module: Triton reads the source of a kernel from its file."""
    name = f"labkit_solutions_{lesson}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, lessons.solutions_file(lessons.resolve(lesson)))
        assert spec is not None and spec.loader is not None, "a .py file always has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
