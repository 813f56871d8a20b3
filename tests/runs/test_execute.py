import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import places
from labkit.runs import execute as runner

CLAIM = "from labkit.claims import Measured, claim\n"
CHECK = f"""
from IPython.display import display
display({{"text/plain": "3 passed", "{runner.CHECK_MIME}": {{"name": "n", "passed": 3}}}}, raw=True)
"""
PID = "import os; open('pid', 'w').write(str(os.getpid()))"


@pytest.fixture
def lesson(tmp_path):
    """Writes a lesson; a str is a code cell, a pair is its source and tag."""

    def write(*cells, name="01_toy", heading="# A toy"):
        notebook = new_notebook(cells=[new_markdown_cell(heading)])
        for cell in cells:
            source, tags = (cell, []) if isinstance(cell, str) else (cell[0], [cell[1]])
            notebook.cells.append(new_code_cell(source, metadata={"tags": tags}))
        path = tmp_path / "notebooks" / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, path)
        return path

    return write


@pytest.fixture
def execute(tmp_path):
    return lambda path, *args, **options: runner.execute(
        path, tmp_path / "build" / path.name, *args, **options
    )


def ended(folder, within=5.0):
    """Whether the kernel that wrote its pid into a folder is gone."""
    pid = int((folder / "pid").read_text())
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_a_lesson_is_executed_counted_and_made_a_page(lesson, execute):
    path = lesson(
        PID,
        CLAIM + "claim('{value} bytes', 3, True)\nclaim('{value} wide', 3, False)",
        "claim('{value}x', Measured(2.0, 'recorded', 'other'), True)\nclaim('{value}y', None)",
        CHECK,
        "claim('{value} again', 3, True)",
        ("width: int = 160", "parameters"),
        "import os, matplotlib\n"
        "print(width, os.environ.get('TRITON_INTERPRET'), os.environ['EXTRA'])\n"
        "matplotlib.get_backend()",
    )
    before = path.read_bytes()
    result = execute(path, {"width": "7"}, environment={"EXTRA": "extra"})
    assert result.passed, result.failure
    assert (result.claims_held, result.claims_not_held, result.claims_need_gpu) == (2, 1, 2)
    assert result.checks_passed == 3
    assert path.read_bytes() == before
    last = nbformat.read(result.notebook_path, 4).cells[-1].outputs
    assert (
        last[0].text == f"7 {os.environ.get('TRITON_INTERPRET')} extra\n"
        and "inline" in last[1].data["text/plain"]
    )
    page = result.html_path.read_text()
    assert "<title>A toy</title>" in page and '<html lang="en"' in page
    assert ended(path.parent)


def test_a_failing_cell_ends_the_lesson_and_is_named(lesson, execute):
    path = lesson(PID, "x = 1", "def f():\n    raise KeyError('lost')\n\nf()", "open('ran', 'w')")
    result = execute(path)
    assert not result.passed
    assert result.failure.cell == 3
    assert result.failure.source.startswith("def f():")
    assert result.failure.message == "KeyError: 'lost'"
    assert "raise KeyError('lost')" in result.failure.traceback and "\x1b" not in result.failure.traceback
    assert not (path.parent / "ran").exists()
    assert "KeyError" in result.html_path.read_text()
    assert ended(path.parent)


def test_hostile_parameters_run_nothing(lesson, execute):
    path = lesson(PID, ("N: int = 1\ntext: str = 'a'", "parameters"))
    for given in [{'Z=1;print("x");N': "5"}, {"Z": "1"}, {"N": "__import__('os')"}, {"text": '";print(1);"'}]:
        with pytest.raises(ValueError):
            execute(path, given)
    assert not (path.parent / "pid").exists()


def test_a_hung_cell_is_stopped_and_its_kernel_killed(lesson, execute):
    stubborn = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)"
    path = lesson(PID, stubborn)
    result = execute(path, cell_limit_s=4)
    assert result.failure.cell == 2
    assert result.failure.message == "CellTimeoutError: stopped: the limit for one cell is 4 s"
    assert ended(path.parent)


def test_a_kernel_that_dies_is_an_error_of_its_cell(lesson, execute):
    result = execute(lesson("x = 1", "import os; os._exit(3)"))
    assert result.failure.cell == 2 and result.failure.message.startswith("DeadKernelError")


def test_a_flood_is_cut_and_says_so_and_what_is_replaced_is_none(lesson, execute, monkeypatch):
    monkeypatch.setattr(runner, "DATA_LIMIT", 500_000)
    page = "from IPython.display import HTML, clear_output, display\n"
    path = lesson(
        "for i in range(200):\n    print('x' * 100_000)\nprint('end')",  # 20 MB
        page + "for i in range(8):\n    display(HTML('y' * 100_000))\nprint('goes on')",
        page + "for i in range(8):\n    clear_output(wait=True)\n    display(HTML(str(i) * 400_000))",
        page + "shown = display(HTML(''), display_id=True)\n"
        "for i in range(8):\n    shown.update(HTML(str(i) * 400_000))",
        "raise ValueError('why ' + 'z' * 1_000_000)",
    )
    result = execute(path)
    assert result.failure.message.startswith("ValueError: why z")
    assert result.notebook_path.stat().st_size < 2_000_000
    text, many, cleared, updated, _ = (c.outputs for c in lessons_cells(result))
    assert len(text) == 1 and text[0].text.endswith(runner.CUT)
    assert len(text[0].text) == runner.TEXT_LIMIT + len(runner.CUT)
    kept = [o.data for o in many if "data" in o]
    assert len(kept) == 5 and kept[-1] == {"text/plain": runner.CUT} and many[-1].text == "goes on\n"
    assert [o.data["text/html"][0] for o in (*cleared, *updated)] == ["7", "7"]


def lessons_cells(result):
    """The code cells of an executed lesson."""
    cells = nbformat.read(result.notebook_path, 4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def test_a_cell_that_prints_for_ever_is_stopped_at_its_limit_and_its_text_is_cut(lesson, execute):
    much = "import time\nprint('x' * 1_000_000)\n"  # a slow machine may not get far
    endless = "while True:\n    print('x' * 10_000)\n    time.sleep(0.005)"
    result = execute(lesson(much + endless), cell_limit_s=6)
    assert "the limit for one cell is 6 s" in result.failure.message and result.seconds < 60
    assert result.notebook_path.stat().st_size < 1.5 * runner.TEXT_LIMIT
    assert runner.CUT.strip() in result.html_path.read_text()
    assert result.html_path.stat().st_size < 1_000_000


def test_pieces_of_a_stream_are_one_output_up_to_the_next_figure(lesson, execute):
    pieces = "for i in range(3):\n    print(i, flush=True)\n    print('e', file=sys.stderr, flush=True)\n"
    pieces += "    time.sleep(0.1)\n"
    result = execute(lesson(f"import sys, time\n{pieces}display(1)\n{pieces}"))
    outputs = nbformat.read(result.notebook_path, 4).cells[1].outputs
    assert [o.get("text", "display") for o in outputs if o.get("name") != "stderr"] == [
        "0\n1\n2\n",
        "display",
        "0\n1\n2\n",
    ]
    assert [o.text for o in outputs if o.get("name") == "stderr"] == ["e\ne\ne\n"] * 2


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A lesson that was executed, and its code."""
    code = [
        "1 + 1",
        "import sys, labkit\nprint(sys.executable, labkit.__file__)",
        'from IPython.display import HTML\nHTML(\'<img alt="time against width" src="data:,">\')',
    ]
    folder = tmp_path_factory.mktemp("toy")
    cells = [new_markdown_cell("# A toy"), *map(new_code_cell, code)]
    nbformat.write(new_notebook(cells=cells), folder / "01_toy.ipynb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return runner.execute(folder / "01_toy.ipynb", folder / "{x}" / "out.ipynb"), code


def test_alternative_text_reaches_the_page(toy):
    assert 'alt="time against width"' in toy[0].html_path.read_text()


def test_an_output_path_with_braces_is_taken_as_it_stands(toy):
    output = toy[0].notebook_path
    assert output.parts[-2:] == ("{x}", "out.ipynb") and output.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_kernel(lesson, tmp_path, number):
    path = lesson(PID + "\nimport time\nwhile True: time.sleep(1)", "open('ran', 'w')")
    script = f"""
        import signal, sys
        from pathlib import Path
        from labkit.runs import execute as runner
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        runner.execute(Path({str(path)!r}), Path({str(tmp_path / "out.ipynb")!r}))
    """
    environment = {**os.environ, "PYTHONPATH": places.python_path()}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, stderr=subprocess.PIPE
    )
    pid = path.parent / "pid"
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode in (-signal.SIGINT, 143)
    assert ended(path.parent)
    assert not (path.parent / "ran").exists()
    assert b"was destroyed" not in errors


def test_the_kernel_is_this_python(toy):
    text = nbformat.read(toy[0].notebook_path, 4).cells[2].outputs[0].text
    assert text == f"{sys.executable} {places.CHECKOUT / 'labkit' / '__init__.py'}\n"


def test_the_executed_notebook_is_valid_and_unchanged_in_its_code(toy):
    result, code = toy
    executed = json.loads(result.notebook_path.read_text())
    nbformat.validate(nbformat.from_dict(executed))
    assert ["".join(c["source"]) for c in executed["cells"]] == ["# A toy", *code]
