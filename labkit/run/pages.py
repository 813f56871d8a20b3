"""Notebooks as others read them: slides, and outputs that need no running kernel."""

from collections.abc import Sequence
from pathlib import Path

from nbconvert.exporters.slides import SlidesExporter
from nbformat import NotebookNode

from labkit import notebooks

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def without_widgets(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Outputs without widget views, which show an error on a page without a kernel; static copies stay."""
    return [output for output in outputs if WIDGET_VIEW not in output.get("data", {})]


def slides(path: Path) -> str:
    """A lesson as nbconvert's slides, by the slide types of its cells: text, kernels, exercises and figures.

    Of other code cells only the outputs are shown. The deck loads reveal.js from the network.
    """
    notebook = notebooks.read(path)
    notebook.metadata.pop("widgets", None)
    for _, cell in notebooks.code_cells(notebook):
        cell.outputs = without_widgets(cell.outputs)
        if {notebooks.KERNEL, notebooks.EXERCISE} & set(notebooks.tags(cell)):
            cell.outputs = []  # checks, and "not attempted"
        else:
            cell.metadata.transient = {"remove_source": True}  # what nbconvert's own filters set
    exporter = SlidesExporter(exclude_input_prompt=True, exclude_output_prompt=True, embed_images=True)
    resources = {"metadata": {"name": notebooks.title(notebook) or path.stem, "path": str(path.parent)}}
    page, _ = exporter.from_notebook_node(notebook, resources)
    return str(page)
