"""Functions in processes of their own, with limits on time, memory and output.

``run`` starts a new Python for one call; a ``Forkserver`` is one that has made its imports and forks for each
call. Either way one process, the guard, watches another one that calls the function. The guard ends it with
its whole process group when the call is over, when its time is, or when nobody waits for it any more.

The result comes back through a socket, not through stdout. The child imports the function's module when its
environment is in place, because TRITON_INTERPRET has to be right before Triton is imported.

multiprocessing's own forkserver is one for each process. Here two are needed side by side, with Triton's
interpreter for judging and without it for compiling, so both are spawned, and the forks are made here.
"""

import codecs
import faulthandler
import gc
import io
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from types import ModuleType
from typing import Any, NoReturn

from labkit import backend

START_LIMIT_S = 180.0
"""Longest wait for a process to be ready for its call: on a slow disk importing torch takes minutes."""
END_LIMIT_S = 10.0
"""Longest wait for a process that is told to end."""
OUTPUT_LIMIT = 20_000
"""Characters of what a call prints that are passed on."""
LEFT_OUT = "\n[the rest of what your code printed was left out]\n"

_SPAWN = multiprocessing.get_context("spawn")
_LOCK = threading.Lock()


class ChildError(RuntimeError):
    """What a function raised in its process (``raised``), or how the process ended without a result.

    Its notes are the traceback, and the end of what was printed.
    """

    raised = False
    begun = True
    """Whether the function was called at all."""


def run(
    function: Callable[..., Any], *args: Any, environment: Mapping[str, str] = os.environ, **limits: Any
) -> Any:
    """The result of an importable function, called in a new Python process with these environment variables.

    ``limits`` are ``seconds``, for the call, without the start of the process and the import of the
    function's module; ``memory``, the bytes it may allocate (default: all); and ``show``, which gets what is
    printed as it comes, up to ``OUTPUT_LIMIT`` characters (default: nobody).

    ChildError when the function raises or the process dies, TimeoutError when time is over; this one, and a
    KeyboardInterrupt in here, have a note that says where the call was.
    """
    ours, process = _start(_run_once, dict(environment))
    try:
        return _call(ours, function, args, **limits)
    finally:
        process.join(END_LIMIT_S)


class Forkserver:
    """A process that calls ``prepare(*args, *uses)`` once, at once, and then forks for each call.

    ``uses`` are other servers, which the calls may use. It ends when this object is closed or forgotten.
    """

    def __init__(
        self,
        prepare: Callable[..., Any],
        *args: Any,
        environment: Mapping[str, str] = os.environ,
        uses: tuple["Forkserver", ...] = (),
    ) -> None:
        self._prepare, self._environment, self._uses = (prepare, args), dict(environment), uses
        self._begin()

    def _begin(self) -> None:
        self._requests, self._process = _start(_serve, self._environment, _Late(self._uses))
        self._requests.send(self._prepare)

    def __getstate__(self) -> dict[str, Any]:
        """What a server that uses this one gets: the right to ask it."""
        return {**vars(self), "_process": None}

    def run(self, function: Callable[..., Any], *args: Any, **limits: Any) -> Any:
        """The result of a function, as ``run`` gives it; ChildError also for what ``prepare`` raised."""
        if self._requests.closed or self._requests.poll():  # it never writes: this is the end of the process
            self._begin()
        try:
            return self._ask(function, args, limits)
        except ChildError as error:
            if error.begun:
                raise
        self._begin()  # it has just ended, and that was not to be seen yet
        return self._ask(function, args, limits)

    def _ask(self, function: Callable[..., Any], args: tuple[Any, ...], limits: dict[str, Any]) -> Any:
        ours, theirs = _SPAWN.Pipe()
        with suppress(OSError), theirs:  # that nobody is there is told as the end of the process
            send_handle(self._requests, theirs.fileno(), 0)
        return _call(ours, function, args, **limits)

    def close(self) -> None:
        """End the process; a call after this starts another one."""
        self._requests.close()
        if self._process is not None:
            self._process.terminate()
            self._process.join()


def _start(target: Callable[..., Any], *args: Any) -> tuple[Connection, Any]:
    """Our end of a connection to a process that calls the target with its end; the process."""
    ours, theirs = _SPAWN.Pipe()
    with _LOCK, theirs:
        # Two habits of multiprocessing's: to run this process's script in the new one too, and to fix the
        # start method of this one.
        main, method = sys.modules["__main__"], multiprocessing.get_start_method(allow_none=True)
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            process = _SPAWN.Process(target=target, args=(theirs, *args), daemon=True)
            process.start()
        finally:
            sys.modules["__main__"] = main
            multiprocessing.set_start_method(method, force=True)
    return ours, process


# ---- the process that waits --------------------------------------------------------------------------------


def _call(
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    seconds: float,
    memory: int | None = None,
    show: Callable[[str], object] = lambda text: None,
) -> Any:
    job = bytes(ForkingPickler.dumps((function, args)))  # a view of a buffer may not stay in a traceback
    result: list[Any] = []
    stopped: BaseException | None = None
    status, trace, begun = None, "", False
    with connection, _Output(show) as output:
        with suppress(BrokenPipeError):  # told below as the end of the process
            connection.send(memory)
            send_handle(connection, output.writer, 0)
            connection.send_bytes(job)
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                kind, *content = _message(connection, output, deadline)
            except (EOFError, ConnectionError):
                break
            except (TimeoutError, KeyboardInterrupt) as error:
                if stopped or (result and isinstance(error, TimeoutError)):
                    break
                stopped, deadline = error, time.monotonic() + END_LIMIT_S * begun
                with suppress(OSError):
                    connection.send("stop")
                continue
            if kind == "ended":
                status, trace = content
                break
            if kind == "begun":
                begun, deadline = True, time.monotonic() + (END_LIMIT_S if stopped else seconds)
            else:
                result, deadline = [kind, *content], time.monotonic() + END_LIMIT_S
    if stopped is None and result and result[0] == "returned":
        return result[1]
    if stopped is None:
        _, said, trace = result or (None, _end(status), trace)
        stopped = ChildError(said)
        stopped.raised, stopped.begun = bool(result), begun or bool(result) or status is not None
        trace += output.last
    if trace:
        stopped.add_note(trace)
    raise stopped


def _message(connection: Connection, output: "_Output", deadline: float) -> tuple[Any, ...]:
    """The next message; EOFError when the process is gone, TimeoutError after the deadline."""
    while (left := deadline - time.monotonic()) > 0:
        ready = wait([connection, output.reader], left)
        if output.reader in ready:
            output.read()
        if connection in ready:
            message: tuple[Any, ...] = connection.recv()
            return message
    raise TimeoutError("its process did not end within its limit of time")


def _end(status: int | None) -> str:
    """How a process ended, by its exit status or the negative number of a signal."""
    if status is None:
        return "it ended together with the process that watched it"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it ended with status {status}"


class _Output:
    """What a process prints, passed on as it comes; its end is kept."""

    def __init__(self, show: Callable[[str], object]) -> None:
        self._show, self._left, self.last = show, OUTPUT_LIMIT, ""
        self.reader, self.writer = os.pipe()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.reader)
        os.close(self.writer)

    def read(self) -> None:
        """Pass on what is there."""
        text = self._decode(os.read(self.reader, 65536))
        self.last = (self.last + text)[-2000:]
        if self._left > 0:
            self._show(text[: self._left] + LEFT_OUT * (len(text) > self._left))
        self._left -= len(text)


# ---- the processes that serve, guard and work --------------------------------------------------------------


def _run_once(connection: Connection, environment: dict[str, str]) -> None:
    _settle(environment)
    _guard(connection)


class _Late:
    """Something that a new process unpickles when its environment is in place: that imports modules, and
    Triton among them has to find the right TRITON_INTERPRET."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getstate__(self) -> bytes:
        return bytes(ForkingPickler.dumps(self._value))

    def __setstate__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def unpickled(self) -> Any:
        return ForkingPickler.loads(self._pickled)


def _serve(requests: Connection, environment: dict[str, str], late: _Late) -> None:
    """Prepare, then fork a guard for each connection that comes; end when no more can come."""
    _settle(environment)
    uses = late.unpickled()
    failure: tuple[Any, ...] = ()
    with suppress(EOFError, OSError):
        try:
            prepare, args = requests.recv()
            prepare(*args, *uses)
        except Exception as error:
            failure = _told(error)
        gc.freeze()  # the forks need not look through all of torch again and again
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the guards
        while not requests.closed:
            with Connection(recv_handle(requests)) as connection:
                if failure:
                    requests.close()  # before this is told: the next call starts another process
                    connection.send(failure)
                elif os.fork() == 0:
                    requests.close()
                    _guard(connection)


def _settle(environment: dict[str, str]) -> None:
    """Become a process that the notebook's stop button does not reach, with its own environment."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is printed before a call is nobody's
    multiprocessing.current_process().daemon = False  # which forbids a learner's code processes of its own
    os.environ.clear()
    os.environ.update(environment)
    backend.decide()


def _guard(connection: Connection) -> NoReturn:
    """Have a fork call the function; end its group when it has ended, or when this is asked for."""
    with suppress(EOFError, OSError):  # nobody waits any more
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.set_inheritable(connection.fileno(), False)  # what the function starts has no say
        memory, output, job = connection.recv(), recv_handle(connection), connection.recv_bytes()
        reading, tracing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _work(connection, output, tracing, job, memory)
        os.close(output)
        os.close(tracing)
        while not wait([connection], 0.02):
            # WNOWAIT: until its group is ended its number is nobody else's
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
        else:  # we are told to stop, or nobody waits any more
            os.kill(pid, signal.SIGUSR1)
            wait([reading], 1.0)
            time.sleep(0.1)  # until all of the trace is written
        for kill in (os.killpg, os.kill):  # the second for one that has no group yet
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        trace = os.read(reading, 65536) if wait([reading], 0) else b""
        connection.send(("ended", status, trace.decode(errors="replace")))
    os._exit(0)


def _work(connection: Connection, output: int, tracing: int, job: bytes, memory: int | None) -> NoReturn:
    """Call the function and send what it returned or raised; whatever happens, this does not come back."""
    try:
        here = os.getpid()
        os.setsid()  # a group that can be ended as one
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        unbuffered = open(1, "wb", buffering=0, closefd=False)  # noqa: SIM115 - as long as the process lives
        sys.stdout = sys.stderr = io.TextIOWrapper(unbuffered, "utf-8", "replace", write_through=True)
        faulthandler.enable(tracing)
        faulthandler.register(signal.SIGUSR1, tracing)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        try:
            function, args = ForkingPickler.loads(job)
            connection.send(("begun",))
            message = ForkingPickler.dumps(("returned", function(*args)))
        except BaseException as error:  # SystemExit too: whatever it is, the function raised it
            message = ForkingPickler.dumps(_told(error))
        if os.getpid() == here:  # not in a process that the function has forked
            connection.send_bytes(message)
    finally:
        os._exit(0)  # threads and exit handlers that the function left behind do not matter


def _told(error: BaseException) -> tuple[str, str, str]:
    """The message about an exception."""
    last = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, MemoryError):
        last = "MemoryError: it needed more memory than it may have"
    return "raised", last, "".join(traceback.format_exception(error))
