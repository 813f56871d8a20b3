"""A preloaded process: results, what it leaves behind, and what becomes of it when something dies.

What an answer to an exercise may do to it is in exercises/test_judge.
"""

import importlib
import multiprocessing
import operator
import os
import signal
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import psutil
import pytest
from processes import gone, wait_for

from labkit import child_process, paths


@pytest.fixture(scope="module")
def server():
    """One process for all tests."""
    server = child_process.PreloadedProcess(exec, "import sys\nsys.prepared = 'once'")
    yield server
    server.close()


def evaluate(code):
    return eval(code, globals())


def execute(code):
    exec(code, globals().copy())


def ended(pid):
    """Waits until a process is gone, which it may be already."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return True
    return wait_for(lambda: gone(process), f"end of {pid}", 3)


def square(number):
    return number * number


def square_in_a_pool():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(square, range(3))


def test_a_result_comes_back_and_a_call_may_have_processes_of_its_own(server):
    assert child_process.run(operator.add, "µ", "s", seconds=20) == "µs"
    assert len(server.run(bytes, 10**7, seconds=20, memory=2**29)) == 10**7
    assert server.run(square_in_a_pool, seconds=60) == [0, 1, 4]


@pytest.mark.parametrize(
    ("function", "given", "told"),
    [
        (operator.truediv, (1, 0), "^ZeroDivisionError: division by zero"),
        (evaluate, ("lambda: 1",), "Can't (get|pickle)"),
        (evaluate, ("input()",), "EOF"),
    ],
)
def test_what_is_raised_is_told_with_its_traceback(server, function, given, told):
    with pytest.raises(child_process.ChildError, match=told) as caught:
        server.run(function, *given, seconds=20)
    assert type(caught.value) is child_process.ChildError
    assert "Traceback (most recent call last)" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("os._exit(3)", "it ended with status 3"),
        ("os.closerange(3, 100)", "it ended with status 1"),
        ("if os.fork():\n    os.wait()\n    os._exit(3)", "it ended with status 3"),
        ("if not os.fork():\n    signal.pause()\nos._exit(3)", "it ended with status 3"),
    ],
    ids=["exit", "closes all", "its fork returns", "its fork stays"],
)
def test_a_process_that_dies_is_told_with_what_it_printed_last(server, code, told):
    with pytest.raises(child_process.ChildDiedError) as caught:
        server.run(execute, f"print('no room', end='')\n{code}", seconds=20)
    assert str(caught.value) == told
    assert "no room" in caught.value.__notes__[0]


def test_a_call_and_all_that_it_started_end_when_the_process_that_waits_is_killed(tmp_path):
    kept = tmp_path / "pids"
    slow = f"""
        started = [subprocess.Popen(["sleep", "1234.5"]).pid for _ in range(3)]
        Path({str(kept)!r}).write_text(" ".join(map(str, [os.getpid(), os.getppid(), *started, "."])))
        9 ** 9 ** 9  # holds the interpreter's lock
    """
    code = (
        "import textwrap, test_child_process as own\n"
        f"own.child_process.run(own.execute, textwrap.dedent({slow!r}), seconds=60)"
    )
    path = os.pathsep.join([paths.python_path(), str(Path(__file__).parent)])
    waiting = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path})
    wait_for(lambda: kept.exists() and kept.read_text().endswith("."), "the call", 60)
    assert waiting.poll() is None
    waiting.kill()
    waiting.wait()
    for pid in kept.read_text().split()[:-1]:
        ended(int(pid))


def test_the_environment_is_there_before_the_module_is_imported(monkeypatch, tmp_path):
    """As TRITON_INTERPRET has to be. The one who calls keeps its own."""
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
        assert child_process.run(early.seen, environment=around, seconds=20) == ("1", None, interpret)
    assert os.environ["GONE"] == "1" and "OURS" not in os.environ


def test_it_prepares_once_and_a_call_changes_nothing_for_the_next_one(server):
    prepared = "(sys.prepared, os.getpid(), setattr(sys, 'prepared', 'by a call'))"
    (first, one, _), (second, other, _) = (server.run(evaluate, prepared, seconds=20) for _ in range(2))
    assert first == second == "once" and one != other


KILL_THE_WATCHER = """Path({!r}).write_text(str(os.getpid()))
os.kill(os.getppid(), signal.SIGKILL)
signal.pause()"""


def test_one_that_is_killed_starts_again_and_one_that_is_closed_is_gone(tmp_path):
    server = child_process.PreloadedProcess()
    with pytest.raises(child_process.ChildError, match="together with the process that watched it"):
        server.run(execute, KILL_THE_WATCHER.format(str(tmp_path / "pid")), seconds=20)
    ended(int((tmp_path / "pid").read_text()))
    pid = server.run(evaluate, "os.getppid()", seconds=20)
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    other = server.run(evaluate, "os.getppid()", seconds=20)
    assert other != pid
    server.close()
    ended(other)


def test_where_one_cannot_prepare_the_next_call_tries_again(tmp_path, capfd):
    server = child_process.PreloadedProcess(execute, f"Path({str(tmp_path / 'there')!r}).read_text()")
    with pytest.raises(child_process.ChildDiedError):
        server.run(square, 3, seconds=20)
    assert "FileNotFoundError" in capfd.readouterr().err
    (tmp_path / "there").touch()
    assert server.run(square, 3, seconds=20) == 9
    server.close()


def test_threads_take_turns(server):
    with ThreadPool(4) as pool:
        found = pool.map(lambda number: server.run(square, number, seconds=20), range(4))
    assert found == [0, 1, 4, 9]


def test_scripts_are_not_run_again_and_the_start_method_stays_free(tmp_path):
    """Of a script without a guard, `python -c`, and a process that wants another start method afterwards."""
    code = (
        "import multiprocessing, operator, os, sys\nfrom labkit import child_process\nprint('runs')\n"
        "os.chdir('/')\nprint(child_process.run(operator.add, 1, 2, seconds=20))\n"
        "kept = child_process.PreloadedProcess()\nprint(kept.run(operator.add, 1, 3, seconds=20))\n"
        "multiprocessing.set_start_method('spawn')\n"
    )
    (tmp_path / "script.py").write_text(code)
    for command in ([str(tmp_path / "script.py")], ["-c", code]):
        path = os.environ | {"PYTHONPATH": paths.python_path()}
        done = subprocess.run([sys.executable, *command], env=path, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("runs\n3\n4\n", "")
