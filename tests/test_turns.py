"""Turns on a GPU, with real processes: one at a time, in order, whatever happens to those in the queue."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
import queueing
from queueing import begin, other, says

from labkit import clocks, device, machine, queue_line, turns

GPU = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of this test's own; everything that was said of a queue goes into ``heard``."""
    monkeypatch.setenv(turns.FOLDER, str(tmp_path / "turns"))
    monkeypatch.setattr(turns, "_useless", set())
    return tmp_path / "turns"


@pytest.fixture
def heard(monkeypatch):
    found = []
    token = turns.TELL.set(found.append)
    monkeypatch.setattr(turns, "GRACE_S", 0.0)
    yield found
    turns.TELL.reset(token)


@pytest.fixture
def started():
    """Ends the processes that a test put into the list."""
    found = []
    yield found
    for process in found:
        queueing.end(process)


class LeftError(Exception):
    """The wait was given up."""


def give_up_after(seconds):
    end = time.monotonic() + seconds

    def go_on():
        if time.monotonic() > end:
            raise LeftError

    return go_on


def waits(seconds=0.3):
    """Whether this process does not get its turn within so long."""
    try:
        with turns.hold(GPU, give_up_after(seconds)):
            return False
    except LeftError:
        return True


def tickets(folder):
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


# --- one at a time, in order --------------------------------------------------------------------------


def test_of_several_processes_one_at_a_time_has_its_turn(folder, tmp_path, started):
    """Each finds the file that it makes missing, or two were inside."""
    inside = tmp_path / "inside"
    script = f"""
import os, time
from labkit import turns
for _ in range(10):
    with turns.hold({GPU!r}):
        os.close(os.open({str(inside)!r}, os.O_CREAT | os.O_EXCL))
        time.sleep(0.002)
        os.unlink({str(inside)!r})
"""
    for _ in range(3):
        started.append(subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, text=True))
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert tickets(folder) == []


def test_first_come_first_served(folder, tmp_path, started):
    """Also before one that has just had its turn, and asks for the next right away."""
    order = tmp_path / "order"
    with turns.hold(GPU):
        for number in range(3):
            process = begin(folder, GPU, f"open({str(order)!r}, 'a').write('{number}')")
            assert says(process) == "waits"
            process.stdin.close()  # it does not keep its turn
            started.append(process)
    with turns.hold(GPU):
        assert order.read_text() == "012"


def test_another_gpu_has_a_queue_of_its_own(folder):
    with other(folder, GPU.replace("1", "9")):
        assert not waits()


def test_who_has_its_turn_may_nest_and_ends_it_at_the_outermost(folder, started):
    with turns.hold(GPU):
        with turns.hold(GPU):
            pass
        started.append(begin(folder, GPU))
        assert says(started[0]) == "waits"
    assert says(started[0]) == "served"


def test_an_error_ends_a_turn(folder):
    with pytest.raises(ZeroDivisionError), turns.hold(GPU):
        _ = 1 / 0
    with other(folder, GPU):
        assert not turns.held()


def test_an_interrupt_as_soon_as_it_has_its_turn_ends_the_turn(folder, monkeypatch):
    original = turns._queue

    def interrupted(*given):
        original(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(turns, "_queue", interrupted)
    with pytest.raises(KeyboardInterrupt), turns.hold(GPU):
        pytest.fail("interrupted before")
    monkeypatch.undo()
    assert not turns.held()
    with turns.hold(GPU):
        assert turns.held(), "the next one is the outermost again"


def interrupt(monkeypatch, where, name, times=1):
    """The next calls of a function are interrupted before they begin."""
    original, left = getattr(where, name), [KeyboardInterrupt] * times

    def interrupted(*given, **options):
        if left:
            raise left.pop()
        return original(*given, **options)

    monkeypatch.setattr(where, name, interrupted)


@pytest.mark.parametrize(
    ("where", "name"),
    [(os, "unlink"), (os, "close"), (turns.fcntl, "flock"), (turns._Place, "leave"), (turns, "_leave")],
)
def test_an_interrupt_while_a_turn_ends_locks_nobody_out(folder, monkeypatch, where, name):
    with pytest.raises(KeyboardInterrupt), turns.hold(GPU):
        interrupt(monkeypatch, where, name)
    assert not turns.held()
    with other(folder, GPU):
        pass
    assert not waits()
    assert tickets(folder) == []


def test_what_two_interrupts_left_of_a_turn_ends_with_the_next(folder, monkeypatch):
    with pytest.raises(KeyboardInterrupt), turns.hold(GPU):
        interrupt(monkeypatch, turns._Place, "leave", times=2)
    assert not waits()
    with other(folder, GPU):
        assert not turns.held()


def test_an_interrupt_as_soon_as_it_has_its_ticket_keeps_nobody_waiting(folder, monkeypatch):
    original = turns._Place

    def interrupted(gpu):
        original(gpu)
        raise KeyboardInterrupt

    monkeypatch.setattr(turns, "_Place", interrupted)
    with pytest.raises(KeyboardInterrupt), turns.hold(GPU):
        pytest.fail("interrupted before")
    with other(folder, GPU):
        assert len(tickets(folder)) == 1, "the other's"


def test_a_fork_has_nothing_of_a_turn_that_an_interrupt_left(folder, monkeypatch):
    with pytest.raises(KeyboardInterrupt), turns.hold(GPU):
        interrupt(monkeypatch, turns._Place, "leave", times=2)
    (left,) = turns._places
    if not (child := os.fork()):
        os._exit(left.lock >= 0 or bool(turns._places))
    assert os.waitpid(child, 0)[1] == 0
    assert left.lock >= 0 and not waits()


def test_nobody_queues_within_the_turn_of_who_started_the_process(folder, monkeypatch):
    assert turns.shared() == {}
    with turns.hold(GPU):
        environment = turns.shared()
    with other(folder, GPU), other(folder, GPU.replace("1", "9")):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert not waits()
        with turns.hold(GPU):
            assert not turns.held() and turns.shared() == {}
        with pytest.raises(LeftError), turns.hold(GPU.replace("1", "9"), give_up_after(0.3)):
            pytest.fail("another GPU is not included")


def test_aside_lets_the_others_go_first(folder, started):
    with turns.hold(GPU):
        started.append(begin(folder, GPU))
        assert says(started[0]) == "waits"
        with turns.aside():
            assert [says(started[0]), says(started[0])] == ["served", "has it"]
            queueing.end(started[0])
        assert turns.held()
        started.append(begin(folder, GPU))
        assert says(started[1]) == "waits"
    with turns.aside():
        assert not turns.held(), "nothing to leave, nothing to come back to"
    assert not turns.held()


def test_threads_take_turns_among_themselves_first(monkeypatch):
    monkeypatch.setattr(device, "uuid", lambda: GPU)
    inside, most = [], []

    def work():
        for _ in range(5):
            with machine.gpu_turn():
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 15


def test_a_turn_without_others_costs_far_less_than_a_millisecond(folder):
    with turns.hold(GPU):
        pass
    took = []
    for _ in range(50):
        began = time.perf_counter()
        with turns.hold(GPU):
            pass
        took.append(time.perf_counter() - began)
    assert min(took) < 0.0005


# --- those who do not end as they should --------------------------------------------------------------


def test_a_killed_holder_loses_its_turn_and_leaves_no_ticket(folder):
    with other(folder, GPU) as process:
        assert waits(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert len(tickets(folder)) == 1
        assert not waits()
        assert tickets(folder) == []


def test_a_killed_holder_loses_its_turn_although_its_fork_lives(folder, started):
    fork = "import os, time; os.fork() or time.sleep(1.5) or os._exit(0)"
    process = begin(folder, GPU, fork)
    started.append(process)
    assert says(process) == "has it"
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    os.waitpid(process.pid, 0)
    assert not waits(0.8)


def test_a_killed_waiter_keeps_nobody_waiting(folder, started):
    with turns.hold(GPU):
        for _ in range(2):
            started.append(begin(folder, GPU))
            assert says(started[-1]) == "waits"
        os.kill(started[0].pid, signal.SIGKILL)
        started[0].wait()
    assert [says(started[1]), says(started[1])] == ["served", "has it"]


def test_stop_leaves_the_queue_at_once(folder, monkeypatch):
    monkeypatch.setattr(device, "uuid", lambda: GPU)
    stop = threading.Event()
    with other(folder, GPU):
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(clocks.StoppedError, match="others had their turn"), clocks.gpu_turn(stop.is_set):
            pytest.fail("not its turn")
        assert len(tickets(folder)) == 1, "the holder's"
    assert not waits()


def test_an_interrupted_cell_leaves_the_queue_at_once(folder):
    with other(folder, GPU):
        began = time.monotonic()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt), turns.hold(GPU):
            pytest.fail("not its turn")
        assert time.monotonic() - began < 2.0
        assert len(tickets(folder)) == 1


# --- what is said -------------------------------------------------------------------------------------


def test_a_waiter_hears_its_place_and_who_has_its_turn_until_it_is_served(folder, heard, started):
    with other(folder, GPU) as first:
        started.append(begin(folder, GPU))
        assert says(started[0]) == "waits"

        def go_on():
            if len(heard) == 1:
                queueing.end(first)
            if len(heard) == 2:
                queueing.end(started[0])

        with turns.hold(GPU, go_on):
            pass
    assert len(heard) == 3 and heard[2] == ""
    assert heard[0].startswith(f"2nd in the queue for the GPU. Process {first.pid} of ")
    assert heard[1].startswith(f"1st in the queue for the GPU. Process {started[0].pid} of ")


def test_a_short_wait_is_not_worth_a_line(folder, heard, monkeypatch):
    monkeypatch.setattr(turns, "GRACE_S", 30.0)
    with other(folder, GPU):
        assert waits()
    assert heard == []


@pytest.mark.parametrize(
    ("count", "place"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (13, "13th"), (22, "22nd")],
)
def test_places_are_counted_as_people_do(count, place):
    queue = [turns.Ticket(7, "alice", "", 0.0)] * count
    assert turns.words(queue, 1.0).startswith(f"{place} in the queue for the GPU. Process 7 of alice has ")


def test_who_has_its_turn_for_minutes_is_named_as_one_that_may_hang():
    since = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
    ticket = turns.Ticket(7, "alice", "lab-3", since)
    assert turns.words([ticket], since + 299) == (
        "1st in the queue for the GPU. Process 7 of alice on lab-3 has its turn since 03:04:05."
    )
    assert turns.words([ticket], since + 380).endswith(
        "since 03:04:05. That is 6 minutes: it may hang, and only its owner can end it."
    )
    assert turns.words([], since) == "1st in the queue for the GPU."


def test_the_turn_counts_from_when_it_began_not_from_when_the_wait_did(folder, heard, started):
    with turns.hold(GPU):
        started.append(begin(folder, GPU))
        assert says(started[0]) == "waits"
        (ticket,) = [t for t in tickets(folder) if f".{started[0].pid}." in t.name]
        os.utime(ticket, (1.0, 1.0))
    assert [says(started[0]), says(started[0])] == ["served", "has it"]
    assert time.time() - ticket.stat().st_mtime < 60


@pytest.fixture
def page(monkeypatch):
    """What stands in the notebook, as (text, whether in the place of an earlier one)."""
    shown = []
    monkeypatch.setattr(
        "IPython.core.display_functions.display",
        lambda what, raw=False, display_id=None, update=False, **_: shown.append(
            (what["text/plain"], update)
        ),
    )
    monkeypatch.setattr(queue_line, "get_ipython", object)
    return shown


def test_a_cell_has_one_line_that_is_empty_in_the_end(page, monkeypatch):
    monkeypatch.setenv("LABKIT_HEADLESS", "0")
    for said in ("2nd", "1st", "", "1st", ""):
        queue_line.tell(said)
    assert page == [("2nd", False), ("1st", True), ("", True), ("1st", False), ("", True)]


def test_a_saved_notebook_has_no_line(page, monkeypatch, capfd):
    monkeypatch.setenv("LABKIT_HEADLESS", "1")
    queue_line.tell("2nd")
    assert page == [] and capfd.readouterr() == ("", "")


def test_who_executes_a_saved_notebook_may_have_the_line_in_a_file(page, monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HEADLESS", "1")
    monkeypatch.setenv(queue_line.FILE, str(tmp_path / "line"))
    for said in ("2nd", "1st", ""):
        queue_line.tell(said)
        assert (tmp_path / "line").read_text() == said
    assert page == []


def test_a_terminal_has_a_line_each(monkeypatch, capfd):
    monkeypatch.setattr(queue_line, "get_ipython", lambda: None)
    for said in ("2nd", "1st", ""):
        queue_line.tell(said)
    assert capfd.readouterr() == ("", "2nd\n1st\n")


# --- a folder of all users ----------------------------------------------------------------------------


@pytest.fixture
def narrow_umask():
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_everything_is_for_all_users_whatever_the_umask(folder, narrow_umask):
    with turns.hold(GPU):
        modes = {path.suffix == ".lock": stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert modes == {True: 0o666, False: 0o644}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o1777


def test_a_lock_that_another_user_made_read_only_is_a_lock(folder, monkeypatch):
    """Opened to write it is refused, as the kernel does to all but root."""
    with turns.hold(GPU):
        pass
    refused, original = [], os.open

    def another_users(path, flags, *rest, **options):
        if str(path).endswith(".lock") and flags & (os.O_RDWR | os.O_CREAT):
            refused.append(path)
            raise PermissionError(13, "Permission denied", path)
        return original(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", another_users)
    with turns.hold(GPU):
        assert refused and turns.held()
        assert waits_elsewhere(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a process of another user")
def test_another_user_is_in_the_same_queue(monkeypatch, heard):
    """In a folder like /tmp, where the kernel protects the files of each user from the others."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o1777)
        meeting = Path(name) / "turns"
        monkeypatch.setenv(turns.FOLDER, str(meeting))
        with other(meeting, GPU, user=65534):
            assert meeting.stat().st_uid == (meeting / f"{GPU}.lock").stat().st_uid == 65534
            assert waits()
            assert "Process " in heard[0] and " of root" not in heard[0]
        assert not waits()
        with turns.hold(GPU):
            process = begin(meeting, GPU, user=65534)
            try:
                assert says(process) == "waits"
            finally:
                process.kill()
                process.communicate()
        assert not waits(), "although a ticket that is not ours to remove lies there"


def waits_elsewhere(folder):
    process = begin(folder, GPU)
    try:
        return says(process) == "waits"
    finally:
        process.kill()
        process.communicate()


def test_a_ticket_that_cannot_be_opened_or_removed_keeps_nobody_waiting(folder, monkeypatch):
    folder.mkdir()
    stale = [f"{GPU}.{number:020d}.77.host.0123abcd" for number in (1, 2)]
    for name in stale:
        (folder / name).touch()
    original = os.open

    def another_users(path, flags, *rest, **options):
        if path == stale[0]:
            raise PermissionError(13, "Permission denied", path)
        return original(path, flags, *rest, **options)

    def sticky(path, **_):
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(os, "open", another_users)
    monkeypatch.setattr(os, "unlink", sticky)
    assert not waits()


def test_what_is_no_ticket_is_left_alone(folder):
    folder.mkdir()
    names = ["notes.txt", f"{GPU}.1.2.3", f"{GPU}.{1:020d}.7.<b>.0123abcd", ".0123abcd"]
    for name in names:
        (folder / name).write_text("mine")
    assert not waits()
    assert all((folder / name).read_text() == "mine" for name in names)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_hostile_ticket_is_not_followed(folder, tmp_path, kind):
    folder.mkdir()
    mine = tmp_path / "mine"
    mine.write_text("precious")
    trap = folder / f"{GPU}.{1:020d}.77.host.0123abcd"
    {"link": lambda: trap.symlink_to(mine), "pipe": lambda: os.mkfifo(trap), "folder": trap.mkdir}[kind]()
    assert not waits()
    assert mine.read_text() == "precious" and os.path.lexists(trap)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_a_hostile_lock_is_not_followed_and_measuring_goes_on_without(folder, tmp_path, kind):
    folder.mkdir()
    mine = tmp_path / "mine"
    trap = folder / f"{GPU}.lock"
    if kind == "link":
        mine.write_text("precious")
    made = {"pipe": lambda: os.mkfifo(trap), "folder": trap.mkdir}
    made.get(kind, lambda: trap.symlink_to(mine))()
    with pytest.warns(UserWarning, match="No turns are taken on the GPU"), turns.hold(GPU):
        assert not turns.held()
    assert mine.exists() == (kind == "link") and tickets(folder) == []
    assert kind != "link" or (mine.read_text() == "precious" and stat.S_IMODE(mine.stat().st_mode) != 0o666)


def test_the_usual_folder_is_no_link_of_somebody_elses(tmp_path, monkeypatch):
    monkeypatch.delenv(turns.FOLDER)
    monkeypatch.setattr(turns, "USUAL", tmp_path / "usual")
    (tmp_path / "mine").mkdir()
    (tmp_path / "usual").symlink_to(tmp_path / "mine")
    with pytest.warns(UserWarning, match="No turns are taken"), turns.hold(GPU):
        assert not turns.held()
    assert list((tmp_path / "mine").iterdir()) == []
    monkeypatch.setenv(turns.FOLDER, str(tmp_path / "usual"))
    turns._useless.clear()
    with turns.hold(GPU):
        assert turns.held(), "a link that this user named"


def test_a_lock_that_was_cleaned_away_meanwhile_is_made_again(folder, monkeypatch):
    """Who locked the old file has locked nothing."""
    original, cleaned = turns.fcntl.flock, []

    def flock(handle, how):
        original(handle, how)
        lock = folder / f"{GPU}.lock"
        if not cleaned and lock.exists() and os.path.samestat(os.fstat(handle), lock.stat()):
            lock.unlink()
            cleaned.append(handle)

    monkeypatch.setattr(turns.fcntl, "flock", flock)
    with turns.hold(GPU):
        assert cleaned and (folder / f"{GPU}.lock").exists()
        assert waits_elsewhere(folder)


def said_once(what):
    with pytest.warns(UserWarning, match=what) as given:
        for _ in range(3):
            with turns.hold(GPU):
                assert not turns.held()
    assert len(given) == 1
    assert turns.FOLDER in str(given[0].message)


def test_without_a_folder_it_is_said_once_and_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(turns.FOLDER, str(tmp_path / "file"))
    said_once("Not a directory")
    monkeypatch.setenv(turns.FOLDER, str(tmp_path / "no" / "such"))
    said_once("No such file")


def test_in_a_read_only_folder_it_is_said_once_and_goes_on(folder, monkeypatch):
    original = os.open

    def read_only(path, flags, *rest, **options):
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system", path)
        return original(path, flags, *rest, **options)

    folder.mkdir()
    monkeypatch.setattr(os, "open", read_only)
    said_once("Read-only file system")


def test_on_a_file_system_without_locks_it_is_said_once_and_goes_on(folder, monkeypatch):
    def flock(handle, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(turns.fcntl, "flock", flock)
    said_once("No locks available")
    monkeypatch.undo()
    assert [path.name for path in folder.iterdir()] == []


@pytest.mark.parametrize("problem", [PermissionError, FileExistsError])
def test_who_comes_while_another_makes_the_folder_tries_again(folder, monkeypatch, problem):
    original, tries = turns._folder, []

    def being_made():
        tries.append(1)
        if len(tries) < 3:
            raise problem
        return original()

    monkeypatch.setattr(turns, "_folder", being_made)
    with turns.hold(GPU):
        assert turns.held() and len(tries) == 3


def test_nothing_stays_open(folder):
    with turns.hold(GPU):
        pass
    before = len(os.listdir("/proc/self/fd"))
    with other(folder, GPU):
        assert waits(0.1)
    for _ in range(3):
        with turns.hold(GPU):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_gpu_there_is_no_queue_and_no_folder(folder, monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with machine.gpu_turn():
            assert not turns.held()
    assert not folder.exists()
