"""The commands: what they print and leave, what they refuse in a sentence, and how they end."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import processes
import psutil
import pytest
import stage

from labkit import __version__, backend, notebooks, paths
from labkit.run import main

pytestmark = pytest.mark.usefixtures("clone")
GOOD = "from labkit.display.say import claim\nclaim('{value} bytes', 3, lambda n: n == 3)"
BAD = "x = 1\nraise KeyError('lost [bold]')"
RAN = "open('ran', 'w')"
LONG = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)"


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
        assert f"build/lessons/{name}.ipynb" in result.output and Path(f"build/lessons/{name}.ipynb").exists()


def test_run_takes_names_and_strict_fails_where_a_claim_does_not_hold(clone):
    stage.lesson(clone, BAD, name="01_bad")
    stage.lesson(clone, GOOD.replace("== 3)", "== 4)"), "print(42)", name="02_good")
    result = stage.labkit("run", "02", "02_good")
    assert result.exit_code == 0 and "01_bad" not in result.output and result.output.count("│ passed") == 1
    executed = notebooks.read(paths.BUILD / "lessons/02_good.ipynb")
    assert executed.cells[-1].outputs[0].text == "42\n"
    result = stage.labkit("run", "--strict", "02")
    assert result.exit_code == 1 and "02_good, does not hold: 3 bytes" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "07"], "no lesson is called '07'; there are: 01_a, 02_b"),
        *((["run", f"--timeout={seconds}"], "--timeout") for seconds in ("0", "soon")),
        (["render", "07"], "no lesson is called '07'"),
        (["record", "01"], "recording needs a GPU"),
        (["reset", "01"], "`labkit lab` makes one"),
        (["progress"], "`labkit lab` makes one"),
    ],
)
def test_mistakes_are_one_sentence_and_run_nothing(clone, monkeypatch, no_gpu, arguments, says):
    monkeypatch.setattr(backend, "reason", "there is none")
    stage.lesson(clone, RAN, name="01_a")
    stage.lesson(clone, RAN, name="02_b")
    result = stage.labkit(*arguments)
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output
    assert not list(clone.rglob("ran"))


def test_a_disk_that_fills_up_while_a_lesson_runs_leaves_the_earlier_result(clone, monkeypatch):
    """A disk of 256 KB, on which a lesson's outputs do not fit."""
    own = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount"]
    if not shutil.which("unshare") or subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody here mount a disk of its own")
    stage.lesson(clone, "import os\nprint('x' * int(os.environ['STAGE_SIZE']))")
    run = f"{sys.executable} {stage.__file__} run"
    code = f"mount -t tmpfs -o size=768k tmpfs {paths.BUILD} && STAGE_SIZE=9 {run} && cp -r build before && "
    code += f"! STAGE_SIZE=9999999 {run} && diff -r build before"
    paths.BUILD.mkdir()
    ran = subprocess.run([*own, "sh", "-c", code], capture_output=True, text=True)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0 and "No space left on device" in said, said
    assert re.search(r"01_toy +│ unfinished", said), said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_no_kernel_and_a_table_of_what_is_finished(clone, number, code):
    stage.lesson(clone, "1", name="01_good")
    names = [f"0{number}_long" for number in range(2, 2 + main.AT_ONCE)]
    for name in names:
        stage.lesson(clone, LONG.replace("pid", name, 1), name=name)
    stage.lesson(clone, RAN, name="09_next")
    files = [paths.NOTEBOOKS / name for name in names]
    process = processes.python(stage.__file__, "run")
    begun = lambda: all(pid.exists() and pid.read_text() for pid in files)  # noqa: E731
    processes.wait_for(begun, "the long lessons", 60)
    kernels = [psutil.Process(int(pid.read_text())) for pid in files]
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in output and "was destroyed" not in output, output
    assert all(map(processes.gone, kernels)) and not list(clone.rglob("ran"))
    assert re.search(r"01_good +│ passed", output) and "build/lessons/01_good.ipynb" in output
    assert all(re.search(rf"{name} +│ unfinished", output) for name in (*names, "09_next"))
