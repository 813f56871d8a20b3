"""The lessons as slides: reveal.js decks that open from a folder, without a network.

Each cell's slide type says whether it is a slide (in JupyterLab: the property inspector). The cell of a
kernel or an exercise shows its source, any other code cell its outputs.
"""

import re
import shutil
from copy import deepcopy
from pathlib import Path

from nbconvert.exporters.slides import SlidesExporter
from nbformat import NotebookNode

from labkit import paths
from labkit.lessons import notebooks
from labkit.runs import record

REVEAL = paths.DATA / "reveal"
BESIDE = 2
"""So many claims, checks or answers leave a figure its room."""
TABLES = ("<table", "<div>", "<style")
"""How the HTML of a table begins, pandas's among them."""
ROWS = 16
"""A table of more rows needs a slide of its own."""
BREAK = "<!-- slide -->"
"""What a text has where a slide is full; no page shows it."""
SHOWN = {notebooks.KERNEL, notebooks.EXERCISE}
"""Tags of the cells whose source is on slides."""


def to_slides(notebook: NotebookNode, name: str) -> str:
    """A lesson as one page of slides, beside a folder ``reveal``; changes the notebook."""
    notebook.metadata.pop("widgets", None)
    for _, cell in notebooks.code_cells(notebook):
        cell.outputs = record.without_widgets(cell.outputs)
        if SHOWN & set(notebooks.tags(cell)):
            cell.outputs = []  # checks, and "not attempted"
        else:
            cell.metadata.transient = {"remove_source": True}  # what nbconvert's own filters set
    parts = [part for cell in notebook.cells for part in split_text(cell)]
    notebook.cells = [slide for cell in parts for slide in one_figure_each(cell)]
    exporter = SlidesExporter(
        template_file="deck.html.j2",
        extra_template_paths=[str(REVEAL)],
        reveal_url_prefix="reveal",
        reveal_theme="labkit",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        language_code="en",
        embed_images=True,
    )
    resources = {"metadata": {"name": notebooks.title(notebook) or name, "path": str(paths.NOTEBOOKS)}}
    page, _ = exporter.from_notebook_node(notebook, resources=resources)
    return re.sub(r'<a href="\d\d_\w+\.ipynb">(.*?)</a>', r"\1", str(page))  # a deck stands alone


def split_text(cell: NotebookNode) -> list[NotebookNode]:
    """The cell, or of a text with lines ``<!-- slide -->`` a copy for each part, on a slide of its own."""
    if cell.cell_type != "markdown":
        return [cell]
    cells = []
    for number, text in enumerate(cell.source.split(BREAK)):
        part = deepcopy(cell)
        part.source = text
        if number:
            part.id = f"{cell.id}-{number}"
            part.metadata["slideshow"] = {"slide_type": "subslide"}
        cells.append(part)
    return cells


def one_figure_each(cell: NotebookNode) -> list[NotebookNode]:
    """The cell, or copies of it: each figure and each long table on a slide of its own, with what was put
    out since the one before if that is short. The axis of a guess is no figure, and stays with what follows
    it. Tables beside a figure are left out: they are for reading, and a room reads the figure.
    """
    outputs = cell.get("outputs", [])
    if any(map(_is_figure, outputs)):
        outputs = [output for output in outputs if not _html(output).lstrip().startswith(TABLES)]
    slides: list[list[NotebookNode]] = [[]]
    for output in outputs:
        drawn = bool(slides[-1]) and _is_figure(slides[-1][-1])
        full = _is_figure(output) and len(slides[-1]) > BESIDE
        if drawn or full or (slides[-1] and _html(output).count("<tr") > ROWS):
            slides.append([])
        slides[-1].append(output)
    copies = [NotebookNode({**deepcopy(cell), "outputs": part}) for part in slides]
    for number, copy in enumerate(copies[1:], start=2):
        copy.id = f"{cell.id}-{number}"
        copy.metadata.slideshow = {"slide_type": "subslide"}
    return copies if outputs else [cell]


def _is_figure(output: NotebookNode) -> bool:
    return _html(output).startswith("<img")


def _html(output: NotebookNode) -> str:
    return "".join(output.get("data", {}).get("text/html", ""))


def write(chosen: list[Path], folder: Path) -> list[Path]:
    """Write a deck for each lesson, and reveal.js beside them; gives the decks' files."""
    shutil.copytree(REVEAL, folder / "reveal", dirs_exist_ok=True)
    written = [folder / f"{path.stem}.html" for path in chosen]
    for path, deck in zip(chosen, written, strict=True):
        paths.write_text(deck, to_slides(notebooks.read(path), path.stem))
    return written
