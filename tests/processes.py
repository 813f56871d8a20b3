"""Processes that hear Ctrl-C, waiting for what they do, and ending them with all that they have started."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil


def python(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """Python with a group of its own, as a command in a terminal has. It hears Ctrl-C where the tests do not.

    All that it prints is in its stdout.
    """
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )  # fmt: skip


def gone(process: psutil.Process) -> bool:
    """Whether it has ended; a zombie has."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], Any], what: str, seconds: float) -> Any:
    """The first true value that ``condition()`` gives; TimeoutError naming ``what`` when there is none."""
    end_s = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)
    return found


def tree(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """A process and all that come from it; nothing once it has ended."""
    if process.poll() is not None:
        return []
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def end(process: subprocess.Popen[Any], patience_s: float) -> None:
    """Ask a process to end, and kill what is left then of it and of those that came from it."""
    there: Iterable[psutil.Process] = tree(process)
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for each in there:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
