"""The lessons as slides: reveal.js decks that open from a folder, without a network.

Each cell's slide type says whether it is a slide (in JupyterLab: the property inspector). The cell of a
kernel or an exercise shows its source, any other code cell its outputs.
"""

import re
import shutil
from pathlib import Path

from nbconvert.exporters.slides import SlidesExporter
from nbformat import NotebookNode

from labkit import lessons, places
from labkit.runs import record

REVEAL = places.DATA / "reveal"
FILES = {"reveal.js": "dist", "reveal.css": "dist", "labkit.css": "dist/theme", "LICENSE": ""}
"""The files of reveal.js and its theme, and where in its folder a deck looks for each."""
SHOWN = {lessons.KERNEL, lessons.EXERCISE}
"""Tags of the cells whose source is on slides."""


def to_slides(notebook: NotebookNode, name: str) -> str:
    """A lesson as one page of slides, beside a folder ``reveal``; changes the notebook."""
    notebook.metadata.pop("widgets", None)
    for _, cell in lessons.code_cells(notebook):
        cell.outputs = record.still(cell.outputs)
        if SHOWN & set(lessons.tags(cell)):
            cell.outputs = []  # checks, and "not attempted"
        else:
            cell.metadata.transient = {"remove_source": True}  # what nbconvert's own filters set
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
    resources = {"metadata": {"name": lessons.title(notebook) or name, "path": str(places.NOTEBOOKS)}}
    page, _ = exporter.from_notebook_node(notebook, resources=resources)
    return re.sub(r'<a href="\d\d_\w+\.ipynb">(.*?)</a>', r"\1", str(page))  # a deck stands alone


def write(paths: list[Path], folder: Path) -> list[Path]:
    """Write a deck for each lesson, and reveal.js beside them; gives the decks' files."""
    for name, place in FILES.items():
        target = folder / "reveal" / place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REVEAL / name, target)
    written = [folder / f"{path.stem}.html" for path in paths]
    for path, deck in zip(paths, written, strict=True):
        places.write_text(deck, to_slides(lessons.read(path), path.stem))
    return written
