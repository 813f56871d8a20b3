"""Executing a lesson: what came out of it, how it fails, and what is cut."""

import os
import re
import sys

import nbformat
import psutil
import pytest
import stage
from processes import gone

from labkit import paths
from labkit.runs import execute as runner

PID = "import os; open('pid', 'w').write(str(os.getpid()))"
CLAIMS = """
from IPython.display import HTML, display
from labkit.measure.results import Measured
from labkit.widgets import claim
claim('{value} bytes', 3, True)
claim('{value} wide', 3, False)
claim('{value}x', Measured(2.0, 'recorded', 'other'), True)
claim('{value}y', None)
display({"text/plain": "3 passed", "MIME": {"name": "n", "passed": 3}}, raw=True)
HTML('<img alt="time against width" src="data:,">')
""".replace("MIME", runner.CHECK_MIME)
TELL = """
import os, sys, matplotlib, labkit
print(width, os.environ.get('TRITON_INTERPRET'), os.environ['EXTRA'], sys.executable, labkit.__file__)
matplotlib.get_backend()
"""
PIECES = """
for i in range(3):
    print(i, flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def execute(clone):
    """Executes a lesson of these cells; gives the result and the outputs of each code cell."""

    def run(*cells, parameters="", given=None, **options):
        path = stage.lesson(clone, *cells, parameters=parameters)
        before = path.read_bytes()
        result = runner.execute(path, clone / "{x}" / "out.ipynb", given, **options)
        assert path.read_bytes() == before and result.notebook_path == clone / "{x}" / "out.ipynb"
        executed = nbformat.read(result.notebook_path, 4)
        nbformat.validate(executed)
        return result, [cell.outputs for cell in executed.cells if cell.cell_type == "code"]

    return run


def ended():
    """Whether the kernel that wrote its pid is gone."""
    pid = int((paths.NOTEBOOKS / "pid").read_text())
    return not psutil.pid_exists(pid) or gone(psutil.Process(pid))


def test_a_lesson_is_executed_by_this_python_counted_and_made_a_page(execute):
    options = dict(parameters="width: int = 160", given={"width": "7"}, environment={"EXTRA": "extra"})
    result, outputs = execute(
        PID,
        CLAIMS,
        TELL,
        "claim('{value} again', 3, True)",
        "import time" + PIECES + "display(1)" + PIECES,
        **options,
    )
    assert result.passed and result.lesson == "01_toy", result.failure
    assert (result.claims_held, len(result.not_held), result.claims_need_gpu) == (2, 1, 2)
    assert result.checks_passed == 3
    told, backend = outputs[-3]
    package = paths.CHECKOUT / "labkit" / "__init__.py"
    assert told.text == f"7 {os.environ['TRITON_INTERPRET']} extra {sys.executable} {package}\n"
    assert "inline" in backend.data["text/plain"]
    streams = [o.get("text", "display") for o in outputs[-1]]
    assert streams == ["0\n1\n2\n", "display", "0\n1\n2\n"], (
        "pieces of a stream are joined, not across a figure"
    )
    page = result.html_path.read_text()
    assert (
        "<title>01_toy</title>" in page and '<html lang="en"' in page and 'alt="time against width"' in page
    )
    assert ended()


def test_a_failing_cell_ends_the_lesson_and_is_named(execute, clone):
    result, _ = execute(PID, "x = 1", "def f():\n    raise KeyError('lost')\n\nf()", "open('ran', 'w')")
    assert not result.passed and result.failure.cell == 3 and result.failure.source.startswith("def f():")
    assert result.failure.message == "KeyError: 'lost'"
    assert "raise KeyError('lost')" in result.failure.traceback and "\x1b" not in result.failure.traceback
    assert "KeyError" in result.html_path.read_text()
    assert ended() and not list(clone.rglob("ran"))


STUBBORN = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)"


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        (STUBBORN, "CellTimeoutError: stopped: .* 4 s"),
        ("import os; os._exit(3)", "DeadKernelError.*the process"),
    ],
)
def test_a_cell_that_hangs_or_kills_its_kernel_is_told_in_a_sentence(execute, cell, told):
    result, _ = execute(PID, cell, cell_limit_s=4)
    assert result.failure.cell == 2 and ended()
    assert re.match(told, result.failure.message)


def test_a_flood_is_cut_and_says_so_and_what_is_replaced_is_none(execute, monkeypatch):
    monkeypatch.setattr(runner, "DATA_LIMIT", 500_000)
    page = "from IPython.display import HTML, clear_output, display\n"
    result, (text, many, cleared, updated, _) = execute(
        "for i in range(200):\n    print('x' * 100_000)\nprint('end')",  # 20 MB
        page + "for i in range(8):\n    display(HTML('y' * 100_000))\nprint('goes on')",
        page + "for i in range(8):\n    clear_output(wait=True)\n    display(HTML(str(i) * 400_000))",
        page + "shown = display(HTML(''), display_id=True)\n"
        "for i in range(8):\n    shown.update(HTML(str(i) * 400_000))",
        "raise ValueError('why ' + 'z' * 1_000_000)",
    )
    assert result.failure.message.startswith("ValueError: why z")
    assert result.notebook_path.stat().st_size < 2_000_000
    assert len(text) == 1 and text[0].text.endswith(runner.CUT)
    assert len(text[0].text) == runner.TEXT_LIMIT + len(runner.CUT)
    kept = [o.data for o in many if "data" in o]
    assert len(kept) == 5 and kept[-1] == {"text/plain": runner.CUT} and many[-1].text == "goes on\n"
    assert [o.data["text/html"][0] for o in (*cleared, *updated)] == ["7", "7"]
