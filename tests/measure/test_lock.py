"""The lock of a GPU, with real processes: one at a time, in order, whatever happens to those in the queue."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import pytest
import queueing
from queueing import begin, other, says

from labkit.measure import lock

GPU = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of this test's own, and a GPU."""
    monkeypatch.setattr("labkit.gpu.uuid", lambda: GPU)
    monkeypatch.setenv(lock.LOCK_FOLDER_VARIABLE, str(tmp_path / "turns"))
    return tmp_path / "turns"


@pytest.fixture
def queued(folder):
    """Starts a process that asks for the GPU, once it waits; all are ended with the test."""
    found = []

    def start(while_held=""):
        found.append(begin(folder, GPU, while_held))
        assert says(found[-1]) == "waits"
        return found[-1]

    yield start
    for process in found:
        queueing.end(process)


def waits(seconds=0.3, gpu=GPU):
    """Whether this process does not get its turn within so long."""
    end = time.monotonic() + seconds
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(lock.StoppedError):
        patch.setattr("labkit.gpu.uuid", lambda: gpu)
        with lock.gpu_lock(lambda: time.monotonic() > end):
            return False
    return True


def tickets(folder):
    return list((folder / GPU).iterdir())


# --- one at a time, in order --------------------------------------------------------------------------


def test_one_at_a_time_and_whoever_had_a_turn_goes_behind_those_who_wait(folder, tmp_path):
    """Each of three finds the file missing that it makes in its turn; of 30 turns hardly two go to one."""
    inside, order = tmp_path / "inside", tmp_path / "order"
    script = f"""
import os, sys, time
from labkit import gpu
from labkit.measure import lock
gpu.uuid = lambda: {GPU!r}
open({str(order)!r} + sys.argv[1], "w").close()
while not all(os.path.exists({str(order)!r} + name) for name in "abc"):
    time.sleep(0.01)
for _ in range(10):
    with lock.gpu_lock():
        os.close(os.open({str(inside)!r}, os.O_CREAT | os.O_EXCL))
        open({str(order)!r}, "a").write(sys.argv[1])
        time.sleep(0.01)
        os.unlink({str(inside)!r})
"""
    started = [subprocess.Popen([sys.executable, "-c", script, name]) for name in "abc"]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    had = order.read_text()
    assert all(had.count(name) == 10 for name in "abc")
    assert sum(one == next_ for one, next_ in pairwise(had)) <= 4, had
    assert tickets(folder) == []


def test_in_the_order_of_asking_and_soon(folder, tmp_path, queued):
    """Also before one that has just had its turn, asked within it again, and asks for the next right away."""
    order = tmp_path / "order"
    with pytest.raises(ZeroDivisionError), lock.gpu_lock():
        with lock.gpu_lock():
            pass
        assert lock.held_gpu() == GPU, "a nested turn ends with the first"
        for number in range(3):
            process = queued(f"open({str(order)!r}, 'a').write('{number}')")
            process.stdin.close()  # it does not keep its turn
        time.sleep(0.3)
        released = time.monotonic()
        _ = 1 / 0
    with lock.gpu_lock():
        assert order.read_text() == "012"
        assert time.monotonic() - released < 2.0, "half a second for each of them, and this one"


# --- those who do not end as they should --------------------------------------------------------------


def test_a_killed_process_loses_its_turn_or_its_place(folder, queued):
    with other(folder, GPU) as holder:
        first, second = queued(), queued()
        for process in (holder, first):
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        while (said := says(second)) == "waits":
            pass
        assert [said, says(second)] == ["served", "has it"]
        assert [ticket.name.split(".")[1] for ticket in tickets(folder)] == [str(second.pid)]


def test_stop_leaves_the_queue_at_once(folder):
    before = len(os.listdir("/proc/self/fd"))
    with other(folder, GPU):
        began = time.monotonic()
        assert waits(0.2) and time.monotonic() - began < 2.0
        assert len(tickets(folder)) == 1, "the holder's"
    assert not waits()
    assert len(os.listdir("/proc/self/fd")) == before, "nothing stays open"


# --- what is said -------------------------------------------------------------------------------------


def test_a_waiter_hears_its_place_and_whose_turn_it_is_until_it_has_its_own(folder, queued, monkeypatch):
    heard = []
    token = lock.SHOW_QUEUE.set(heard.append)
    with other(folder, GPU) as first:
        monkeypatch.setattr(lock, "SILENT_S", 30.0)
        assert waits() and heard == [], "so short a wait is not worth a line"
        monkeypatch.setattr(lock, "SILENT_S", 0.0)
        second = queued()
        with lock.gpu_lock(lambda: queueing.end(first if len(heard) == 1 else second) or False):
            assert heard.pop() == ""
    lock.SHOW_QUEUE.reset(token)
    assert heard[0].startswith(f"Waiting for the GPU, number 2 in the queue: process {first.pid} of ")
    assert heard[1].startswith(f"Waiting for the GPU, number 1 in the queue: process {second.pid} of ")


# --- a folder of all users ----------------------------------------------------------------------------


def test_everything_is_for_all_users_whatever_the_umask(folder):
    before = os.umask(0o077)
    try:
        with lock.gpu_lock():
            (ticket,) = tickets(folder)
            modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / GPU, ticket)]
            assert modes == [0o1777, 0o1777, 0o644]
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a process of another user")
def test_another_user_is_in_the_same_queue(monkeypatch):
    """In a folder like /tmp, where the kernel protects the files of each user from the others."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o1777)
        meeting = Path(name) / "turns"
        monkeypatch.setenv(lock.LOCK_FOLDER_VARIABLE, str(meeting))
        with other(meeting, GPU, user=65534) as process:
            assert {path.stat().st_uid for path in (meeting, *meeting.rglob("*"))} == {65534}
            assert waits()
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            with other(meeting, GPU, user=65533):
                assert waits(), "before a ticket that is not the other user's to remove"


@pytest.mark.parametrize(("path", "problem"), [("file", "Not a directory"), ("no/such", "No such file")])
def test_without_a_folder_it_is_said_and_goes_on(tmp_path, monkeypatch, path, problem):
    (tmp_path / "file").touch()
    monkeypatch.setenv(lock.LOCK_FOLDER_VARIABLE, str(tmp_path / path))
    done = []
    with pytest.warns(
        UserWarning, match=f"{problem}.*{lock.LOCK_FOLDER_VARIABLE} names another folder"
    ) as given:
        for _ in range(3):
            with lock.gpu_lock():
                done.append(True)
    assert given and done == [True] * 3


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_ticket_is_not_followed_and_keeps_nobody_waiting(folder, tmp_path, kind):
    (folder / GPU).mkdir(parents=True)
    trap, mine = folder / GPU / "000000000001.77.eve@lab", tmp_path / "mine"
    mine.write_text("precious")
    {"link": lambda: trap.symlink_to(mine), "pipe": lambda: os.mkfifo(trap), "folder": trap.mkdir}[kind]()
    assert not waits()
    with other(folder, GPU):
        assert waits() and not waits(gpu=GPU.replace("1", "9")), "another GPU is free"
    assert mine.read_text() == "precious"


@pytest.mark.parametrize(
    ("headless", "shown"),
    [("1", []), ("0", [("2nd", False), ("1st", True), ("", True), ("1st", False), ("", True)])],
)
def test_a_cell_has_one_line_that_is_empty_in_the_end(monkeypatch, capfd, headless, shown):
    """A notebook that nobody looks at has none, which would be saved; a terminal has a line each."""
    lock.show_queue("2nd"), lock.show_queue("")
    assert capfd.readouterr() == ("", "2nd\n")
    found = []
    display = lambda what, update=False, **_: found.append((what["text/plain"], update))  # noqa: E731
    monkeypatch.setattr("IPython.core.display_functions.display", display)
    monkeypatch.setattr("IPython.get_ipython", object)
    monkeypatch.setenv("LABKIT_HEADLESS", headless)
    for said in ("2nd", "1st", "", "1st", ""):
        lock.show_queue(said)
    assert found == shown and capfd.readouterr() == ("", "")
