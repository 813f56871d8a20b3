"""Cuts a lesson into slides.

A cell is on slides unless it is tagged ``setup`` or ``parameters`` or belongs to an aside. Its slide type,
as JupyterLab's property inspector sets it, overrules that: ``skip`` leaves the cell out, ``slide`` and
``subslide`` show it. A heading begins a section of the deck. Prose is parted between paragraphs, at need
between sentences, so that no slide holds more than a room can read. A kernel's cell shows its source, any
other code cell what it put out. Exercises belong to the notebook: the deck only names them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from labkit import claims, folds, lessons
from labkit.runs import record

LINE = 74
"""Characters of prose in a line, at the size that `data/reveal/labkit.css` gives them."""
LINES = 11
"""Lines of prose on a slide."""
CODE_LINES = 24
"""Lines of code on a slide."""
ROOM = 600
"""Pixels for what a cell put out, on a slide 720 high."""
FIGURE = 380
"""Pixels that a figure has to have; it takes what the others leave."""
SMALLER = 84
"""Characters from which on a line of code needs the smaller letters."""
UNSEEN = {"setup", "parameters"}
"""Tags of cells that no slide shows, unless they say so."""
KINDS = ("slide", "subslide", "skip")


def kind(cell: NotebookNode, default: str = "subslide") -> str:
    """A cell's slide type, ``default`` for one without; ValueError for one that is none of KINDS."""
    said = str(cell.metadata.get("slideshow", {}).get("slide_type") or default)
    if said not in KINDS:
        known = ", ".join(KINDS)
        raise ValueError(f"cell {cell.id}: its slide type is {said!r}, but has to be one of {known}, or none")
    return said


def cut(notebook: NotebookNode) -> NotebookNode:
    """A notebook with one cell for each slide; what cells put out is kept as it was saved.

    ValueError for a cell with an unknown slide type, or an exercise that hands in nothing.
    """
    made = deepcopy(notebook)
    made.metadata.pop("widgets", None)
    made.cells = [
        _placed(cell, "slide" if begins else "subslide", section)
        for cell, begins, section in _slides(notebook.cells)
    ]
    return made


def _slides(cells: Sequence[NotebookNode]) -> Iterator[tuple[NotebookNode, bool, str]]:
    """Each slide's cell, whether it begins a section, and the heading to repeat over it."""
    section = ""
    for cell in _seen(cells):
        tags = lessons.tags(cell)
        if cell.cell_type == "markdown":
            for heading, text in sections(cell.source):
                section = heading or section
                for number, piece in enumerate(pieces(text)):
                    begins = bool(heading) and number == 0
                    yield new_markdown_cell(piece), begins, "" if begins else section
        elif "exercise" in tags:
            yield new_markdown_cell(_your_turn(cell)), False, section
        elif lessons.KERNEL in tags:
            for source in code_pieces(cell.source):
                yield new_code_cell(source), False, section
        else:
            for outputs in output_groups(record.still(cell.outputs)):
                shown = new_code_cell(outputs=outputs)
                shown.metadata.transient = {"remove_source": True}  # what nbconvert's own filters set
                yield shown, False, section


def _seen(cells: Sequence[NotebookNode]) -> Iterator[NotebookNode]:
    """The cells that are on slides."""
    aside = {id(cell) for section in folds.asides(cells) for cell in section}
    for cell in cells:
        unseen = id(cell) in aside or UNSEEN & set(lessons.tags(cell))
        if kind(cell, "skip" if unseen else "subslide") != "skip":
            yield cell


def _placed(cell: NotebookNode, slide_type: str, section: str) -> NotebookNode:
    data = {"title": section} if section else {}
    if max(map(len, cell.source.splitlines()), default=0) > SMALLER and cell.cell_type == "code":
        data["code"] = "small"
    cell.metadata.slideshow = {"slide_type": slide_type, "data": data}
    return cell


def _your_turn(cell: NotebookNode) -> str:
    return f"### Your turn: `{lessons.exercise_of(cell)}`\n\nThe exercise is in the notebook."


def sections(text: str) -> Iterator[tuple[str, str]]:
    """A cell's prose parted before each heading: the heading without marks (or nothing), and the text."""
    for part in re.split(r"^(?=#{1,2} )", text, flags=re.MULTILINE):
        if part.strip():
            yield folds.heading(part), part.strip()


def pieces(text: str) -> list[str]:
    """Prose in pieces that fill no more than a slide, parted where a reader would pause."""
    found: list[list[str]] = [[]]
    room = float(LINES)
    for block in _blocks(text):
        height = _height(block)
        if found[-1] and height > room and not _is_heading(found[-1][-1]):
            found.append([])
            room = LINES
        found[-1].append(block)
        room -= height
    return ["\n\n".join(piece) for piece in found if piece]


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs, list items, tables and fenced blocks; a paragraph longer than a slide comes in parts."""
    for part in re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL):
        if part.startswith("```"):
            yield part
            continue
        for paragraph in filter(None, (block.strip() for block in part.split("\n\n"))):
            if re.match(r"(\d+\.|-) ", paragraph):
                yield from re.split(r"\n(?=\d+\. |- )", paragraph)
            elif paragraph.startswith(("|", "#")):
                yield paragraph
            else:
                yield from _sentences(paragraph)


def _sentences(paragraph: str) -> Iterator[str]:
    """A paragraph in as few parts of about the same length as fit on slides, each of whole sentences."""
    parts = -(-len(paragraph) // (LINE * (LINES - 2)))
    wanted, part = len(paragraph) / parts, ""
    for sentence in re.split(r"(?<=[.?!:]) (?=[A-Z`*\"(])", paragraph):
        if part and len(part) + len(sentence) / 2 > wanted and _is_whole(part):
            yield part
            part = sentence
        else:
            part = f"{part} {sentence}".lstrip()
    yield part


def _is_whole(text: str) -> bool:
    """Whether no mark, bracket or quotation is left open at the end."""
    return not (text.count("`") % 2 or text.count("**") % 2 or text.count('"') % 2) and text.count(
        "("
    ) == text.count(")")


def _is_heading(block: str) -> bool:
    return block.startswith("#") and "\n" not in block


def _height(block: str) -> float:
    """Lines of prose that a block takes the place of."""
    lines = block.splitlines()
    if block.startswith("```"):
        return 0.7 * len(lines)
    if block.startswith("|"):
        return 1.3 * len(lines)
    if block.startswith("#"):
        return 2.0 * -(-len(block) // 52)
    return -(-len(block) // LINE) + 0.5


def code_pieces(source: str) -> list[str]:
    """A cell's code in pieces that fit a slide: parted between functions, a long one in the middle."""
    found = [""]
    for part in re.split(r"\n\n\n", source):
        joined = f"{found[-1]}\n\n\n{part}".lstrip("\n")
        if _count(joined) <= CODE_LINES:
            found[-1] = joined
        else:
            found += _evenly(part)
    return [piece for piece in found if piece.strip()]


def _evenly(part: str) -> list[str]:
    """A function's lines in as few parts of the same length as fit."""
    lines = part.splitlines()
    count = -(-len(lines) // CODE_LINES)
    size = -(-len(lines) // count)
    return ["\n".join(lines[start : start + size]) for start in range(0, len(lines), size)]


def _count(text: str) -> int:
    return text.count("\n") + 1


def output_groups(outputs: Iterable[NotebookNode]) -> list[list[NotebookNode]]:
    """What a cell put out, in slides: in order, one figure at most on each, with what leaves it room."""
    found: list[list[NotebookNode]] = [[]]
    room = ROOM
    for output in outputs:
        height = output_height(output)
        if found[-1] and (height > room or any(map(_is_figure, found[-1]))):
            found.append([])
            room = ROOM
        found[-1].append(output)
        room -= height
    return [group for group in found if group]


def _html(output: NotebookNode) -> str:
    return str(output.get("data", {}).get("text/html", ""))


def _is_figure(output: NotebookNode) -> bool:
    return "<img" in _html(output)


def _row_lines(row: str) -> int:
    """Lines that the text of a table's row takes, about."""
    text = " ".join(re.sub(r"<[^>]*>", " ", row).split())
    return -(-len(text) // LINE) or 1


def output_height(output: NotebookNode) -> int:
    """Pixels that an output takes of a slide, about."""
    data: dict[str, Any] = output.get("data", {})
    if claims.MIME in data:
        return 34 * -(-len(data["text/plain"]) // 105) + 12
    if _is_figure(output):
        return FIGURE
    if rows := re.findall(r"<tr.*?</tr>", _html(output), re.DOTALL):
        return 36 * sum(map(_row_lines, rows))
    text = str(output.get("text") or data.get("text/plain", ""))
    return 30 * sum(-(-len(line) // 110) or 1 for line in text.splitlines())
