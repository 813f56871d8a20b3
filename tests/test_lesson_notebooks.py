"""Rules that hold for every lesson's notebook, as it stands in the tree."""

import os
import re
import subprocess
import sys
import tomllib

import nbformat
import pytest

import labkit
from labkit import paths
from labkit.lessons import notebooks, stamps

LESSONS = notebooks.find()
TAGS = {notebooks.COLAB, notebooks.SETUP, notebooks.KERNEL, "parameters", "exercise"}
FOLDED = "jp-MarkdownHeadingCollapsed"
CELL_METADATA = {"tags", "lines_to_next_cell", FOLDED, "jupyter", "slideshow"}
"""What a cell may carry; ``lines_to_next_cell`` is jupytext's, which keeps a percent script's blank lines,
the others are JupyterLab's: a folded section, a hidden output, a place among the slides."""
MOST_CELLS, MOST_KB, MOST_NAMES = 42, 36, 25
"""Cells, KB of source and names of labkit's face that a lesson has at most: it takes an hour."""
LONGEST_CELL = 30
"""Lines of a cell that holds no kernel."""
HOME = re.compile(r"(?<![\w.:/])/(?:home|root|work|tmp|mnt|Users|usr|opt|var)/\w+|\b[A-Z]:\\\\\w")
"""A path of somebody's machine, in JSON."""

every_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def code(path):
    return list(notebooks.code_cells(notebooks.read(path)))


def test_there_are_lessons_and_each_has_a_number_of_its_own():
    numbers = [path.stem[:2] for path in LESSONS]
    assert numbers and len(set(numbers)) == len(numbers)
    others = {path.name for path in paths.NOTEBOOKS.glob("*.ipynb")} - {path.name for path in LESSONS}
    assert not others, "a notebook that is no lesson is never executed"


@every_lesson
def test_it_is_valid_written_as_jupyter_writes_it_and_holds_nothing_but_what_is_used(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5), "cells have ids from 4.5 on"
    # else the first save in Jupyter changes lines that nobody edited
    assert path.read_text(encoding="utf-8").rstrip("\n") == nbformat.writes(notebook).rstrip("\n")
    metadata = notebook.metadata
    assert set(metadata) <= {"kernelspec", "language_info", "labkit"}
    assert metadata.kernelspec.name == "python3", "the kernel that everybody has"
    for number, cell in enumerate(notebook.cells):
        tags = notebooks.tags(cell)
        assert set(cell.metadata) <= CELL_METADATA, f"cell {number}"
        own = set(tags) - {"nbval-check-output", "remove-cell"}  # what others than labkit read
        assert own <= TAGS and len(own) <= (cell.cell_type == "code"), f"cell {number}: {tags}"


@every_lesson
def test_no_path_of_somebodys_machine_is_in_it(path):
    # a picture is text that may look like anything
    found = HOME.search(re.sub(r"base64,[\w+/=]+", "", path.read_text(encoding="utf-8")))
    assert found is None, found


@every_lesson
def test_its_prose_has_one_title_and_links_that_lead_somewhere(path):
    cells = notebooks.read(path).cells
    prose = [cell for cell in cells if cell.cell_type == "markdown"]
    text = "\n".join(cell.source for cell in prose)
    assert cells[0].cell_type == "markdown"
    assert re.match(rf"# {int(path.stem[:2])}\. \S", cells[0].source), "# <its number>. <title>"
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, "one title; sections are ##"
    targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", re.sub(r"`[^`\n]*`", "", text))
    assert not [target for target in targets if not (path.parent / target).exists()]


@every_lesson
def test_it_sets_up_first_and_its_parameters_have_a_kind_a_default_and_a_sentence(path):
    _, *tagged = [(notebooks.tags(cell) or [""])[0] for _, cell in code(path)]  # after the one for Colab
    assert tagged[0] == notebooks.SETUP and tagged.count("parameters") <= 1, "papermill reads one cell only"
    declared = notebooks.parameters(path)  # refuses what has no kind
    assert ("parameters" in tagged) == bool(declared)
    if declared:
        assert tagged.index("parameters") <= tagged.count(notebooks.SETUP), "else its values come too late"
    for parameter in declared.values():
        assert len(parameter.help.split()) > 1, f"{parameter.name}: say what it is, in a comment behind it"


@every_lesson
def test_it_has_the_size_and_the_parts_of_a_lesson_and_only_a_kernel_is_longer_than_a_screen(path):
    cells = [cell for cell in notebooks.read(path).cells if notebooks.COLAB not in notebooks.tags(cell)]
    found = code(path)[1:]
    assert 25 <= len(cells) <= MOST_CELLS and path.stat().st_size <= 640 * 1024
    assert sum(len(cell.source.encode()) for cell in cells) <= MOST_KB * 1024
    plain = [(number, cell) for number, cell in found if notebooks.KERNEL not in notebooks.tags(cell)]
    lines = {number: len(cell.source.splitlines()) for number, cell in plain}
    long = {number: count for number, count in lines.items() if count > LONGEST_CELL}
    assert not long, f"lines of code cells that hold no kernel, at most {LONGEST_CELL}: {long}"
    exercises = [cell for _, cell in found if "exercise" in notebooks.tags(cell)]
    assert len(exercises) >= 3
    assert all(cell.source.splitlines()[-1].startswith("tasks.check(") for cell in exercises)
    assert any("lab.panel.sweep(" in cell.source for _, cell in found), "no live sweep"
    assert found[-1][1].source == "tasks.summary()", "the table of claims comes last"


@every_lesson
def test_it_imports_nothing_of_labkit_but_the_face_and_uses_names_that_the_face_has(path):
    cells = [cell.source for _, cell in code(path) if notebooks.COLAB not in notebooks.tags(cell)]
    source = "\n\n".join(cells)
    assert cells[0].startswith("import labkit as lab\n")
    assert re.findall(r"^\s*(?:import|from) labkit\b.*$", source, re.MULTILINE) == ["import labkit as lab"]
    used = set(re.findall(r"\blab\.(\w+)", source))
    assert used <= set(labkit.FACE), used - set(labkit.FACE)
    assert len(used) <= MOST_NAMES, sorted(used)


@every_lesson
def test_its_first_code_cell_acts_on_colab_and_kaggle_only(path, monkeypatch):
    """There it gets the tagged version from the repository that pyproject names, as badge and glossary do."""
    ran, (_, cell) = [], code(path)[0]
    assert notebooks.tags(cell) == [notebooks.COLAB, "remove-cell"]
    shell = type("Shell", (), {"system": lambda self, command: ran.append(command)})
    for name in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    exec(cell.source, {"get_ipython": shell})
    assert ran == []
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    exec(cell.source, {"get_ipython": shell})
    repository = tomllib.loads((paths.CHECKOUT / "pyproject.toml").read_text())["project"]["urls"][
        "Repository"
    ]
    course = f"gpu-labkit @ git+{repository}@v{labkit.__version__}"
    assert ran == [f"pip install -q --no-deps '{course}' nvidia-ml-py filelock psutil"]
    page = (
        f"{repository.replace('github.com', 'colab.research.google.com/github')}/blob/v{labkit.__version__}"
    )
    badge = f"[![Open in Colab](images/open-in-colab.svg)]({page}/notebooks/{path.name})"
    cells = notebooks.read(path).cells
    assert badge in cells[0].source.splitlines()
    at = f"{repository}/blob/v{labkit.__version__}/docs"  # a learner's folder has no docs
    pages = f"[glossary]({at}/glossary.md), [cheat sheet]({at}/cheat_sheet.md)"
    assert any(pages in cell.source for cell in cells[-2:])


@every_lesson
def test_every_guess_comes_before_its_answer(path):
    def places_of(pattern):
        found = [(re.findall(pattern, cell.source, re.MULTILINE), number) for number, cell in code(path)]
        return {guess: number for guesses, number in found for guess in guesses}

    asked, answered = places_of(r"^(\w+) = lab\.guess\("), places_of(r"^(\w+)\.reveal\(")
    assert asked and asked.keys() == answered.keys()
    cells = dict(code(path))
    for guess, number in answered.items():
        assert asked[guess] < number, f"{guess} is answered before it is asked"
        hidden = cells[number].metadata.get("jupyter", {}).get("outputs_hidden")
        assert hidden, f"the saved answer to {guess} is in sight of its question"


@every_lesson
def test_its_outputs_are_of_its_code_whole_and_can_be_read_without_seeing_them(path):
    state = stamps.recording_state(path)
    assert state.status != "stale", state.detail
    outputs = [(number, output) for number, cell in code(path) for output in cell.outputs]
    for number, output in outputs:
        assert output.output_type != "error" and not output.get("metadata"), f"code cell {number}"
        assert output.get("name") != "stderr", f"code cell {number}: {output.get('text')}"
        data = output.get("data", {})
        assert not [mime for mime in data if mime.startswith("image/") or "widget" in mime], (
            f"code cell {number}: an <img> with alt text reaches every page, this does not"
        )
        page = data.get("text/html", "")
        images = re.findall(r'<img alt="([^"]*)"[^>]* src="data:', page)  # a file of its own gets lost
        assert len(images) == page.count("<img"), f"code cell {number}"
        assert all(len(alt) > 80 for alt in images), f"code cell {number}"
        for cell in re.findall(r"<td[^>]*>(.*?)</td>", page):  # a name is not taken for a tag
            assert set(re.findall(r"</?(\w*)", cell)) <= {"small", "span"}, (number, cell)


LOADING = """
from labkit.lessons import notebooks
from labkit.measure import clocks, sweeps
from labkit.profiling import codegen, launch_counts, profiles

def refuse(*_, **__):
    raise SystemExit("loading a lesson measured, compiled or counted something")

clocks.measure = sweeps.run = codegen.compile_many = launch_counts.count = profiles.profile = refuse
for path in notebooks.find():
    notebooks.load(path)
print("loaded")
"""


def test_loading_a_lesson_measures_and_prints_nothing(tmp_path):
    # in a process of its own: what a lesson registers with torch it registers once
    environment = {**os.environ, "LABKIT_CACHE": str(tmp_path), "PYTHONPATH": paths.python_path()}
    environment.setdefault("TRITON_INTERPRET", "1")
    done = subprocess.run([sys.executable, "-c", LOADING], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stdout + done.stderr
