"""The lock of a GPU: one process of the machine is timed on it at a time, in the order of asking.

`gpu_lock` is what a measurement takes. The threads of one process exclude each other by `thread_lock`.

The processes meet in a folder that users and containers share; there each GPU, or slice of one, has a folder.
A process that asks makes a ticket there, a file with the next number, and keeps it locked (flock) until it is
done. It has the GPU when no lower ticket is locked. The operating system unlocks a ticket when its process
ends, however it ends.

Tickets of other users are opened for reading only, and links among them are not followed. Where no folder
can be shared, processes measure without the lock, and a warning says so.
"""

import fcntl
import os
import re
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from labkit import gpu

Stop = Callable[[], bool]
LOCK_FOLDER_VARIABLE = "LABKIT_TURNS"
"""Environment variable: the folder where the processes meet, if it is not /tmp/labkit-turns."""
SILENT_S = 0.2
"""Seconds that a process waits before it says so."""
BUSY_CELL_S = 1.0
"""Seconds that a busy cell may keep a measurement waiting before it gives the GPU to other processes."""
TICKET = re.compile(r"\d{12}\.\d+\.[A-Za-z0-9@-]+", re.ASCII)
"""Name of a ticket: number, process and owner."""


class StoppedError(RuntimeError):
    """The measurement was asked to stop before it was complete."""


def raise_if_stopped(stop: Stop) -> None:
    """Raise StoppedError when ``stop()`` is true."""
    if stop():
        raise StoppedError("stopped before the measurement was complete")


# ---- processes ---------------------------------------------------------------------------------------------


class _Ticket:
    """This process's place in the queue of a GPU: a file that is locked until `leave`."""

    def __init__(self, gpu: str) -> None:
        self.gpu, self.folder = gpu, _queue_folder() / gpu
        user = os.environ.get("JUPYTERHUB_USER") or os.environ.get("USER") or os.getuid()
        owner = re.sub("[^A-Za-z0-9@-]", "-", f"{user}@{socket.gethostname()}")
        for folder in (self.folder.parent, self.folder):
            with suppress(FileExistsError):
                folder.mkdir()
                folder.chmod(0o1777)  # whatever the umask: other users make tickets, too
        door = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(door, fcntl.LOCK_EX)  # one process at a time takes a number
            number = max((int(name[:12]) for name in self._names()), default=0) + 1
            self.path = self.folder / f"{number:012}.{os.getpid()}.{owner}"
            self.file = self.path.open("xb")
            self.path.chmod(0o644)  # others test whether it is locked
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(door)

    def _names(self) -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if TICKET.fullmatch(name))

    def ahead(self) -> list[str]:
        """Who asked before this process and is still there, the first one first, each as a sentence."""
        found = []
        for path in (self.folder / name for name in self._names() if name < self.path.name):
            # A ticket that is gone meanwhile, a link, or not readable keeps nobody waiting.
            with suppress(OSError), open(path, "rb", opener=_open_without_following) as ticket:
                try:
                    fcntl.flock(ticket, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    path.unlink()  # a killed process left it; in a shared folder only its user may remove it
                except BlockingIOError:
                    _, process, owner = path.name.split(".")
                    since = time.strftime("%H:%M:%S", time.localtime(os.fstat(ticket.fileno()).st_mtime))
                    found.append(f"process {process} of {owner} has it since {since}.")
        return found

    def leave(self) -> None:
        self.path.unlink(missing_ok=True)
        fcntl.flock(self.file, fcntl.LOCK_UN)  # closing would not do where a fork has it open, too
        self.file.close()


def _queue_folder() -> Path:
    return Path(os.environ.get(LOCK_FOLDER_VARIABLE) or "/tmp/labkit-turns").expanduser()


def _open_without_following(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


_ticket: _Ticket | None = None


def held_gpu() -> str:
    """UUID of the GPU that this process has locked or waits for; empty if there is none."""
    return _ticket.gpu if _ticket else ""


@contextmanager
def gpu_lock(stop: Stop = lambda: False) -> Iterator[None]:
    """The GPU to oneself, among all processes of the machine that ask for it: one after another as they came.

    Hold it around what is timed, for seconds, and not around what is compiled or checked. Whoever has it may
    ask again. The others are told how long the queue is, and who has the GPU. Without a GPU this is only
    :func:`thread_lock`.

    Raises StoppedError when ``stop()`` turns true while it waits.
    """
    uuid = gpu.uuid()
    with thread_lock(stop):
        if uuid in ("", held_gpu()):
            yield
            return
        try:
            _wait_in_queue(uuid, stop)
            yield
        finally:
            _release()


def _wait_in_queue(uuid: str, stop: Stop) -> None:
    """Wait until this process has the GPU; go on without where there is no folder or no lock to be had."""
    global _ticket
    shown, began = "", time.monotonic()
    try:
        _ticket = _Ticket(uuid)
        while ahead := _ticket.ahead():
            text = f"Waiting for the GPU, number {len(ahead)} in the queue: {ahead[0]}"
            if text != shown and time.monotonic() - began > SILENT_S:
                SHOW_QUEUE.get()(text)
                shown = text
            raise_if_stopped(stop)
            time.sleep(min(0.02 * len(ahead), 0.2))  # the next one looks often, a long queue costs no CPU
        os.utime(_ticket.path)  # since when it has the GPU
    except OSError as problem:
        warnings.warn(
            f"The GPU is not locked ({_queue_folder()}: {problem.strerror}): while others measure, too, "
            f"figures may be off. {LOCK_FOLDER_VARIABLE} names another folder for all who share it.",
            stacklevel=2,
        )
    finally:
        if shown:
            SHOW_QUEUE.get()("")


def _release() -> None:
    global _ticket
    ticket, _ticket = _ticket, None
    if ticket:
        ticket.leave()


def show_queue(text: str) -> None:
    """Show a line about the queue beneath the cell that waits, or on the terminal; "" removes it.

    In a notebook that is executed without a reader nothing is shown: the line would stay in what is saved.
    """
    global _line
    notebook: Any = sys.modules.get("IPython")  # not imported: most who measure have no need of it
    if notebook is None or notebook.get_ipython() is None:
        if text:
            print(text, file=sys.stderr, flush=True)
    elif os.environ.get("LABKIT_HEADLESS") != "1":
        line = _line or notebook.display.DisplayHandle()
        (line.update if _line else line.display)({"text/plain": text}, raw=True)
        _line = line if text else None


_line: Any = None
SHOW_QUEUE: ContextVar[Callable[[str], None]] = ContextVar("SHOW_QUEUE", default=show_queue)
"""Called with a line about the queue whenever that changes, and with "" when the wait is over."""


# ---- threads of one process --------------------------------------------------------------------------------

Section = Callable[[], Any]
RUN_ON_MAIN_THREAD = ContextVar[Callable[[Section], Any]]("RUN_ON_MAIN_THREAD", default=lambda act: act())
"""Calls a capture or a sample. A panel that measures in a thread has the thread of the cells call it:
while a graph is captured no other thread may draw random numbers, and what a cell does would be timed too."""
_waiting: SimpleQueue[Callable[[], None]] = SimpleQueue()
_THREAD_LOCK = threading.RLock()


def on_main_thread(section: Section, wake: Callable[[Callable[[], None]], Any], stop: Stop) -> Any:
    """Have the main thread call ``section`` between cells, and wait for its result.

    ``wake`` has a function called there as soon as no cell keeps it busy. StoppedError when ``stop()`` turns
    true before that, or when the cell that runs the section is interrupted.
    """
    result: Future[Any] = Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(section())
        except Exception as error:
            result.set_exception(error)
        except BaseException:
            # The notebook's stop button meant the cell that ran it. In the other thread this would end up in
            # the event loop, and end the kernel.
            result.set_exception(StoppedError("stopped with the cell that was waiting for it"))
            raise

    _waiting.put(run)
    wake(run_waiting)
    began = time.monotonic()
    while not result.done():
        wait([result], timeout=0.05)
        if stop() and result.cancel():
            raise StoppedError("stopped while a cell was running")
        uuid = held_gpu()
        if uuid and time.monotonic() - began > BUSY_CELL_S and result.cancel():
            _release()  # other processes go first until the cell is done
            on_main_thread(lambda: None, wake, stop)
            _wait_in_queue(uuid, stop)
            return on_main_thread(section, wake, stop)
    return result.result()


def run_waiting() -> None:
    """Call what waits for this thread."""
    with suppress(Empty):
        while True:
            _waiting.get_nowait()()


@contextmanager
def thread_lock(stop: Stop = lambda: False) -> Iterator[None]:
    """The device to oneself, among the threads of this process: a panel measures while cells run.

    Raises StoppedError when ``stop()`` turns true while another thread has it.
    """
    while not _THREAD_LOCK.acquire(timeout=0.05):
        if stop():
            raise StoppedError("stopped while another measurement had the GPU")
        if threading.current_thread() is threading.main_thread():
            run_waiting()  # the other measurement may be waiting for this thread
    try:
        yield
    finally:
        _THREAD_LOCK.release()
