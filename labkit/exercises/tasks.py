"""A lesson's tasks in this session: a cell is judged, and what is right is raced in the same cell.

``tasks = lab.lesson("launch_overhead")``; then a cell that writes a function ends with
``raced = tasks.check("affine", affine)``. Its source is read from the notebook's input and judged beside the
lesson's setup and kernel cells, in a process of its own. So the verdict is the same on every machine, and
nothing that the answer does reaches this process.
"""

import ast
import hashlib
import html
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from IPython.core.getipython import get_ipython
from IPython.display import display

from labkit import gpu, interpreter, notebooks, paths
from labkit.display import style
from labkit.display.style import interactive
from labkit.display.table import Table, show_table
from labkit.exercises import judge, learner, race
from labkit.exercises.engine import Exercise, Finding, JudgeStatus
from labkit.measure import session
from labkit.measure.correctness import CHECK_MIME
from labkit.measure.session import Point, Way

LIMIT_S = 20.0
"""Seconds that judging an answer may take."""
MEMORY_SHARE = 0.25
"""Of the machine's memory, what an answer may allocate."""
OFFERED_AFTER = 3
"""Distinct answers, after which a wrong one's verdict holds the solution; ``solution`` shows it any time."""


TO_DO = "Change or complete it, and run it (Shift+Enter): it says what is wrong."


def lesson(name: str) -> "Tasks":
    """Begin a lesson: say how kernels run here, and return its tasks. ``name`` is "launch_overhead".

    ValueError for a lesson that there is not.
    """
    interpreter.patch()
    path = notebooks.resolve(name)
    session.begin(path)
    where = "Kernels are compiled, run on the GPU, and are timed here."
    if not gpu.available():
        where = "No GPU is used here: kernels run in an interpreter, on the CPU, and times are recorded ones."
    style.show(f"<p><small>{where}</small></p>", where)
    return Tasks(notebooks.name_of(path))


class Tasks:
    """The tasks of one lesson in this session of a notebook."""

    def __init__(self, lesson: str, limit_s: float = LIMIT_S) -> None:
        self._lesson, self._limit_s = lesson, limit_s
        self._exercises = judge.find(lesson)
        self._solutions = notebooks.solution_cells(notebooks.resolve(lesson))
        self._right: dict[str, tuple[Any, Path]] = {}
        """The learner's answers whose last verdict was right, and the files of their cells."""
        if self._exercises and interactive():
            judge.process(lesson)  # gets ready while the learner reads

    def check(
        self, name: str, answer: Any, beside: Mapping[str, Callable[..., Any]] | None = None
    ) -> Table | None:
        """Judge the cell that this call stands in, show the verdict, and race what is right.

        ``answer`` is what the cell wrote: kept for ``answer()`` if it is right. ``beside`` are ways of the
        lesson's own to race it with, by name; the task has those of libraries. Returns the race: the
        learner's kernel beside the others, or the solution where the learner's cannot be raced; None for a
        task without a race. ValueError for an unknown name, RuntimeError outside a notebook.
        """
        beside, exercise = beside or {}, self._exercise(name)
        self._judge_cell(exercise, answer)
        if exercise.race is None:
            return None
        if name in self._right and exercise.race.counted and not gpu.available():
            race.count(exercise.race, self._right[name][0], beside)
        if name in self._right and (
            problem := race.problem_at_size(self._lesson, exercise, self._right[name][1])
        ):
            self._take_back(name, problem)
        if name not in self._right and interactive():  # nothing is measured for an answer that is not right
            return self._race(name, beside, measured=False)
        table = self._race(name, beside)
        display(table)
        return table

    def answer(self, name: str) -> Any:
        """The learner's own function if this session's last verdict on it was right, else the solution's."""
        self._exercise(name)
        return self._right[name][0] if name in self._right else self._solution(name)

    def way(self, name: str, called: str = "") -> dict[str, Callable[..., Any]]:
        """The learner's kernel as a way for ``lab.race`` and ``lab.sweep``: {"your kernel": ...}.

        It is {"the solution": ...} until this session's last verdict was right, and where there is no GPU.
        ``called`` is its name in either case, if it is given.
        """
        exercise = self._exercise(name)
        as_layer = exercise.race.as_layer if exercise.race else lambda call: call
        mine = name in self._right and gpu.available()
        call = self._right[name][0] if mine else self._solution(name)
        return {called or ("your kernel" if mine else "the solution"): as_layer(call)}

    def solution(self, name: str) -> None:
        """Show the solution of an exercise."""
        self._exercise(name)
        source = self._solutions[name]
        style.show(solution_html(source), source)

    def reset(self, name: str) -> None:
        """Forget the verdicts on an exercise, and put its cell as the lesson has it below the present one.

        The cell that the learner has written stays: a notebook that is open saves over what is changed on
        the disk, so nothing but the page itself can change one.
        """
        self._exercise(name)
        learner.keep(self._lesson, name, "not attempted")
        self._right.pop(name, None)
        cells = notebooks.code_cells(notebooks.read_json(notebooks.resolve(self._lesson)))
        (cell,) = [each["source"] for _, each in cells if f'tasks.check("{name}",' in each["source"]]
        shell = get_ipython()
        if shell is None:
            print(cell)
        else:
            shell.set_next_input(cell, replace=False)
            print("The cell below is as the lesson has it; delete your own, or keep it to compare.")

    def progress(self) -> None:
        """Show the tasks of all lessons: open, tried or solved, and how many tries there were."""
        lessons = [path for path in notebooks.find() if path.parent == paths.NOTEBOOKS]
        if not interactive():  # what is saved in a notebook is about this lesson, and nobody's own
            lessons = [notebooks.resolve(self._lesson)]
        table = learner.table(lessons)
        show_table("", list(table), table.to_numpy().tolist())

    def _judge_cell(self, exercise: Exercise, answer: Any) -> None:
        """Judge the cell that is running, show the verdict, and keep it."""
        name, cell = exercise.name, _current_cell()
        self._right.pop(name, None)
        if why := _not_handed_in(exercise, cell):
            self._show(exercise, Finding("not attempted", why))
            return
        file = self._write(name, cell)
        finding = self._judge(name, file)
        if learner.read(self._lesson).get(name) != "right":  # what was solved once stays so
            learner.keep(self._lesson, name, finding.status)
        if finding.status == "right":
            self._right[name] = answer, file
        self._show(exercise, finding)

    def _exercise(self, name: str) -> Exercise:
        if name not in self._exercises:
            known = ", ".join(self._exercises)
            raise ValueError(f"name: {self._lesson} has no exercise {name!r}; it has {known}")
        return self._exercises[name]

    def _solution(self, name: str) -> Any:
        return getattr(judge.solutions(self._lesson), self._exercise(name).answer)

    def _judge(self, name: str, file: Path) -> Finding:
        memory = int(MEMORY_SHARE * psutil.virtual_memory().total)
        show = partial(print, end="", flush=True)
        own = paths.state().parent / f"{self._lesson}.ipynb"  # a learner may have changed a kernel cell
        notebook = own if own.exists() else None
        limits: Any = {"seconds": self._limit_s, "memory": memory, "show": show}
        return judge.judge_in_child(self._lesson, name, file, notebook, **limits)

    def _show(self, exercise: Exercise, finding: Finding) -> None:
        """Show the verdict, with the solution below it after some answers that were not right."""
        tried = len(learner.attempt_files(self._lesson, exercise.name))
        offered = finding.status not in ("right", "not attempted") and tried >= OFFERED_AFTER
        display(Verdict(exercise, finding, self._solutions[exercise.name] if offered else ""))

    def _write(self, name: str, cell: str) -> Path:
        """Write an answer to a file before it is run; the files of earlier answers stay."""
        earlier = learner.attempt_files(self._lesson, name)
        for file in earlier:  # run again, it is no other try
            if source_digest(file.read_text(encoding="utf-8")) == source_digest(cell):
                paths.write_text(file, cell)
                return file
        number = int(earlier[-1].stem) + 1 if earlier else 1
        file = learner.attempts(self._lesson) / name / f"{number:04}.py"
        paths.write_text(file, cell)
        return file

    def _take_back(self, name: str, problem: Finding) -> None:
        """A kernel that was right in the interpreter, and is not at the race's sizes on this GPU."""
        del self._right[name]
        learner.keep(self._lesson, name, problem.status)
        self._show(self._exercise(name), problem)

    def _race(self, name: str, beside: Mapping[str, Callable[..., Any]], measured: bool = True) -> Table:
        exercise, known = self._exercise(name), session.current()
        spec = exercise.race
        assert spec is not None, "check has seen that there is one"
        calls = {**race.compiled(spec), **beside, **self.way(name)}
        ways = tuple(Way(each, call, spec.works.get(each, spec.work)) for each, call in calls.items())
        title = f"The race: {exercise.title}"
        how = {"dtype": spec.dtype, "direction": spec.direction, "cache": spec.cache}
        points = [
            Point(title, ways, size, clock=clock, **how)  # type: ignore[arg-type]
            for size in spec.sizes
            for clock in spec.clocks
        ]
        rows = [row for point in points for row in (known.measure if measured else known.find)(point)]
        return Table(title, rows, known.live and measured, known)


def source_digest(source: str) -> str:
    """12 hex digits of a cell's source that do not change with comments and white space."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    words: list[str] = []
    with suppress(tokenize.TokenError, SyntaxError):  # a cell may be unfinished: what could be read counts
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            words += [token.string] if token.type not in skipped else []
    return hashlib.sha256(" ".join(words).strip().encode()).hexdigest()[:12]


def _not_handed_in(exercise: Exercise, cell: str) -> str:
    """Why a cell is not judged: it is as the lesson gives it, has three dots left, or checks twice; or ""."""
    if source_digest(cell) == exercise.untouched:
        return f"The cell is as the lesson gives it. {TO_DO}"
    with suppress(SyntaxError):  # judged, and explained there
        tree = ast.parse(cell)
        calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and each.args]
        names = [call.args[0] for call in calls if ast.unparse(call.func) == "tasks.check"]
        if sum(isinstance(each, ast.Constant) and each.value == exercise.name for each in names) > 1:
            return "The cell hands this task in twice. Keep one tasks.check in a cell."
        for each in list(ast.walk(tree)):
            if isinstance(each, ast.Subscript):
                each.slice = ast.Constant(0)  # x[..., 0] is Python
        dots = [each for each in ast.walk(tree) if isinstance(each, ast.Constant) and each.value is ...]
        if dots:
            return f"Line {dots[0].lineno} of the cell still has three dots. {TO_DO}"
    return ""


def _current_cell() -> str:
    shell = get_ipython()
    if shell is None:
        raise RuntimeError("tasks.check reads the cell that it stands in: run it in a notebook")
    return str(shell.user_ns["In"][-1])


# ---- a verdict, as a learner sees it: a sentence, hints to unfold, the solution ----------------------------

# Okabe-Ito colours, as claims have them; the symbol and the word say the same.
LOOK: dict[JudgeStatus, tuple[str, str]] = {
    "not attempted": ("○", "#0072B2"),
    "right": ("✓", "#009E73"),
    "wrong": ("✗", "#D55E00"),
    "error": ("✗", "#D55E00"),
    "stopped": ("■", "#D55E00"),
    "crashed": ("■", "#D55E00"),
    "interrupted": ("■", "#767676"),
}


@dataclass(frozen=True)
class Verdict:
    """A finding as the learner sees it."""

    exercise: Exercise
    finding: Finding
    solution: str = ""
    """The solution's source; empty where it is not offered."""

    def __str__(self) -> str:
        found = self.finding
        lines = [f"{LOOK[found.status][0]} {self.exercise.title}: {found.status}. {found.observed}"]
        lines += [found.where] if found.where else []
        lines += [f"Hint {number}: {hint}" for number, hint in enumerate(found.hints, start=1)]
        return "\n".join([*lines, *self._advice()])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The verdict as HTML and text; a right one also as data, for whoever counts checks."""
        bundle: dict[str, Any] = {"text/plain": str(self), "text/html": self._html()}
        if self.finding.status == "right":
            bundle[CHECK_MIME] = {"name": self.exercise.name, "passed": self.finding.checks}
        return bundle

    def _advice(self) -> list[str]:
        if self.finding.status in ("right", "not attempted"):
            return []
        return [f'`tasks.solution("{self.exercise.name}")` shows a solution at any time.']

    def _html(self) -> str:
        symbol, colour = LOOK[self.finding.status]
        return (
            f'<div style="border-left:4px solid {colour};padding:0.2em 0.8em;margin:0.4em 0">'
            f'<div><span style="color:{colour}" aria-hidden="true">{symbol}</span> '
            f"{html.escape(self.exercise.title)}: <strong>{self.finding.status}</strong></div>"
            f'<div style="margin:0.3em 0;white-space:pre-line">{_marked(self.finding.observed)}</div>'
            f"{''.join(self._parts())}</div>"
        )

    def _parts(self) -> Iterator[str]:
        if self.finding.where:
            yield f'<pre style="margin:0.3em 0">{html.escape(self.finding.where)}</pre>'
        for number, hint in enumerate(self.finding.hints, start=1):
            yield _folded(f"Hint {number}", f'<div style="padding:0.2em 1.2em">{_marked(hint)}</div>')
        for line in self._advice():
            yield f'<div style="margin:0.2em 0"><small>{_marked(line)}</small></div>'
        if self.solution:
            yield solution_html(self.solution)


def solution_html(source: str) -> str:
    """A solution's source, folded: a click, or Enter on the focused line, opens it."""
    # A long line scrolls, and what scrolls has to be reachable with the keyboard.
    style = "padding:0.2em 1.2em;overflow-x:auto"
    return _folded("Solution", f'<div tabindex="0" style="{style}"><pre>{html.escape(source)}</pre></div>')


def _marked(text: str) -> str:
    """Text as HTML, what stands between backticks as code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(text))


def _folded(summary: str, inside: str) -> str:
    label = f'<summary style="cursor:pointer">{summary}</summary>'
    return f'<details style="margin:0.2em 0">{label}{inside}</details>'
