"""Rules for every lesson's notebook as it stands in the tree, and what its saved outputs have to be."""

import difflib
import os
import re
from functools import cache
from importlib import metadata
from unittest import mock

import nbformat
import pytest

import labkit
from labkit import notebooks, paths
from labkit.measure import tape
from labkit.run import record

NEW = notebooks.find()
TAGS = {notebooks.SETUP, notebooks.KERNEL, "way", notebooks.EXERCISE}
MOST_NAMES = 12
"""Names of labkit's face that a lesson has at most."""
HOME = re.compile(r"(?<![\w.:/])/(?:home|root|work|tmp|mnt|Users|usr|opt|var)/\w+|\b[A-Z]:\\\\\w")
"""A path of somebody's machine, in JSON."""
PICTURE = re.compile(r"base64,[\w+/=]+")
DEVICES = [(path, device) for path in NEW for device in tape.tapes(notebooks.key_of(path))]

every_lesson = pytest.mark.parametrize("path", NEW, ids=notebooks.name_of)


def code(path):
    return [cell for _, cell in notebooks.code_cells(notebooks.read(path))]


def test_each_lesson_has_a_number_of_its_own_and_no_notebook_is_left_out():
    numbers = [path.stem[:2] for path in NEW if path.parent == paths.NOTEBOOKS]
    assert numbers and len(set(numbers)) == len(numbers)
    there = {*paths.NOTEBOOKS.glob("*.ipynb"), *paths.NOTEBOOKS.glob("asides/*.ipynb")}
    assert there == set(NEW), "a notebook that is no lesson is never executed"


@every_lesson
def test_it_is_valid_and_written_as_jupyter_writes_it(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    # else the first save in Jupyter changes lines that nobody edited
    assert path.read_text(encoding="utf-8").rstrip("\n") == nbformat.writes(notebook).rstrip("\n")
    assert notebook.metadata.kernelspec.name == "python3", "the kernel that everybody has"
    assert {tag for cell in notebook.cells for tag in notebooks.tags(cell)} <= TAGS


@every_lesson
def test_no_path_of_somebodys_machine_is_in_it(path):
    found = HOME.search(PICTURE.sub("", path.read_text(encoding="utf-8")))
    assert found is None, found


@every_lesson
def test_its_prose_has_one_title_and_links_that_lead_somewhere(path):
    cells = [cell.source for cell in notebooks.read(path).cells if cell.cell_type == "markdown"]
    number = "" if path.parent.name == notebooks.ASIDES else rf"{int(path.stem[:2])}\. "
    assert re.match(rf"# {number}\S", cells[0]), "# <its number>. <title>"
    assert len(re.findall(r"^# ", "\n".join(cells), re.MULTILINE)) == 1, "one title; sections are ##"
    targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", re.sub(r"`[^`\n]*`", "", "\n".join(cells)))
    assert not [target for target in targets if not (path.parent / target).exists()]
    pictures = re.findall(r"!\[([^\]]*)\]\(", "\n".join(cells))
    assert all(len(alt) > 20 for alt in pictures), "a picture can be read without seeing it"


@every_lesson
def test_it_imports_nothing_of_labkit_but_the_face_and_uses_names_that_the_face_has(path):
    source = "\n\n".join(cell.source for cell in code(path))
    assert re.findall(r"^\s*(?:import|from) labkit\b.*$", source, re.MULTILINE) == ["import labkit as lab"]
    used = set(re.findall(r"\blab\.(\w+)", source))
    assert used <= set(labkit.FACE), used - set(labkit.FACE)
    assert len(used) <= MOST_NAMES, sorted(used)
    assert all(hasattr(labkit.kernels, name) for name in re.findall(r"\blab\.kernels\.(\w+)", source))


# ---- saved outputs -----------------------------------------------------------------------------------------


@cache
def rendered(path, device):
    """What record.rendered gives: the lesson is executed once for each device, without a GPU.

    ``device`` is "" for the one whose tape is shown.
    """
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        notebook, result = record.rendered(path, device)
    assert result.passed, result.failure
    return notebook, result


def shown(cell):
    """What a cell shows: a text for each output and kind of data."""
    found = {}
    for number, output in enumerate(cell.outputs, 1):
        texts = output.get("data", {output.get("name", output.output_type): output.get("text", "")})
        found |= {f"output {number}, {kind}": str(text) for kind, text in texts.items()}
    return found


def assert_same(path, comparable):
    """The committed outputs are those of an execution now, each compared as ``comparable`` makes it."""
    for committed, now in zip(
        code(path), [c for _, c in notebooks.code_cells(rendered(path, "")[0])], strict=True
    ):
        before, after = shown(committed), shown(now)
        where = f"{path.name}, cell {committed.id}"
        assert before.keys() == after.keys(), f"{where}: has other outputs now; `labkit render` saves them"
        for name, text in before.items():
            lines = [comparable(each).splitlines() for each in (text, after[name])]
            apart = list(difflib.unified_diff(*lines, "committed", "now", lineterm="", n=0))
            assert not apart, f"{where}, {name}; `labkit render` saves it anew:\n" + "\n".join(apart)[:2000]


@every_lesson
def test_its_saved_text_is_what_it_shows_now(path):
    """Pictures count by their alt text: pixels are other ones with each version of matplotlib."""
    assert_same(path, lambda text: PICTURE.sub("a picture", text))


@every_lesson
def test_its_saved_pictures_are_what_it_shows_now(path):
    pins = (paths.CHECKOUT / "constraints.txt").read_text()
    for name in ("torch", "triton", "matplotlib"):
        version = metadata.version(name).partition("+")[0]
        if f"\n{name}=={version}\n" not in pins:
            pytest.skip(
                f"pictures are compared with {name} as in constraints.txt only, and this is {version}"
            )
    assert_same(path, lambda text: text)


@every_lesson
def test_its_outputs_are_whole_and_can_be_read_without_seeing_them(path):
    for cell in code(path):
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr", (
                f"cell {cell.id}: {output}"
            )
            page = output.get("data", {}).get("text/html", "")
            images = re.findall(r'<img[^>]* alt="([^"]*)"', page)
            assert len(images) == page.count("<img") and all(len(alt) > 40 for alt in images), cell.id


@pytest.mark.parametrize(
    ("path", "device"), DEVICES, ids=[f"{path.stem}-{device}" for path, device in DEVICES]
)
def test_nothing_on_a_tape_is_an_error(path, device):
    rows = tape.read(tape.tapes(notebooks.key_of(path))[device])
    notes = [(row.title, getattr(row, "note", "")) for row in rows]
    failed = [said for said in notes if re.match(r"\w*Error\b", said[1])]
    assert not failed, failed


@pytest.mark.parametrize(
    ("path", "device"), DEVICES, ids=[f"{path.stem}-{device}" for path, device in DEVICES]
)
def test_each_claim_holds_on_each_recorded_device(path, device):
    _, result = rendered(path, "" if device == next(iter(tape.tapes(notebooks.key_of(path)))) else device)
    assert result.not_held == () and result.claims_need_gpu == 0
    assert result.claims_held > 0 or path.parent.name == notebooks.ASIDES
