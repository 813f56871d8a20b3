"""docs/teaching.md: what it names exists, what it quotes is said, its minutes add up."""

import re
import runpy
from types import SimpleNamespace

import pytest
from test_readme import check

from labkit import paths
from labkit.exercises import judge
from labkit.lessons import notebooks

TEACHING = SimpleNamespace(**runpy.run_path(str(paths.CHECKOUT / "docs" / "teaching.py")))
TEXT = TEACHING.PAGE.read_text(encoding="utf-8")
PARTS = {path: part for path, part in TEACHING.sections(TEXT) if path is not None}


def minutes(text):
    """Of the first table: the names of its rows, and its columns of minutes, in each of which the last
    number is the total."""
    (table, *_) = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    rows = [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    columns = [
        [int(cell or 0) for cell in column] for column in zip(*rows, strict=True) if column[-1].isdigit()
    ]
    return [name for name, *_ in rows], columns


def test_each_lesson_has_its_part_in_order():
    assert list(PARTS) == notebooks.find()
    numbers = re.findall(r"^## Lesson (\d): ", TEXT, re.MULTILINE)
    assert numbers == [str(int(path.stem[:2])) for path in PARTS]


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.stem)
def test_its_plan_exercises_and_questions_are_those_of_the_lesson(path):
    cells = notebooks.read_json(path)["cells"]
    prose, code = (
        "\n".join(cell["source"] for cell in cells if cell["cell_type"] == kind)
        for kind in ("markdown", "code")
    )
    names, columns = minutes(PARTS[path])
    assert set(names[:-1]) <= set(re.findall(r"^## (.+)$", prose, re.MULTILINE))
    assert all(sum(given) == total for *given, total in columns)
    assert sum(total for *_, total in columns) == 60, "a lesson takes an hour: so it says itself"
    named = re.findall(r"\*\*Errors in `(\w+)`\.\*\*", PARTS[path])
    assert sorted(named) == sorted(judge.find(path.stem))
    asked = re.findall(r"\*\*Ask:\*\* (.+)", PARTS[path])
    assert asked and not [question for question in asked if f'"{question}"' not in code]


@pytest.mark.parametrize(
    ("name", "whole"), [("90 minutes: one layer", 90), ("Half a day", 210), ("A day", 420), ("Two days", 840)]
)
def test_agendas_add_up(name, whole):
    _, ((*given, total), *_) = minutes(TEXT.partition(f"### {name}\n")[2])
    assert sum(given) == total == whole


def test_recorded_answers_and_claims_are_those_of_the_notebooks():
    assert TEACHING.renew(TEXT) == TEXT, "run `python -m docs.teaching`"
    with pytest.raises(ValueError, match="no recorded claim is like 'twice as fast'"):
        TEACHING.renewed_claim("twice as fast", ["3 times as fast"])


def test_links_lead_to_files_and_commands_exist():
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert links and not [link for link in links if not (TEACHING.PAGE.parent / link).is_file()]
    quoted = "".join(line for line in TEXT.splitlines(keepends=True) if not line.lstrip().startswith(">"))
    commands = set(re.findall(r"`((?:make|labkit|python) [^`]+)`", quoted))
    assert len(commands) >= 5
    for command in commands:
        check(command)
