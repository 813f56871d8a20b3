"""The course as pages: what is folded, where links lead, what is refused."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import folds, lessons, links, website


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "old.html").write_text("a lesson that is gone")
    return website.write([lessons.resolve("01"), lessons.resolve("09")], folder)


def test_pages_lead_to_each_other(site):
    index, first, last = (page.read_text() for page in site)
    assert [page.name for page in site] == [
        "index.html",
        "01_launch_overhead.html",
        "09_microsecond_ledger.html",
    ]
    assert not (site[0].parent / "old.html").exists()
    assert 'href="01_launch_overhead.html"' in index and 'href="09_microsecond_ledger.html"' in index
    assert (
        'rel="next"' in first and 'rel="prev"' not in first and 'href="09_microsecond_ledger.html"' in first
    )
    assert 'rel="prev"' in last and 'rel="next"' not in last and 'href="01_launch_overhead.html"' in last


def test_the_index_says_where_figures_are_from(site):
    text = site[0].read_text()
    for name in ("01", "09"):
        path = lessons.resolve(name)
        assert website._origin(path) in text


def test_exercises_and_answers_are_folded_and_solutions_behind_a_click(site):
    text = site[1].read_text()
    assert text.count("<summary>Exercise: ") == 3 and text.count(">Solution</summary>") == 3
    assert text.count("<summary>The answer, and how it was measured</summary>") == 4
    assert text.count("<summary>An aside: ") == 2
    assert text.count("<details") == text.count("</details>")
    assert "not attempted" not in text


def test_nothing_is_fetched(site):
    for page in site:
        assert "cdnjs" not in page.read_text() and "<script src" not in page.read_text()


def test_an_aside_is_folded_up_to_the_next_heading():
    cells = [
        new_markdown_cell("## An aside: `more`"),
        new_code_cell("1"),
        new_markdown_cell("## Next"),
    ]
    first, inside, after = folds.folded(new_notebook(cells=cells), {}).cells
    assert first.metadata.before == "<details><summary>An aside: more</summary>" and not first.metadata.after
    assert not inside.metadata.before and inside.metadata.after == "</details>"
    assert not after.metadata.before and not after.metadata.after


def test_a_lesson_that_cannot_be_made_a_page_leaves_the_site_as_it_was(site, monkeypatch):
    before = {path.name: path.read_bytes() for path in site[0].parent.iterdir()}
    monkeypatch.setattr(website, "to_page", lambda *_: exec("raise ValueError('no solution')"))
    with pytest.raises(ValueError, match="no solution"):
        website.write([lessons.resolve("01")], site[0].parent)
    assert {path.name: path.read_bytes() for path in site[0].parent.iterdir()} == before


def test_an_exercise_without_a_solution_is_refused():
    cell = new_code_cell('tasks.check("lost", f)', metadata={"tags": ["exercise"]})
    with pytest.raises(ValueError, match="there is no solution of the exercise 'lost'"):
        folds.folded(new_notebook(cells=[cell]), {"mask": ""})


def test_an_exercise_that_hands_in_nothing_is_refused():
    cell = new_code_cell("f = ...", metadata={"tags": ["exercise"]})
    with pytest.raises(ValueError, match=f"cell {cell.id}: it is tagged exercise, but has no tasks.check"):
        folds.folded(new_notebook(cells=[cell]), {"mask": ""})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<a href="gone.html">x</a>', "gone.html leads nowhere"),
        ('<a href="#gone">x</a>', "#gone leads nowhere"),
        ('<a href="page.html#gone">x</a>', "page.html#gone leads nowhere"),
        ('<a href="javascript:x()">x</a>', "leads nowhere"),
        ('<img src="data:,">', "pictures without alt text: 1"),
        ('<img alt=" " src="data:,">', "pictures without alt text: 1"),
        ('<img alt="x" src="gone.png">', "gone.png is not in the folder"),
        ('<script src="https://example.org/x.js"></script>', "x.js is not in the folder"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "x.css is not in the folder"),
    ],
)
def test_broken_pages_are_refused(tmp_path, text, problem):
    page = tmp_path / "page.html"
    page.write_text(text)
    with pytest.raises(ValueError, match=f"^page.html: .*{problem}"):
        links.check([page])


def test_whole_pages_pass(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<h2 id="a%20b">x</h2><a href="#a%2520b">x</a><a href="page.html">x</a><a href="https://example.org">x</a>'
        '<img alt="a" src="data:,">'
    )
    links.check([page])
