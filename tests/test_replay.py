"""One execution of a lesson serves papermill's checks and nbval's; see conftest.py."""

import os
import re
import shutil
import subprocess
import sys

import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from labkit import paths
from labkit.lessons import notebooks
from labkit.runs import execute

MARKED = "# NBVAL_CHECK_OUTPUT\n"
CELLS = [
    "open('runs', 'a').write('x')\nfrom labkit.widgets import claim",
    MARKED + "import sys\nprint('four', 4)\nprint('five', file=sys.stderr)\n4",
    "import time\nprint(time.time_ns())",
    "",
    MARKED + "claim('{value} bytes', 3, True)",
    MARKED + "print('again')",
    MARKED + "print('again')",
    MARKED + "print('as it was')",
]
TEST = """
from pathlib import Path
def test_lesson(executed):
    result = executed(Path('notebooks/01_toy.ipynb'))
    assert result.passed and result.claims_held == 1
"""


def test_changed_outputs_of_marked_cells_fail_and_no_others_and_the_lesson_runs_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (folder := tmp_path / "notebooks").mkdir()
    path, temporary = folder / "01_toy.ipynb", tmp_path / "temporary"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in CELLS]), path)
    result = execute.execute(path, tmp_path / "executed.ipynb")
    assert result.passed, result.failure
    notebook = notebooks.read(result.notebook_path)
    cells = notebook.cells
    cells[1].outputs[0].text = "four 5\n"
    cells[2].outputs[0].text = "0\n"  # it is not marked
    cells[4].outputs[0].data["application/vnd.labkit.claim+json"]["value"] = 4
    cells[5].outputs.append(new_output("display_data", {"text/plain": "1"}))
    cells[6].outputs = []
    nbformat.write(notebook, path)
    (folder / "runs").unlink(missing_ok=True)

    shutil.copy(paths.CHECKOUT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TEST)
    temporary.mkdir()
    mine = ("PYTEST", "LABKIT", "CI")  # with CI pytest prints every failure a second time
    environment = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    environment |= {"PYTHONPATH": paths.python_path(), "TMPDIR": str(temporary)}
    options = ("--nbval-lax", "-p", "no:cacheprovider", "-rf", "notebooks", "test_it.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    printed = done.stdout
    assert re.findall(r"^FAILED notebooks/01_toy\.ipynb::Cell (\d+)", printed, re.MULTILINE) == list("1456")
    assert "4 failed, 5 passed" in printed and printed.count("Cell outputs differ") == 4, printed
    assert (folder / "runs").read_text() == "x", "nbval and the test share one execution"
    assert not list(temporary.glob("labkit-lessons-*")), "executions were left behind"
