"""Whose turn it is on a GPU, among all processes of the machine: one at a time, first come, first served.

To have the turn is to hold a lock of the operating system (flock) on one file per physical GPU, in a folder
that users and containers share. It ends with the process that holds it, however that one ends. The order is
kept by tickets: each process that waits or has its turn keeps one locked, named after when it came. A ticket
that is not locked was left by a killed process, and keeps nobody waiting.

What other users put into the folder is never followed as a link, read or written: at worst it makes one wait,
which can be stopped, or measure without a turn, as where no folder can be shared; that is said once.
"""

import errno
import fcntl
import os
import pwd
import re
import secrets
import socket
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from labkit import queue_line

FOLDER = "LABKIT_TURNS"
"""Names the folder where the processes meet; containers that share a GPU mount one."""
WITHIN = "LABKIT_WITHIN_TURN"
"""Names the GPU whose turn is that of who started this process, and waits for it: no queueing for it here."""
USUAL = Path("/tmp/labkit-turns")
LOOK_S, SELDOM_S = 0.02, 0.5
"""Who is next looks as often as the first; the others look less, the longer their queue is: it costs CPU."""
GRACE_S = 0.2
"""A shorter wait is not worth a line."""
HANGS_S = 300.0
"""Hardly a point of a benchmark takes so long, with all that is compiled for it: longer turns may hang."""

TELL: ContextVar[Callable[[str], None]] = ContextVar("TELL", default=queue_line.tell)
"""Hears in words how long the queue is, whenever that changes, and "" when the wait is over."""

T = TypeVar("T")
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TICKET = re.compile(r"(GPU-[\w-]+)\.(\d{20})\.(\d{1,10})\.([A-Za-z0-9-]*)\.[0-9a-f]{8}", re.ASCII)


@dataclass(frozen=True)
class Ticket:
    """A process in the queue, as the others see it."""

    pid: int
    user: str
    host: str
    """What its container calls itself; empty where that is this one."""
    since: float
    """When it got its turn, or joined the queue; seconds since 1970."""

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"Process {self.pid} of {self.user}{where}"


def words(ahead: Sequence[Ticket], now: float) -> str:
    """What a process says while it waits behind these."""
    place = max(len(ahead), 1)
    ending = {1: "st", 2: "nd", 3: "rd"}.get(0 if place % 100 in (11, 12, 13) else place % 10, "th")
    said = f"{place}{ending} in the queue for the GPU."
    if not ahead:  # the lock is taken, but the ticket that belongs to it is gone
        return said
    first = ahead[0]
    said += f" {first} has its turn since {time.strftime('%H:%M:%S', time.localtime(first.since))}."
    minutes = int((now - first.since) / 60)
    if now - first.since > HANGS_S:
        said += f" That is {minutes} minutes: it may hang, and only its owner can end it."
    return said


class _Place:
    """This process's place in the queue of one GPU: its ticket, and in its turn the lock.

    An interrupt may come between any two steps. What it left open is closed by the next `_leave`, which finds
    it among `_places`: a lock that is open without an owner keeps all others waiting.
    """

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self.lock = self.ticket = self.folder = -1
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:63]
        mark = secrets.token_hex(4)
        self.name = f"{gpu}.{time.time_ns():020d}.{os.getpid()}.{host}.{mark}"
        hidden = f".{mark}"  # until it is locked, when it takes its name
        _places.add(self)
        try:
            self.folder = _folder()
            self.ticket = os.open(
                hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o644, dir_fd=self.folder
            )
            os.fchmod(self.ticket, 0o644)  # whatever the umask: the others look whether it is locked
            fcntl.flock(self.ticket, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(hidden, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except BaseException:
            if self.ticket >= 0:
                with suppress(OSError):
                    os.unlink(hidden, dir_fd=self.folder)
            self.forget()
            raise

    def ahead(self) -> list[Ticket]:
        """Who came before this process and is still there, the first first."""
        there = sorted(name for name in os.listdir(self.folder) if name < self.name)
        found = (self._alive(match) for match in map(_TICKET.fullmatch, there) if match)
        return [ticket for ticket in found if ticket]

    def _alive(self, match: re.Match[str]) -> Ticket | None:
        if match[1] != self.gpu:
            return None
        try:
            ticket = os.open(match[0], os.O_RDONLY | _SAFE, dir_fd=self.folder)
        except OSError:  # gone meanwhile, a link, or not readable: it keeps nobody waiting
            return None
        try:
            found = os.fstat(ticket)
            if not stat.S_ISREG(found.st_mode):
                return None
            fcntl.flock(ticket, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            host = "" if match[4] == self.name.split(".")[3] else match[4]
            return Ticket(int(match[3]), _user(found.st_uid), host, found.st_mtime)
        finally:
            os.close(ticket)
        with suppress(OSError):  # in a folder of all users only its owner may remove it
            os.unlink(match[0], dir_fd=self.folder)
        return None

    def take(self) -> bool:
        """Whether this process has its turn now."""
        name, mine = f"{self.gpu}.lock", False
        self.lock = _lock_file(self.folder, name)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = os.stat(name, dir_fd=self.folder, follow_symlinks=False)
            # Else it was cleaned away, and another is the lock now.
            if os.path.samestat(os.fstat(self.lock), here):
                os.utime(self.ticket)
                mine = True
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if not mine:
                self._close("lock")
        return mine

    def leave(self) -> None:
        """End the turn, or the wait for it: the lock first, and each step whatever becomes of the others."""
        try:
            if self.lock >= 0:
                fcntl.flock(self.lock, fcntl.LOCK_UN)  # closing would not do where a fork has it open, too
        finally:
            try:
                with suppress(OSError):
                    os.unlink(self.name, dir_fd=self.folder)
            finally:
                try:
                    if self.ticket >= 0:
                        fcntl.flock(self.ticket, fcntl.LOCK_UN)
                finally:
                    self.forget()

    def forget(self) -> None:
        """Close what is open; what another process has open as well stays locked."""
        for which in ("lock", "ticket", "folder"):
            self._close(which)
        _places.discard(self)

    def _close(self, which: str) -> None:
        handle = getattr(self, which)
        setattr(self, which, -1)  # first: closed twice it might be another's that has the number by then
        if handle >= 0:
            os.close(handle)


def _folder() -> int:
    """The open folder where the processes meet, made for all users where it is not there."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    path = _path()
    # A folder that anybody may have put there is no link; one that this user named is what the user says.
    found = flags if os.environ.get(FOLDER) else flags | os.O_NOFOLLOW
    with suppress(FileNotFoundError):
        return os.open(path, found)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
        made = os.open(path, flags | os.O_NOFOLLOW)
        os.fchmod(made, 0o1777)  # whatever the umask
        return made
    return os.open(path, found)


def _path() -> Path:
    return Path(os.environ.get(FOLDER) or USUAL).expanduser()


def _lock_file(folder: int, name: str) -> int:
    """The open lock of a GPU, made where it is not there.

    Never O_CREAT on one that is: in a folder of all users the kernel refuses that for another user's file.
    """
    try:
        handle = os.open(name, os.O_RDWR | _SAFE, dir_fd=folder)
    except FileNotFoundError:
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o666, dir_fd=folder)
        os.fchmod(handle, 0o666)
    except PermissionError:
        handle = os.open(name, os.O_RDONLY | _SAFE, dir_fd=folder)  # enough to lock a local file
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return handle


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # of another container
        return f"user {uid}"


_place: _Place | None = None
"""Where this process stands in a queue; its threads take turns among themselves (clocks.turn)."""
_places: set[_Place] = set()
"""Where something may be open: in that one, and in what interrupts left of earlier ones."""
_depth = 0
_useless: set[Path] = set()
"""Folders that were of no use, and said to be so."""


@contextmanager
def hold(gpu: str, go_on: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The GPU of this UUID to this process; who has it may nest. Nothing is held for a GPU without a name, or
    where it is the turn of who started this process (:func:`shared`).

    While it waits it calls ``go_on`` at least every 50 ms, and leaves the queue with what that raises, or
    with the KeyboardInterrupt of a cell. Only one thread of a process at a time may be in here.
    """
    global _depth
    _depth += 1
    try:
        if _depth == 1 and gpu and gpu != os.environ.get(WITHIN):
            _leave()
            _queue(gpu, go_on)
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            try:
                _leave()
            finally:  # an interrupt may have ended it before it began
                _leave()


@contextmanager
def aside(go_on: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let the others go first meanwhile, when this process has its turn; then queue again."""
    gpu = _place.gpu if _place else ""
    _leave()
    yield
    if gpu:
        _queue(gpu, go_on)


def shared() -> dict[str, str]:
    """Environment variables for a process that works in this one's turn, while this one waits for it."""
    return {WITHIN: _place.gpu} if _place else {}


def held() -> bool:
    """Whether others wait for this process, or would."""
    return _place is not None


def _leave() -> None:
    global _place
    for place in list(_places):
        place.leave()
    _place = None


def _queue(gpu: str, go_on: Callable[[], None]) -> None:
    """Wait for this process's turn; go on without where there is no folder or no lock to be had."""
    global _place
    path = _path()
    if path in _useless:
        return
    try:
        _place = _patiently(lambda: _Place(gpu))
        _wait(_place, go_on)
    except OSError as problem:
        _leave()
        _useless.add(path)
        warnings.warn(
            f"No turns are taken on the GPU ({problem}): while others measure, too, figures may be off. "
            f"{FOLDER} names another folder for all who share it.",
            stacklevel=2,
        )
    except BaseException:  # here, not only in `hold`: who was aside may turn an error into a gap, and go on
        _leave()
        raise


def _wait(place: _Place, go_on: Callable[[], None]) -> None:
    told, began = "", time.monotonic()
    try:
        while True:
            ahead = place.ahead()
            if not ahead and _patiently(place.take):
                return
            said = words(ahead, time.time())
            if said != told and time.monotonic() - began > GRACE_S:
                TELL.get()(said)
                told = said
            _pause(min(LOOK_S * max(len(ahead), 1), SELDOM_S), go_on)
    finally:
        if told:
            TELL.get()("")


def _pause(seconds: float, go_on: Callable[[], None]) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        go_on()
        time.sleep(min(left, 0.05))


def _patiently(act: Callable[[], T]) -> T:
    """Try again what fails while another process makes a folder or a file that is not open to all yet."""
    for pause_s in (0.02, 0.1):
        try:
            return act()
        except (PermissionError, FileExistsError):
            time.sleep(pause_s)
    return act()


def _forked() -> None:
    """A fork does not wait, and has no turn: what it inherits would outlive this process as a lock."""
    global _place, _depth
    _place, _depth = None, 0
    for place in list(_places):
        place.forget()


os.register_at_fork(after_in_child=_forked)
