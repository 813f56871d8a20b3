"""What a worker does in its own process; the runs of several are in test_many.py."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import queueing
from processes import wait_for
from simulated import doubling, install
from taped import recorded

from labkit import device, jobs, machine, places, record, rows, suites, turns, worker
from labkit.bench_plan import Part
from labkit.jobs import Job, Outcome


@pytest.fixture
def job(tmp_path, monkeypatch):
    made = Job("bench", "affine", {"peers": False, "roofs": False}, "key", build=str(tmp_path), cache="none")
    monkeypatch.setenv("LABKIT_CACHE", str(made.home / "cache"))
    jobs.prepare(made)
    return made


def test_a_suite_that_is_cut_short_leaves_its_rows_and_goes_on_days_later(job, monkeypatch):
    gpu = install(monkeypatch.setattr)
    one = doubling(gpu)
    part = Part((one,), tuple({"batch": 2, "width": w} for w in (16, 32)), "bench/affine", ("float32",))
    monkeypatch.setattr(suites, "parts", lambda name, *, peers: [part])

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(jobs, "say_progress", stop)
        worker.WORK["bench"](job, time.perf_counter())
    (first,) = rows.read(job.home / "rows.jsonl")
    (tape,) = (places.cache() / "bench").glob("*.jsonl")
    old = replace(first, date=(datetime.now(UTC) - timedelta(days=2)).isoformat(timespec="seconds"))
    rows.write(tape, [old])

    jobs.prepare(job)
    assert rows.read(job.home / "rows.jsonl") == [first], "until there are new ones"
    outcome = worker.WORK["bench"](job, time.perf_counter())
    assert outcome.passed and outcome.device == "Simulated"
    found = rows.read(job.home / "rows.jsonl")
    assert found[0] == old and [row.shape["width"] for row in found] == [16, 32]
    assert jobs.progress(job)[:2] == (2, 2)


BENCHMARK = """
import os, sys, time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {tests!r})
import simulated
from labkit import device, jobs, suites, worker
from labkit.bench_plan import Part

gpu = simulated.install(setattr)
device.uuid = lambda: "GPU-simulated"
doubling = simulated.doubling(gpu)

def call(x):
    with open("calls", "a") as log:
        log.write(f"{{os.getpid()}} {{x.shape[1]}}\\n")
    time.sleep(0.01)
    return doubling.call(x)

shapes = tuple({{"batch": 2, "width": width}} for width in (16, 32))
part = Part((replace(doubling, call=call),), shapes, "bench/affine", ("float32",))
suites.parts = lambda name, *, peers: [part]
job = jobs.Job("bench", "affine", {{"peers": False, "roofs": False}}, "key", build=sys.argv[1], cache="none")
jobs.prepare(job)
os.environ["LABKIT_CACHE"] = str(job.home / "cache")
Path(f"ready {{os.getpid()}}").touch()
while len(list(Path().glob("ready *"))) < 2:
    time.sleep(0.01)
worker.WORK["bench"](job, time.perf_counter())
"""


def test_two_benchmarks_on_one_gpu_wait_for_each_other(tmp_path):
    """Neither calls anything while the other measures a point: not to time it, nor to check it."""
    script = tmp_path / "benchmark.py"
    script.write_text(BENCHMARK.format(tests=str(Path(__file__).parent)))
    environment = {
        **os.environ,
        "PYTHONPATH": places.python_path(),
        "TRITON_INTERPRET": "1",
        turns.FOLDER: str(tmp_path / "turns"),
    }
    started = [
        subprocess.Popen([sys.executable, str(script), name], cwd=tmp_path, env=environment) for name in "ab"
    ]
    assert [process.wait(120) for process in started] == [0, 0]
    calls = (tmp_path / "calls").read_text().splitlines()
    points = [call for call, _ in groupby(calls)]
    assert len(calls) > len(points) == len(set(points)) == 4
    for name in "ab":
        (found,) = (tmp_path / name).rglob("rows.jsonl")
        assert [row.shape["width"] for row in rows.read(found)] == [16, 32]


def test_a_worker_says_that_it_waits_for_its_gpu(job, tmp_path, monkeypatch):
    monkeypatch.setenv(turns.FOLDER, str(tmp_path / "turns"))
    gpu = install(monkeypatch.setattr)
    monkeypatch.setattr(device, "uuid", lambda: "GPU-simulated")
    part = Part((doubling(gpu),), ({"batch": 2, "width": 16},), "bench/affine", ("float32",))
    monkeypatch.setattr(suites, "parts", lambda name, *, peers: [part])
    work = threading.Thread(target=worker.WORK["bench"], args=(job, time.perf_counter()), daemon=True)
    with queueing.other(tmp_path / "turns", "GPU-simulated") as process:
        work.start()
        deadline = time.monotonic() + 20
        while not (said := jobs.progress(job)):
            assert time.monotonic() < deadline, "it said nothing"
            time.sleep(0.02)
        assert said[:2] == (0, 1)
        assert said[2].startswith(f"1st in the queue for the GPU. Process {process.pid} of ")
    work.join(20)
    assert jobs.progress(job)[:2] == (1, 1)


def test_roofs_go_to_a_worker_and_come_back_to_whoever_had_none(job, tmp_path):
    known = tmp_path / "cache"
    job = replace(job, cache=str(known))
    places.write_text(known / "roofs" / "a.jsonl", "known\n")
    worker._take_roofs(job)
    mine = job.home / "cache" / "roofs"
    assert (mine / "a.jsonl").read_text() == "known\n"
    places.write_text(mine / "a.jsonl", "measured again\n")
    places.write_text(mine / "b.jsonl", "new\n")
    jobs.keep_roofs(job)
    assert {path.name: path.read_text() for path in (known / "roofs").iterdir()} == {
        "a.jsonl": "known\n",
        "b.jsonl": "new\n",
    }


def test_a_worker_takes_the_roofs_that_it_can_read(job, tmp_path):
    known = tmp_path / "cache" / "roofs"
    places.write_text(known / "c.jsonl", "known\n")
    (known / "a.jsonl").write_bytes(b"\xff\xfe")
    (known / "b.jsonl").mkdir()
    worker._take_roofs(replace(job, cache=str(tmp_path / "cache")))
    assert [path.name for path in (job.home / "cache" / "roofs").iterdir()] == ["c.jsonl"]


def test_a_cache_that_cannot_be_written_ends_no_run(job, tmp_path):
    (tmp_path / "file").touch()
    mine = job.home / "cache" / "roofs" / "a.jsonl"
    places.write_text(mine, "new\n")
    jobs.keep_roofs(replace(job, cache=str(tmp_path / "file")))
    assert mine.read_text() == "new\n"


def test_a_recording_that_goes_on_elsewhere_keeps_the_roofs_of_its_first_rows(job, monkeypatch):
    job = replace(job, kind="record", subject="01_toy.ipynb")
    measured, slug = job.home / "cache" / "roofs.jsonl", "nvidia-h200"
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "identity", lambda: SimpleNamespace(slug=slug, device="NVIDIA H200"))
    monkeypatch.setattr(machine, "roofs", lambda: None)
    monkeypatch.setattr(machine, "cache_path", lambda: measured)
    monkeypatch.setattr(record, "record", lambda *_, **__: None)
    for hour in (10, 12):
        rows.write(measured, [recorded(suite="roofs/copy", date=f"2026-01-01T{hour}:00:00+00:00")])
        assert worker.WORK["record"](job, time.perf_counter()).passed
        left = job.home / "work" / slug / "toy@0123456789ab.jsonl"
        rows.write(left, [recorded(date="2026-01-01T11:00:00+00:00")])
    assert len(rows.read(job.home / "recorded" / slug / "roofs.jsonl")) == 2


def test_a_result_of_other_code_or_a_torn_one_is_none(job):
    jobs.finish(Outcome(job, True, device="Toy"))
    assert jobs.kept(job) == Outcome(job, True, device="Toy")
    assert jobs.kept(replace(job, key="other")) is None
    assert jobs.kept(replace(job, again=True)) is None
    (job.home / "result.json").write_text('{"key": "ke')
    assert jobs.result(job) is None
    (job.home / "result.json").write_text('{"key": "key"}')
    assert jobs.result(job) is None


@pytest.mark.parametrize(
    ("changes", "stay"),
    [({}, True), ({"retry": True}, True), ({"again": True}, False), ({"key": "other"}, False)],
)
def test_rows_of_an_earlier_worker_stay_if_they_are_of_the_same_key(job, changes, stay):
    places.write_text(job.home / "rows.jsonl", "a row\n")
    jobs.prepare(replace(job, **changes))
    assert (job.home / "rows.jsonl").exists() == stay
    places.write_text(job.home / "rows.jsonl", "a row\n")
    job.file.unlink()
    jobs.prepare(job)
    assert not (job.home / "rows.jsonl").exists(), "nobody knows of what"


def test_a_job_is_called_after_its_subject_and_variant_and_never_leaves_its_folder():
    job = Job("run", "/x/01_a.ipynb", {}, "key", "gres=gpu:a100/../..", build="/b")
    assert job.name == "01_a@gres=gpu-a100-..-.." and job.home.parent.as_posix() == "/b/workers/run"


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (0, ""),
        (1, ""),
        (-signal.SIGKILL, "its worker was ended by SIGKILL, as it is when memory runs out"),
        (128 + signal.SIGTERM, "its worker was ended by SIGTERM"),
        (2, "its worker ended with status 2"),
        (255, "its worker ended with status 255"),
    ],
)
def test_an_exit_status_is_said_in_words(status, says):
    assert worker.how_it_ended(status) == says


def test_a_worker_that_will_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "GRACE_S", 0.3)
    started = tmp_path / "started"
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(started)!r}, 'w')\nwhile True: time.sleep(1)"
    )
    assert worker.launch(("-c", script), {}, started.exists) == -signal.SIGKILL


HANGS = """
import ctypes, os, signal, sys, threading
from labkit import worker
worker.GRACE_S = 0.1
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
threading.Thread(target=worker._end_with, args=(os.getppid(),), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the other thread gets it, and wakes nobody
print(os.getpid(), flush=True)
ctypes.CDLL(None).sleep(600)
"""


def test_a_worker_that_hangs_in_a_call_of_c_ends_with_its_parent(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    parent = subprocess.Popen(
        ["sh", "-c", '"$@"; true', "sh", sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": places.python_path()}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    hanging = psutil.Process(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.wait(60)
        wait_for(lambda: not hanging.is_running() or hanging.status() == "zombie", "its end", 60)
    finally:
        if hanging.is_running():
            hanging.kill()


ASKED_TWICE = """
import os, signal
from labkit import worker
worker.end_when_asked()
try:
    os.kill(os.getpid(), signal.SIGUSR2)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    print("rows are kept")
"""


def test_a_worker_that_is_asked_twice_ends_once():
    done = subprocess.run([sys.executable, "-c", ASKED_TWICE], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("rows are kept\n", 128 + signal.SIGUSR2)


def test_a_launch_ends_with_its_owner():
    assert worker.launch_far(("-c", "import time; time.sleep(60)"), {}, 2**22 + 1) == -signal.SIGTERM
