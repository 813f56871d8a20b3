"""The course as pages that open from a folder: an index, a page for each lesson, nothing to fetch."""

import html
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from nbconvert.exporters.html import HTMLExporter
from nbformat import NotebookNode

from labkit import exercises, folds, lessons, links, places
from labkit.runs import record

PAGES = places.DATA / "pages"


def write(notebooks: Sequence[Path], folder: Path) -> list[Path]:
    """Write a page for each notebook, in this order, and the index; gives the pages, the index first.

    The pages replace those that are there, once all of them are made. ValueError naming each broken link and
    each picture without alt text, or as `to_page` gives it.
    """
    pages = {folder / "index.html": _index(notebooks)}
    for number, path in enumerate(notebooks):
        bar = _bar(notebooks[:number][-1:], notebooks[number + 1 :][:1])
        pages[folder / f"{path.stem}.html"] = to_page(lessons.read(path), path.stem, bar)
    for page, text in pages.items():
        places.write_text(page, text)
    for old in set(folder.glob("*.html")) - set(pages):
        old.unlink()
    shutil.copy(PAGES / "site.css", folder / "site.css")
    links.check(pages)
    return list(pages)


def to_page(notebook: NotebookNode, lesson: str, bar: str = "") -> str:
    """A lesson as a page: exercises, asides and answers to guesses folded, solutions behind a click.

    ValueError for an exercise without a solution, or that hands in nothing.
    """
    exporter = HTMLExporter(
        template_file="lesson.html.j2",
        extra_template_paths=[str(PAGES)],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        language_code="en",
        embed_images=True,
    )
    metadata = {"name": lessons.title(notebook) or lesson, "path": str(places.NOTEBOOKS)}
    resources = {"metadata": metadata, "bar": bar}
    try:
        folded = folds.folded(notebook, exercises.solution_cells(lesson))
    except ValueError as error:
        raise ValueError(f"{lesson}, {error}") from error
    page, _ = exporter.from_notebook_node(folded, resources=resources)
    return re.sub(r'(href="\d\d_\w+)\.ipynb"', r'\1.html"', str(page))  # a lesson names the next one


def _bar(before: Sequence[Path], after: Sequence[Path]) -> str:
    """Where a reader can go from a lesson."""
    parts = [
        "".join(f'<a rel="prev" href="{path.stem}.html">← {_title(path)}</a>' for path in before),
        '<a href="index.html">All lessons</a>',
        "".join(f'<a rel="next" href="{path.stem}.html">{_title(path)} →</a>' for path in after),
    ]
    inside = "".join(f"<span>{part}</span>" for part in parts)
    return f'<nav class="bar" aria-label="Lessons">{inside}</nav>'


def _title(path: Path) -> str:
    return html.escape(lessons.title(lessons.look(path)) or path.stem)


def _index(notebooks: Sequence[Path]) -> str:
    """The page that lists the lessons, and says where the figures of each are from."""
    items = "".join(
        f'<li><a href="{path.stem}.html">{_title(path)}</a><small>{_origin(path)}</small></li>\n'
        for path in notebooks
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GPU performance, measured</title>
<link rel="stylesheet" href="site.css">
</head>
<body>
<main class="index">
<h1>GPU performance, measured</h1>
<p>A course in notebooks, to read. To work through it, to guess, write kernels and measure on your own
machine, open the notebooks in JupyterLab.</p>
<ul style="list-style:none;padding:0">
{items}</ul>
</main>
</body>
</html>
"""


def _origin(path: Path) -> str:
    notebook = lessons.look(path)
    stamp = record.read_stamp(notebook)
    if stamp is not None:
        return html.escape(f"Figures recorded on {stamp}.")
    if any(cell["outputs"] for _, cell in lessons.code_cells(notebook)):
        return "As it was executed on the machine that made these pages."
    return "Not recorded yet: without figures."
