"""Modules run in processes of their own: their answers, their ends, what they leave behind."""

import os
import sys
import time
from pathlib import Path

import pytest

from labkit import elsewhere
from labkit.profile_tapes import TAPE


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run source as a module; its name is found through PYTHONPATH, which is passed on."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(source, job=None, environment=None, limit_s=60.0):
        head = "import json, os, sys, time\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n"
        (tmp_path / "toy_worker.py").write_text(head + source)
        return elsewhere.run("toy_worker", job or {}, environment or {}, limit_s)

    return run


ANSWER = "(folder / 'answer.json').write_text(json.dumps({}))\n"


def test_the_job_goes_there_and_the_answer_comes_back(run):
    source = ANSWER.format("{'job': json.loads((folder / 'job.json').read_text()), 'by': sys.executable}")
    assert run(source, {"text": "µ"}) == {"job": {"text": "µ"}, "by": sys.executable}


def test_variables_are_set_on_top_of_this_process_own_but_no_tape(run, monkeypatch):
    monkeypatch.setenv("OURS", "1")
    monkeypatch.setenv("BOTH", "1")
    monkeypatch.setenv(TAPE, "lesson.jsonl")
    names = ["OURS", "BOTH", "THEIRS", TAPE]
    found = run(
        ANSWER.format(f"[os.environ.get(name) for name in {names}]"), environment={"BOTH": "2", "THEIRS": "3"}
    )
    assert found == ["1", "2", "3", None]
    assert os.environ["BOTH"] == "1" and "THEIRS" not in os.environ


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("os._exit(3)", "ended by status 3 without an answer$"),
        ("print('first'); print('the last line', flush=True); os.abort()", "by SIGABRT .*: the last line$"),
        ("raise OSError('no room')", "by status 1 without an answer: OSError: no room$"),
    ],
)
def test_an_end_without_an_answer_is_told(run, source, message):
    with pytest.raises(RuntimeError, match=message):
        run(source)


def test_what_takes_too_long_is_ended_with_all_it_started(run, tmp_path):
    child = "import time; time.sleep(60)"
    source = (
        f"import subprocess\np = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"Path({str(tmp_path / 'pid')!r}).write_text(str(p.pid))\ntime.sleep(60)\n"
    )
    before = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not end within 2 s"):
        run(source, limit_s=2.0)
    assert time.monotonic() - before < 20
    assert _ended(int((tmp_path / "pid").read_text()))


def test_what_it_leaves_running_does_not_hold_up_the_answer(run):
    child = "import time; time.sleep(8)"
    source = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n" + ANSWER.format("1")
    before = time.monotonic()
    assert run(source) == 1
    assert time.monotonic() - before < 7


def _ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that waits for its parent, within a few seconds."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False
