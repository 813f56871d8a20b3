"""The lock of a GPU: one process of the machine is timed on it at a time, in the order of asking.

`gpu_turn` is what a measurement takes; the threads of one process take turns by `turn`.

The processes meet in a folder that users and containers share; there each GPU, or slice of one, has a folder.
A process that asks draws a ticket, a file with the next number, and keeps it locked (flock) until its turn is
over. It has its turn when no lower ticket is locked. The operating system unlocks a ticket when its process
ends, however it ends.

What other users put there is not followed as a link, read or written. At worst it makes a process wait, which
can be stopped, or measure without a turn, as where no folder can be shared; that is said once.
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
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from labkit import gpu
from labkit.measure import noise

FOLDER = "LABKIT_TURNS"
"""Names the folder where the processes meet, if it is not /tmp/labkit-turns."""
WITHIN = "LABKIT_WITHIN_TURN"
"""Names the GPU that is locked by who started this process, and waits for it: no queueing for it here."""
LOOK_S, SELDOM_S = 0.02, 0.2
"""Who is next looks as often as the first; the others look less, the longer their queue is: it costs CPU."""
GRACE_S = 0.2
"""A shorter wait is not worth a line."""
TICKET = re.compile(r"\d{12}\.\d+\.[A-Za-z0-9@-]+", re.ASCII)
"""Number, process and owner."""


class _Place:
    """A place in the queue of one GPU: its ticket, an open file that is locked, or -1."""

    def __init__(self, gpu: str) -> None:
        self.gpu, self.ticket = gpu, -1
        self.folder = Path(os.environ.get(FOLDER) or "/tmp/labkit-turns").expanduser() / gpu

    def join(self) -> None:
        """Draw a ticket; one process at a time does."""
        user = os.environ.get("JUPYTERHUB_USER") or os.environ.get("USER") or os.getuid()
        owner = re.sub("[^A-Za-z0-9@-]", "-", f"{user}@{socket.gethostname()}")
        for folder in (self.folder.parent, self.folder):
            with suppress(FileExistsError):
                folder.mkdir()
                folder.chmod(0o1777)  # whatever the umask: other users draw tickets, too
        door = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(door, fcntl.LOCK_EX)
            number = max((int(name[:12]) for name in self.tickets()), default=0) + 1
            self.path = self.folder / f"{number:012}.{os.getpid()}.{owner}"
            self.ticket = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.fchmod(self.ticket, 0o644)  # others look whether it is locked
            fcntl.flock(self.ticket, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(door)

    def tickets(self) -> list[str]:
        """The names of all tickets, the first first."""
        return [name for name in sorted(os.listdir(self.folder)) if TICKET.fullmatch(name)]

    def ahead(self) -> list[str]:
        """Who asked before this process and is still there, the first first."""
        found = []
        for path in (self.folder / name for name in self.tickets() if name < self.path.name):
            # A ticket that is gone meanwhile, a link, or not readable keeps nobody waiting.
            with suppress(OSError), open(path, "rb", opener=_open) as ticket:
                try:
                    fcntl.flock(ticket, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    path.unlink()  # a killed process left it; in a shared folder only its user may remove it
                except BlockingIOError:
                    _, process, owner = path.name.split(".")
                    since = time.strftime("%H:%M:%S", time.localtime(os.fstat(ticket.fileno()).st_mtime))
                    found.append(f"Process {process} of {owner} has its turn since {since}.")
        return found

    def leave(self) -> None:
        """End the turn, or the wait for it. Called again it does what an interrupt left undone."""
        if (ticket := self.ticket) >= 0:
            with suppress(OSError):
                os.unlink(self.path)
            fcntl.flock(ticket, fcntl.LOCK_UN)  # closing would not do where a fork has it open, too
            self.ticket = -1  # first: closed twice it might be another's that has the number then
            os.close(ticket)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


_place: _Place | None = None
"""Where this process stands in a queue; its threads take turns among themselves (clocks.turn)."""


@contextmanager
def hold(gpu: str, go_on: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The GPU of this UUID to this process; who has it may nest. Nothing is held for a GPU without a name, or
    where who started this process has it (``WITHIN``).

    While it waits it calls ``go_on`` every 0.2 s or more often, and leaves the queue with what that raises,
    or with the KeyboardInterrupt of a cell. Only one thread of a process at a time may be in here.
    """
    if not gpu or gpu == os.environ.get(WITHIN) or held():
        yield
        return
    try:
        _queue(gpu, go_on)
        yield
    finally:
        try:
            _leave()
        finally:  # an interrupt may have ended it too early
            _leave()


@contextmanager
def aside(go_on: Callable[[], None]) -> Iterator[None]:
    """Let the others go first meanwhile, when this process has its turn; then queue again."""
    gpu = held()
    _leave()
    yield
    if gpu:
        _queue(gpu, go_on)


def held() -> str:
    """The GPU that others wait for until this process is done, or would; empty if there is none."""
    return _place.gpu if _place else ""


def _leave() -> None:
    global _place
    if _place:
        _place.leave()
    _place = None


def _queue(gpu: str, go_on: Callable[[], None]) -> None:
    """Wait for this process's turn; go on without where there is no folder or no lock to be had."""
    global _place
    _place, told, began = _Place(gpu), "", time.monotonic()
    try:
        _place.join()
        while ahead := _place.ahead():
            number = len(ahead)
            ending = {1: "st", 2: "nd", 3: "rd"}.get(0 if number % 100 in (11, 12, 13) else number % 10, "th")
            said = f"{number}{ending} in the queue for the GPU. {ahead[0]}"
            if said != told and time.monotonic() - began > GRACE_S:
                TELL.get()(said)
                told = said
            go_on()
            time.sleep(min(LOOK_S * number, SELDOM_S))
        os.utime(_place.ticket)  # since when it has its turn
    except OSError as problem:
        _warn(f"{_place.folder}: {problem.strerror}")
        _leave()
    finally:
        if told:
            TELL.get()("")


@cache
def _warn(problem: str) -> None:
    without = f"No turns are taken on the GPU ({problem}): while others measure, too, figures may be off."
    warnings.warn(f"{without} {FOLDER} names another folder for all who share it.", stacklevel=2)


def tell(words: str) -> None:
    """Show a line about the wait beneath the cell that waits, or on the terminal; "" ends it.

    In a notebook that is executed without a reader nothing is shown: the line would stay in what is saved.
    """
    global _shown
    notebook: Any = sys.modules.get("IPython")  # not imported: most who measure have no need of it
    if notebook is None or notebook.get_ipython() is None:
        if words:
            print(words, file=sys.stderr, flush=True)
    elif os.environ.get("LABKIT_HEADLESS") != "1":
        line = _shown or notebook.display.DisplayHandle()
        (line.update if _shown else line.display)({"text/plain": words}, raw=True)
        _shown = line if words else None


_shown: Any = None
"""What stands beneath the waiting cell now."""
TELL: ContextVar[Callable[[str], None]] = ContextVar("TELL", default=tell)
"""Hears in words how long the queue is, whenever that changes, and "" when the wait is over."""


# ---- threads of one process --------------------------------------------------------------------------------


class StoppedError(RuntimeError):
    """The measurement was asked to stop before it was complete."""


SECTION: ContextVar[Callable[[Callable[[], Any]], Any]] = ContextVar("SECTION", default=lambda act: act())
"""Who calls a capture or a sample. A panel that measures in a thread has the thread of the cells do it:
while a graph is captured no other thread may draw random numbers, and what a cell does would be timed too."""
GAUGE: ContextVar[noise.Gauge | None] = ContextVar("GAUGE", default=None)
"""What watches the samples that are being taken."""
_waiting: SimpleQueue[Callable[[], None]] = SimpleQueue()
_TURN = threading.RLock()
BUSY_S = 1.0
"""A cell that keeps a measurement waiting for longer does not keep the other processes waiting as well."""


def on_main_thread(
    act: Callable[[], Any], wake: Callable[[Callable[[], None]], Any], stop: Callable[[], bool]
) -> Any:
    """Have the main thread call ``act`` between cells, and wait for its result.

    ``wake`` has a function called there as soon as no cell keeps it busy. StoppedError when ``stop()`` turns
    true before it got to it, or the cell that served it was interrupted.
    """
    result: Future[Any] = Future()

    def section() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(act())
        except Exception as error:
            result.set_exception(error)
        except BaseException:
            # The notebook's stop button meant the cell that was serving. In the other thread this would end
            # up in the event loop, and end the kernel.
            result.set_exception(StoppedError("stopped with the cell that was waiting for it"))
            raise

    _waiting.put(section)
    wake(serve)
    began = time.monotonic()
    while not result.done():
        wait([result], timeout=0.05)
        if stop() and result.cancel():
            raise StoppedError("stopped while a cell was running")
        if held() and time.monotonic() - began > BUSY_S and result.cancel():
            gauge = GAUGE.get()
            with gauge.away() if gauge else nullcontext(), aside(partial(_go_on, stop)):
                on_main_thread(lambda: None, wake, stop)
            return on_main_thread(act, wake, stop)
    return result.result()


def serve() -> None:
    """Call what waits for this thread."""
    with suppress(Empty):
        while True:
            _waiting.get_nowait()()


@contextmanager
def turn(stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """The device to oneself, among the threads of this process: a panel measures while cells run.

    Raises StoppedError when ``stop()`` turns true while another thread has its turn.
    """
    while not _TURN.acquire(timeout=0.05):
        if stop():
            raise StoppedError("stopped while another measurement had its turn")
        if threading.current_thread() is threading.main_thread():
            serve()  # whose turn it is may be waiting for this thread
    try:
        yield
    finally:
        _TURN.release()


@contextmanager
def gpu_turn(stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """The GPU to oneself, among all processes of the machine that ask for it: one after another as they came.

    Around what is timed, for seconds, and not around what is compiled or checked, unless nothing else may go
    on meanwhile. Who has its turn may ask again. The others are told how long the queue is, and who has its
    turn; a killed process loses it. Where there is no GPU, or no folder to meet in (LABKIT_TURNS), it is only
    :func:`turn`.

    Raises StoppedError when ``stop()`` turns true while it waits.
    """
    with turn(stop), hold(gpu.uuid(), partial(_go_on, stop)):
        yield


def _go_on(stop: Callable[[], bool]) -> None:
    if stop():
        raise StoppedError("stopped while others had their turn on the GPU")
