"""Lessons: found by number, loaded as modules."""

import inspect
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import notebooks, paths

pytestmark = pytest.mark.usefixtures("own_folders")


def write(folder, name, *cells):
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=list(cells)), path)
    return path


def code(source, *tags):
    return new_code_cell(source, metadata={"tags": list(tags)})


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    """The only one that there is."""
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    cells = [
        code("import math", "setup"),
        code("raise RuntimeError('loading must not run this')"),
        code("def double(x):\n    return 2 * x", "kernel"),
        code("def area(r):\n    return double(math.pi) * r", "kernel"),
    ]
    return write(tmp_path, "01_toy", new_markdown_cell("text\n\n# A toy\n\ntext"), *cells)


def test_lessons_are_found_in_order_and_by_number_name_and_file(lesson, tmp_path, monkeypatch):
    (tmp_path / "asides").mkdir()
    for name in ["02_b", "notes", "1_c", "asides/toys"]:
        write(tmp_path, name)
    assert [notebooks.name_of(path) for path in notebooks.find()] == ["01_toy", "02_b", "asides/toys"]
    for name in ["01", "1", "01_toy", "toy", "01_toy.ipynb", str(lesson)]:
        assert notebooks.resolve(name) == lesson
    for name in ["asides/toys", "asides/toys.ipynb", str(tmp_path / "asides" / "toys.ipynb")]:
        assert notebooks.resolve(name) == tmp_path / "asides" / "toys.ipynb"
    for name in ["03", "", "0", "asides", "toys", "../01_toy"]:
        with pytest.raises(ValueError, match="there are: 01_toy, 02_b, asides/toys"):
            notebooks.resolve(name)
    assert notebooks.title(notebooks.read(lesson)) == "A toy" and notebooks.title(new_notebook()) is None
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path / "missing")
    assert notebooks.find() == []


def test_load_gives_setup_and_kernel_cells_alone_with_source_that_can_be_inspected(lesson, tmp_path):
    module = notebooks.load(lesson)
    assert module.area(1) == pytest.approx(6.283, abs=1e-3) and not hasattr(module, "width")
    assert inspect.getsource(module.double) == "def double(x):\n    return 2 * x\n"
    assert notebooks.load("01") is module
    del sys.modules[module.__name__]
    with open(module.__file__, "w") as damaged:
        damaged.write("double = None")
    assert notebooks.load(lesson).double(2) == 4
    write(tmp_path, "01_toy", code("def double(x):\n    return x + x", "kernel"))
    second = notebooks.load(lesson)
    assert second.__file__ != module.__file__ and module.double(2) == second.double(2) == 4


@pytest.mark.parametrize("source", ["%timeit 1", "x = 1\n!ls", "len?", "x ="])
def test_load_names_the_cell_that_is_not_plain_python(tmp_path, source):
    path = write(tmp_path, "01_magic", code("x = 1", "setup"), code(source, "kernel"))
    with pytest.raises(ValueError, match=r"01_magic, cell 2: .* kernel "):
        notebooks.load(path)
