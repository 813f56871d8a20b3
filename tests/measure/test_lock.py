"""The lock of a GPU, with real processes: one at a time, in order, whatever happens to those in the queue."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import queueing
from queueing import begin, other, says

from labkit import clocks, device, machine
from labkit.measure import lock

GPU = "GPU-11111111-2222-3333-4444-555555555555"
SLICE = "MIG-11111111-2222-3333-4444-555555555555"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of this test's own."""
    monkeypatch.setenv(lock.FOLDER, str(tmp_path / "turns"))
    return tmp_path / "turns"


@pytest.fixture
def heard():
    """Everything that is said about the wait."""
    found = []
    token = lock.TELL.set(found.append)
    yield found
    lock.TELL.reset(token)


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


class LeftError(Exception):
    """The wait was given up."""


def waits(seconds=0.3, gpu=GPU):
    """Whether this process does not get its turn within so long."""
    end = time.monotonic() + seconds

    def go_on():
        if time.monotonic() > end:
            raise LeftError

    try:
        with lock.hold(gpu, go_on):
            return False
    except LeftError:
        return True


def gets_it(process):
    """Whether it has its turn after it said a while that it waits."""
    while (said := says(process)) == "waits":
        pass
    return [said, says(process)] == ["served", "has it"]


def tickets(folder):
    return list((folder / GPU).iterdir())


# --- one at a time, in order --------------------------------------------------------------------------


def test_one_at_a_time_and_whoever_had_a_turn_goes_behind_those_who_wait(folder, tmp_path):
    """Each of three finds the file missing that it makes in its turn; of 30 turns hardly two go to one."""
    inside, order = tmp_path / "inside", tmp_path / "order"
    script = f"""
import os, sys, time
from labkit.measure import lock
open({str(order)!r} + sys.argv[1], "w").close()
while not all(os.path.exists({str(order)!r} + name) for name in "abc"):
    time.sleep(0.01)
for _ in range(10):
    with lock.hold({GPU!r}):
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
    """Also before one that has just had its turn, and asks for the next right away."""
    order = tmp_path / "order"
    with lock.hold(GPU):
        for number in range(3):
            process = queued(f"open({str(order)!r}, 'a').write('{number}')")
            process.stdin.close()  # it does not keep its turn
        time.sleep(0.3)
        released = time.monotonic()
    with lock.hold(GPU):
        assert order.read_text() == "012"
        assert time.monotonic() - released < 1.0, "a quarter of a second for each of them, and this one"


def test_two_gpus_and_two_slices_do_not_wait_for_each_other(folder):
    with other(folder, GPU), other(folder, SLICE):
        assert waits() and waits(gpu=SLICE)
        assert not waits(gpu=GPU.replace("1", "9")) and not waits(gpu=SLICE.replace("1", "9"))


def test_who_has_its_turn_may_ask_again_and_ends_it_with_the_first(folder, queued):
    with pytest.raises(ZeroDivisionError), lock.hold(GPU):
        with lock.hold(GPU):
            pass
        process = queued()
        _ = 1 / 0
    assert gets_it(process)


def test_threads_of_a_process_share_a_place_and_take_turns_in_it(folder, monkeypatch):
    monkeypatch.setattr(device, "uuid", lambda: GPU)
    had = []

    def work():
        with machine.gpu_turn():
            had.append(lock.held())

    with other(folder, GPU) as process:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert had == [] and len(tickets(folder)) == 2
        queueing.end(process)
        for thread in threads:
            thread.join(10)
    assert had == [GPU] * 3


# --- those who do not end as they should --------------------------------------------------------------


def test_a_killed_process_loses_its_turn_or_its_place(folder, queued):
    with other(folder, GPU) as holder:
        first, second = queued(), queued()
        for process in (holder, first):
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert gets_it(second)
        assert [ticket.name.split(".")[1] for ticket in tickets(folder)] == [str(second.pid)]


def test_stop_leaves_the_queue_at_once(folder, monkeypatch):
    monkeypatch.setattr(device, "uuid", lambda: GPU)
    stop = threading.Event()
    before = len(os.listdir("/proc/self/fd"))
    with other(folder, GPU):
        threading.Timer(0.2, stop.set).start()
        began = time.monotonic()
        with pytest.raises(clocks.StoppedError, match="others had their turn"), clocks.gpu_turn(stop.is_set):
            pytest.fail("not its turn")
        assert time.monotonic() - began < 0.7
        assert len(tickets(folder)) == 1, "the holder's"
    assert not waits()
    assert len(os.listdir("/proc/self/fd")) == before, "nothing stays open"


def test_ctrl_c_while_waiting_and_within_a_turn_leaves_no_ticket(folder, queued):
    with lock.hold(GPU):
        waiting, next_ = queued(), queued()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(10) != 0
        assert len(tickets(folder)) == 2
    assert gets_it(next_)
    next_.send_signal(signal.SIGINT)
    assert next_.wait(10) != 0
    assert tickets(folder) == [] and not waits()


@pytest.mark.parametrize(
    ("where", "name"),
    [(os, "unlink"), (lock.fcntl, "flock"), (os, "close"), (lock._Place, "leave"), (lock, "_leave")],
)
def test_ctrl_c_while_a_turn_ends_locks_nobody_out(folder, monkeypatch, where, name):
    original, left = getattr(where, name), [KeyboardInterrupt]

    def interrupted(*given):
        if left:
            raise left.pop()
        return original(*given)

    with pytest.raises(KeyboardInterrupt), lock.hold(GPU):
        monkeypatch.setattr(where, name, interrupted)
    assert not lock.held() and tickets(folder) == []
    with other(folder, GPU):
        assert waits()


# --- what is said -------------------------------------------------------------------------------------


def test_a_waiter_hears_its_place_and_whose_turn_it_is_until_it_has_its_own(
    folder, heard, queued, monkeypatch
):
    with other(folder, GPU) as first:
        monkeypatch.setattr(lock, "GRACE_S", 30.0)
        assert waits() and heard == [], "so short a wait is not worth a line"
        monkeypatch.setattr(lock, "GRACE_S", 0.0)
        second = queued()

        def go_on():
            queueing.end(first if len(heard) == 1 else second)

        with lock.hold(GPU, go_on):
            assert heard.pop() == ""
    assert heard[0].startswith(f"2nd in the queue for the GPU. Process {first.pid} of ")
    assert heard[1].startswith(f"1st in the queue for the GPU. Process {second.pid} of ")


def test_a_turn_is_said_to_last_since_it_began_not_since_the_wait_did(folder, queued):
    with lock.hold(GPU):
        process = queued()
        (ticket,) = [path for path in tickets(folder) if f".{process.pid}." in path.name]
        os.utime(ticket, (1.0, 1.0))
    assert gets_it(process)
    assert time.time() - ticket.stat().st_mtime < 60


@pytest.mark.parametrize(
    ("headless", "shown"),
    [("1", []), ("0", [("2nd", False), ("1st", True), ("", True), ("1st", False), ("", True)])],
)
def test_a_cell_has_one_line_that_is_empty_in_the_end(monkeypatch, capfd, headless, shown):
    """And a notebook that nobody looks at has none: it would be saved."""
    found = []
    monkeypatch.setattr(
        "IPython.core.display_functions.display",
        lambda what, display_id=None, update=False, **_: found.append((what["text/plain"], update)),
    )
    monkeypatch.setattr(lock, "get_ipython", object)
    monkeypatch.setenv("LABKIT_HEADLESS", headless)
    for said in ("2nd", "1st", "", "1st", ""):
        lock.tell(said)
    assert found == shown and capfd.readouterr() == ("", "")


def test_a_terminal_has_a_line_each(capfd):
    for said in ("2nd", "1st", ""):
        lock.tell(said)
    assert capfd.readouterr() == ("", "2nd\n1st\n")


# --- a folder of all users ----------------------------------------------------------------------------


def test_everything_is_for_all_users_whatever_the_umask(folder):
    before = os.umask(0o077)
    try:
        with lock.hold(GPU):
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
        monkeypatch.setenv(lock.FOLDER, str(meeting))
        with other(meeting, GPU, user=65534) as process:
            assert {path.stat().st_uid for path in (meeting, *meeting.rglob("*"))} == {65534}
            assert waits()
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            with other(meeting, GPU, user=65533):
                assert waits(), "before a ticket that is not the other user's to remove"
        with lock.hold(GPU):
            process = begin(meeting, GPU, user=65534)
            try:
                assert says(process) == "waits"
            finally:
                process.kill()
                process.communicate()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_ticket_is_not_followed_and_keeps_nobody_waiting(folder, tmp_path, kind):
    (folder / GPU).mkdir(parents=True)
    mine = tmp_path / "mine"
    mine.write_text("precious")
    trap = folder / GPU / "000000000001.77.eve@lab"
    {"link": lambda: trap.symlink_to(mine), "pipe": lambda: os.mkfifo(trap), "folder": trap.mkdir}[kind]()
    (folder / GPU / "notes.txt").touch()
    assert not waits()
    with other(folder, GPU):
        assert waits()
    assert mine.read_text() == "precious" and (folder / GPU / "notes.txt").exists()


def test_a_link_in_place_of_the_gpus_folder_is_not_followed(folder, tmp_path):
    folder.mkdir()
    (tmp_path / "mine").mkdir()
    (folder / GPU).symlink_to(tmp_path / "mine")
    with pytest.warns(UserWarning, match="No turns are taken on the GPU"), lock.hold(GPU):
        assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(("path", "problem"), [("file", "Not a directory"), ("no/such", "No such file")])
def test_without_a_folder_it_is_said_once_and_goes_on(tmp_path, monkeypatch, path, problem):
    (tmp_path / "file").touch()
    monkeypatch.setenv(lock.FOLDER, str(tmp_path / path))
    done = []
    with pytest.warns(UserWarning, match=f"{problem}.*{lock.FOLDER} names another folder") as given:
        for _ in range(3):
            with lock.hold(GPU):
                done.append(True)
    assert len(given) == 1 and done == [True] * 3


def test_without_a_gpu_nothing_of_it_is_used(folder, monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    with machine.gpu_turn():
        assert not lock.held()
    assert not folder.exists()
