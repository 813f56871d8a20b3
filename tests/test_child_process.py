"""Functions in processes of their own: results, limits, ends, and what is left behind."""

import gc
import importlib
import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

import psutil
import pytest
from processes import gone

from labkit import child_process, paths


@pytest.fixture(scope="module")
def server():
    """One process for all tests."""
    server = child_process.Forkserver(exec, "import sys\nsys.prepared = 'once'")
    yield server
    server.close()


@pytest.fixture(params=["a new process", "a fork of a prepared one"])
def run(request, server):
    return child_process.run if request.param == "a new process" else server.run


def evaluate(code):
    return eval(code, globals())


def execute(code):
    exec(code, globals().copy())


def ended(pid):
    """Whether a process is gone within a second."""
    for _ in range(50):
        if not psutil.pid_exists(pid) or gone(psutil.Process(pid)):
            return True
        time.sleep(0.02)
    return False


def test_a_result_comes_back_and_a_call_may_have_processes_of_its_own(run):
    assert run(operator.add, "µ", "s", seconds=20) == "µs"
    assert len(run(bytes, 10**7, seconds=20, memory=2**29)) == 10**7
    assert run(square_in_a_pool, seconds=60) == [0, 1, 4]


def square_in_a_pool():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(square, range(3))


def square(number):
    return number * number


@pytest.mark.parametrize(
    ("function", "given", "told"),
    [
        (operator.truediv, (1, 0), "^ZeroDivisionError: division by zero"),
        (evaluate, ("sys.exit(2)",), "SystemExit: 2"),
        (evaluate, ("lambda: 1",), "Can't (get|pickle)"),
        (evaluate, ("input()",), "EOF"),
        (bytes, (10**9,), "^MemoryError"),
    ],
)
def test_what_is_raised_is_told_with_its_traceback(run, function, given, told):
    with pytest.raises(child_process.ChildError, match=told) as caught:
        run(function, *given, seconds=20, memory=2**29)
    assert caught.value.raised and "Traceback (most recent call last)" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("code", "told", "where"),
    [
        ("os._exit(3)", "it ended with status 3", ""),
        ("os.abort()", "it was ended by SIGABRT", "in execute"),
        ("os.closerange(3, 100)", "it ended with status 0", ""),
        ("if os.fork():\n    time.sleep(0.5)\n    os._exit(3)", "it ended with status 3", ""),
    ],
    ids=["exit", "abort", "closes all", "its fork returns"],
)
def test_a_process_that_dies_is_told_with_what_it_printed_last(run, code, told, where):
    with pytest.raises(child_process.ChildError) as caught:
        run(execute, f"print('no room', end='')\n{code}", seconds=20)
    (note,) = caught.value.__notes__
    assert str(caught.value) == told and not caught.value.raised
    assert note.endswith("no room") and where in note


@pytest.mark.parametrize("code", ["time.sleep(60)", "while True: print('x' * 1000)", "pass", "os._exit(3)"])
def test_what_it_leaves_running_is_ended_and_what_takes_too_long_with_all_it_started(run, code):
    said, began = [], time.monotonic()
    starts = "print(subprocess.Popen(['sleep', '1234.5']).pid, flush=True)\n"
    try:
        run(execute, starts + code, seconds=1, show=said.append)
        assert code == "pass"
    except TimeoutError as error:
        assert code[0] in "tw" and "in execute" in error.__notes__[0]
    except child_process.ChildError:
        assert code == "os._exit(3)"
    assert time.monotonic() - began < 10
    assert ended(int("".join(said).split()[0]))


@pytest.fixture
def hears_interrupts():
    """Also where the tests are a job in the background, which a shell starts deaf to them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
def test_an_interrupt_ends_it_and_says_where_it_was(run):
    said = []

    def interrupt_soon(text):
        said.append(text)
        if len(said) == 1:  # the line may come in parts
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt) as caught:
        run(execute, "print(os.getpid(), flush=True)\ntime.sleep(60)", seconds=60, show=interrupt_soon)
    assert "in execute" in caught.value.__notes__[0] and ended(int("".join(said)))
    assert run(operator.add, 1, 2, seconds=20) == 3


def test_it_ends_when_the_process_that_waits_is_killed(tmp_path):
    kept = tmp_path / "pid"
    slow = f"Path({str(kept)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    code = f"import test_child_process as own\nown.child_process.run(own.execute, {slow!r}, seconds=60)"
    path = os.pathsep.join([paths.python_path(), str(Path(__file__).parent)])
    waiting = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path})
    while not kept.exists() or not (pid := kept.read_text()):
        assert waiting.poll() is None
        time.sleep(0.05)
    waiting.kill()
    waiting.wait()
    time.sleep(1.2)  # where it was is looked for first
    assert ended(int(pid))


def test_prints_are_passed_on_as_they_come_and_a_flood_is_cut(run):
    said = []
    run(
        execute,
        "print('first')\nos.system('echo second')\nprint('x' * 20_000_000)",
        seconds=60,
        show=said.append,
    )
    text = "".join(said)
    assert text.startswith("first\nsecond\nxxx") and text.endswith(child_process.LEFT_OUT)
    assert len(text) == child_process.OUTPUT_LIMIT + len(child_process.LEFT_OUT)


def test_the_environment_is_there_before_the_module_is_imported(monkeypatch, tmp_path):
    """As TRITON_INTERPRET has to be, in the new process and in a server's."""
    names = ("OURS", "GONE", "TRITON_INTERPRET")
    (tmp_path / "early.py").write_text(
        f"import os\nSEEN = tuple(map(os.environ.get, {names}))\ndef seen(): return SEEN\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    early = importlib.import_module("early")
    monkeypatch.setenv("GONE", "1")
    around = {name: value for name, value in os.environ.items() if name != "GONE"}
    for interpret in ("0", "1"):
        around |= {"OURS": "1", "TRITON_INTERPRET": interpret}
        server = child_process.Forkserver(early.seen, environment=around)
        assert child_process.run(early.seen, environment=around, seconds=20) == ("1", None, interpret)
        assert server.run(early.seen, seconds=20) == ("1", None, interpret)
        server.close()
    assert os.environ["GONE"] == "1" and "OURS" not in os.environ


def test_a_server_prepares_once_and_a_call_changes_nothing_for_the_next_one(server):
    prepared = "(sys.prepared, os.getpid(), setattr(sys, 'prepared', 'by a call'))"
    (first, one, _), (second, other, _) = (server.run(evaluate, prepared, seconds=20) for _ in range(2))
    assert first == second == "once" and one != other


def test_a_server_that_is_killed_or_forgotten():
    server = child_process.Forkserver()
    parent = "os.getppid()"
    pid = server.run(evaluate, parent, seconds=20)
    with pytest.raises(child_process.ChildError, match="together with the process that watched it"):
        server.run(execute, "os.kill(os.getppid(), signal.SIGKILL)\nos._exit(0)", seconds=20)
    pid = server.run(evaluate, parent, seconds=20)
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)
    other = server.run(evaluate, parent, seconds=20)
    assert other != pid
    del server
    gc.collect()  # what was raised above refers to it
    assert ended(other)


def test_a_server_that_cannot_prepare_says_so_and_the_next_call_tries_again(tmp_path):
    server = child_process.Forkserver(execute, f"Path({str(tmp_path / 'there')!r}).read_text()")
    with pytest.raises(child_process.ChildError, match="FileNotFoundError") as caught:
        server.run(square, 3, seconds=20)
    assert caught.value.raised
    (tmp_path / "there").touch()
    assert server.run(square, 3, seconds=20) == 9


def test_a_server_answers_several_threads(server):
    with ThreadPool(4) as pool:
        found = pool.map(lambda number: server.run(square, number, seconds=20), range(4))
    assert found == [0, 1, 4, 9]


def test_scripts_are_not_run_again_and_the_start_method_stays_free(tmp_path):
    """Of a script without a guard, `python -c`, and a process that wants another start method afterwards."""
    code = (
        "import multiprocessing, operator, os, sys\nfrom labkit import child_process\nprint('runs')\n"
        "os.chdir('/')\nprint(child_process.run(operator.add, 1, 2, seconds=20))\n"
        "multiprocessing.set_start_method('spawn')\n"
    )
    (tmp_path / "script.py").write_text(code)
    for command in ([str(tmp_path / "script.py")], ["-c", code]):
        path = os.environ | {"PYTHONPATH": paths.python_path()}
        done = subprocess.run([sys.executable, *command], env=path, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("runs\n3\n", "")
