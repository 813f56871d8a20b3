"""How a lesson is cut into slides."""

import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit import claims, deck, folds, lessons
from labkit.runs import record

LESSONS = lessons.find()
EXERCISE = 'answer = ...\n\n\ntasks.check("mask", answer)'
FIGURE = '<img alt="a figure" src="data:,">'


def metadata(kind):
    return {"slideshow": {"slide_type": kind}} if kind else {}


def markdown(text, kind=""):
    return new_markdown_cell(text, metadata=metadata(kind))


def code(source="", kind="", tags=(), outputs=()):
    return new_code_cell(source, metadata={**metadata(kind), "tags": list(tags)}, outputs=list(outputs))


def shown(html, mime=""):
    data = {"text/html": html, "text/plain": "shown"} | ({mime: {}} if mime else {})
    return new_output("display_data", data=data)


def cut(*cells):
    return deck.cut(new_notebook(cells=list(cells))).cells


def sources(*cells):
    return [slide.source for slide in cut(*cells)]


def test_a_cell_is_shown_unless_it_prepares_something_or_says_otherwise():
    assert sources(markdown("text"), code("k", tags=["kernel"])) == ["text", "k"]
    assert cut(code("1", tags=["setup"], outputs=[shown("x")]), code("n: int = 1", tags=["parameters"])) == []
    assert cut(markdown("text", "skip"), code("1", "skip", outputs=[shown("x")])) == []
    assert len(cut(code("1", "slide", tags=["setup"], outputs=[shown("x")]))) == 1


def test_an_unknown_slide_type_is_refused():
    cell = markdown("text", "notes")
    with pytest.raises(ValueError, match=f"cell {cell.id}: its slide type is 'notes', but has to be one of"):
        cut(cell)


def test_headings_begin_sections_and_are_repeated_over_what_follows():
    slides = cut(markdown("# Title\n\nText.\n\n## Part `one`\n\nMore."), code(outputs=[shown(FIGURE)]))
    kinds = [slide.metadata.slideshow.slide_type for slide in slides]
    titles = [slide.metadata.slideshow.data.get("title") for slide in slides]
    assert kinds == ["slide", "slide", "subslide"] and titles == [None, None, "Part one"]


def test_asides_are_left_out_up_to_the_next_heading():
    before, aside = markdown("Before."), markdown("## An aside: more\n\nText.")
    inside = [code("k", tags=["kernel"]), code("1", outputs=[shown("x")]), markdown("Still inside.")]
    assert sources(before, aside, *inside, markdown("## Next")) == ["Before.", "## Next"]
    assert sources(before, aside, code("k", "subslide", tags=["kernel"])) == ["Before.", "k"]


def test_an_exercise_is_named_and_stays_in_the_notebook():
    (slide,) = cut(code(EXERCISE, tags=["exercise"]))
    assert "`mask`" in slide.source and "answer" not in slide.source


def test_an_exercise_obeys_its_slide_type():
    assert cut(code(EXERCISE, "skip", ["exercise"])) == []
    assert cut(markdown("## An aside: more", "skip"), code(EXERCISE, tags=["exercise"])) == []
    assert len(cut(markdown("## An aside: more", "skip"), code(EXERCISE, "slide", ["exercise"]))) == 1
    with pytest.raises(ValueError, match="its slide type is 'notes'"):
        cut(code(EXERCISE, "notes", ["exercise"]))


def test_an_exercise_that_hands_in_nothing_is_refused():
    cell = code("answer = ...", tags=["exercise"])
    with pytest.raises(ValueError, match=f"cell {cell.id}: it is tagged exercise, but has no tasks.check"):
        cut(cell)


def test_a_kernel_shows_its_source_and_other_code_what_it_put_out():
    kernel, figure = cut(
        code("def kernel(): ...", tags=["kernel"], outputs=[shown("x")]), code("f()", outputs=[shown(FIGURE)])
    )
    assert kernel.source == "def kernel(): ..." and kernel.outputs == []
    assert figure.source == "" and len(figure.outputs) == 1


def test_a_live_widget_gives_way_to_its_picture():
    view = new_output("display_data", data={record.WIDGET_VIEW: {}, "text/plain": "Box()"})
    notebook = new_notebook(cells=[code("panel", outputs=[view, shown(FIGURE)])], metadata={"widgets": {}})
    for made in (deck.cut(notebook), folds.folded(notebook, {})):
        assert "widgets" not in made.metadata
        assert [list(output.data) for output in made.cells[0].outputs] == [["text/html", "text/plain"]]


def test_long_prose_is_parted_between_sentences_and_nothing_is_lost():
    text = "A sentence of some length that says `one. Thing` and no more. " * 40
    pieces = deck.pieces(text)
    assert len(pieces) > 2
    assert " ".join(pieces).split() == text.split()
    assert all(piece.endswith(".") and piece.count("`") % 2 == 0 for piece in pieces)


def test_a_heading_stays_with_its_text():
    tall = "- " + "word " * 14
    pieces = deck.pieces("## Heading\n\n" + "\n".join([tall] * 20))
    assert pieces[0].startswith("## Heading\n\n- word") and not pieces[-1].startswith("##")


def test_blocks_of_text_stay_whole():
    block = "```\n" + "a b c\n\n" * 5 + "```"
    assert block in deck.pieces(f"Before.\n\n{block}\n\nAfter.")[0]


def test_code_is_parted_between_functions():
    function = "def f():\n" + "    x = 1\n" * 14 + "    return x"
    pieces = deck.code_pieces("\n\n\n".join([function] * 3))
    assert pieces == [function] * 3
    long = "\n".join(f"line{number}" for number in range(60))
    assert [piece.count("\n") + 1 for piece in deck.code_pieces(long)] == [20, 20, 20]


def test_a_slide_has_one_figure_at_most_and_room_for_it():
    claim = shown("held", claims.MIME)
    groups = deck.output_groups([claim, shown(FIGURE), claim, shown(FIGURE), *[claim] * 8, shown(FIGURE)])
    figures = [sum("<img" in output.data["text/html"] for output in group) for group in groups]
    assert max(figures) == 1 and sum(figures) == 3
    for group in groups:
        assert sum(map(deck.output_height, group)) <= deck.ROOM


def test_a_table_of_long_rows_has_a_slide_of_its_own():
    def table(text):
        return shown("<table>" + f"<tr>\n<td class='data'>{text}</td>\n</tr>" * 10 + "</table>")

    claim = shown("held", claims.MIME)
    assert len(deck.output_groups([table("478"), claim])) == 1
    assert len(deck.output_groups([table("a kernel and the reason for it " * 5), claim])) == 2


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_slides_of_all_its_sections(path):
    cells = lessons.read(path).cells
    prose = "\n\n".join(
        cell.source for cell in cells if deck.kind(cell) != "skip" and cell.cell_type == "markdown"
    )
    headings = [
        heading for heading, _ in deck.sections(prose) if heading and not heading.startswith(folds.ASIDE)
    ]
    slides = deck.cut(lessons.read(path)).cells
    begun = [slide.source for slide in slides if slide.metadata.slideshow.slide_type == "slide"]
    assert len(begun) == len(headings) > 3
    for heading, source in zip(headings, begun, strict=True):
        assert heading in re.sub(r"[`*]", "", source.splitlines()[0])
