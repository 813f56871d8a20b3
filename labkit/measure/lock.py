"""The lock of a GPU: one process of the machine measures on it at a time.

Each GPU has a file, which all users of the machine may write. A process locks it for a point of a
measurement: the check, the warm-up and the timing of all contenders at one size. The operating system unlocks
it when the process ends, however it ends. Those who wait get it in no particular order.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from labkit import gpu

FOLDER = Path("/tmp")
"""Where the processes meet. Not the temporary folder of Python, which a user or a job may have for itself."""
SILENT_S = 1.0
"""Seconds that a process waits before it says so."""
POLL_S = 0.05


@contextmanager
def gpu_lock() -> Iterator[None]:
    """The GPU to oneself, among the processes of the machine that ask for it.

    A process that has it may ask again: the lock ends with the first of its contexts. Without a GPU there is
    no lock. Where the file cannot be written a warning says so, and the process goes on without the lock.
    """
    held: AbstractContextManager[Any] = nullcontext()
    if uuid := gpu.uuid():
        file = _file_lock(FOLDER / f"labkit-{uuid}.lock")
        try:
            try:
                held = file.acquire(timeout=SILENT_S, poll_interval=POLL_S)
            except Timeout:
                print("Waiting for the GPU: another process measures on it.", file=sys.stderr, flush=True)
                held = file.acquire(poll_interval=POLL_S)
        except OSError as problem:
            unlocked = f"The GPU is not locked ({problem}): while others measure on it, figures may be off."
            warnings.warn(unlocked, stacklevel=3)
    with held:
        yield


@cache
def _file_lock(path: Path) -> FileLock:
    """One lock for all who ask in this process: it counts how often it is held."""
    return FileLock(path, mode=0o666, thread_local=False)  # the mode holds whatever the umask
