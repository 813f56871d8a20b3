"""The commands: what they print and leave, what they refuse in a sentence, and how they end."""

import errno
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import processes
import psutil
import pytest
import stage

from labkit import __version__, backend, paths
from labkit.cli import main
from labkit.lessons import notebooks

pytestmark = pytest.mark.usefixtures("clone")
GOOD = "from labkit.widgets import claim\nclaim('{value} bytes', 3, True)"
BAD = "x = 1\nraise KeyError('lost [bold]')"
RAN = "open('ran', 'w')"


def test_version_and_help():
    assert __version__ in stage.labkit("--version").output
    assert all(name in stage.labkit("-h").output for name in main.cli.commands)


def test_run_goes_on_after_a_failing_lesson_and_fails(clone):
    stage.lesson(clone, BAD, name="01_bad")
    stage.lesson(clone, GOOD, name="02_good")
    result = stage.labkit("run")
    assert result.exit_code == 1
    assert "01_bad failed in cell 1" in result.output and "    raise KeyError('lost [bold]')" in result.output
    assert result.output.count("KeyError: 'lost [bold]'") == 1 and "\x1b" not in result.output
    assert re.search(r"01_bad +│ failed +│ +\d+\.\d │ +0 │ +0 │", result.output)
    assert re.search(r"02_good +│ passed +│ +\d+\.\d │ +0 │ +1 │ +0 │ +0 │", result.output)
    for name in ("01_bad", "02_good"):
        assert (paths.BUILD / f"lessons/{name}.ipynb").exists()
        assert f"build/lessons/{name}.html" in result.output and Path(f"build/lessons/{name}.html").exists()


def test_run_takes_names_and_parameters(clone):
    stage.lesson(clone, BAD, name="01_bad")
    stage.lesson(clone, "print(width * 2)", name="02_good", parameters="width: int = 1")
    result = stage.labkit("run", "02", "02_good", "-p", "width=21")
    assert result.exit_code == 0 and "01_bad" not in result.output and result.output.count("│ passed") == 1
    assert notebooks.read(paths.BUILD / "lessons/02_good.ipynb").cells[-1].outputs[0].text == "42\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "07"], "no lesson is called '07'; there are: 01_a, 02_b"),
        (["run", "01", "-p", "width"], "name=value"),
        (["run", "01", "-p", "depth=1"], "no parameter 'depth'; it declares: width (int)"),
        (["run", "01", "-p", 'Z=1;open("ran", "w");width=5'], "no parameter 'Z'"),
        (["run", "01", "-p", "width=open('ran', 'w')"], "is not a whole number"),
        (["run", "-p", "width=2"], "02_b has no parameter"),
        *(([ "run", f"--timeout={seconds}"], "--timeout") for seconds in ("0", "inf", "nan", "soon")),
        (["slides", "07"], "no lesson is called '07'"),
        (["record", "01"], "recording needs a GPU"),
        (["record", "01", "--check"], "leave the rest out"),
        (["doctor", "--measure"], "needs a GPU"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_and_run_nothing(clone, monkeypatch, arguments, says):
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    monkeypatch.setattr(backend, "reason", "there is none")
    stage.lesson(clone, RAN, name="01_a", parameters="width: int = 1")
    stage.lesson(clone, RAN, name="02_b")
    result = stage.labkit(*arguments)
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output
    assert not list(clone.rglob("ran"))


def test_a_course_without_lessons_says_so_and_has_nothing_stale():
    result = stage.labkit("run")
    assert result.exit_code == 1 and "no lessons" in result.output
    assert stage.labkit("record", "--check").exit_code == 0


@pytest.mark.parametrize("kind", ["run", "slides"])
def test_where_the_disk_is_full_a_sentence_says_what_to_do_and_the_earlier_result_stays(
    clone, monkeypatch, kind
):
    stage.lesson(clone, GOOD)
    assert stage.labkit(kind).exit_code == 0
    kept = {path: path.read_bytes() for path in paths.BUILD.rglob("*") if path.is_file()}

    def full(*given, **_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    monkeypatch.setattr(os, "replace", full)
    result = stage.labkit(kind)
    assert result.exit_code == 1
    assert "No space left on device" in result.output and "make room" in result.output
    assert {path: path.read_bytes() for path in paths.BUILD.rglob("*") if path.is_file()} == kept


def test_lessons_run_at_once_and_their_results_come_in_order(clone):
    """Each waits until the other has begun."""
    meet = "import os, time\nopen('{}', 'w').close()\nwhile not os.path.exists('{}'): time.sleep(0.05)"
    stage.lesson(clone, meet.format("one", "two"), name="01_one")
    stage.lesson(clone, meet.format("two", "one"), name="02_two")
    stage.lesson(clone, BAD, name="03_bad")
    result = stage.labkit("run", "--jobs", "2", "--timeout", "60")
    assert result.exit_code == 1 and "03_bad failed in cell 1" in result.output
    assert re.search(r"01_one +│ passed.*02_two +│ passed.*03_bad +│ failed", result.output, re.DOTALL)


@pytest.mark.parametrize(("gib", "cpus", "jobs"), [(80, 16, 3), (80, 8, 1), (24, 16, 1), (0, 16, 1)])
def test_three_lessons_run_at_once_where_there_is_room(monkeypatch, gib, cpus, jobs):
    card = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr("labkit.gpu.available", lambda: gib > 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: card)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert main.jobs_at_once() == jobs


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_no_kernel_and_a_table_of_what_is_finished(clone, number, code):
    pid = paths.NOTEBOOKS / "pid"
    stage.lesson(clone, GOOD, name="01_good")
    stage.lesson(
        clone, "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)", name="02_long"
    )
    stage.lesson(clone, RAN, name="03_next")
    process = processes.python(stage.__file__, "run")
    processes.wait_for(lambda: pid.exists() and pid.read_text(), "the second lesson", 60)
    kernel = psutil.Process(int(pid.read_text()))
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in output and "was destroyed" not in output, output
    assert processes.gone(kernel) and not list(clone.rglob("ran"))
    assert re.search(r"01_good +│ passed", output) and "build/lessons/01_good.html" in output
    assert re.search(r"02_long +│ unfinished", output) and re.search(r"03_next +│ unfinished", output)


def test_interrupted_none_of_several_kernels_is_left(clone):
    pids = [paths.NOTEBOOKS / name for name in ("one", "two")]
    for number, path in enumerate(pids, 1):
        code = f"import os, time\nopen({path.name!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
        stage.lesson(clone, code, name=f"0{number}_long")
    process = processes.python(stage.__file__, "run", "--jobs", "2")
    processes.wait_for(lambda: all(path.exists() and path.read_text() for path in pids), "both lessons", 60)
    kernels = [psutil.Process(int(path.read_text())) for path in pids]
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in output, output
    assert all(map(processes.gone, kernels))
    assert re.search(r"01_long +│ unfinished.*02_long +│ unfinished", output, re.DOTALL)


def test_record_check_and_strip(clone, monkeypatch):
    stage.set_up_gpu(monkeypatch.setattr)
    stage.lesson(clone, BAD, name="01_bad")
    path = stage.lesson(clone, GOOD, name="02_good")
    result = stage.labkit("record")
    assert result.exit_code == 1
    assert "01_bad failed in cell 1" in result.output and "02_good: recorded in" in result.output
    assert "02_good: recorded already on Simulated" in stage.labkit("record", "02").output
    assert (paths.RECORDED / "simulated" / "roofs.jsonl").exists()
    checked = stage.labkit("record", "--check")
    assert checked.exit_code == 0 and re.search("^no outputs +01_bad$", checked.output, re.MULTILINE)
    assert re.search("^recorded +02_good +Simulated, driver 570.1", checked.output, re.MULTILINE)
    notebook = json.loads(path.read_text())
    notebook["cells"][1]["source"] += ["\n"]
    path.write_text(json.dumps(notebook))
    checked = stage.labkit("record", "--check")
    assert checked.exit_code == 1 and re.search("^stale +02_good", checked.output, re.MULTILINE)
    stripped = stage.labkit("record", "--strip-stale", "--check")
    assert stripped.exit_code == 0 and "Stripped: 02_good" in stripped.output
