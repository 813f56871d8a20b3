"""One execution of a lesson serves papermill's checks and nbval's; see conftest.py."""

import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import lessons, places
from labkit.runs import execute

MARKED = "# NBVAL_CHECK_OUTPUT\n"
CELLS = [
    "open('runs', 'a').write('x')\nfrom labkit.claims import claim",
    MARKED + "import sys\nprint('four', 4)\nprint('five', file=sys.stderr)\n4",
    "import time\nprint(time.time_ns())",
    "",
    MARKED + "claim('{value} bytes', 3, True)",
    MARKED + "print('again')",
    MARKED + "print('again')",
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """CELLS as a lesson with the outputs of an execution."""
    folder = tmp_path_factory.mktemp("reference")
    path = folder / "01_toy.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Toy"), *map(new_code_cell, CELLS)]), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        result = execute.execute(path, folder / "executed.ipynb")
    assert result.passed, result.failure
    return result.notebook_path


class Project:
    """A checkout with this conftest, whose lessons are the reference with changed outputs."""

    def __init__(self, root, reference):
        self.root, self.reference = root, reference
        self.notebooks = root / "notebooks"
        self.notebooks.mkdir()
        shutil.copy(places.CHECKOUT / "conftest.py", root)
        (root / "pytest.ini").write_text("[pytest]\n")

    def lesson(self, name, change=lambda cells: None):
        notebook = lessons.read(self.reference)
        change([cell for _, cell in lessons.code_cells(notebook)])
        nbformat.write(notebook, self.notebooks / f"{name}.ipynb")

    def test(self, name):
        (self.root / f"test_{name}.py").write_text(
            "from pathlib import Path\n"
            "def test_lesson(executed):\n"
            "    result = executed(Path('notebooks/01_toy.ipynb'))\n"
            "    assert result.passed and result.claims_held == 1\n"
        )

    def pytest(self, *arguments):
        """Counts of passed and failed, which cells failed, and all that was printed."""
        mine = ("PYTEST", "LABKIT")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
        temporary = self.root / "temporary"
        temporary.mkdir(exist_ok=True)
        environment.pop("CI", None)  # there pytest prints every failure a second time, in its summary
        environment |= {"PYTHONPATH": places.python_path(), "TMPDIR": str(temporary), "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", "pytest", "--nbval-lax", "-p", "no:cacheprovider", "-rf", *arguments]
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True)
        counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed)", done.stdout)}
        failed = re.findall(r"^FAILED notebooks/(\w+)\.ipynb::Cell (\d+)", done.stdout, re.MULTILINE)
        assert not list(temporary.glob("labkit-lessons-*")), "executions were left behind"
        return counts, failed, done.stdout

    def runs(self):
        return (self.notebooks / "runs").read_text()


@pytest.fixture
def project(tmp_path, reference):
    return Project(tmp_path, reference)


def test_outputs_that_agree_pass_and_the_lesson_runs_once(project):
    project.lesson("01_toy")
    project.test("it")
    counts, _, printed = project.pytest("notebooks", "test_it.py")
    assert counts == {"passed": 8}, printed
    assert project.runs() == "x"


def test_workers_share_one_execution(project):
    project.lesson("01_toy")
    for name in "ab":
        project.test(name)
    counts, _, printed = project.pytest(
        "-n", "2", "--dist", "loadfile", "notebooks", "test_a.py", "test_b.py"
    )
    assert counts == {"passed": 9}, printed
    assert project.runs() == "x"


def alter_text(cells):
    cells[1].outputs[0].text = "four 5\n"


def alter_data(cells):
    cells[4].outputs[0].data["application/vnd.labkit.claim+json"]["value"] = 4


def drop_output(cells):
    cells[6].outputs = []


def add_output(cells):
    cells[5].outputs.append(nbformat.v4.new_output("display_data", {"text/plain": "1"}))


def alter_unmarked(cells):
    cells[2].outputs[0].text = "0\n"


def fail(cells):
    cells[3].source = "1 / 0"


def test_changed_outputs_of_marked_cells_fail_and_no_others(project):
    changes = (alter_text, alter_unmarked, alter_data, add_output, drop_output)
    project.lesson("01_toy", lambda cells: [change(cells) for change in changes])
    counts, failed, printed = project.pytest("notebooks")
    assert failed == [("01_toy", cell) for cell in "1456"], printed
    assert counts == {"failed": 4, "passed": len(CELLS) - 4}
    assert printed.count("Cell outputs differ") == 4


def test_a_failing_cell_fails_and_so_do_those_that_did_not_run(project):
    project.lesson("01_toy", fail)
    _, failed, printed = project.pytest("notebooks")
    assert [cell for _, cell in failed] == ["3", "4", "5", "6"], printed
    assert "ZeroDivisionError" in printed and "did not run" in printed


def test_a_chosen_cell_is_compared_with_its_own_outputs(project):
    project.lesson("01_toy", alter_data)
    chosen = [f"notebooks/01_toy.ipynb::Cell {number}" for number in (2, 4, 6)]
    counts, failed, printed = project.pytest(*chosen)
    assert failed == [("01_toy", "4")] and counts == {"passed": 2, "failed": 1}, printed
