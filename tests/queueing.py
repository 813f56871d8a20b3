"""Other processes in the queue for a GPU: inside `with other(folder, "GPU-1")` one has its turn."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from labkit import paths
from labkit.measure import lock

HOLDER = """
import os, sys
from labkit import gpu
from labkit.measure import lock
gpu.uuid = lambda: sys.argv[1]
{first}
lock.SILENT_S = 0.0
lock.SHOW_QUEUE.set(lambda said: print("waits" if said else "served", flush=True))
with lock.gpu_lock():
    print("has it", flush=True)
    {while_held}
    sys.stdin.readline()
"""


def begin(folder: Path, gpu: str, while_held: str = "", user: int | None = None) -> subprocess.Popen[str]:
    """A process that asks for its turn, says when it waits and has it, and keeps it until it is told."""
    # Once all is imported: where Python itself is installed another user may not read.
    first = "" if user is None else f"os.setuid({user})"
    environment = {**os.environ, "PYTHONPATH": paths.python_path(), lock.LOCK_FOLDER_VARIABLE: str(folder)}
    command = [sys.executable, "-c", HOLDER.format(first=first, while_held=while_held), gpu]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def says(process: subprocess.Popen[str]) -> str:
    """What it says next."""
    assert process.stdout
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    """Let it end its turn, whatever it is doing."""
    with contextlib.suppress(OSError, ValueError):
        process.communicate("\n", timeout=20)
    if process.poll() is None:
        process.kill()
        process.wait()


@contextlib.contextmanager
def other(folder: Path, gpu: str, user: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Another process that has its turn."""
    process = begin(folder, gpu, user=user)
    try:
        assert says(process) == "has it"
        yield process
    finally:
        end(process)
