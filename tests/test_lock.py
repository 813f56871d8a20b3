"""The lock of a GPU, with real processes: one at a time, whatever becomes of the others."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from filelock import Timeout

from labkit import gpu, paths

GPU = "GPU-11111111-2222-3333-4444-555555555555"
START = f"""
import sys, time
from pathlib import Path
from labkit import gpu
gpu.uuid = lambda: {GPU!r}
gpu.LOCK_FOLDER = Path(sys.argv[1])
"""
HOLDER = """
with gpu.locked():
    print("has it", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of this test's own, and a GPU."""
    monkeypatch.setattr("labkit.gpu.uuid", lambda: GPU)
    monkeypatch.setattr(gpu, "LOCK_FOLDER", tmp_path)
    return tmp_path


def start(script, *arguments, user=None):
    """Another process, which is there when its first line has been read."""
    if user is not None:  # once all is imported: where Python itself is installed another user may not read
        script = f"import os\nos.setuid({user})\n{script}"
    command = [sys.executable, "-c", START + script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": paths.python_path()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


@pytest.fixture
def other(folder):
    """Another process that has the GPU."""
    process = start(HOLDER, folder)
    assert process.stdout.readline() == "has it\n"
    yield process
    process.kill()
    process.communicate()


def is_free(seconds=0.3):
    """Whether this process gets the GPU within so long."""
    try:
        with gpu._file_lock(gpu.LOCK_FOLDER / f"labkit-{GPU}.lock").acquire(timeout=seconds):
            return True
    except Timeout:
        return False


def test_points_of_two_processes_do_not_overlap(folder):
    """Each finds the file missing that it makes in its turn."""
    script = """
from dataclasses import replace
from simulated import install
from labkit import work
from labkit.measure import clocks, session
virtual = install(setattr)
gpu.uuid = lambda: sys.argv[2]
def inputs(shape):  # the beginning of a point
    (Path(sys.argv[1]) / "inside").touch(exist_ok=False)
    time.sleep(0.02)
    return work.affine.inputs(shape)
def measured(*given, **options):  # its end
    found = measure(*given, **options)
    (Path(sys.argv[1]) / "inside").unlink()
    return found
measure, clocks.measure = clocks.measure, measured
def call(x, w, b):
    virtual.launch(4.0, 1.0 * x.shape[1])
    return x * w + b
ways, known = (session.Way("one", call, replace(work.affine, inputs=inputs)),), session.Session()
print("ready", flush=True)
sys.stdin.readline()
for n in range(1, 11):
    (row,) = known.measure(session.Point("title", ways, {"batch": 2, "width": 8 * n}))
    assert row.median_us and not row.note, row
"""
    script = f"sys.path.insert(0, {str(paths.CHECKOUT / 'tests')!r})\n{script}"
    both = [start(script, folder, GPU) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        process.communicate(timeout=60)
    assert [process.returncode for process in both] == [0, 0]


def test_who_has_it_may_ask_again_and_an_error_ends_it(folder):
    with pytest.raises(ZeroDivisionError), gpu.locked():
        with gpu.locked():
            pass
        process = start(f"print('asks', flush=True)\n{HOLDER}", folder)
        assert process.stdout.readline() == "asks\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate("\n", timeout=0.5)
        _ = 1 / 0
    assert process.communicate(timeout=20)[0] == "has it\n"


def test_a_killed_process_loses_it(other):
    assert not is_free()
    os.kill(other.pid, signal.SIGKILL)
    assert is_free(10.0)


def test_a_wait_is_told_in_one_line(other, monkeypatch, capfd):
    def ask():
        with gpu.locked():
            pass

    assert not is_free()
    monkeypatch.setattr(gpu, "SILENT_S", 0.1)
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(0.5)
    assert asking.is_alive()
    assert capfd.readouterr() == ("", "Waiting for the GPU: another process measures on it.\n")
    other.communicate("\n", timeout=20)
    asking.join(20)
    assert not asking.is_alive() and is_free()


def test_the_file_is_for_all_users_whatever_the_umask(folder):
    before = os.umask(0o077)
    try:
        with gpu.locked():
            (file,) = folder.iterdir()
            assert stat.S_IMODE(file.stat().st_mode) == 0o666
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a process of another user")
def test_another_users_process_is_waited_for(monkeypatch):
    """In a folder like /tmp, where the kernel protects the files of each user from the others."""
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o1777)
        monkeypatch.setattr(gpu, "LOCK_FOLDER", Path(shared) / "locks")
        process = start(HOLDER, gpu.LOCK_FOLDER, user=65534)
        assert process.stdout.readline() == "has it\n"
        assert not is_free()
        process.communicate("\n", timeout=20)
        assert is_free()


def test_where_the_file_cannot_be_written_it_is_said_and_goes_on(folder, monkeypatch):
    (folder / "no folder").touch()
    monkeypatch.setattr(gpu, "LOCK_FOLDER", folder / "no folder")
    done = []
    said = r"The GPU is not locked \(.*no folder.*figures may be off"
    with pytest.warns(UserWarning, match=said), gpu.locked():
        done.append(True)
    assert done


def test_without_a_gpu_there_is_no_lock(folder, monkeypatch):
    monkeypatch.setattr("labkit.gpu.uuid", lambda: "")
    with gpu.locked():
        assert list(folder.iterdir()) == []
