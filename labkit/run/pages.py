"""Notebooks as others read them: slides, and outputs that need no running kernel."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

from nbconvert.exporters.slides import SlidesExporter
from nbformat import NotebookNode

from labkit import notebooks

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def without_widgets(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Outputs without widget views, which show an error on a page without a kernel; static copies stay."""
    return [output for output in outputs if WIDGET_VIEW not in output.get("data", {})]


SHOWN = {notebooks.KERNEL, notebooks.EXERCISE, "way"}
"""Tags of code cells whose source is shown; of the others only the outputs are."""
SLIDE_WORDS = 95
"""Of text on a slide, where a paragraph leaves the choice: what can be read while somebody speaks."""
SLIDE_STYLE = """<style>
.reveal .slides section .jp-RenderedHTMLCommon { font-size: 24px; line-height: 1.35; }
.reveal h1 { font-size: 44px !important; }
.reveal h2 { font-size: 36px !important; }
.reveal h3 { font-size: 30px !important; }
.reveal div.highlight pre { font-size: 17px !important; }
.reveal .jp-OutputArea-output img { min-width: 900px; max-height: 560px; }
.reveal .jp-OutputArea-output:has(img ~ img) img { min-width: 0; max-height: 300px; }
.reveal .jp-OutputArea-output img ~ img ~ img { display: none; }
.reveal .jp-MarkdownOutput img { max-width: 100%; max-height: 560px; }
.reveal small { font-size: 14px !important; }
.reveal .jp-OutputArea details { display: none; }
</style>"""
"""For the back row: large text and figures, without the numbers that fold out beneath them."""


def slides(path: Path) -> str:
    """A lesson as nbconvert's slides, by the slide types of its cells: text, kernels, exercises and figures.

    A text is shared out over several slides, at its headings, its pictures and by its length. Of other code
    cells only the outputs are shown, and of folded code nothing. The deck loads reveal.js from the network.
    """
    notebook = notebooks.read(path)
    notebook.metadata.pop("widgets", None)
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and slide_type(cell) in ("slide", "subslide"):
            cells += text_slides(cell)
            continue
        if cell.cell_type == "code":
            cell.outputs = without_widgets(cell.outputs)
            if SHOWN & set(notebooks.tags(cell)):
                cell.outputs = []  # checks, and "not attempted"
            else:
                cell.metadata.transient = {"remove_source": True}  # what nbconvert's own filters set
            shown = cell.outputs if "transient" in cell.metadata else not is_folded(cell)
            if not shown:
                cell.metadata["slideshow"] = {"slide_type": "skip"}
            elif slide_type(cell) != "skip":
                cells += output_slides(cell)
                continue
        cells.append(cell)
    notebook.cells = cells
    exporter = SlidesExporter(
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        embed_images=True,
        reveal_width="1280",
        reveal_height="720",
    )
    resources = {"metadata": {"name": notebooks.title(notebook) or path.stem, "path": str(path.parent)}}
    page, _ = exporter.from_notebook_node(notebook, resources)
    return str(page).replace("</head>", f"{SLIDE_STYLE}</head>")


def slide_type(cell: NotebookNode) -> str:
    """ "slide", "subslide", "fragment", "skip" or "" """
    return str(cell.metadata.get("slideshow", {}).get("slide_type", ""))


def is_folded(cell: NotebookNode) -> bool:
    """Whether JupyterLab shows no source of a code cell until somebody asks for it."""
    return bool(cell.metadata.get("jupyter", {}).get("source_hidden"))


def output_slides(cell: NotebookNode) -> list[NotebookNode]:
    """A code cell as several: each figure, and each table behind one, begins a slide."""
    slides: list[list[NotebookNode]] = [[]]
    for output in cell.outputs:
        page = "".join(output.get("data", {}).get("text/html", ""))
        figure, table = "<img" in page or "image/png" in output.get("data", {}), "<table" in page
        if slides[-1] and (figure or table):
            slides.append([])
        slides[-1].append(output)
    made = copies(cell, len(slides))
    for part, outputs in zip(made, slides, strict=True):
        part.outputs = outputs
    return made


def text_slides(cell: NotebookNode) -> list[NotebookNode]:
    """A text cell as several: one begins at each heading, a picture has one, long texts are shared out."""
    slides: list[list[str]] = [[]]
    for block in paragraphs(cell.source):
        here = slides[-1]
        heading, picture = block.startswith("#"), block.startswith("![")
        words = sum(len(each.split()) for each in here) + len(block.split())
        alone = all(each.startswith("#") for each in here)  # a heading goes with what follows it
        after_picture = any(each.startswith("![") for each in here)
        if here and not alone and (heading or picture or after_picture or words > SLIDE_WORDS):
            slides.append([])
        slides[-1].append(block)
    made = copies(cell, len(slides))
    for part, blocks in zip(made, slides, strict=True):
        part.source = "\n\n".join(blocks)
    return made


def copies(cell: NotebookNode, count: int) -> list[NotebookNode]:
    """A cell so many times, each copy after the first a slide below it."""
    made = [deepcopy(cell) for _ in range(count)]
    for number, part in enumerate(made[1:], start=1):
        part.id, part.metadata["slideshow"] = f"{cell.id}-{number}", {"slide_type": "subslide"}
    return made


def paragraphs(text: str) -> list[str]:
    """The blocks of a text between blank lines; a block of code is one, whatever blank lines it has."""
    found: list[list[str]] = [[]]
    in_code = False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if line.strip() or in_code:
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(lines) for lines in found if lines]
