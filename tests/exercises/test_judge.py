"""Answers to every exercise: the table in answers/NN_name.txt says what is found in each."""

import re
from pathlib import Path

import pytest
import triton

from labkit.exercises import judge
from labkit.exercises.lesson import _untouched
from labkit.lessons import notebooks

LESSONS = [path.stem for path in notebooks.find()]


def answers(lesson):
    """Exercise, verdict, label and cell of each answer in a lesson's file.

    Lines that begin with - and + are text of the solution and what stands in its place.
    """
    solutions = notebooks.solution_cells(notebooks.resolve(lesson))
    text = (Path(__file__).parent / "answers" / f"{lesson}.txt").read_text()
    for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        head, _, body = entry.partition("\n")
        name, expected, label = head.split(" | ")
        cell = body.strip("\n")
        if re.match("[-+] ", cell):
            changes = re.findall(r"((?:^- .*\n)+)((?:^\+ .*(?:\n|\Z))+)", cell, re.MULTILINE)
            cell = f"{solutions[name]}\n"
            for change in changes:
                old, new = ("\n".join(line[2:] for line in part.splitlines()) for part in change)
                assert old in cell, f"{label}: the solution of {name} has no {old!r}"
                cell = cell.replace(old, new)
        yield name, expected, label, cell


TABLE = {lesson: list(answers(lesson)) for lesson in LESSONS}


def found(lesson, name, source, folder):
    """The finding for a cell, from the process that judges."""
    file = folder / "cell.py"
    file.write_text(f'{source}\n\ntasks.check("{name}", {judge.find(lesson)[name].answer})\n')
    return judge.judge_in_child(lesson, name, file, seconds=60.0, memory=8 * 2**30)


@pytest.mark.parametrize(
    ("lesson", "name", "expected", "source"),
    [
        pytest.param(lesson, name, expected, cell, id=f"{lesson[:2]}-{name}-{expected}-{label}")
        for lesson, table in TABLE.items()
        for name, expected, label, cell in table
    ],
)
def test_an_answer_gets_its_verdict(lesson, name, expected, source, tmp_path):
    finding = found(lesson, name, source, tmp_path)
    if expected in ("right", "error"):
        assert finding.status == expected, finding
    else:
        if expected == "sums-in-16-bits" and finding.status == "wrong" and triton.__version__ >= "3.8":
            expected = "rounded-twice"  # tl.dot takes such a sum there, and the exercise's property finds it
        assert finding.status in ("wrong", "error") and (finding.mistake or "unknown") == expected, finding
        assert bool(finding.hints) == (expected != "unknown"), "hints for a known mistake, else numbers"


@pytest.mark.parametrize("lesson", LESSONS)
def test_solutions_are_right_and_untouched_cells_are_known(lesson, tmp_path):
    cells = [cell["source"] for cell in notebooks.read_json(notebooks.resolve(lesson))["cells"]]
    handed_in = {notebooks.exercise_of({"source": s, "id": ""}): s for s in cells if "tasks.check(" in s}
    solutions = notebooks.solution_cells(notebooks.resolve(lesson))
    assert set(handed_in) == set(judge.find(lesson)) == set(solutions)
    for name, exercise in judge.find(lesson).items():
        finding = found(lesson, name, solutions[name], tmp_path)
        assert finding.status == "right" and finding.checks, finding
        assert _untouched(exercise, handed_in[name])
        assert not _untouched(exercise, solutions[name])


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_mistake_is_told_by_the_table_and_has_two_or_three_hints(lesson):
    for name, exercise in judge.find(lesson).items():
        told = [expected for of, expected, _, _ in TABLE[lesson] if of == name]
        assert set(exercise.mistakes) <= set(told)
        assert told.count("right") >= 5
        assert all(2 <= len(each.hints) <= 3 for each in exercise.mistakes.values())
