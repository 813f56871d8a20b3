"""Lessons: found by number, loaded as modules, their parameters read and given values checked."""

import inspect
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import paths
from labkit.lessons import notebooks

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
        code("width: int = 160  # columns\nrate: float = 0.5\nfast: bool = True", "parameters"),
    ]
    return write(tmp_path, "01_toy", new_markdown_cell("text\n\n# A toy\n\ntext"), *cells)


def test_lessons_are_found_in_order_and_by_number_name_and_file(lesson, tmp_path, monkeypatch):
    for name in ["02_b", "notes", "1_c"]:
        write(tmp_path, name)
    assert [path.stem for path in notebooks.find()] == ["01_toy", "02_b"]
    for name in ["01", "01_toy", "01_toy.ipynb", str(lesson)]:
        assert notebooks.resolve(name) == lesson
    for name in ["03", "toy", "", "0", "../01_toy"]:
        with pytest.raises(ValueError, match="there are: 01_toy, 02_b"):
            notebooks.resolve(name)
    write(tmp_path, "01_other")
    with pytest.raises(ValueError, match="several lessons"):
        notebooks.resolve("01")
    assert notebooks.title(notebooks.read(lesson)) == "A toy" and notebooks.title(new_notebook()) is None
    assert notebooks.lesson_key("01_toy") == "toy"
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


def test_load_solved_has_the_solutions_in_place_of_the_exercises(tmp_path):
    exercise = code('def mine(x):\n    ...\n\ntasks.check("mine", mine)', "exercise")
    path = write(tmp_path, "01_toy", code("SIZE = 2", "setup"), exercise, code("size = mine(1)"))
    solutions = tmp_path / "solutions" / "01_toy.py"
    solutions.parent.mkdir()
    solutions.write_text('"""Solutions."""\n\n# %% [mine]\ndef mine(x):\n    return SIZE * x\n')
    assert not hasattr(notebooks.load(path), "mine")
    assert notebooks.load(path, solved=True).mine(3) == 6


@pytest.mark.parametrize("source", ["%timeit 1", "x = 1\n!ls", "len?", "x ="])
def test_load_names_the_cell_that_is_not_plain_python(tmp_path, source):
    path = write(tmp_path, "01_magic", code("x = 1", "setup"), code(source, "kernel"))
    with pytest.raises(ValueError, match=r"01_magic, cell 2: .* kernel "):
        notebooks.load(path)


def test_the_hash_is_of_the_code_alone_and_of_all_of_it(tmp_path):
    def hashed(*sources):
        return notebooks.code_hash(write(tmp_path, "01_b", *map(code, sources)))

    plain = hashed("x = 1", "y = 2")
    shown = new_code_cell(
        "x = 1",
        outputs=[nbformat.v4.new_output("stream", text="1")],
        execution_count=7,
        metadata={"tags": ["a"]},
    )
    assert (
        notebooks.code_hash(write(tmp_path, "01_a", new_markdown_cell("text"), shown, code("y = 2"))) == plain
    )
    for other in (["x = 1", "y = 3"], ["x = 1y = 2"], ["y = 2", "x = 1"], ["x = 1", "", "y = 2"]):
        assert hashed(*other) != plain
    solutions = tmp_path / "solutions" / "01_a.py"
    solutions.parent.mkdir()
    solutions.write_text("x = 1")
    assert notebooks.code_hash(tmp_path / "01_a.ipynb") != plain


def test_parameters_are_read_and_given_values_converted(lesson, tmp_path):
    found = notebooks.parameters(lesson)
    assert list(found) == ["width", "rate", "fast"]
    assert found["width"] == notebooks.Parameter("width", "int", 160, "columns")
    given = {"width": "161", "rate": "1e-3", "fast": "False"}
    wanted = {"width": 161, "rate": 0.001, "fast": False}
    assert notebooks.check_parameters(lesson, given) == wanted
    assert notebooks.parameters(write(tmp_path, "02_a", code("x: int = 1"))) == {}


@pytest.mark.parametrize(
    ("kind", "default"),
    [("", "3"), (": list", "[3]"), (": str", "'a'"), (": int", "3.0"), (": int", "True"), (": int", "f(3)")],
)
def test_a_badly_declared_parameter_is_refused(tmp_path, kind, default):
    with pytest.raises(ValueError, match="parameter width: "):
        notebooks.parameters(write(tmp_path, "01_a", code(f"width{kind} = {default}", "parameters")))


CODE = ["__import__('os')", "1; open('ran', 'w')", "1\nopen('ran', 'w')", "!touch ran", "\\", "9" * 5000, ""]
REFUSED = {
    "width": [*CODE, "1.5", "0", "-1"],
    "rate": [*CODE[:-2], "nan", "inf", "1e999", ""],
    "fast": [*CODE, "maybe", "2"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_of_the_wrong_kind_is_refused(lesson, name):
    for text in REFUSED[name]:
        with pytest.raises(ValueError, match=f"parameter {name}: .* is not ") as raised:
            notebooks.check_parameters(lesson, {name: text})
        assert len(str(raised.value)) < 200


UNDECLARED = ["width=1;x", "width\nimport os", "depth", "", "width ", "\uff57idth", "__import__", "../width"]


@pytest.mark.parametrize("name", ['Z=1;print("x");N', *UNDECLARED])
def test_a_name_that_is_not_declared_is_refused(lesson, name):
    with pytest.raises(ValueError, match="declares: width"):
        notebooks.check_parameters(lesson, {name: "1"})
