import inspect
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import lessons


def write(folder, name, *cells, **metadata):
    notebook = new_notebook(cells=list(cells), metadata=metadata)
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def code(source, *tags):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def lesson(tmp_path):
    return write(
        tmp_path,
        "01_toy",
        new_markdown_cell("# A toy\n\ntext"),
        code("import math", "setup"),
        code("raise RuntimeError('loading must not run this')"),
        code("def double(x):\n    return 2 * x", "kernel"),
        code("def area(r):\n    return double(math.pi) * r", "kernel"),
        code(
            "width: int = 160  # columns\nrate: float = 0.5\nname: str = 'a b'\nfast: bool = True",
            "parameters",
        ),
    )


def test_find_lists_lessons_in_order_and_nothing_else(tmp_path):
    for name in ["02_b", "01_a", "notes", "1_c"]:
        write(tmp_path, name)
    assert [path.stem for path in lessons.find(tmp_path)] == ["01_a", "02_b"]
    assert lessons.find(tmp_path / "missing") == []


def test_resolve_takes_number_name_and_file(lesson, tmp_path):
    for name in ["01", "01_toy", "01_toy.ipynb", str(lesson)]:
        assert lessons.resolve(name, tmp_path) == lesson


@pytest.mark.parametrize("name", ["02", "toy", "", "0", "../01_toy"])
def test_resolve_names_what_there_is(lesson, tmp_path, name):
    with pytest.raises(ValueError, match="there are: 01_toy"):
        lessons.resolve(name, tmp_path)


def test_resolve_refuses_an_ambiguous_number(lesson, tmp_path):
    write(tmp_path, "01_other")
    with pytest.raises(ValueError, match="several lessons"):
        lessons.resolve("01", tmp_path)


def test_title_is_the_first_heading(lesson):
    assert lessons.title(lessons.read(lesson)) == "A toy"
    assert lessons.title(new_notebook()) is None


def test_load_gives_setup_and_kernel_cells_only(lesson):
    module = lessons.load(lesson)
    assert module.area(1) == pytest.approx(6.283, abs=1e-3)
    assert not hasattr(module, "width")


def test_load_leaves_source_that_can_be_inspected_and_located(lesson):
    module = lessons.load(lesson)
    assert inspect.getsource(module.double) == "def double(x):\n    return 2 * x\n"
    assert "# 01_toy, cell 3 (kernel)\ndef double(x):" in inspect.getsource(module)


def test_load_imports_once_for_each_content(lesson, tmp_path):
    first = lessons.load(lesson)
    assert lessons.load("01", tmp_path) is first
    write(tmp_path, "01_toy", code("def double(x):\n    return x + x", "kernel"))
    second = lessons.load(lesson)
    assert second is not first and second.__file__ != first.__file__
    assert first.double(2) == second.double(2) == 4


def test_load_does_not_trust_a_damaged_cache(lesson, tmp_path):
    module = lessons.load(lesson)
    del sys.modules[module.__name__]
    with open(module.__file__, "w") as file:
        file.write("double = None")
    assert lessons.load(lesson).double(2) == 4


def test_load_solved_has_the_solutions_in_place_of_the_exercises(tmp_path):
    exercise = code('def mine(x):\n    ...\n\ntasks.check("mine", mine)', "exercise")
    path = write(tmp_path, "01_toy", code("SIZE = 2", "setup"), exercise, code("size = mine(1)"))
    solutions = tmp_path / "solutions" / "01_toy.py"
    solutions.parent.mkdir()
    solutions.write_text('"""Solutions."""\n\n# %% [mine]\ndef mine(x):\n    return SIZE * x\n')
    assert not hasattr(lessons.load(path), "mine")
    assert lessons.load(path, solved=True).mine(3) == 6


@pytest.mark.parametrize("source", ["%timeit 1", "x = 1\n!ls", "files = !ls", "len?", "%%time\nx = 1", "x ="])
def test_load_names_the_cell_that_is_not_plain_python(tmp_path, source):
    path = write(tmp_path, "01_magic", code("x = 1", "setup"), code(source, "kernel"))
    with pytest.raises(ValueError, match=r"01_magic, cell 2: a cell tagged kernel has to be plain Python"):
        lessons.load(path)


def test_load_of_a_lesson_without_kernels_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no cell is tagged setup or kernel"):
        lessons.load(write(tmp_path, "01_bare", code("x = 1")))


def test_a_module_that_fails_is_not_kept(tmp_path):
    path = write(tmp_path, "01_bad", code("1 / 0", "setup"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            lessons.load(path)


def test_code_hash_is_of_the_code_alone(tmp_path):
    path = write(tmp_path, "01_a", code("x = 1"), code("y = 2"))
    plain = lessons.code_hash(path)
    assert len(plain) == 12 and int(plain, 16) >= 0
    notebook = lessons.read(path)
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", text="hello")]
    notebook.cells[0].execution_count = 7
    notebook.cells[0].metadata["tags"] = ["setup"]
    notebook.cells.insert(0, new_markdown_cell("text"))
    notebook.metadata["labkit"] = {"recorded": {}}
    nbformat.write(notebook, path)
    assert lessons.code_hash(path) == plain


@pytest.mark.parametrize(
    "sources", [["x = 1", "y = 3"], ["x = 1y = 2"], ["y = 2", "x = 1"], ["x = 1", "", "y = 2"]]
)
def test_code_hash_changes_with_the_code(tmp_path, sources):
    before = lessons.code_hash(write(tmp_path, "01_a", code("x = 1"), code("y = 2")))
    assert lessons.code_hash(write(tmp_path, "01_b", *map(code, sources))) != before


def test_parameters_are_read_from_the_tagged_cell(lesson):
    found = lessons.parameters(lesson)
    assert list(found) == ["width", "rate", "name", "fast"]
    assert found["width"] == lessons.Parameter("width", "int", 160, "columns")
    assert found["name"].default == "a b" and found["fast"].default is True


def test_a_lesson_without_parameters_declares_none(tmp_path):
    assert lessons.parameters(write(tmp_path, "01_a", code("x: int = 1"))) == {}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("width = 3", "declared as None"),
        ("width: list = [3]", "declared as list"),
        ("width: int = 3.0", "its default is 3.0"),
        ("width: int = True", "its default is True"),
        ("width: int = f(3)", "is not a literal"),
    ],
)
def test_a_badly_declared_parameter_is_refused(tmp_path, source, problem):
    with pytest.raises(ValueError, match=f"parameter width: .*{problem}"):
        lessons.parameters(write(tmp_path, "01_a", code(source, "parameters")))


def test_given_values_are_converted_to_their_kinds(lesson):
    given = {"width": "161", "rate": "1e-3", "name": "two words, é", "fast": "False"}
    assert lessons.check_parameters(lesson, given) == {
        "width": 161,
        "rate": 0.001,
        "name": "two words, é",
        "fast": False,
    }


@pytest.mark.parametrize(
    "name", ['Z=1;print("x");N', "wid th", "depth", "", "width ", "\uff57idth", "__import__"]
)
def test_a_name_that_is_not_declared_is_refused(lesson, name):
    with pytest.raises(ValueError, match="declares: width"):
        lessons.check_parameters(lesson, {name: "1"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("width", "1.5"),
        ("width", "0"),
        ("width", "-1"),
        ("width", "print(1)"),
        ("width", ""),
        ("width", "9" * 5000),
        ("rate", "nan"),
        ("rate", "inf"),
        ("rate", "one"),
        ("fast", "maybe"),
        ("fast", "2"),
        *(("name", f"a{bad}b") for bad in ["\n", "\r", '"', "'", "\\", "`", "\0", "\x1b", "\u2028"]),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(lesson, name, text):
    with pytest.raises(ValueError, match=f"parameter {name}: .* is not "):
        lessons.check_parameters(lesson, {name: text})


def test_triton_can_read_the_source_of_a_loaded_kernel(tmp_path):
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    kernel = "@triton.jit\ndef copy(x, y, N: tl.constexpr):\n    at = tl.arange(0, N)\n"
    kernel += "    tl.store(y + at, tl.load(x + at))"
    path = write(
        tmp_path,
        "01_kernel",
        code("import triton\nimport triton.language as tl", "setup"),
        code("@triton.jit\ndef first(x):\n    return x", "kernel"),
        code(kernel, "kernel"),
    )
    module = lessons.load(path)
    assert inspect.getsource(module.copy.fn) == kernel + "\n"
