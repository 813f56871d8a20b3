"""Notebooks as others read them: slides, and outputs that need no running kernel."""

from collections.abc import Sequence
from pathlib import Path

from nbconvert.exporters.slides import SlidesExporter
from nbformat import NotebookNode

from labkit import notebooks

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
SHOWN = {notebooks.KERNEL, notebooks.EXERCISE, "way", "shown"}
"""Tags of code cells whose source is on slides; of the others only the outputs are."""
SLIDE_STYLE = """<style>
.reveal .slides section section { max-height: 700px; overflow-y: auto; }
.reveal .slides section .jp-RenderedHTMLCommon { font-size: 24px; line-height: 1.35; }
.reveal h1 { font-size: 44px !important; }
.reveal h2 { font-size: 36px !important; }
.reveal h3 { font-size: 30px !important; }
.reveal table { font-size: 21px !important; }
.reveal div.highlight pre { font-size: 20px !important; white-space: pre-wrap !important; }
.reveal .jp-OutputArea-output pre { font-size: 20px !important; }
.reveal .jp-OutputArea-output img { width: auto !important; max-height: 460px !important; }
.reveal .jp-MarkdownOutput img { width: auto; max-height: 460px; max-width: 100%; object-fit: contain; }
.reveal small { font-size: 16px !important; }
.reveal .jp-OutputArea details { display: none; }
.reveal .controls { opacity: 0.4; }
</style>"""
"""For the back row: large text and figures, without the numbers that fold out beneath them. What is longer
than a slide scrolls."""


def without_widgets(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Outputs without widget views, which show an error on a page without a kernel; static copies stay."""
    return [output for output in outputs if WIDGET_VIEW not in output.get("data", {})]


def slides(path: Path) -> str:
    """A lesson as nbconvert's slides, by the slide types of its cells: text, kernels, exercises and figures.

    A cell is a slide, and scrolls where it is longer. Code that is folded in the notebook is on none, and of
    code that is neither a kernel nor an exercise only the outputs are. The deck loads reveal.js from the
    network.
    """
    notebook = notebooks.read(path)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.source = cell.source.replace("](../images/", "](images/")
        if cell.cell_type != "code":
            continue
        cell.outputs = without_widgets(cell.outputs)
        folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        if folded or not SHOWN & set(notebooks.tags(cell)):
            cell.metadata["transient"] = {"remove_source": True}  # as nbconvert's own filters do it
            if not cell.outputs:
                cell.metadata["slideshow"] = {"slide_type": "skip"}
    exporter = SlidesExporter(
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        embed_images=True,
        reveal_width="1280",
        reveal_height="720",
    )
    folder = path.parent.parent if path.parent.name == notebooks.ASIDES else path.parent  # of images/
    resources = {"metadata": {"name": notebooks.title(notebook) or path.stem, "path": str(folder)}}
    page, _ = exporter.from_notebook_node(notebook, resources)
    return str(page).replace("</head>", f"{SLIDE_STYLE}</head>")
