"""Lessons on several GPUs or a cluster: real processes through submitit's own executors."""

import io
import os
import re
import signal

import processes
import psutil
import pytest
import stage
from rich.console import Console

from labkit.runs import jobs

SLOW = "import time\nopen('begun', 'w').write('1')\ntime.sleep(60)"
OURS = """
import os, pathlib
from labkit import paths
from labkit.runs import jobs
folder = pathlib.Path(os.environ['STAGE_FOLDER'])
paths.NOTEBOOKS, paths.BUILD = folder / 'notebooks', folder / 'build'
jobs.gpus_here = lambda: ['4', 'GPU-b']
"""


@pytest.fixture
def clone(clone, monkeypatch):
    """A clone in which two GPUs are believed in, called 4 and GPU-b, also by the commands that jobs start."""
    (clone / "sitecustomize.py").write_text(OURS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(clone), os.environ["PYTHONPATH"]]))
    monkeypatch.setattr(jobs, "gpus_here", lambda: ["4", "GPU-b"])
    return clone


def run(*names, gpus="all", slurm=(), options=()):
    said = Console(file=io.StringIO(), record=True, width=200)
    given = jobs.workers_for(gpus, slurm, len(names))
    passed = jobs.run(said, "run", names, list(options), given, again=False)
    return passed, said.export_text()


def test_each_lesson_runs_on_one_gpu_and_a_dead_or_failing_one_ends_no_other(clone):
    gpu = "import os, time\nopen({!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\ntime.sleep(3)"
    cells = {
        "01_one": gpu.format("one"),
        "02_two": gpu.format("two"),
        "03_dies": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "04_fails": "1 / 0",
        "05_last": "x = 1",
    }
    for name, cell in cells.items():
        stage.lesson(clone, cell, name=name)
    passed, text = run(*cells)
    assert not passed
    assert sorted((clone / "notebooks" / each).read_text() for each in ("one", "two")) == ["4", "GPU-b"]
    assert "03_dies: ended by SIGKILL; see build/logs/run/03_dies.log" in text
    assert "04_fails: failed with status 1" in text and "Finished: 01_one, 02_two, 05_last." in text
    assert "ZeroDivisionError" in (clone / "build/logs/run/04_fails.log").read_text()
    # mended, the same command does what is missing, and everything once code has changed
    page = clone / "build/lessons/05_last.html"
    before = page.stat().st_mtime_ns
    passed, text = run("05_last", "01_one")
    assert passed and "an earlier run finished 05_last, 01_one" in text and page.stat().st_mtime_ns == before
    stage.lesson(clone, "x = 2", name="05_last")
    passed, text = run("05_last")
    assert passed and "an earlier run" not in text and page.stat().st_mtime_ns > before


def test_through_slurms_interface_a_lesson_is_run_with_its_options(clone):
    stage.lesson(clone, "print(N)", name="01_one", parameters="N: int = 1")
    slurm = ("cluster=debug", "partition=gpu", "time=5", "gres=gpu:h100:1")
    passed, text = run("01_one", gpus=None, slurm=slurm, options=["-p", "N=7"])
    assert passed and "7" in (clone / "build/lessons/01_one.html").read_text(), text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process_and_says_what_is_finished(clone, number):
    stage.lesson(clone, SLOW, name="01_slow")
    process = processes.python("-m", "labkit", "run", "01", "--gpus", "0")
    processes.wait_for((clone / "notebooks" / "begun").exists, "the lesson", 60)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3, "controller, job, command, kernel"
    os.kill(process.pid, number)
    text, _ = process.communicate(timeout=40)
    assert process.returncode in (130, 143), text
    assert (
        "01_slow: stopped, or not begun; see build/logs/run/01_slow.log" in text
        and "Finished: nothing" in text
    )
    assert "Traceback" not in text and all(map(processes.gone, family))


@pytest.mark.parametrize("kind", ["run", "record", "bench"])
def test_a_second_run_in_the_same_clone_is_refused_and_touches_nothing(clone, monkeypatch, kind):
    stage.set_up_gpu(monkeypatch.setattr)
    stage.lesson(clone, "open('ran', 'w')")
    with jobs.exclusive(kind):
        result = stage.labkit(kind)
    assert result.exit_code == 2 and f"another `labkit {kind}` is running" in result.output
    assert not list(clone.rglob("ran")) and not stage.measured()
    assert stage.labkit(kind).exit_code == 0, "the lock goes with whoever had it"


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
        (None, ("time=0",), "is no value for time"),
        (None, ("partition=gpu",), "--slurm: "),
    ],
)
def test_mistakes_are_refused_before_anything_starts(clone, monkeypatch, gpus, slurm, says):
    monkeypatch.setenv("PATH", "")  # no srun
    with pytest.raises(ValueError, match=re.escape(says)):
        jobs.workers_for(gpus, slurm, 2)


def test_options_of_slurm_reach_submitit():
    given = ("partition=gpu", "mem=64G", "time=30", "container-image=a.sqsh")
    cluster, made = jobs.slurm_parameters(given)
    assert cluster == "slurm"
    assert (made["timeout_min"], made["gpus_per_node"]) == (30, 1)
    assert made["slurm_srun_args"] == ["--container-image=a.sqsh"]
    assert made["slurm_additional_parameters"] == {"partition": "gpu", "mem": "64G"}
