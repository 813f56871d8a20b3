"""A lesson's tasks in this session: a cell is judged, and what is right is raced in the same cell.

``tasks = lab.lesson("launch_overhead")``; then a cell that writes a function ends with
``raced = tasks.check("affine", affine)``.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from IPython.display import display

from labkit import gpu, interpreter, notebooks, paths
from labkit.display.style import interactive, show
from labkit.display.table import Table, plain_table
from labkit.exercises import judge, progress, race
from labkit.exercises.engine import Exercise, Finding, RaceSpec
from labkit.exercises.lesson import ExerciseSession, show_verdict
from labkit.measure import launch_counts, session
from labkit.measure.session import Point, Way

MOST_PROGRAMS = 4000
"""Of a launch that is counted: an interpreted program takes half a millisecond."""
COUNTED_ROWS = 256
"""So many rows at most are counted: the others would add as much for each row."""


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
    show(f"<p><small>{where}</small></p>", where)
    return Tasks(notebooks.name_of(path))


class Tasks(ExerciseSession):
    """The tasks of one lesson in this session of a notebook."""

    def check(  # type: ignore[override]
        self, name: str, answer: Any, beside: Mapping[str, Callable[..., Any]] | None = None
    ) -> Table | None:
        """Judge the cell that this call stands in, show the verdict, and race what is right.

        ``beside`` are ways of the lesson's own to race it with, by name; the task has those of libraries.
        Returns the race: the learner's kernel beside the others, or the solution where the learner's cannot
        be raced; None for a task without a race. ValueError for an unknown name.
        """
        beside = beside or {}
        exercise = self._exercise(name)
        super().check(name, answer)
        if exercise.race is None:
            return None
        if name in self._right and exercise.race.counted and not gpu.available():
            count(exercise, self._right[name][0], beside)
        if name in self._right and (
            problem := race.problem_at_size(self._lesson, exercise, self._right[name][1])
        ):
            self._take_back(name, problem)
        if name not in self._right and interactive():  # nothing is measured for an answer that is not right
            return self._race(name, beside, measured=False)
        table = self._race(name, beside)
        display(table)
        return table

    def way(self, name: str, called: str = "") -> dict[str, Callable[..., Any]]:
        """The learner's kernel as a way for ``lab.race`` and ``lab.sweep``: {"your kernel": ...}.

        It is {"the solution": ...} until this session's last verdict was right, and where there is no GPU.
        ``called`` is its name in either case, if it is given.
        """
        exercise = self._exercise(name)
        as_layer = race.race_of(exercise).as_layer if exercise.race else lambda call: call
        mine = name in self._right and gpu.available()
        call = self._right[name][0] if mine else self._solution(name)
        return {called or ("your kernel" if mine else "the solution"): as_layer(call)}

    def hint(self, name: str) -> None:
        """Show one hint more for the mistake of this session's last answer."""
        exercise, finding = self._exercise(name), self._findings.get(name)
        if finding is None or not finding.hints:
            said = "There is no hint: hints are for the mistake of the last answer that was run here."
            show(f"<p>{said}</p>", said)
            return
        with progress.updated(self._lesson, name) as record:
            record.hints += 1
            verdict = self._verdict(exercise, finding, "", record)
        show_verdict(verdict)

    def progress(self) -> None:
        """Show the tasks of all lessons: open, tried or solved, and how many tries there were."""
        lessons = [path for path in notebooks.find() if path.parent == paths.NOTEBOOKS]
        if not interactive():  # what is saved in a notebook is about this lesson, and nobody's own
            lessons = [notebooks.resolve(self._lesson)]
        table = progress.table(lessons)
        show(plain_table(list(table), table.to_numpy().tolist()), table.to_string(index=False))

    def _solution(self, name: str) -> Any:
        return getattr(judge.solutions(self._lesson), self._exercise(name).answer)

    def _take_back(self, name: str, problem: Finding) -> None:
        """A kernel that was right in the interpreter, and is not at the race's sizes on this GPU."""
        exercise, _ = self._exercise(name), self._right.pop(name)
        self._findings[name] = problem
        with progress.updated(self._lesson, name) as record:
            verdict = self._verdict(exercise, problem, "", record)
            record.status = verdict.status
        show_verdict(verdict)

    def _race(self, name: str, beside: Mapping[str, Callable[..., Any]], measured: bool = True) -> Table:
        exercise, known = self._exercise(name), session.current()
        spec = race.race_of(exercise)
        calls = {**compiled(spec), **beside, **self.way(name)}
        ways = tuple(Way(each, call, spec.works.get(each, spec.work)) for each, call in calls.items())
        title = f"The race: {exercise.title}"
        how = {"dtype": spec.dtype, "direction": spec.direction, "cache": spec.cache}
        points = [
            Point(title, ways, size, clock=clock, **how)  # type: ignore[arg-type]
            for size in race.sizes_of(spec)
            for clock in spec.clocks
        ]
        rows = [row for point in points for row in (known.measure if measured else known.find)(point)]
        return Table(title, rows, known.live and measured, known)


def compiled(spec: RaceSpec) -> dict[str, Callable[..., Any]]:
    """The rivals of a race, 'torch.compile' compiled."""
    return {
        name: torch.compile(call, dynamic=False) if name == "torch.compile" else call
        for name, call in spec.rivals.items()
    }


def count(exercise: Exercise, answer: Callable[..., Any], beside: Mapping[str, Callable[..., Any]]) -> None:
    """Race by what can be counted without a GPU: launches, and bytes that are read and written.

    An address that is read again counts once: on a GPU it comes from a cache, if it is read again soon.
    """
    spec = race.race_of(exercise)
    size, dtype = dict(race.sizes_of(spec)[0]), getattr(torch, spec.dtype)
    if "batch" in size:
        size["batch"] = min(size["batch"], COUNTED_ROWS)
    lines = []
    for name, call in {**spec.rivals, **beside, "your kernel": spec.as_layer(answer)}.items():
        if name in ("torch.compile", "labkit"):  # the one is not compiled here, the other is launched alike
            continue
        given = [each.to(dtype) for each in spec.work.inputs(size)]
        try:
            lines.append((name, *map("{:,}".format, moved(*counted(call, given, spec.direction)))))
        except _TooManyProgramsError:
            lines.append((name, "", "more programs than are counted here", "", ""))
    read, written = sum(each.nbytes for each in given), spec.work.reference(*given).nbytes
    if spec.direction == "backward":  # the inputs and dy, and the gradients of the inputs
        read, written = read + written, read
    lines.append(("each number once", "1", f"{read:,}", f"{written:,}", f"{read + written:,}"))
    heads = ["", "launches", "bytes read", "bytes written", "in all"]
    where = ", ".join(f"{axis} {count}" for axis, count in size.items())
    said = (
        f"Counted here, in the interpreter: {where}, {spec.dtype}. "
        "A number counts once for each launch that reads it, however often the launch does."
    )
    if len({line[1:] for line in lines}) == 1:  # no table of lines that are alike
        who = "All of these ways touch" if len(lines) > 2 else "Your kernel touches"
        alike = f"{who} as few bytes as can be, {lines[0][-1]}. {said}"
        show(f"<p><small>{alike}</small></p>", alike)
        return
    text = "\n".join("  ".join(line) for line in (heads, *lines))
    show(f"{plain_table(heads, lines)}<p><small>{said}</small></p>", f"{text}\n{said}")


def counted(
    call: Callable[..., Any], given: list[torch.Tensor], direction: str
) -> tuple[Callable[..., Any], list[Any]]:
    """What is counted of a way, its forward or its backward pass alone, and what that is called with."""
    if direction == "forward":
        return torch.no_grad()(call), given
    leaves = [each.detach().requires_grad_() for each in given]
    y = call(*leaves)
    return torch.autograd.grad, [y, leaves, torch.randn_like(y)]


def moved(call: Callable[..., Any], given: list[Any]) -> tuple[int, int, int, int]:
    """Of a call without a GPU: launches, bytes read, bytes written, and both. Each address counts once."""
    addresses = _Addresses()
    with interpreter.watching(addresses):
        made = launch_counts.count(lambda: call(*given)).launches
    read = sum(one.bytes_read for one in made if not one.programs) + addresses.bytes(addresses.loads)
    written = sum(one.bytes_written for one in made if not one.programs) + addresses.bytes(addresses.stores)
    return len(made), read, written, read + written


class _TooManyProgramsError(Exception):
    """So many that an interpreter would take long."""


class _Addresses(interpreter.Observer):
    """The distinct addresses that interpreted kernels load and store, with how many bytes lie at each."""

    def __init__(self) -> None:
        self.loads: dict[int, set[int]] = {}
        self.stores: dict[int, set[int]] = {}

    def grid(self, *sizes: int) -> None:
        if math.prod(sizes) > MOST_PROGRAMS:
            raise _TooManyProgramsError

    def load(self, addresses: Any, size: int, unfilled: bool) -> None:
        self.loads.setdefault(size, set()).update(addresses.tolist())

    def store(self, addresses: Any, size: int) -> None:
        self.stores.setdefault(size, set()).update(addresses.tolist())

    def bytes(self, seen: dict[int, set[int]]) -> int:
        """How many bytes lie at the addresses seen."""
        return sum(size * len(places) for size, places in seen.items())
