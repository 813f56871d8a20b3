"""Waiting for what a process does, and ending it with all that it has started."""

import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil


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
