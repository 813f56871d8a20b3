"""Notebooks as others read them: slides, and outputs that need no running kernel."""

import re
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


SHOWN = {notebooks.KERNEL, notebooks.EXERCISE, "way", "shown"}
"""Tags of code cells whose source is shown; of the others only the outputs are."""
SLIDE_WORDS, SLIDE_LINES = 95, 26
"""Of text, and of code, on a slide, where paragraphs or blank lines leave the choice."""
SLIDE_STYLE = """<style>
.reveal .slides section .jp-RenderedHTMLCommon { font-size: 24px; line-height: 1.35; }
.reveal h1 { font-size: 44px !important; }
.reveal h2 { font-size: 36px !important; }
.reveal h3 { font-size: 30px !important; }
.reveal table { font-size: 21px !important; }
.reveal div.highlight pre { font-size: 20px !important; white-space: pre-wrap !important; }
.reveal .jp-OutputArea-output pre { font-size: 20px !important; }
.reveal .jp-OutputArea-output img { width: auto !important; height: 460px !important; object-fit: contain; }
.reveal .jp-MarkdownOutput img { width: auto; height: 540px; max-width: 100%; object-fit: contain; }
.reveal small { font-size: 16px !important; }
.reveal .jp-OutputArea details { display: none; }
.reveal .controls { opacity: 0.4; }
</style>"""
"""For the back row: large text and figures, without the numbers that fold out beneath them."""


def slides(path: Path) -> str:
    """A lesson as nbconvert's slides, by the slide types of its cells: text, kernels, exercises and figures.

    A text is shared out over several slides, at its headings, its pictures and by its length, and so is code
    at blank lines. Of other code cells only the outputs are shown, a figure a slide, and of folded code
    nothing. The deck loads reveal.js from the network.
    """
    notebook = notebooks.read(path)
    notebook.metadata.pop("widgets", None)
    notebook.cells = [each for cell in notebook.cells for each in slides_of(cell)]
    for before, cell in zip(notebook.cells, notebook.cells[1:], strict=False):
        if all(block.startswith("#") for block in paragraphs(before.source)) and slide_type(cell) != "skip":
            cell.metadata["slideshow"] = {"slide_type": ""}  # a heading goes with what follows it
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


def slide_type(cell: NotebookNode) -> str:
    """ "slide", "subslide", "fragment", "skip" or "" """
    return str(cell.metadata.get("slideshow", {}).get("slide_type", ""))


def slides_of(cell: NotebookNode) -> list[NotebookNode]:
    """A cell as one or several that nbconvert makes slides of."""
    if cell.cell_type == "markdown":
        cell.source = cell.source.replace("](../images/", "](images/")
        return text_slides(cell) if slide_type(cell) in ("slide", "subslide") else [cell]
    if slide_type(cell) == "skip":
        return [cell]
    shown = SHOWN & set(notebooks.tags(cell))
    outputs = without_widgets(cell.outputs)
    if shown - {"shown"}:  # not its check, and "not attempted"
        outputs = [each for each in outputs if is_figure(each) or "The answer is" in html(each)]
    made = code_slides(cell) if shown and not cell.metadata.get("jupyter", {}).get("source_hidden") else []
    made += output_slides(cell, outputs)
    if made:
        made[0].id = cell.id
        return made
    cell.metadata["slideshow"] = {"slide_type": "skip"}
    return [cell]


def html(output: NotebookNode) -> str:
    """An output's page, or ""."""
    return "".join(output.get("data", {}).get("text/html", ""))


def is_figure(output: NotebookNode) -> bool:
    return "<img" in html(output) or "image/png" in output.get("data", {})


def part(cell: NotebookNode, number: int, kind: str, **changes: object) -> NotebookNode:
    """A copy of a cell, of another slide type."""
    made = deepcopy(cell)
    made.id, made.metadata["slideshow"] = f"{cell.id}-{number}", {"slide_type": kind}
    made.update(changes)
    return made


def code_slides(cell: NotebookNode) -> list[NotebookNode]:
    """The source of a cell as several, at blank lines, where it has too many lines for one slide."""
    slides = [""]
    for block in re.split(r"(?<=\n\n)(?=\n*\S)" if long(cell.source) else r"\Z", cell.source):
        if slides[-1] and long(slides[-1] + block):
            slides.append("")
        slides[-1] += block
    slides = [re.sub(r" *# noqa.*", "", source).strip("\n") for source in slides]
    kinds = [slide_type(cell), *["subslide"] * len(slides)]
    return [
        part(cell, 100 + number, kinds[number], source=source, outputs=[])
        for number, source in enumerate(slides)
    ]


def long(source: str) -> bool:
    return source.count("\n") >= SLIDE_LINES


def output_slides(cell: NotebookNode, outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Outputs as cells without their source: each figure, and each table behind one, begins a slide.

    What was said before a figure stands beneath it. Where there is no figure, and no table, nothing begins:
    a few lines of text are shown on the slide before. The roofs stand beside many figures, and are left out
    there.
    """
    single = [each for output in outputs for each in one_figure_each(output)]
    if any(map(is_figure, single)):
        single = [output for output in single if "Roofs of this GPU" not in html(output)]
    slides: list[list[NotebookNode]] = [[]]
    for output in single:
        begun = any(is_figure(each) or "<table" in html(each) for each in slides[-1])
        if begun and (is_figure(output) or "<table" in html(output)):
            slides.append([])
        slides[-1].insert(0 if is_figure(output) else len(slides[-1]), output)
    made = []
    for number, group in enumerate(filter(None, slides)):
        lines = sum("".join(each.get("text", "")).count("\n") for each in group)
        large = lines > 3 or any(is_figure(each) or "<table" in html(each) for each in group)
        made.append(part(cell, 200 + number, "subslide" if large else "fragment", outputs=group))
        made[-1].metadata["transient"] = {"remove_source": True}  # what nbconvert's own filters set
    if made and slide_type(cell) == "slide" and slide_type(made[0]) == "subslide":
        made[0].metadata["slideshow"] = {"slide_type": "slide"}
    return made


def one_figure_each(output: NotebookNode) -> list[NotebookNode]:
    """An output with several figures as several; what else it says goes with the last one."""
    images = re.findall(r"<img[^>]*>", html(output))
    made = [deepcopy(output) for _ in images] or [output]
    for number, (copy, image) in enumerate(zip(made, images, strict=False)):
        others = [each for each in images if each != image]
        page = html(output)
        for other in others:
            page = page.replace(other, "")
        copy.data["text/html"] = page if number == len(images) - 1 else image
    return made


def text_slides(cell: NotebookNode) -> list[NotebookNode]:
    """A text cell as several: one begins at each heading, a picture has one, long texts are shared out.

    A sentence goes with the list, or the picture, that it announces. What folds out comes last.
    """
    slides: list[list[str]] = [[]]
    source, *folded = re.split(r"<details>", cell.source)
    for block in paragraphs(source):
        here = slides[-1]
        heading, picture = block.startswith("#"), block.startswith("![")
        words = sum(len(each.split()) for each in here) + len(block.split())
        after_picture = any(each.startswith("![") for each in here)
        full = heading or picture or after_picture or words > SLIDE_WORDS
        if full and not all(map(announces, here)):
            slides.append([here.pop()] if announces(here[-1]) and not heading else [])
        slides[-1].append(block)
    kinds = [slide_type(cell), *["subslide"] * len(slides)]
    made = [part(cell, n, kinds[n], source="\n\n".join(blocks)) for n, blocks in enumerate(slides)]
    for fold in folded:
        question, answer = fold.replace("</details>", "").split("</summary>")
        made[-1].source += f"\n\n**{question.strip().removeprefix('<summary>')}**"
        made.append(part(cell, len(made), "fragment", source=answer.strip()))
    made[0].id = cell.id
    return made


def announces(block: str) -> bool:
    """Whether a block is a heading, or ends without the end of a sentence."""
    return block.startswith("#") or not re.search(r"[.!?|)*`>]$", block)


def paragraphs(text: str) -> list[str]:
    """The blocks of a text between blank lines, and the items of a long list.

    A block of code is one, whatever blank lines it has.
    """
    found: list[list[str]] = [[]]
    in_code = False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if line.strip() or in_code:
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    blocks: list[str] = []
    for block in ("\n".join(lines) for lines in found if lines):
        is_list = re.match(r"(-|\d+\.) ", block) and len(block.split()) > SLIDE_WORDS
        blocks += re.split(r"\n(?=(?:-|\d+\.) )", block) if is_list else [block]
    return blocks
