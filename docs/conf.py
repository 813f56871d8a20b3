"""The course as pages: `make site`. Lessons come with their saved outputs."""

import re

import nbformat
from sphinx.application import Sphinx

from labkit import notebooks, paths

project = "GPU performance, measured"
author = "the labkit contributors"
copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    *(f"notebooks/{part}*.ipynb" for part in ("", "asides/")),
    "CONTRIBUTING.md",
]
exclude_patterns = ["build", "labkit", "tests", ".*"]
templates_path = ["."]
html_additional_pages = {"index": "home.html"}  # at the top of the folder: leads to the root page
suppress_warnings = ["mystnb.unknown_mime_type"]  # claims and checks have an HTML form beside their own

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # widgets are left out below; their pictures stay
myst_heading_anchors = 3
napoleon_use_param = napoleon_use_rtype = False  # "a, b: (B, T, H)" stays one line
autodoc_typehints = "none"  # signatures would be wider than the page, and docstrings have dtypes and shapes

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["site.css", "site.js"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": [],
}


WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def without_widgets(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Outputs without widget views, which show an error on a page without a kernel; static copies stay."""
    return [output for output in outputs if WIDGET_VIEW not in output.get("data", {})]


def empty(output: nbformat.NotebookNode) -> bool:
    """Whether it is the verdict on an exercise that nobody has tried, which says nothing to a reader."""
    return ": not attempted." in output.get("data", {}).get("text/plain", "")


def fold(app: Sphinx, docname: str, source: list[str]) -> None:
    """A lesson for a reader: no widgets, answers to guesses and exercises' solutions behind a click."""
    path = paths.CHECKOUT / f"{docname}.ipynb"
    if not path.exists():
        return
    notebook, solutions = nbformat.reads(source[0], as_version=4), notebooks.solution_cells(path)
    notebook.metadata.pop("widgets", None)
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type != "code":
            continue
        cell.outputs = without_widgets(cell.outputs)
        tags = notebooks.tags(cell)
        folded = cell.metadata.get("jupyter", {})
        if "setup" in tags or folded.get("source_hidden"):
            tags.append("hide-input")
        if folded.get("outputs_hidden"):
            tags.append("hide-output")
        if "exercise" in tags:
            solution = nbformat.v4.new_code_cell(solutions[notebooks.exercise_of(cell)])
            solution.outputs, cell.outputs = [each for each in cell.outputs if not empty(each)], []
            solution.metadata.update(tags=["hide-input"], mystnb={"code_prompt_show": "Solution"})
            cells.append(solution)
        cell.metadata["tags"] = tags
    notebook.cells = cells
    source[0] = nbformat.writes(notebook)


def plain(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """A docstring is plain text: x**2 is no bold type."""
    lines[:] = ["".join(re.sub(r"[*|]", r"\\\g<0>", part) if part[:2] != "``" else part
                        for part in re.split(r"(``.+?``)", line)) for line in lines]  # fmt: skip


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", plain, priority=100)  # before napoleon reads it
    app.connect("source-read", fold)
