import asyncio
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
import queueing
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import limited_client as limits
from labkit import places, runner

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
    seen = []
    result = execute(path, {"width": "7"}, seen.append, environment={"EXTRA": "extra"})
    assert result.passed, result.failure
    assert (result.claims_held, result.claims_not_held, result.claims_need_gpu) == (2, 1, 2)
    assert result.checks_passed == 3
    assert path.read_bytes() == before
    assert [(p.cell, p.cells) for p in seen] == [(n, 7) for n in [1, 2, 3, 4, 5, 6, 6, 7]]
    assert seen[0].line == PID and seen[-1].seconds > seen[0].seconds >= 0
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


def test_a_cell_that_waited_for_the_gpu_until_its_limit_says_so(lesson, execute, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_TURNS", str(tmp_path / "turns"))
    path = lesson("from labkit import turns", "with turns.hold('GPU-1'):\n    pass")
    alone = execute(path)
    assert alone.passed
    limit_s = round(5 + 2 * alone.seconds)  # enough on this machine to come to the queue, and say so

    class Lingering(runner.AsyncKernelManager):
        """A kernel is interrupted, which ends its wait, before it is killed."""

        async def _async_kill_kernel(self, restart=False):
            await asyncio.sleep(1)
            await super()._async_kill_kernel(restart)

    monkeypatch.setattr(runner, "AsyncKernelManager", Lingering)
    with queueing.other(tmp_path / "turns", "GPU-1") as process:
        failure = execute(path, cell_limit_s=limit_s).failure
    assert failure.cell == 2
    assert f"the limit for one cell is {limit_s} s; it was 1st in the queue for the GPU." in failure.message
    assert f"Process {process.pid} of " in failure.message


def test_a_lesson_has_a_limit_of_its_own(lesson, execute):
    result = execute(lesson(*["import time; time.sleep(0.7)"] * 15), limit_s=8)
    assert "the lesson's limit is 8 s" in result.failure.message
    assert 1 < result.failure.cell < 15


def test_a_kernel_that_dies_is_an_error_of_its_cell(lesson, execute):
    result = execute(lesson("x = 1", "import os; os._exit(3)"))
    assert result.failure.cell == 2 and result.failure.message.startswith("DeadKernelError")


def test_a_flood_of_text_is_cut_and_says_so(lesson, execute):
    path = lesson(
        "for i in range(40):\n    print('x' * 100_000)",
        "import sys\n"
        "for i in range(40):\n"
        "    print('o' * 20_000, flush=True)\n"
        "    print('e' * 20_000, file=sys.stderr, flush=True)",
        "print('short')",
        "class Long:\n    def __repr__(self): return 'r' * 1_000_000\nLong()",
    )
    result = execute(path)
    assert result.passed
    assert result.notebook_path.stat().st_size < 3.5 * limits.TEXT_LIMIT
    cells = nbformat.read(result.notebook_path, 4).cells[1:]
    assert cells[0].outputs[0].text.count(limits.CUT) == 1
    assert sum(output.text.count(limits.CUT) for output in cells[1].outputs) == 1
    assert cells[2].outputs[0].text == "short\n"
    assert cells[3].outputs[0].data["text/plain"].endswith(limits.CUT)


def test_a_flood_of_pages_and_figures_is_cut_and_says_so(lesson, execute, monkeypatch):
    monkeypatch.setattr(limits, "DATA_LIMIT", 500_000)
    monkeypatch.setattr(limits, "MOST_OUTPUTS", 100)
    page = "from IPython.display import HTML, display\n"
    handle = page + "shown = display(HTML('x'), display_id=True)\n"
    path = lesson(
        page + "for i in range(8):\n    display(HTML('x' * 100_000))\nprint('goes on')",
        page + "display(HTML('x' * 2_000_000))",
        handle + "shown.update(HTML('x' * 2_000_000))",
        page + "for i in range(400):\n    display(HTML('x'))",
        handle + "for i in range(8):\n    shown.update(HTML(str(i) * 100_000))",
        "import ipywidgets\nout = ipywidgets.Output()\n"
        "with out:\n    for i in range(40):\n        print('w' * 20_000, flush=True)\ndisplay(out)",
    )
    result = execute(path)
    assert result.passed, result.failure
    assert result.notebook_path.stat().st_size < 3 * limits.DATA_LIMIT
    assert result.html_path.stat().st_size < 4 * limits.DATA_LIMIT
    executed = nbformat.read(result.notebook_path, 4)
    many, one, updated, small, live = (cell.outputs for cell in executed.cells[1:6])
    assert len([o for o in many if "text/html" in o.get("data", {})]) == 5
    assert many[5].data == {"text/plain": limits.DATA_CUT} and many[6].text == "goes on\n"
    for outputs in (one, updated):
        assert [o.data for o in outputs] == [{"text/plain": limits.DATA_CUT}]
    assert small[-1].data == {"text/plain": limits.DATA_CUT} and len(small) == limits.MOST_OUTPUTS + 1
    assert live[0].data["text/html"] == "7" * 100_000, "what takes the place of another adds nothing"
    (widgets,) = executed.metadata.widgets.values()
    states = [widget["state"] for widget in widgets["state"].values()]
    (held,) = [state["outputs"] for state in states if state.get("outputs")]
    assert held[0]["text"].endswith(limits.CUT) and len(held[0]["text"]) < 1.1 * limits.TEXT_LIMIT
    assert limits.DATA_CUT in result.html_path.read_text()


WIDGETS = "import ipywidgets\nfrom IPython.display import HTML, clear_output, display\n"


def widget_states(executed):
    (widgets,) = executed.metadata.widgets.values()
    return [widget["state"] for widget in widgets["state"].values()]


def test_a_flood_in_widgets_and_handles_is_cut_and_says_so(lesson, execute, monkeypatch):
    monkeypatch.setattr(limits, "DATA_LIMIT", 500_000)
    path = lesson(
        WIDGETS + "for i in range(30):\n    display(ipywidgets.HTML('x' * 100_000))",
        WIDGETS + "box = ipywidgets.HTML('small')\nbox.value = 'x' * 2_000_000\nbox.value = 'last'",
        WIDGETS + "for i in range(30):\n    ipywidgets.Image(value=bytes(100_000))",
        WIDGETS + "for i in range(30):\n    display(HTML(''), display_id=True).update(HTML('x' * 100_000))",
        WIDGETS + "for i in range(30):\n    display(HTML('x' * 100_000), display_id='one')",
        WIDGETS + "out = ipywidgets.Output()\n"
        "for i in range(30):\n    display(HTML('x' * 100_000))\n    out.clear_output()",
        WIDGETS + "clear_output(wait=True)\nbox = ipywidgets.HTML('x' * 600_000)\nprint('after')",
        WIDGETS + "for i in range(30):\n    display(ipywidgets.HTML('x' * 100_000))\n    clear_output()",
    )
    result = execute(path)
    assert result.passed, result.failure
    executed = nbformat.read(result.notebook_path, 4)
    for cell in executed.cells[1:-1]:
        notes = [o for o in cell.outputs if o.get("data", {}).get("text/plain") == limits.DATA_CUT]
        assert notes, cell.source
        assert len(json.dumps(cell.outputs)) < 1.1 * limits.DATA_LIMIT, cell.source
        assert len(cell.outputs) <= 30
    assert executed.cells[-1].outputs == [] and executed.cells[-2].outputs[-1].text == "after\n"
    assert len(json.dumps(executed.metadata)) < 3.5 * limits.DATA_LIMIT, "three cells have a flood of widgets"
    assert [state["value"] for state in widget_states(executed) if state.get("value") == "last"] == ["last"]


def test_what_is_replaced_in_place_is_no_flood(lesson, execute, monkeypatch):
    monkeypatch.setattr(limits, "DATA_LIMIT", 500_000)
    monkeypatch.setattr(limits, "TEXT_LIMIT", 500_000)
    turns = "for i in range(8):\n    "
    path = lesson(
        WIDGETS + "box = ipywidgets.HTML()\n" + turns + "box.value = str(i) * 100_000",
        WIDGETS + "image = ipywidgets.Image()\n" + turns + "image.value = str(i).encode() * 100_000",
        WIDGETS + "shown = display(HTML(''), display_id=True)\n"
        f"{turns}shown.update(HTML(str(i) * 100_000))\nshown.update(HTML('z'))\n"
        "display(HTML('y' * 400_000))",
        WIDGETS + "out = ipywidgets.Output()\ndisplay(out)\n"
        f"{turns}with out:\n        clear_output(wait=True)\n"
        "        display(HTML(str(i) * 100_000))\n        print(str(i) * 100_000)",
        WIDGETS + f"{turns}clear_output(wait=True)\n    display(HTML(str(i) * 100_000))",
        "box.value = 'q' * 400_000",
        WIDGETS + "for i in range(3):\n    clear_output(wait=True)\n"
        "    display(HTML(str(i) * 300_000), display_id='again')",
    )
    result = execute(path)
    assert result.passed, result.failure
    assert limits.DATA_CUT not in result.notebook_path.read_text()
    assert limits.CUT not in result.notebook_path.read_text()
    executed = nbformat.read(result.notebook_path, 4)
    states = widget_states(executed)
    assert [state["value"] for state in states if state["_model_name"] == "HTMLModel"] == ["q" * 400_000]
    (held,) = [state["outputs"] for state in states if state.get("outputs")]
    assert held[0]["data"]["text/html"] == "7" * 100_000 and held[1]["text"] == "7" * 100_000 + "\n"
    assert [o.data["text/html"] for o in executed.cells[3].outputs] == ["z", "y" * 400_000]
    assert [o.data["text/html"] for o in executed.cells[5].outputs] == ["7" * 100_000]
    assert [o.data["text/html"] for o in executed.cells[7].outputs] == ["2" * 300_000]


def test_a_cell_that_prints_for_ever_is_stopped_at_its_limit_and_its_text_is_cut(lesson, execute):
    much = "import time\nprint('x' * 1_000_000)\n"  # a slow machine may not get far
    endless = "while True:\n    print('x' * 10_000)\n    time.sleep(0.005)"
    result = execute(lesson(much + endless), cell_limit_s=6)
    assert "the limit for one cell is 6 s" in result.failure.message and result.seconds < 60
    assert result.notebook_path.stat().st_size < 1.5 * limits.TEXT_LIMIT
    assert limits.CUT.strip() in result.html_path.read_text()
    assert result.html_path.stat().st_size < 1_000_000


def test_an_enormous_error_still_says_what_happened(lesson, execute):
    result = execute(lesson("print('x' * 300_000)", "raise ValueError('why ' + 'x' * 1_000_000)"))
    assert result.failure.message.startswith("ValueError: why x")
    assert result.notebook_path.stat().st_size < 2 * limits.TEXT_LIMIT


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
        from labkit import runner
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
