"""The lessons as slides: reveal.js decks that open from a folder, without a network."""

import re
import shutil
from pathlib import Path

from nbconvert.exporters.slides import SlidesExporter
from nbformat import NotebookNode

from labkit import deck, lessons, links, places

PAGES = places.DATA / "pages"
REVEAL = places.DATA / "reveal"
FILES = {"reveal.js": "dist", "reveal.css": "dist", "labkit.css": "dist/theme", "LICENSE": ""}
"""The files of reveal.js and its theme, and where in its folder a deck looks for each."""


def to_slides(notebook: NotebookNode, name: str) -> str:
    """A lesson as one page of slides, beside a folder ``reveal``.

    ValueError as `deck.cut` gives it.
    """
    exporter = SlidesExporter(
        template_file="deck.html.j2",
        extra_template_paths=[str(PAGES)],
        reveal_url_prefix="reveal",
        reveal_theme="labkit",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        language_code="en",
        embed_images=True,
    )
    resources = {"metadata": {"name": lessons.title(notebook) or name, "path": str(places.NOTEBOOKS)}}
    page, _ = exporter.from_notebook_node(deck.cut(notebook), resources=resources)
    return re.sub(r'<a href="\d\d_\w+\.ipynb">(.*?)</a>', r"\1", str(page))  # a deck stands alone


def write(paths: list[Path], folder: Path) -> list[Path]:
    """Write a deck for each lesson, and reveal.js beside them; gives the decks' files.

    ValueError as `to_slides` gives it, or naming each broken link and each picture without alt text.
    """
    for name, place in FILES.items():
        target = folder / "reveal" / place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REVEAL / name, target)
    written = []
    for path in paths:
        written.append(folder / f"{path.stem}.html")
        try:
            places.write_text(written[-1], to_slides(lessons.read(path), path.stem))
        except ValueError as error:
            raise ValueError(f"{path.stem}, {error}") from error
    links.check(written)
    return written
