"""Rules that hold for every lesson's notebook, as it stands in the tree."""

import html.parser
import json
import os
import re
import statistics
import subprocess
import sys

import nbformat
import pytest

from labkit import folds, lessons, places
from labkit.runs import record

LESSONS = lessons.find()
TAGS = {lessons.SETUP, lessons.KERNEL, "parameters", "exercise"}
NOTEBOOK_METADATA = {"kernelspec", "language_info", "labkit"}
FOLDED = "jp-MarkdownHeadingCollapsed"
CELL_METADATA = {"tags", "lines_to_next_cell", FOLDED, "jupyter", "slideshow"}
"""What a cell may carry; ``lines_to_next_cell`` is jupytext's, which keeps a percent script's blank lines,
the others are JupyterLab's: a folded section, a hidden output, a place among the slides."""
SIZES = {"01": (55, 36), "09": (66, 48)} | dict.fromkeys(("02", "04", "05", "07"), (62, 60))
"""Most cells and KB of source, where they are not 40 and 30: the first lesson holds the primer as well, and
the last one takes every rung apart."""
LONGEST_CELL = 30
"""Lines of a cell that holds no kernel."""
HOME = re.compile(r"(?<![\w.:/])/(?:home|root|work|tmp|mnt|Users|usr|opt|var)/\w+|\b[A-Z]:\\\\\w")
"""A path of somebody's machine, in JSON."""

every_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def code(path):
    return list(lessons.code_cells(lessons.read(path)))


def outputs(path):
    return [(number, output) for number, cell in code(path) for output in cell.outputs]


def test_there_are_lessons_and_each_has_a_number_of_its_own():
    numbers = [path.stem[:2] for path in LESSONS]
    assert numbers and len(set(numbers)) == len(numbers)
    others = {path.name for path in places.NOTEBOOKS.glob("*.ipynb")} - {path.name for path in LESSONS}
    assert not others, "a notebook that is no lesson is never executed"


@every_lesson
def test_it_is_valid_and_written_as_jupyter_writes_it(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5), "cells have ids from 4.5 on"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    # else the first save in Jupyter changes lines that nobody edited
    assert path.read_text(encoding="utf-8").rstrip("\n") == nbformat.writes(notebook).rstrip("\n")


@every_lesson
def test_it_runs_with_the_kernel_that_everybody_has(path):
    metadata = lessons.read(path).metadata
    assert metadata.kernelspec.name == "python3" and metadata.kernelspec.language == "python"
    assert metadata.language_info.name == "python"


@every_lesson
def test_metadata_hold_nothing_but_what_is_used(path):
    notebook = lessons.read(path)
    assert set(notebook.metadata) <= NOTEBOOK_METADATA
    assert set(notebook.metadata.get("labkit", {})) <= {"recorded"}
    for number, cell in enumerate(notebook.cells):
        assert set(cell.metadata) <= CELL_METADATA, f"cell {number}"
    for number, output in outputs(path):
        assert not output.get("metadata"), f"code cell {number}"


@every_lesson
def test_tags_are_known_and_stand_on_code(path):
    for number, cell in enumerate(lessons.read(path).cells):
        tags = lessons.tags(cell)
        assert set(tags) <= TAGS and len(tags) <= 1, f"cell {number}: {tags}"
        assert not tags or cell.cell_type == "code", f"cell {number}: {tags}"


@every_lesson
def test_no_path_of_somebodys_machine_is_in_it(path):
    notebook = lessons.read(path)
    for _, cell in lessons.code_cells(notebook):
        for output in cell.outputs:
            if "text/html" in output.get("data", {}):  # a picture is text that may look like anything
                output.data["text/html"] = re.sub(r"base64,[\w+/=]+", "", output.data["text/html"])
    found = HOME.search(json.dumps(notebook, ensure_ascii=False))
    assert found is None, found


@every_lesson
def test_it_begins_with_its_title(path):
    first = lessons.read(path).cells[0]
    assert first.cell_type == "markdown"
    assert re.match(rf"# {int(path.stem[:2])}\. \S", first.source), "# <its number>. <title>"
    titles = [
        line
        for cell in lessons.read(path).cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if re.match(r"# ", line)
    ]
    assert len(titles) == 1, "one title; sections are ##"


@every_lesson
def test_its_asides_begin_and_end_with_a_cell_and_open_folded(path):
    """Else JupyterLab, the slides and the page do not agree on what belongs to one."""
    cells = lessons.read(path).cells
    aside = {cell.id for section in folds.asides(cells) for cell in section}
    for cell in cells:
        if cell.cell_type == "markdown":
            begins = folds.heading(cell.source).startswith(folds.ASIDE)
            assert bool(cell.metadata.get(FOLDED)) == begins, cell.id
            within = re.findall(r"\n#{1,2} (.*)", cell.source)
            assert not within or cell.id not in aside, cell.id
            assert not any(heading.startswith(folds.ASIDE) for heading in within), cell.id


@every_lesson
def test_what_it_links_to_is_there(path):
    for cell in lessons.read(path).cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"`[^`]*`", "", cell.source)
            for target in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", prose):
                assert (path.parent / target).exists(), target


@every_lesson
def test_its_parameters_have_a_kind_a_default_and_a_sentence(path):
    cells = [number for number, cell in code(path) if "parameters" in lessons.tags(cell)]
    assert len(cells) <= 1, "papermill reads one cell only"
    declared = lessons.parameters(path)  # refuses what has no kind
    assert bool(cells) == bool(declared)
    for parameter in declared.values():
        assert len(parameter.help.split()) > 1, f"{parameter.name}: say what it is, in a comment behind it"


@every_lesson
def test_it_sets_up_before_it_does_anything(path):
    tagged = [(lessons.tags(cell) or [""])[0] for _, cell in code(path)]
    assert tagged[0] == lessons.SETUP
    if "parameters" in tagged:
        assert tagged.index("parameters") <= tagged.count(lessons.SETUP), "else its values come too late"


@every_lesson
def test_only_a_kernel_is_longer_than_a_screen(path, capsys):
    lengths = {number: len(cell.source.splitlines()) for number, cell in code(path)}
    prose = sum(len(cell.source.split()) for cell in lessons.read(path).cells if cell.cell_type == "markdown")
    with capsys.disabled():
        tenth = sorted(lengths.values())[int(0.9 * len(lengths))]
        middle, ratio = statistics.median(lengths.values()), prose / sum(lengths.values())
        print(
            f"\n{path.stem}: {len(lengths)} code cells, lines: median {middle:g}, 9 in 10 at most {tenth},",
            end=" ",
        )
        print(f"longest {max(lengths.values())}; {ratio:.1f} words of prose a line of code")
    kernels = {number for number, cell in code(path) if lessons.KERNEL in lessons.tags(cell)}
    too_long = {n: lines for n, lines in lengths.items() if lines > LONGEST_CELL and n not in kernels}
    assert not too_long, "code cell: lines"


@every_lesson
def test_its_size(path):
    cells = lessons.read(path).cells
    most, room = SIZES.get(path.stem[:2], (40, 30))
    assert 25 <= len(cells) <= most
    assert sum(len(cell.source.encode()) for cell in cells) <= room * 1024
    assert path.stat().st_size <= 500 * 1024


@every_lesson
def test_it_has_the_parts_of_a_lesson(path):
    cells = code(path)
    exercises = [cell for _, cell in cells if "exercise" in lessons.tags(cell)]
    assert len(exercises) >= 3
    assert all(cell.source.splitlines()[-1].startswith("tasks.check(") for cell in exercises)
    assert sum("panels.sweep(" in cell.source for _, cell in cells) >= 1, "no live sweep"
    assert cells[-1][1].source == "summary()", "the table of claims comes last"


@every_lesson
def test_every_guess_comes_before_its_answer(path):
    asked = {}
    for number, cell in code(path):
        for guess in re.findall(r"^(\w+) = panels\.predict\(", cell.source, re.MULTILINE):
            asked[guess] = number
    answered = {
        guess: number
        for number, cell in code(path)
        for guess in re.findall(r"^(\w+)\.reveal\(", cell.source, re.MULTILINE)
    }
    assert asked and asked.keys() == answered.keys()
    hidden = [cell.metadata.get("jupyter", {}).get("outputs_hidden", False) for _, cell in code(path)]
    for guess, number in asked.items():
        assert number < answered[guess], f"{guess} is answered before it is asked"
        assert hidden[answered[guess] - 1], f"the saved answer to {guess} is in sight of its question"


@every_lesson
def test_its_outputs_were_made_by_its_code(path):
    state = record.state(path)
    assert state.status != "stale", state.detail


@every_lesson
def test_no_name_in_a_table_is_taken_for_a_tag(path):
    for number, output in outputs(path):
        for cell in re.findall(r"<td[^>]*>(.*?)</td>", output.get("data", {}).get("text/html", "")):
            assert set(re.findall(r"</?(\w*)", cell)) <= {"small", "span"}, (number, cell)


class Images(html.parser.HTMLParser):
    """The images in a piece of HTML."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.found.append(dict(attributes))


@every_lesson
def test_its_outputs_are_whole_and_can_be_read_without_seeing_them(path):
    for number, output in outputs(path):
        assert output.output_type != "error", f"code cell {number}"
        assert output.get("name") != "stderr", f"code cell {number}: {output.get('text')}"
        data = output.get("data", {})
        assert not [mime for mime in data if mime.startswith("image/") or "widget" in mime], (
            f"code cell {number}: an <img> with alt text reaches every page, this does not"
        )
        for image in Images(data.get("text/html", "")).found:
            assert len(image.get("alt") or "") > 80, f"code cell {number}"
            assert image["src"].startswith("data:"), (
                f"code cell {number}: a picture of its own file gets lost"
            )


LOADING = """
from labkit import clocks, codegen, counts, lessons, profiles, sweeps
from labkit.runs import execute

def refuse(*_, **__):
    raise SystemExit("loading a lesson measured, compiled or counted something")

for module, names in {
    clocks: ["measure"], sweeps: ["run"], codegen: ["compile_many"], counts: ["count"],
    profiles: ["profile"], execute: ["execute"],
}.items():
    for name in names:
        assert callable(getattr(module, name))
        setattr(module, name, refuse)
for path in lessons.find():
    lessons.load(path)
print("loaded")
"""


def test_loading_a_lesson_measures_and_prints_nothing(tmp_path):
    # in a process of its own: what a lesson registers with torch it registers once
    environment = {**os.environ, "LABKIT_CACHE": str(tmp_path), "PYTHONPATH": places.python_path()}
    environment.setdefault("TRITON_INTERPRET", "1")
    done = subprocess.run([sys.executable, "-c", LOADING], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stdout + done.stderr
