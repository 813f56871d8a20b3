"""What the tests of every lesson's exercises share: the cells, answers made from them, and their findings."""

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from labkit import attempt, device, exercises, lessons
from labkit.tasks import Task, find, slips

INTERPRETED = pytest.mark.skipif(
    device.has_gpu(),
    reason="checkers watch interpreted kernels; on a GPU they run in the process that test_exercises starts",
)
Table = dict[str, tuple[str, str]]
"""What is wrong with an answer: its cell and the reason that it is refused for."""
Judged = Callable[[str, str], dict[str, Any]]
"""The finding for an exercise's cell: the fixture ``judged``."""


class Answers:
    """The exercises of a lesson as its notebook gives them, their solutions, and changes of these."""

    def __init__(self, lesson: str) -> None:
        self.lesson, self.tasks = lesson, find(lesson)
        self.solutions = exercises.solution_cells(lesson)

    def scaffold(self, name: str) -> str:
        """The one cell of the lesson that hands in this exercise."""
        cells = (cell.source for _, cell in lessons.code_cells(lessons.read(lessons.resolve(self.lesson))))
        (given,) = (source for source in cells if f'tasks.check("{name}"' in source)
        return str(given)

    def solved(self, name: str) -> str:
        """The cell with the solution in it."""
        return f'{self.solutions[name]}\n\n\ntasks.check("{name}", {self.tasks[name].answer})'

    def changed(self, name: str, *pairs: tuple[str, str]) -> str:
        """The solution of an exercise with some of its text replaced."""
        source = self.solved(name)
        for old, new in pairs:
            assert old in source, f"the solution of {name} has no {old!r}"
            source = source.replace(old, new)
        return source

    def finding(self, name: str, source: str, folder: Path) -> dict[str, Any]:
        """What the checker finds in a cell."""
        file = folder / "cell.py"
        file.write_text(source)
        return attempt.judge(self.lesson, self._namespace, name, self.tasks[name], file)

    @cached_property
    def _namespace(self) -> dict[str, Any]:
        return vars(lessons.load(self.lesson))


class ExerciseTests:
    """What holds of every lesson's exercises; a test file's subclass says which, with which other answers."""

    answers: Answers
    others: Mapping[str, tuple[str, str]]
    """Exercise and cell of answers that are right and unlike the solution, by what they do."""
    least_passed: int
    """How many checks a right answer passes at least."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "exercise" in metafunc.fixturenames:
            metafunc.parametrize("exercise", self.answers.tasks)
        if "other" in metafunc.fixturenames:
            metafunc.parametrize("other", self.others.values(), ids=list(self.others))

    @INTERPRETED
    def test_the_solution_is_right(self, judged: Judged, exercise: str) -> None:
        finding = judged(exercise, self.answers.solved(exercise))
        assert finding["status"] == "right", finding
        assert finding["passed"] >= self.least_passed

    @INTERPRETED
    def test_another_right_answer_is_right(self, judged: Judged, other: tuple[str, str]) -> None:
        finding = judged(*other)
        assert finding["status"] == "right", finding

    @INTERPRETED
    def test_the_scaffold_is_not_right_yet(self, judged: Judged, exercise: str) -> None:
        assert judged(exercise, self.answers.scaffold(exercise))["status"] == "wrong"

    def test_the_lesson_gives_the_scaffold(self, exercise: str) -> None:
        assert exercises.digest(self.answers.scaffold(exercise)) == self.answers.tasks[exercise].scaffold


class RefusalTests(ExerciseTests):
    """What holds, besides, where every exercise has tables of wrong answers and of answers that raise."""

    wrong: Mapping[str, Table]
    errors: Mapping[str, Table]
    hints: Mapping[str, dict[str, tuple[str, ...]]]
    elsewhere: Mapping[str, set[str]] = {}
    """Reasons of an exercise that tests of their own try."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        if "raising" in metafunc.fixturenames:
            metafunc.parametrize(("raising", "source", "reason"), cases(self.errors))

    @INTERPRETED
    def test_an_answer_that_raises_gets_hints_of_its_own(
        self, judged: Judged, raising: str, source: str, reason: str
    ) -> None:
        assert_raised(judged(raising, source), reason, self.answers.tasks[raising])

    def test_every_reason_has_a_wrong_answer_and_hints_of_its_own(self, exercise: str) -> None:
        task, hints = self.answers.tasks[exercise], self.hints[exercise]
        assert reasons(self.wrong[exercise]) | self.elsewhere.get(exercise, set()) == set(hints)
        assert {slip.reason for slip in task.slips} <= reasons(self.errors[exercise])
        assert_hints_of_its_own(task, hints)


def cases(tables: Mapping[str, Table]) -> list[Any]:
    """Exercise, cell and reason of every wrong answer, for parametrize."""
    return [
        pytest.param(name, source, reason, id=f"{name}: {what}")
        for name, table in tables.items()
        for what, (source, reason) in table.items()
    ]


def reasons(table: Table) -> set[str]:
    """For what the answers of a table are refused."""
    return {reason for _, reason in table.values()}


def assert_refused(finding: dict[str, Any], reason: str, hints: dict[str, tuple[str, ...]]) -> None:
    """A wrong answer was refused for this reason, with its hints and what was observed."""
    assert finding["status"] == "wrong", finding
    assert finding["reason"] == reason, finding
    assert finding["hints"] == list(hints[reason])
    assert finding["observed"]


def assert_raised(finding: dict[str, Any], reason: str, task: Task) -> None:
    """An answer's exception was taken for this slip, and got all of its hints."""
    assert finding["status"] == "raised", finding
    assert finding["reason"] == reason, finding
    (slip,) = (slip for slip in (*task.slips, *slips.ANYWHERE) if slip.reason == reason)
    assert len(finding["hints"]) == len(slip.hints)


def assert_hints_of_its_own(
    task: Task, hints: dict[str, tuple[str, ...]], shared: tuple[str, ...] = ()
) -> None:
    """Of an exercise's reasons and errors: two hints or more for each, and none twice but the shared ones."""
    of_errors = [slip.hints for slip in (*task.slips, *slips.ANYWHERE)]
    told = [hint for each in (*hints.values(), *of_errors) for hint in each if hint not in shared]
    assert len(told) == len(set(told))
    assert all(len(each) >= 2 for each in (*hints.values(), *of_errors))


def code_lines(source: str) -> list[str]:
    """Lines of a cell without comments, docstrings aside."""
    lines = (re.sub(r"\s*#.*", "", line) for line in source.splitlines())
    return [line for line in lines if line.strip()]
