"""The course as pages: what is folded, where links lead, what is refused."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import folds, lessons, links, website

FIRST, MIDDLE, LAST = "01_launch_overhead.html", "02_kernel_fusion.html", "09_microsecond_ledger.html"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "old.html").write_text("a lesson that is gone")
    return website.write([lessons.resolve(number) for number in ("01", "02", "09")], folder)


def test_pages_lead_to_each_other_fold_their_answers_and_fetch_nothing(site):
    index, first, middle, last = texts = [page.read_text() for page in site]
    assert [page.name for page in site] == ["index.html", FIRST, MIDDLE, LAST]
    assert not (site[0].parent / "old.html").exists()
    assert f'href="{FIRST}"' in index and f'href="{LAST}"' in index
    assert 'rel="next"' in first and 'rel="prev"' not in first and f'href="{MIDDLE}"' in first
    assert 'rel="prev"' in last and 'rel="next"' not in last and f'href="{MIDDLE}"' in last
    assert 'rel="prev"' in middle and 'rel="next"' in middle
    assert first.count('src="data:image/svg+xml') == 2, "drawn pictures are in the page"
    for name in ("01", "09"):
        assert website._origin(lessons.resolve(name)) in index, "where its figures are from"
    assert first.count("<summary>Exercise: ") == first.count(">Solution</summary>") == 4
    assert first.count("<summary>The answer, and how it was measured</summary>") == 2
    assert first.count("<details") == first.count("</details>") and "not attempted" not in first
    assert not any("cdnjs" in text or "<script src" in text for text in texts)


def test_a_lesson_that_cannot_be_made_a_page_leaves_the_site_as_it_was(site, monkeypatch):
    before = {path.name: path.read_bytes() for path in site[0].parent.iterdir()}
    monkeypatch.setattr(website, "to_page", lambda *_: exec("raise ValueError('no solution')"))
    with pytest.raises(ValueError, match="no solution"):
        website.write([lessons.resolve("01")], site[0].parent)
    assert {path.name: path.read_bytes() for path in site[0].parent.iterdir()} == before


def test_an_aside_is_folded_up_to_the_next_heading_and_an_exercise_needs_a_solution():
    cells = [new_markdown_cell("## An aside: `more`"), new_code_cell("1"), new_markdown_cell("## Next")]
    first, inside, after = folds.folded(new_notebook(cells=cells), {}).cells
    assert first.metadata.before == "<details><summary>An aside: more</summary>" and not first.metadata.after
    assert not inside.metadata.before and inside.metadata.after == "</details>"
    assert not after.metadata.before and not after.metadata.after
    for source, message in (
        ('tasks.check("lost", f)', "no solution of the exercise 'lost'"),
        ("f = ...", "no tasks.check"),
    ):
        cell = new_code_cell(source, metadata={"tags": ["exercise"]})
        with pytest.raises(ValueError, match=message):
            folds.folded(new_notebook(cells=[cell]), {"mask": ""})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *(
            (f'<a href="{to}">x</a>', f"{to} leads nowhere")
            for to in ("gone.html", "#gone", "page.html#gone")
        ),
        ('<a href="javascript:x()">x</a>', "leads nowhere"),
        *((f'<img {alt} src="data:,">', "pictures without alt text: 1") for alt in ("", 'alt=" "')),
        ('<img alt="x" src="gone.png">', "gone.png is not in the folder"),
        ('<script src="https://example.org/x.js"></script>', "x.js is not in the folder"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "x.css is not in the folder"),
    ],
)
def test_broken_pages_are_refused_and_whole_ones_pass(tmp_path, text, problem):
    page = tmp_path / "page.html"
    page.write_text(
        '<h2 id="a%20b">x</h2><a href="#a%2520b">x</a><a href="page.html">x</a><img alt="a" src="data:,">'
        '<a href="https://example.org">x</a>'
    )
    links.check([page])
    page.write_text(text)
    with pytest.raises(ValueError, match=f"^page.html: .*{problem}"):
        links.check([page])
