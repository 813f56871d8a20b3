import errno
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import nbformat
import psutil
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import __version__, cli, device, doctor, exercises, lessons, places

GOOD = "from labkit.claims import claim\nclaim('{value} bytes', 3, True)"
BAD = "x = 1\nraise KeyError('lost [bold]')"
FOR_EVER = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nwhile True: time.sleep(1)"


@pytest.fixture(autouse=True)
def course(tmp_path, monkeypatch):
    """A checkout without lessons; gives a function that adds one."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(places, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(places, "BUILD", tmp_path / "build")
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    monkeypatch.chdir(tmp_path)
    places.NOTEBOOKS.mkdir()

    def add(name, *cells, parameters=None):
        notebook = new_notebook(cells=[new_markdown_cell(f"# {name}")])
        if parameters:
            notebook.cells.append(new_code_cell(parameters, metadata={"tags": ["parameters"]}))
        notebook.cells += map(new_code_cell, cells)
        nbformat.write(notebook, places.NOTEBOOKS / f"{name}.ipynb")
        return places.NOTEBOOKS / f"{name}.ipynb"

    return add


def labkit(*arguments):
    result = CliRunner().invoke(cli.cli, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_version_and_help():
    assert __version__ in labkit("--version").output
    assert all(name in labkit("-h").output for name in ["run", "doctor", "record", "bench", "slides", "site"])


def test_run_goes_on_after_a_failing_lesson_and_fails(course):
    course("01_bad", BAD)
    course("02_good", GOOD)
    result = labkit("run")
    assert result.exit_code == 1
    assert "01_bad failed in cell 1" in result.output
    assert "    raise KeyError('lost [bold]')" in result.output
    assert result.output.count("KeyError: 'lost [bold]'") == 1 and "\x1b" not in result.output
    assert re.search(r"01_bad +│ failed +│ +\d+\.\d │ +0 │ +0 │", result.output)
    assert re.search(r"02_good +│ passed +│ +\d+\.\d │ +0 │ +1 │ +0 │ +0 │", result.output)
    assert "build/lessons/02_good.html" in result.output
    for name in ["01_bad", "02_good"]:
        assert (places.BUILD / "lessons" / f"{name}.ipynb").exists()
        assert (places.BUILD / "lessons" / f"{name}.html").exists()


def test_however_a_run_ends_a_table_says_what_is_finished_and_where(course, monkeypatch):
    from labkit.runs import execute as runner

    course("01_good", GOOD)
    course("02_cut", GOOD)
    course("03_never", GOOD)
    execute = runner.execute

    def interrupted(path, *rest, **options):
        if path.stem == "02_cut":
            raise KeyboardInterrupt
        return execute(path, *rest, **options)

    monkeypatch.setattr(runner, "execute", interrupted)
    result = labkit("run")
    assert result.exit_code == 130
    assert re.search(r"01_good +│ passed", result.output) and "build/lessons/01_good.html" in result.output
    assert re.search(r"02_cut +│ unfinished", result.output)
    assert re.search(r"03_never +│ unfinished", result.output)


def test_where_the_new_result_cannot_be_written_the_earlier_one_stays(course, monkeypatch):
    from labkit.runs import execute as runner

    course("01_good", GOOD)
    assert labkit("run").exit_code == 0
    kept = {path.name: path.read_bytes() for path in (places.BUILD / "lessons").iterdir()}

    def full(notebook, output, **_):
        Path(output).write_text("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), output)

    monkeypatch.setattr(runner.papermill, "execute_notebook", full)
    result = labkit("run")
    assert result.exit_code == 1 and "No space left on device" in result.output
    assert {path.name: path.read_bytes() for path in (places.BUILD / "lessons").iterdir()} == kept


def test_run_takes_names_and_parameters(course):
    course("01_bad", BAD)
    course("02_good", "print(width * 2)", parameters="width: int = 1")
    result = labkit("run", "02", "02_good", "-p", "width=21")
    assert result.exit_code == 0
    assert "01_bad" not in result.output and result.output.count("│ passed") == 1
    assert lessons.read(places.BUILD / "lessons" / "02_good.ipynb").cells[-1].outputs[0].text == "42\n"


def test_the_site_is_made_of_saved_outputs_or_of_executed_lessons(course, monkeypatch):
    monkeypatch.setattr(exercises, "solution_cells", lambda lesson: {})
    course("01_good", GOOD)
    page = places.BUILD / "site" / "01_good.html"
    assert labkit("site").exit_code == 0 and "3 bytes" not in page.read_text()
    assert "build/site/index.html" in labkit("site", "--execute").output and "3 bytes" in page.read_text()
    course("02_bad", BAD)
    result = labkit("site", "--execute")
    assert result.exit_code == 1 and "the pages are not made: a lesson failed" in result.output


@pytest.mark.parametrize("kind", ["run", "slides", "site"])
def test_where_nothing_can_be_written_a_sentence_says_what_to_do(course, monkeypatch, kind):
    course("01_good", GOOD)

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(places, "write_text", full)
    monkeypatch.setattr(exercises, "solution_cells", lambda lesson: {})
    result = labkit(kind)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "No space left on device" in result.output and "make room, or the folder writable" in result.output


def test_run_without_lessons_says_so():
    result = labkit("run")
    assert result.exit_code == 1 and "There are no lessons in notebooks/" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "07"], "no lesson is called '07'; there are: 01_a"),
        (["run", "-p", "width"], "write it as name=value"),
        (["run", "-p", "depth=1"], "no parameter 'depth'; it declares: width (int)"),
        (["run", "-p", 'Z=1;print("x");N=5'], "no parameter 'Z'"),
        (["run", "-p", "width=wide"], "is not a whole number"),
        (["slides", "07"], "no lesson is called '07'; there are: 01_a"),
        (["record", "07"], "no lesson is called"),
        (["record", "01", "--check"], "leave the rest out"),
        (["record", "--strip-stale", "--again"], "leave the rest out"),
    ],
)
def test_mistakes_are_one_sentence_and_run_nothing(course, arguments, says):
    course("01_a", "open('ran', 'w')", parameters="width: int = 1")
    result = labkit(*arguments)
    assert result.exit_code == 2
    assert says in result.output and "Traceback" not in result.output
    assert not (places.NOTEBOOKS / "ran").exists()


def test_a_parameter_has_to_be_declared_by_every_chosen_lesson(course):
    course("01_a", "open('ran', 'w')", parameters="width: int = 1")
    course("02_b", "1")
    assert labkit("run", "-p", "width=2").exit_code == 2
    assert not (places.NOTEBOOKS / "ran").exists()


def test_run_limits_the_time_of_a_cell(course):
    course("01_slow", "import time; time.sleep(60)")
    result = labkit("run", "--timeout", "0.5")
    assert result.exit_code == 1 and "the limit for one cell is 0.5 s" in result.output


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan", "soon"])
def test_a_limit_is_a_number_of_seconds(course, seconds):
    course("01_a", "open('ran', 'w')")
    result = labkit("run", f"--timeout={seconds}")
    assert result.exit_code == 2 and "--timeout" in result.output
    assert not (places.NOTEBOOKS / "ran").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_stops_and_leaves_no_kernel(course, number, code):
    course("01_long", FOR_EVER)
    course("02_next", "open('ran', 'w')")
    script = (
        "from pathlib import Path\nfrom labkit import cli, places\n"
        f"places.NOTEBOOKS, places.BUILD = Path({str(places.NOTEBOOKS)!r}), Path({str(places.BUILD)!r})\n"
        "import sys; sys.argv = ['labkit', 'run']\ncli.main()"
    )
    environment = {**os.environ, "PYTHONPATH": places.python_path()}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    pid = places.NOTEBOOKS / "pid"
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == code, output
    assert "Traceback" not in output
    kernel = int(pid.read_text())
    assert not psutil.pid_exists(kernel) or psutil.Process(kernel).status() == psutil.STATUS_ZOMBIE
    assert not (places.NOTEBOOKS / "ran").exists()


def test_doctor_says_ten_lines_and_a_sentence(monkeypatch):
    versions = {"torch": "2.13.0", "triton": "3.6.0", "ipykernel": "7", "ipywidgets": "8"}
    facts = doctor.Facts(versions=versions, triton_wanted="3.7.1", roofs="[x]")
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    result = labkit("doctor")
    assert result.exit_code == 1
    assert "[x]" in result.output
    assert "goes with triton 3.7.1" in " ".join(result.output.split())
    assert len(result.output.split("\n\n")[0].splitlines()) == 10
    refused = labkit("doctor", "--measure")
    assert refused.exit_code == 2 and "needs a GPU" in refused.output


def test_record_without_a_gpu_refuses_in_a_sentence(course, monkeypatch):
    course("01_a", "open('ran', 'w')")
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    result = labkit("record")
    assert result.exit_code == 2 and "recording needs a GPU" in result.output
    assert not (places.NOTEBOOKS / "ran").exists()


@pytest.fixture
def fake_gpu(tmp_path, monkeypatch):
    identity = types.SimpleNamespace(device="Toy GPU", driver="1", torch="2", triton="3", slug="toy-gpu")
    measured = tmp_path / "roofs.jsonl"
    machine = types.SimpleNamespace(
        identity=lambda: identity, roofs=measured.touch, cache_path=lambda: measured
    )
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "labkit.machine", machine)
    monkeypatch.setattr("labkit.machine", machine, raising=False)


def test_record_check_and_strip(course, fake_gpu):
    course("01_bad", BAD)
    path = course("02_good", GOOD)
    result = labkit("record")
    assert result.exit_code == 1
    assert "01_bad failed in cell 1" in result.output and "02_good: recorded in" in result.output
    assert "02_good: recorded already on Toy GPU" in labkit("record", "02").output
    assert (places.RECORDED / "toy-gpu" / "roofs.jsonl").exists()

    checked = labkit("record", "--check")
    assert checked.exit_code == 0
    assert re.search(r"^no outputs +01_bad$", checked.output, re.MULTILINE)
    assert re.search(
        r"^recorded +02_good +Toy GPU, driver 1, torch 2, triton 3, 20", checked.output, re.MULTILINE
    )

    notebook = lessons.read(path)
    notebook.cells[1].source += "\n"
    nbformat.write(notebook, path)
    checked = labkit("record", "--check")
    assert checked.exit_code == 1 and re.search(r"^stale +02_good", checked.output, re.MULTILINE)
    stripped = labkit("record", "--strip-stale", "--check")
    assert stripped.exit_code == 0 and "Stripped: 02_good" in stripped.output


def test_check_of_an_empty_course_finds_nothing_stale():
    assert labkit("record", "--check").exit_code == 0
