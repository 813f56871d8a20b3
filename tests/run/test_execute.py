"""Executing a lesson: what came out of it, how it fails, and what ends it."""

import os
import sys

import nbformat
import psutil
import pytest
import stage
from processes import gone

from labkit import paths
from labkit.run import execute as runner

PID = "import os; open('pid', 'w').write(str(os.getpid()))"
SHOWN = """
import math
from IPython.display import HTML, display
from labkit.display.say import claim
claim('{value} bytes', 3, lambda n: n == 3)
claim('{value} wide', 3, lambda n: n == 4)
claim('{value}x', math.nan, lambda n: True)
display({"text/plain": "3 passed", "MIME": {"name": "n", "passed": 3}}, raw=True)
HTML('<img alt="time against width" src="data:,">')
""".replace("MIME", runner.CHECK_MIME)
TELL = """
import os, sys, labkit
print(os.environ.get('TRITON_INTERPRET'), os.getcwd(), sys.executable, labkit.__file__)
"""


@pytest.fixture
def execute(clone):
    """Executes a lesson of these cells; gives the result and the outputs of each code cell."""

    def run(*cells, cell_limit_s=60):
        path = stage.lesson(clone, *cells)
        before = path.read_bytes()
        result = runner.execute(path, clone / "{x}" / "out.ipynb", cell_limit_s)
        assert path.read_bytes() == before
        executed = nbformat.read(clone / "{x}" / "out.ipynb", 4)
        nbformat.validate(executed)
        return result, [cell.outputs for cell in executed.cells if cell.cell_type == "code"]

    return run


def ended():
    """Whether the kernel that wrote its pid is gone."""
    pid = int((paths.NOTEBOOKS / "pid").read_text())
    return not psutil.pid_exists(pid) or gone(psutil.Process(pid))


def test_a_lesson_is_executed_by_this_python_in_its_folder_and_counted(execute):
    result, outputs = execute(PID, SHOWN, TELL)
    assert result.passed and result.lesson == "01_toy", result.failure
    assert (result.claims_held, len(result.not_held), result.claims_need_gpu) == (1, 1, 1)
    assert result.checks_passed == 3
    package = paths.CHECKOUT / "labkit" / "__init__.py"
    where = f"{os.environ['TRITON_INTERPRET']} {paths.NOTEBOOKS} {sys.executable} {package}"
    assert outputs[-1][0].text == f"{where}\n"
    assert ended()


def test_a_failing_cell_ends_the_lesson_and_is_named(execute, clone):
    result, _ = execute(PID, "x = 1", "def f():\n    raise KeyError('lost')\n\nf()", "open('ran', 'w')")
    assert not result.passed and result.failure.cell == 3 and result.failure.source.startswith("def f():")
    assert result.failure.message == "KeyError: 'lost'"
    assert "raise KeyError('lost')" in result.failure.traceback and "\x1b" not in result.failure.traceback
    assert ended() and not list(clone.rglob("ran"))


STUBBORN = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)"


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        (STUBBORN, "stopped: the limit for one cell is 4 s"),
        ("import os; os._exit(3)", "the process of the lesson ended in the middle of this cell"),
    ],
)
def test_a_cell_that_hangs_or_kills_its_kernel_is_named_and_told_in_a_sentence(execute, cell, told):
    result, _ = execute(PID, cell, "1", cell_limit_s=4)
    assert (result.failure.cell, result.failure.source, result.failure.message) == (2, cell, told)
    assert ended()
