"""Functions in processes of their own, with limits on time, memory and output.

A ``Forkserver`` is a new Python that makes its imports once. For each call it forks a worker, which calls the
function, and it ends the worker's whole process group when the call is over, when its time is over, and when
the process that waits for the result has ended. ``run`` starts such a server for one call. The result comes
back through a socket, not through stdout.

multiprocessing has one forkserver for each process. Here two are needed side by side, with Triton's
interpreter for judging and without it for compiling, and TRITON_INTERPRET has to be set before Triton is
imported. So a new Python is started with its environment, and the forks are made here.
"""

import faulthandler
import gc
import io
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

Function = Callable[..., Any]
Environment = Mapping[str, str]
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


def run(function: Function, *args: Any, environment: Environment = os.environ, **limits: Any) -> Any:
    """Call an importable function in a new Python process with these environment variables.

    ``limits`` are those of ``Forkserver.run``, which also says what is returned and raised.
    """
    server = Forkserver(environment=environment)
    try:
        return server.run(function, *args, **limits)
    finally:
        server.close()


class Forkserver:
    """A process that calls ``prepare(*args)`` once, at once, and then forks for each call.

    It ends when this object is closed or garbage collected.
    """

    def __init__(
        self, prepare: Function = gc.collect, *args: Any, environment: Environment = os.environ
    ) -> None:
        self._prepare, self._environment = ForkingPickler.dumps((prepare, args)), dict(environment)
        self._start()

    def _start(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import sys; sys.path = {[*map(str, sys.path)]}; from labkit import child_process as here"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code}; here._serve({theirs.fileno()})"],
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # the notebook's stop button does not reach it
            )
        self._requests.send(self._prepare)
        self.close = weakref.finalize(self, _end_server, self._requests, self._process)
        """End the process; a call after this starts another one."""

    def run(
        self,
        function: Function,
        *args: Any,
        seconds: float,
        memory: int | None = None,
        show: Callable[[str], object] = lambda text: None,
    ) -> Any:
        """Call an importable function in a fork, and return its result.

        ``seconds`` is the time for the call, without the start of the process and the import of the
        function's module; ``memory`` the bytes that it may allocate (default: all). ``show`` gets what is
        printed as it comes, up to ``OUTPUT_LIMIT`` characters.

        Raises ChildError when the function or ``prepare`` raises or the process dies, and TimeoutError when
        the time is over. A TimeoutError, and a KeyboardInterrupt in this process, have a note that says where
        the call was.
        """
        if self._process.poll() is not None:
            self.close()
            self._start()
        job = bytes(ForkingPickler.dumps((function, args)))  # of a view a traceback would keep the buffer
        (ours, theirs), (output, printing), (trace, tracing) = Pipe(), os.pipe(), os.pipe()
        printed, last_printed = 0, ""
        received: dict[str, Any] = {}
        """What came: "begun" with the worker's number, "returned" or "raised", "ended" with its status."""
        stopped: BaseException | None = None
        try:
            with suppress(OSError), theirs:  # reported below: no process answers
                socket.send_fds(self._requests, [b"+"], [theirs.fileno(), printing, tracing])
                ours.send((memory, job))
            deadline = time.monotonic() + START_LIMIT_S
            while "ended" not in received:
                try:
                    left = deadline - time.monotonic()  # also looked at while a function prints without end
                    ready = wait([ours, output], left) if left > 0 else []
                    if not ready:
                        raise TimeoutError("its process did not end within its limit of time")
                    if output in ready:
                        text = os.read(output, 65536).decode(errors="replace")
                        last_printed = (last_printed + text)[-2000:]
                        if printed < OUTPUT_LIMIT:
                            rest = OUTPUT_LIMIT - printed
                            show(text[:rest] + LEFT_OUT * (len(text) > rest))
                        printed += len(text)
                    if ours in ready:
                        kind, value = ours.recv()
                        received[kind] = value
                        deadline = time.monotonic() + (seconds if kind == "begun" else END_LIMIT_S)
                except (EOFError, ConnectionError):
                    break
                except (TimeoutError, KeyboardInterrupt) as error:
                    if stopped or "begun" not in received:
                        stopped = stopped or error
                        break
                    stopped, deadline = error, time.monotonic() + END_LIMIT_S
                    with suppress(ProcessLookupError):
                        os.kill(received["begun"], signal.SIGUSR1)
                    if wait([trace], 1.0):
                        time.sleep(0.2)  # it comes in parts where the machine is busy
                    with suppress(ConnectionError):
                        ours.send("stop")
            where = os.read(trace, 65536).decode(errors="replace") if wait([trace], 0) else ""
        finally:
            ours.close()
            for each in (output, printing, trace, tracing):
                os.close(each)
        if stopped is None:
            if not {"begun", "ended"} <= received.keys():
                self.close()  # ``prepare`` failed, or the process was killed: the next call starts another
            if "returned" in received:
                return received["returned"]
            status = received.get("ended")
            if "raised" in received:
                message, where = received["raised"]
            elif status is None:
                message = "it ended together with the process that watched it"
            elif status < 0:
                message = f"it was ended by {signal.Signals(-status).name}"
            else:
                message = f"it ended with status {status}"
            stopped = ChildError(message)
            stopped.raised = "raised" in received
            where += last_printed
        if where:
            stopped.add_note(where)
        raise stopped


def _end_server(requests: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    requests.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)  # it ends its workers first
    process.kill()
    process.wait()


# ---- the server and its workers ----------------------------------------------------------------------------


def _serve(descriptor: int) -> None:
    """Prepare, then fork a worker for each call that comes; end when no more can come."""
    requests, failure = socket.socket(fileno=descriptor), None
    try:
        prepare, args = ForkingPickler.loads(requests.recv(65536))
        prepare(*args)
    except Exception as error:
        failure = _message_of(error)
    gc.freeze()  # the forks need not look through all of torch again and again
    calls: dict[int, Connection] = {}
    """By the worker's process: a connection to whoever waits for its result."""
    descriptors = [descriptor]  # none is left when the process that started this one has ended
    while descriptors:
        ready = wait([requests, *calls.values()], 0.02 if calls else None)
        if requests in ready:
            _, descriptors, *_ = socket.recv_fds(requests, 1, 3)
        for process, connection in [*calls.items()]:
            # WNOWAIT: until its group is ended its number is not given to another process
            ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended or connection in ready or not descriptors:  # or told to stop, or nobody waits any more
                os.killpg(process, signal.SIGKILL)
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                with suppress(OSError), calls.pop(process):
                    connection.send(("ended", status))
        if requests in ready and descriptors:
            connection, output, tracing = Connection(descriptors[0]), *descriptors[1:]
            with suppress(EOFError, OSError):  # nobody waits for the result any more
                if failure is not None:
                    connection.send(failure)
                    return
                memory, job = connection.recv()
                process = os.fork()
                if process == 0:
                    requests.close()
                    for other in calls.values():
                        other.close()
                    _work(connection, output, tracing, job, memory)
                calls[process] = connection
                os.setpgid(process, process)  # here and in the worker: whoever comes first
            os.close(output)
            os.close(tracing)


def _work(connection: Connection, output: int, tracing: int, job: bytes, memory: int | None) -> NoReturn:
    """Call the function and send what it returned or raised; the process ends here, whatever happens."""
    try:
        process = os.getpid()
        os.setpgid(0, 0)  # a group that can be ended as one
        for each in (connection.fileno(), output, tracing):
            os.set_inheritable(each, False)  # programs that the function starts do not get it
        for standard in (1, 2):
            os.dup2(output, standard)
        unbuffered = open(1, "wb", buffering=0, closefd=False)  # noqa: SIM115 - as long as the process lives
        sys.stdout = sys.stderr = io.TextIOWrapper(unbuffered, "utf-8", "replace", write_through=True)
        faulthandler.enable(tracing)
        faulthandler.register(signal.SIGUSR1, tracing)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        try:
            function, args = ForkingPickler.loads(job)
            connection.send(("begun", process))
            message = ForkingPickler.dumps(("returned", function(*args)))
        except BaseException as error:  # SystemExit too: whatever it is, the function raised it
            message = ForkingPickler.dumps(_message_of(error))
        if os.getpid() == process:  # not in a process that the function has forked
            connection.send_bytes(message)
    finally:
        os._exit(0)  # threads and exit handlers that the function left behind do not matter


def _message_of(error: BaseException) -> tuple[str, tuple[str, str]]:
    """What is sent about an exception: that it was raised, with its last line and its traceback."""
    last = traceback.format_exception_only(error)[-1].strip()
    return "raised", (last, "".join(traceback.format_exception(error)))
