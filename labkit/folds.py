"""What is folded away on a lesson's page: exercises with their solutions, asides, answers to guesses."""

import html
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy

from nbconvert.filters.highlight import Highlight2HTML
from nbformat import NotebookNode

from labkit import lessons
from labkit.exercises.verdicts import solution_html
from labkit.runs import record

ASIDE = "An aside"
"""How the heading of an aside begins."""


def folded(notebook: NotebookNode, solutions: Mapping[str, str]) -> NotebookNode:
    """A copy whose cells say in their metadata which HTML stands ``before`` and ``after`` each of them.

    ValueError for an exercise that has no solution among ``solutions``, or hands in nothing.
    """
    made = deepcopy(notebook)
    made.metadata.pop("widgets", None)
    for cell in made.cells:
        cell.metadata.update(before="", after="")
        if cell.cell_type == "code":
            cell.outputs = record.still(cell.outputs)
        if "exercise" in lessons.tags(cell):
            _fold_exercise(cell, solutions)
        elif cell.metadata.get("jupyter", {}).get("outputs_hidden"):
            _fold([cell], "The answer, and how it was measured")
    for section in asides(made.cells):
        _fold(section, heading(section[0].source))
    return made


def asides(cells: Iterable[NotebookNode]) -> list[list[NotebookNode]]:
    """The sections called "An aside": each from the cell that begins with such a heading to the next heading
    that begins a cell."""
    found: list[list[NotebookNode]] = []
    inside = False
    for cell in cells:
        if cell.cell_type == "markdown" and (said := heading(cell.source)):
            inside = said.startswith(ASIDE)
            found += [[]] if inside else []
        if inside:
            found[-1].append(cell)
    return found


def heading(text: str) -> str:
    """The heading of the first or second level that a text begins with, without marks; empty where there is
    none."""
    found = re.match(r"#{1,2} (.*)", text)
    return re.sub(r"[`*]", "", found[1]) if found else ""


def _fold(cells: list[NotebookNode], summary: str) -> None:
    """Fold neighbours under one line to click."""
    cells[0].metadata.before = f"<details><summary>{html.escape(summary)}</summary>{cells[0].metadata.before}"
    cells[-1].metadata.after += "</details>"


def _fold_exercise(cell: NotebookNode, solutions: Mapping[str, str]) -> None:
    name = lessons.exercise_of(cell)
    if name not in solutions:
        raise ValueError(f"cell {cell.id}: there is no solution of the exercise {name!r}")
    cell.outputs = []  # "not attempted" says nothing to a reader
    coloured = Highlight2HTML(pygments_lexer="python3")(solutions[name])
    cell.metadata.after = solution_html(solutions[name], coloured)
    _fold([cell], f"Exercise: {name}")
