"""notebooks/TEACHING.md: what it names exists, what it quotes is said, its minutes add up."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_readme import check

from labkit import exercises, lessons, places, tasks

TEACHING = SimpleNamespace(**runpy.run_path(str(places.CHECKOUT / "docs" / "teaching.py")))
TEXT = TEACHING.PAGE.read_text(encoding="utf-8")
PARTS = {path: part for path, part in TEACHING.sections(TEXT) if path is not None}
every_part = pytest.mark.parametrize("path", PARTS, ids=lambda path: path.stem)


def headings(path: Path) -> set[str]:
    cells = lessons.look(path)["cells"]
    prose = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    return set(re.findall(r"^## (.+)$", prose, re.MULTILINE))


def tables(text: str) -> Iterator[list[list[str]]]:
    """The rows of each table below its heading, without bold marks."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in block.splitlines()]
        yield rows[2:]


def minutes(cell: str) -> int:
    return int(cell or 0)


# --- lessons, exercises, questions ----------------------------------------------------------------------


def test_each_lesson_has_its_part_in_order() -> None:
    assert list(PARTS) == lessons.find()
    numbers = re.findall(r"^## Lesson (\d): ", TEXT, re.MULTILINE)
    assert numbers == [str(int(path.stem[:2])) for path in PARTS]


@every_part
def test_its_plan_names_sections_of_the_lesson_and_adds_up(path: Path) -> None:
    (plan,) = tables(PARTS[path])
    *rows, total = plan
    assert {name for name, *_ in rows} <= headings(path)
    sums = [sum(minutes(row[column]) for row in rows) for column in (1, 2)]
    assert sums == [minutes(total[1]), minutes(total[2])]
    assert sum(sums) == 60, "a lesson takes an hour: so it says itself"


@every_part
def test_every_section_has_minutes_or_is_said_to_have_none(path: Path) -> None:
    (plan,) = tables(PARTS[path])
    left_out = re.search(r"^Run, and read at home: ((?:.+\n)+)", PARTS[path], re.MULTILINE)
    named = {name for name, *_ in plan[:-1]}
    named |= set(re.findall(r"\*(.+?)\*", left_out[1].replace("\n", " "))) if left_out else set()
    assert named == {name for name in headings(path) if not name.startswith("An aside: ")}


@every_part
def test_its_exercises_are_those_of_the_lesson(path: Path) -> None:
    named = re.findall(r"\*\*Errors in `(\w+)`\.\*\*", PARTS[path])
    assert sorted(named) == sorted(tasks.find(path.stem))


@every_part
def test_its_questions_are_those_of_the_notebook(path: Path) -> None:
    source = "\n".join(cell["source"] for _, cell in lessons.code_cells(lessons.look(path)))
    asked = re.findall(r"\*\*Ask:\*\* (.+)", PARTS[path])
    assert asked and not [question for question in asked if f'"{question}"' not in source]


@every_part
def test_its_parts_are_all_there(path: Path) -> None:
    for name in ("Board", "Late?", "Smaller GPU", "No GPU"):
        assert f"**{name.rstrip('.')}" in PARTS[path], name


def test_sections_that_are_named_in_passing_exist() -> None:
    for path, part in PARTS.items():
        prose = re.sub(r"^[|>].*$|\*\*(?:Ask|Claim):\*\*.*$", "", part, flags=re.MULTILINE)
        prose = re.sub(r"`[^`]*`|\*\*", "", prose).replace("\n", " ")
        assert set(re.findall(r"(?<!\w)\*(.+?)\*", prose)) <= headings(path) | {"Not held"}, path.stem
    for number, rest in re.findall(r"Lesson (\d)(.*)\|$", TEXT, re.MULTILINE):
        assert set(re.findall(r"\*(.+?)\*", rest)) <= headings(lessons.resolve(f"0{number}"))


# --- agendas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "whole"), [("90 minutes: one layer", 90), ("Half a day", 210), ("A day", 420)]
)
def test_agendas_add_up(name: str, whole: int) -> None:
    part = TEXT.partition(f"### {name}\n")[2]
    *rows, total = next(tables(part))
    assert sum(minutes(row[0]) for row in rows) == minutes(total[0]) == whole


# --- what it quotes -------------------------------------------------------------------------------------


def said(node: ast.AST) -> str | None:
    """A string of the code as a learner sees it, … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{[\w:.]+\}", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return None


MESSAGES = [
    text
    for file in (places.CHECKOUT / "labkit").rglob("*.py")
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    if (text := said(node))
]
QUOTES = re.findall(r"^ *> (.+)$", TEXT, re.MULTILINE)


def is_said(quote: str) -> bool:
    pattern = ".*".join(re.escape(part.strip()) for part in quote.split("…"))
    return any(re.search(pattern, message, re.DOTALL) for message in MESSAGES)


def test_what_it_quotes_is_said_by_the_code() -> None:
    assert len(QUOTES) > 50
    assert not [quote for quote in QUOTES if not is_said(quote)]
    assert not is_said("Python counts from 1. What is the number of the last element of a tensor of 10?")


def test_the_solution_comes_when_it_says() -> None:
    assert "so does the third attempt" in TEXT and exercises.OFFERED_FROM == 3


# --- numbers --------------------------------------------------------------------------------------------


def test_recorded_answers_and_claims_are_those_of_the_notebooks() -> None:
    assert TEACHING.renew(TEXT) == TEXT, "run `python -m docs.teaching`"


def test_measured_numbers_stand_in_claims_and_answers_only() -> None:
    prose = re.sub(r"\*\*(?:Claim|Recorded|Ask):\*\* .+|^ *> .+", "", TEXT, flags=re.MULTILINE)
    assert not re.findall(r"\d\s*(?:times|×|%|[µm]?s|[GT]B/s|TFLOP\S*)\b", prose)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("bf16, width 161: 3 times.", "bf16, width 161: 2.5 times."), ("off by 0.", "off by 1e-03.")],
)
def test_a_claim_gets_the_recorded_number(text: str, wanted: str) -> None:
    known = ["bf16, width 160: 9 times.", "bf16, width 161: 2.5 times.", "off by 1e-03."]
    assert TEACHING.renewed_claim(text, known) == wanted


def test_a_claim_that_nobody_makes_is_an_error() -> None:
    with pytest.raises(ValueError, match="no recorded claim is like 'twice as fast'"):
        TEACHING.renewed_claim("twice as fast", ["3 times as fast"])


# --- links and commands ---------------------------------------------------------------------------------


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert links and not [link for link in links if not (TEACHING.PAGE.parent / link).is_file()]


def test_commands_exist() -> None:
    quoted = "".join(line for line in TEXT.splitlines(keepends=True) if not line.lstrip().startswith(">"))
    found = set(re.findall(r"`((?:make|labkit|python) [^`]+)`", quoted))
    assert len(found) >= 5
    for command in found:
        check(command)
