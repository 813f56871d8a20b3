"""Functions in processes of their own, with limits on time, memory and output.

``run`` starts a new Python for one call. A ``Forkserver`` is a Python that has made its imports, and forks
for each call. In both, one process (the guard) forks another one (the worker), which calls the function. The
guard ends the worker and its whole process group when the call is over, when its time is over, or when the
process that waits for the result has ended. The result comes back through a socket, not through stdout.

multiprocessing has one forkserver for each process. Here two are needed side by side, with Triton's
interpreter for judging and without it for compiling, and TRITON_INTERPRET has to be set before Triton is
imported. So a new Python is started with its environment, and the forks are made here.
"""

import codecs
import faulthandler
import gc
import io
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any, NoReturn

START_LIMIT_S = 180.0
"""Longest wait for a process to be ready for its call: on a slow disk importing torch takes minutes."""
END_LIMIT_S = 10.0
"""Longest wait for a process that is told to end."""
OUTPUT_LIMIT = 20_000
"""Characters of what a call prints that are passed on."""
LEFT_OUT = "\n[the rest of what your code printed was left out]\n"


class ChildError(RuntimeError):
    """What a function raised in its process (``raised``), or how the process ended without a result.

    Its note is the traceback, and the end of what was printed.
    """

    raised = False
    begun = True
    """Whether the function was called at all."""


def run(
    function: Callable[..., Any], *args: Any, environment: Mapping[str, str] = os.environ, **limits: Any
) -> Any:
    """Call an importable function in a new Python process with these environment variables.

    ``limits`` are ``seconds`` for the call, without the start of the process and the import of the function's
    module; ``memory``, the bytes that it may allocate (default: all); and ``show``, a function that gets what
    is printed as it comes, up to ``OUTPUT_LIMIT`` characters.

    Returns the function's result. Raises ChildError when the function raises or the process dies, and
    TimeoutError when the time is over. A TimeoutError, and a KeyboardInterrupt in the waiting process, have a
    note that says where the call was.
    """
    connection, process = _start(_run_once, environment)
    try:
        return _call(connection, function, args, **limits)
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_S)


class Forkserver:
    """A process that calls ``prepare(*args)`` once, at once, and then forks for each call.

    It ends when this object is closed or garbage collected.
    """

    def __init__(
        self, prepare: Callable[..., Any], *args: Any, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._prepare, self._environment = (prepare, args), dict(environment)
        self._begin()

    def _begin(self) -> None:
        self._requests, process = _start(_serve, self._environment)
        self.close = weakref.finalize(self, _end_server, self._requests, process)
        """End the process; a call after this starts another one."""
        self._requests.send(self._prepare)

    def run(self, function: Callable[..., Any], *args: Any, **limits: Any) -> Any:
        """Call a function in a fork, as ``run`` does; ChildError also for what ``prepare`` raised."""
        for attempt in range(2):  # a server that has ended is started once more
            ours, theirs = Pipe()
            with suppress(OSError), theirs:  # a closed connection is reported below: no process answers
                send_handle(self._requests, theirs.fileno(), 0)
            try:
                return _call(ours, function, args, **limits)
            except ChildError as error:
                if error.begun or attempt:
                    raise
            self.close()
            self._begin()


def _end_server(requests: Connection, process: "subprocess.Popen[bytes]") -> None:
    requests.close()
    process.kill()
    process.wait()


def _start(target: Callable[[int], None], environment: Mapping[str, str]) -> "tuple[Connection, Any]":
    """Start a Python that calls a function of this module; returns a connection to it, and the process."""
    ours, theirs = Pipe()
    code = f"import sys; sys.path = {[*map(str, sys.path)]}; from labkit import child_process as here"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}; here.{target.__name__}({theirs.fileno()})"],
            env=dict(environment),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # the notebook's stop button does not reach it
        )
    return ours, process


# ---- the process that waits for the result -----------------------------------------------------------------


def _call(
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    seconds: float,
    memory: int | None = None,
    show: Callable[[str], object] = lambda text: None,
) -> Any:
    """Have the guard at the other end of a connection call a function; returns or raises as ``run`` does."""
    job = bytes(ForkingPickler.dumps((function, args)))  # of a view a traceback would keep the buffer
    output, writer = os.pipe()
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    printed, last_printed, trace, status = 0, "", "", None
    result: tuple[str, Any, str] | None = None  # "returned" or "raised", the value or message, the traceback
    stopped: BaseException | None = None
    begun = False
    try:
        with suppress(BrokenPipeError):  # reported below: the connection has ended
            connection.send((memory, job))
            send_handle(connection, writer, 0)
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                left = deadline - time.monotonic()  # also looked at while a function prints without end
                ready = wait([connection, output], left) if left > 0 else []
                if not ready:
                    raise TimeoutError("its process did not end within its limit of time")
                if output in ready:
                    text = decode(os.read(output, 65536))
                    last_printed = (last_printed + text)[-2000:]
                    if printed < OUTPUT_LIMIT:
                        rest = OUTPUT_LIMIT - printed
                        show(text[:rest] + LEFT_OUT * (len(text) > rest))
                    printed += len(text)
                if connection not in ready:
                    continue
                kind, *content = connection.recv()
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
                result, deadline = (kind, *content), time.monotonic() + END_LIMIT_S
    finally:
        connection.close()
        os.close(output)
        os.close(writer)
    if stopped is None and result and result[0] == "returned":
        return result[1]
    if stopped is None:
        if result:
            stopped, trace = ChildError(result[1]), result[2]
        elif status is None:
            stopped = ChildError("it ended together with the process that watched it")
        elif status < 0:
            stopped = ChildError(f"it was ended by {signal.Signals(-status).name}")
        else:
            stopped = ChildError(f"it ended with status {status}")
        stopped.raised, stopped.begun = bool(result), begun or bool(result) or status is not None
        trace += last_printed
    if trace:
        stopped.add_note(trace)
    raise stopped


# ---- the processes that serve, guard and work --------------------------------------------------------------


def _run_once(descriptor: int) -> NoReturn:
    _guard(Connection(descriptor))


def _serve(descriptor: int) -> None:
    """Prepare, then fork a guard for each connection that comes; end when no more can come."""
    requests, failure = Connection(descriptor), None
    with suppress(EOFError, OSError):  # the process that started this one has ended
        try:
            prepare, args = requests.recv()
            prepare(*args)
        except Exception as error:
            failure = _message_of(error)
        gc.freeze()  # the forks need not look through all of torch again and again
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the guards
        while failure is None or not requests.closed:
            with Connection(recv_handle(requests)) as connection:
                if failure is not None:
                    requests.close()  # before the failure is sent: the next call starts another process
                    connection.send(failure)
                elif os.fork() == 0:
                    requests.close()
                    _guard(connection)


def _guard(connection: Connection) -> NoReturn:
    """Have a fork call the function; end its group when it has ended, or when this is asked for."""
    with suppress(EOFError, OSError):  # nobody waits for the result any more
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.set_inheritable(connection.fileno(), False)  # programs that the function starts do not get it
        (memory, job), output = connection.recv(), recv_handle(connection)
        trace, (trace_reader, trace_writer) = b"", os.pipe()
        worker = os.fork()
        if worker == 0:
            _work(connection, output, trace_writer, job, memory)
        os.close(output)
        os.close(trace_writer)
        while not wait([connection], 0.02):
            # WNOWAIT: until its group is ended its number is not given to another process
            if os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
        else:  # we are told to stop, or nobody waits any more
            os.kill(worker, signal.SIGUSR1)
            # It comes in parts where the machine is busy.
            while len(trace) < 65536 and wait([trace_reader], 0.2 if trace else 1.0):
                trace += (part := os.read(trace_reader, 65536))
                if not part:
                    break
        for kill in (os.killpg, os.kill):  # the second for a worker that has no group yet
            with suppress(ProcessLookupError):
                kill(worker, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        trace += os.read(trace_reader, 65536) if wait([trace_reader], 0) else b""
        connection.send(("ended", status, trace.decode(errors="replace")))
    os._exit(0)


def _work(connection: Connection, output: int, trace_writer: int, job: bytes, memory: int | None) -> NoReturn:
    """Call the function and send what it returned or raised; the process ends here, whatever happens."""
    try:
        process = os.getpid()
        os.setsid()  # a group that can be ended as one
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        unbuffered = open(1, "wb", buffering=0, closefd=False)  # noqa: SIM115 - as long as the process lives
        sys.stdout = sys.stderr = io.TextIOWrapper(unbuffered, "utf-8", "replace", write_through=True)
        faulthandler.enable(trace_writer)
        faulthandler.register(signal.SIGUSR1, trace_writer)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        try:
            function, args = ForkingPickler.loads(job)
            connection.send(("begun",))
            message = ForkingPickler.dumps(("returned", function(*args), ""))
        except BaseException as error:  # SystemExit too: whatever it is, the function raised it
            message = ForkingPickler.dumps(_message_of(error))
        if os.getpid() == process:  # not in a process that the function has forked
            connection.send_bytes(message)
    finally:
        os._exit(0)  # threads and exit handlers that the function left behind do not matter


def _message_of(error: BaseException) -> tuple[str, str, str]:
    """What is sent about an exception: that it was raised, its last line, and its traceback."""
    last = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, MemoryError):
        last = "MemoryError: it needed more memory than it may have"
    return "raised", last, "".join(traceback.format_exception(error))
