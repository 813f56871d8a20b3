"""What is folded away on a lesson's page: exercises with their solutions, asides, answers to guesses."""

import html
import re
from collections.abc import Mapping
from copy import deepcopy

from nbconvert.filters.highlight import Highlight2HTML
from nbformat import NotebookNode

from labkit import lessons, record
from labkit.verdicts import solution_html

FOLDED = "jp-MarkdownHeadingCollapsed"


def folded(notebook: NotebookNode, solutions: Mapping[str, str]) -> NotebookNode:
    """A copy whose cells say in their metadata which HTML stands ``before`` and ``after`` each of them.

    ValueError for an exercise that has no solution among ``solutions``.
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
    for section in _asides(made.cells):
        _fold(section, re.sub(r"^#+ |[`*]", "", section[0].source.splitlines()[0]))
    return made


def _fold(cells: list[NotebookNode], summary: str) -> None:
    """Fold neighbours under one line to click."""
    cells[0].metadata.before = f"<details><summary>{html.escape(summary)}</summary>{cells[0].metadata.before}"
    cells[-1].metadata.after += "</details>"


def _fold_exercise(cell: NotebookNode, solutions: Mapping[str, str]) -> None:
    named = re.search(r'^tasks\.check\("(\w+)"', cell.source, re.MULTILINE)
    name = named[1] if named else ""
    if name not in solutions:
        raise ValueError(f"cell {cell.id}: there is no solution of the exercise {name!r}")
    cell.outputs = []  # "not attempted" says nothing to a reader
    coloured = Highlight2HTML(pygments_lexer="python3")(solutions[name])
    cell.metadata.after = solution_html(solutions[name], coloured)
    _fold([cell], f"Exercise: {name}")


def _asides(cells: list[NotebookNode]) -> list[list[NotebookNode]]:
    """The sections that JupyterLab opens folded: from such a heading to the next heading."""
    found: list[list[NotebookNode]] = []
    inside = False
    for cell in cells:
        if cell.cell_type == "markdown" and re.match(r"#{1,2} ", cell.source):
            inside = bool(cell.metadata.get(FOLDED))
            found += [[]] if inside else []
        if inside:
            found[-1].append(cell)
    return found
