"""How a lesson is cut into slides."""

import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit import claims, deck, folds, lessons
from labkit.runs import record

EXERCISE = 'answer = ...\n\n\ntasks.check("mask", answer)'
FIGURE = '<img alt="a figure" src="data:,">'
ASIDE = "## An aside: more"


def metadata(kind):
    return {"slideshow": {"slide_type": kind}} if kind else {}


def markdown(text, kind=""):
    return new_markdown_cell(text, metadata=metadata(kind))


def code(source="", kind="", tag="", outputs=()):
    tags = [tag] if tag else []
    return new_code_cell(source, metadata={**metadata(kind), "tags": tags}, outputs=list(outputs))


def shown(html, mime=""):
    data = {"text/html": html, "text/plain": "shown"} | ({mime: {}} if mime else {})
    return new_output("display_data", data=data)


def cut(*cells):
    return deck.cut(new_notebook(cells=list(cells))).cells


def sources(*cells):
    return [slide.source for slide in cut(*cells)]


def test_a_cell_is_shown_unless_it_prepares_something_or_says_otherwise():
    out = [shown("x")]
    assert sources(markdown("text"), code("k", tag="kernel", outputs=out)) == ["text", "k"]
    assert sources(code("1", tag="setup", outputs=out), code("n: int = 1", tag="parameters")) == []
    assert (
        sources(markdown("text", "skip"), code("1", "skip", outputs=out), code(EXERCISE, "skip", "exercise"))
        == []
    )
    assert len(cut(code("1", "slide", "setup", out))) == 1
    figure, kernel = cut(code("f()", outputs=[shown(FIGURE)]), code("k", tag="kernel", outputs=out))
    assert figure.source == "" and len(figure.outputs) == 1 and kernel.outputs == []
    (exercise,) = cut(code(EXERCISE, tag="exercise"))
    assert "`mask`" in exercise.source and "answer" not in exercise.source


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        *(
            (made, "its slide type is 'notes'")
            for made in (markdown("x", "notes"), code(EXERCISE, "notes", "exercise"))
        ),
        (code("answer = ...", tag="exercise"), "it is tagged exercise, but has no tasks.check"),
    ],
)
def test_a_slide_type_that_is_none_and_an_exercise_that_hands_in_nothing_are_refused(cell, message):
    with pytest.raises(ValueError, match=f"cell {cell.id}: {message}"):
        cut(cell)


def test_headings_begin_sections_and_are_repeated_and_asides_are_left_out():
    slides = cut(markdown("# Title\n\nText.\n\n## Part `one`\n\nMore."), code(outputs=[shown(FIGURE)]))
    kinds = [slide.metadata.slideshow.slide_type for slide in slides]
    titles = [slide.metadata.slideshow.data.get("title") for slide in slides]
    assert kinds == ["slide", "slide", "subslide"] and titles == [None, None, "Part one"]
    inside = [code("k", tag="kernel"), code("1", outputs=[shown("x")]), markdown("Still inside.")]
    assert sources(markdown("A."), markdown(ASIDE), *inside, markdown("## Next")) == ["A.", "## Next"]
    assert sources(markdown("A."), markdown(ASIDE), code("k", "subslide", "kernel")) == ["A.", "k"]
    for kind, count in (("", 0), ("slide", 1)):
        assert len(cut(markdown(ASIDE, "skip"), code(EXERCISE, kind, "exercise"))) == count


def test_a_live_widget_gives_way_to_its_picture():
    view = new_output("display_data", data={record.WIDGET_VIEW: {}, "text/plain": "Box()"})
    notebook = new_notebook(cells=[code("panel", outputs=[view, shown(FIGURE)])], metadata={"widgets": {}})
    for made in (deck.cut(notebook), folds.folded(notebook, {})):
        assert "widgets" not in made.metadata
        assert [list(output.data) for output in made.cells[0].outputs] == [["text/html", "text/plain"]]


def test_prose_and_code_are_parted_where_a_reader_pauses_and_nothing_is_lost():
    text = "A sentence of some length that says `one. Thing` and no more. " * 40
    pieces = deck.pieces(text)
    assert len(pieces) > 2 and " ".join(pieces).split() == text.split()
    assert all(piece.endswith(".") and piece.count("`") % 2 == 0 for piece in pieces)
    items = "\n".join(["- " + "word " * 14] * 20)
    first, *_, last = deck.pieces(f"## Heading\n\n{items}")
    assert first.startswith("## Heading\n\n- word") and not last.startswith("##")
    block = "```\n" + "a b c\n\n" * 5 + "```"
    assert block in deck.pieces(f"Before.\n\n{block}\n\nAfter.")[0]
    function = "def f():\n" + "    x = 1\n" * 14 + "    return x"
    assert deck.code_pieces("\n\n\n".join([function] * 3)) == [function] * 3
    long = "\n".join(f"line{number}" for number in range(60))
    assert [piece.count("\n") + 1 for piece in deck.code_pieces(long)] == [20, 20, 20]


def test_a_slide_has_one_figure_at_most_and_room_for_it():
    claim = shown("held", claims.MIME)
    groups = deck.output_groups([claim, shown(FIGURE), claim, shown(FIGURE), *[claim] * 8, shown(FIGURE)])
    figures = [sum("<img" in output.data["text/html"] for output in group) for group in groups]
    assert max(figures) == 1 and sum(figures) == 3
    assert len(deck.output_groups([shown(FIGURE), claim])) == 2, "what follows a figure leaves it its room"
    assert all(sum(map(deck.output_height, group)) <= deck.ROOM for group in groups)
    for text, slides in (("478", 1), ("a kernel and the reason for it " * 5, 2)):
        table = "<table>" + f"<tr>\n<td class='data'>{text}</td>\n</tr>" * 10 + "</table>"
        assert len(deck.output_groups([shown(table), claim])) == slides


@pytest.mark.parametrize("path", lessons.find(), ids=lambda path: path.stem)
def test_a_lesson_has_slides_of_all_its_sections(path):
    cells = [cell for cell in lessons.read(path).cells if deck.kind(cell) != "skip"]
    prose = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    headings = [heading for heading, _ in deck.sections(prose) if heading]
    headings = [heading for heading in headings if not heading.startswith(folds.ASIDE)]
    slides = deck.cut(lessons.read(path)).cells
    begun = [slide.source for slide in slides if slide.metadata.slideshow.slide_type == "slide"]
    assert len(begun) == len(headings) > 3
    for heading, source in zip(headings, begun, strict=True):
        assert heading in re.sub(r"[`*]", "", source.splitlines()[0])
