"""Lessons on several GPUs or a cluster: real processes through submitit's own executors."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import stage
from rich.console import Console

from labkit import places, rows
from labkit.runs import spread

TESTS = Path(__file__).resolve().parents[1]
SLOW = "import time\nopen('begun', 'w').write('1')\ntime.sleep(60)"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone in which two GPUs are believed in, called 4 and GPU-b; kernels stay interpreted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), places.python_path()]))
    monkeypatch.delenv(rows.TAPE, raising=False)
    stage.set_up(tmp_path, monkeypatch.setattr, monkeypatch.setenv)
    (tmp_path / "notebooks" / "01_toy.ipynb").unlink()
    # the commands that jobs start are of this clone, too: `python -m labkit` finds this file first
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        "if os.environ.get('STAGE_FOLDER'):\n"
        "    from labkit import places\n"
        "    folder = pathlib.Path(os.environ['STAGE_FOLDER'])\n"
        "    places.NOTEBOOKS, places.BUILD = folder / 'notebooks', folder / 'build'\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.setattr(spread, "gpus_here", lambda: ["4", "GPU-b"])
    return tmp_path


def show_gpu(name):
    return f"import os\nopen('{name}', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.fixture
def said():
    return Console(file=open(os.devnull, "w"), record=True, width=200)


def run(said, *names, gpus="all", slurm=(), again=False, options=()):
    jobs = spread.places_for(gpus, slurm, len(names))
    passed = spread.run(said, "run", names, list(options), jobs, again)
    return passed, said.export_text()


def test_each_lesson_runs_on_one_gpu_and_a_dead_or_failing_one_ends_no_other(clone, said):
    for name, cell in {
        "01_one": show_gpu("one") + "\nimport time; time.sleep(3)",
        "02_two": show_gpu("two") + "\nimport time; time.sleep(3)",
        "03_dies": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "04_fails": "1 / 0",
        "05_last": "x = 1",
    }.items():
        stage.lesson(clone, cell, name=name)
    names = ["01_one", "02_two", "03_dies", "04_fails", "05_last"]
    passed, text = run(said, *names)
    assert not passed
    assert sorted((clone / "notebooks" / each).read_text() for each in ("one", "two")) == ["4", "GPU-b"]
    assert "03_dies: ended by SIGKILL; see build/logs/run/03_dies.log" in text
    assert "04_fails: failed with status 1; see build/logs/run/04_fails.log" in text
    assert "ZeroDivisionError" in (clone / "build/logs/run/04_fails.log").read_text()
    assert "Finished: 01_one, 02_two, 05_last. The same command goes on with the others." in text
    assert (clone / "build/lessons/05_last.html").exists()
    # mended, the same command does what is missing, and everything once code has changed
    before = (clone / "build/lessons/05_last.html").stat().st_mtime_ns
    passed, text = run(said, "05_last", "01_one")
    assert passed and "Continued: an earlier run finished 05_last, 01_one." in text
    assert (clone / "build/lessons/05_last.html").stat().st_mtime_ns == before
    stage.lesson(clone, "x = 2", name="05_last")
    passed, text = run(said, "05_last")
    assert passed and "Continued" not in text
    assert (clone / "build/lessons/05_last.html").stat().st_mtime_ns > before


def test_through_slurms_interface_by_submitits_debug_executor(clone, said):
    stage.lesson(clone, "print(N)", name="01_one", parameters="N: int = 1")
    slurm = ("cluster=debug", "partition=gpu", "time=5", "gres=gpu:h100:1")
    passed, text = run(said, "01_one", gpus=None, slurm=slurm, options=["-p", "N=7"])
    assert passed, text
    assert "7" in (clone / "build/lessons/01_one.html").read_text()


def test_a_result_that_another_machine_wrote_is_waited_for(clone, said, monkeypatch):
    stage.lesson(clone, "x = 1", name="01_one")
    status, asked = spread._status, []

    def late(*given):
        asked.append(given)
        return status(*given) if len(asked) > 3 else None

    monkeypatch.setattr(spread, "_status", late)
    passed, text = run(said, "01_one", gpus=None, slurm=("cluster=debug",))
    assert passed, text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process_and_says_what_is_finished(clone, number):
    stage.lesson(clone, SLOW, name="01_slow")
    script = (
        "from labkit import cli\nfrom labkit.runs import spread\n"
        "spread.gpus_here = lambda: ['0']\n"
        "import sys\nsys.argv = ['labkit', 'run', '01', '--gpus', 'all']\ncli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 60
    while not (clone / "notebooks" / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3, "controller, job, command, kernel"
    process.send_signal(number)
    text, _ = process.communicate(timeout=40)
    assert process.returncode in (130, 143), text
    assert "01_slow: stopped; see build/logs/run/01_slow.log" in text and "Finished: nothing" in text
    assert "Traceback" not in text
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_second_run_in_the_same_clone_is_refused(clone):
    with (
        spread.alone("run"),
        pytest.raises(ValueError, match="another `labkit run` is running"),
        spread.alone("run"),
    ):
        pass


@pytest.mark.parametrize(
    ("gpus", "slurm", "says"),
    [
        ("0,7", (), "'7' is no GPU here; write all, or some of 0 to 1"),
        ("-1", (), "'-1' is no GPU here"),
        ("all", ("partition=gpu",), "give one of them"),
        (None, ("partition",), "write key=value"),
        (None, ("wrap=rm",), "with a key of account"),
        (None, ("partition=a\n#SBATCH --wrap=b",), "is no value for partition"),
        (None, ("constraint=$(id)",), "is no value for constraint"),
        (None, ("time=ten",), "is no value for time"),
        (None, ("time=0",), "is no value for time"),
        (None, ("partition=gpu",), "--slurm: "),
    ],
)
def test_mistakes_are_refused_before_anything_starts(clone, monkeypatch, gpus, slurm, says):
    monkeypatch.setenv("PATH", "")  # no srun
    with pytest.raises(ValueError, match=re.escape(says)):
        spread.places_for(gpus, slurm, 2)


def test_options_of_slurm_reach_submitit():
    given = dict(map(spread._option, ("partition=gpu", "mem=64G", "time=30", "container-image=a.sqsh")))
    assert spread._parameters(given) == {
        "timeout_min": 30,
        "slurm_srun_args": ["--container-image=a.sqsh"],
        "gpus_per_node": 1,
        "slurm_job_name": "labkit",
        "slurm_additional_parameters": {"partition": "gpu", "mem": "64G"},
    }
