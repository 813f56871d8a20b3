"""Functions in a preloaded process, with limits on time, memory and output.

A ``PreloadedProcess`` is a new Python that makes its imports once. For each call it forks a child (a
``multiprocessing.Process``), which calls the function. The preloaded process watches it, and kills the
child's whole process group when the call is over, when its time is over, and when the process that waits for
the result asks for it or has ended itself.

Not multiprocessing's own forkserver: there is one for each process, with one environment, and from Python
3.14 on everybody's processes come from it. Judging needs Triton's interpreter, and compiling needs Triton
without it.
"""

import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

Function = Callable[..., Any]
Environment = Mapping[str, str]
START_LIMIT_S = 180.0
"""Longest wait for a process to be ready for its call: on a slow disk importing torch takes minutes."""
ABORT_LIMIT_S = 1.0
"""Longest wait for a child that is told to end to write where it was."""
OUTPUT_LIMIT = 20_000
"""Bytes of what a call prints that are passed on."""
LEFT_OUT = "\n[the rest of what your code printed was left out]\n"
PR_SET_PDEATHSIG = 1
"""Of prctl: the signal that a process gets when its parent ends."""


class ChildError(RuntimeError):
    """What a function raised in its process. Its note is the traceback, and the end of what was printed."""


class ChildDiedError(ChildError):
    """How the process of a call ended without a result."""


def run(function: Function, *args: Any, environment: Environment = os.environ, **limits: Any) -> Any:
    """Call an importable function in a new Python process with these environment variables.

    ``limits`` are those of ``PreloadedProcess.run``, which also says what is returned and raised.
    """
    with closing(PreloadedProcess(environment=environment)) as process:
        return process.run(function, *args, **limits)


class PreloadedProcess:
    """A process that calls ``prepare(*args)`` once, at once, and then forks for each call.

    Where ``prepare`` raises, the process and the next call end, and the call after that starts another one.
    It also ends when this object is closed or garbage collected, and with the process that started it.
    """

    def __init__(
        self, prepare: Function = gc.collect, *args: Any, environment: Environment = os.environ
    ) -> None:
        self._prepare, self._environment, self._lock = (prepare, args), dict(environment), threading.Lock()
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        code = f"import sys; sys.path = {[*map(str, sys.path)]}; from labkit import child_process as here"
        command = [sys.executable, "-u", "-X", "utf8", "-c", f"{code}; here._serve({theirs.fileno()})"]
        # In a session of its own: the notebook's stop button does not reach it.
        options: Any = dict(stdin=DEVNULL, stdout=DEVNULL, start_new_session=True)
        with theirs:
            self._process = Popen(command, env=self._environment, pass_fds=[theirs.fileno()], **options)
        self._pipe.send(self._prepare)

    def close(self) -> None:
        """End the process; a call after this starts another one."""
        self._pipe.close()
        with suppress(TimeoutExpired):
            self._process.wait(2 * ABORT_LIMIT_S)  # it ends its child first
        self._process.kill()
        self._process.wait()

    def run(
        self, function: Function, *args: Any, seconds: float, memory: int | None = None, show: Function = str
    ) -> Any:
        """Call an importable function in a fork, and return its result; one call at a time.

        ``seconds`` is the time for the call, without the start of the process and the import of the
        function's module; ``memory`` the bytes that it may allocate (default: all). ``show`` gets what was
        printed, up to ``OUTPUT_LIMIT`` bytes, when the call has ended.

        Raises ChildError when the function raises, ChildDiedError when its process dies, and TimeoutError
        when the time is over. A TimeoutError, and a KeyboardInterrupt in this process, have a note that says
        where the call was.
        """
        interrupt: BaseException | None = None
        with self._lock:
            if self._process.poll() is not None or self._pipe.poll():  # nothing can come but its end
                self.close()
                self._start()
            try:
                self._pipe.send((function, args, seconds, memory))
                try:
                    self._pipe.poll(START_LIMIT_S + seconds)
                except KeyboardInterrupt as caught:
                    interrupt = caught
                    self._pipe.send("stop")
                if not self._pipe.poll(3 * ABORT_LIMIT_S):
                    raise interrupt or TimeoutError("its process was not ready within its limit of time")
                value, error, printed = self._pipe.recv()
            except BaseException as caught:
                self.close()  # what is still to come would be taken for the answer to the next call
                if isinstance(caught, (EOFError, ConnectionError)):
                    raise ChildDiedError("it ended together with the process that watched it") from caught
                raise
        if printed:
            show(printed)
        if error := error or interrupt:
            raise error
        return value


# ---- the preloaded process and its children ----------------------------------------------------------------


def _serve(descriptor: int) -> None:
    """Prepare, then watch a child for each call that comes; end when no more can come."""
    caller = Connection(descriptor)
    with suppress(EOFError, ConnectionError):  # nobody waits any more
        prepare, args = caller.recv()
        prepare(*args)
        gc.freeze()  # the forks need not look through all of torch again and again
        while True:
            call = caller.recv()
            if call != "stop":  # one that came when the call was over
                caller.send(_watch(caller, *call))


def _child(
    caller: Connection,
    printing: Connection,
    answering: Connection,
    trace: Any,
    memory: int | None,
    function: Function,
    args: Any,
) -> None:
    """What the fork of a call does: call the function, and send its result and error."""
    os.setsid()  # a process group that can be ended as one
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also where the one that watches dies
    caller.close()
    for standard in (1, 2):
        os.dup2(printing.fileno(), standard)
    faulthandler.enable(trace)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    process = os.getpid()
    try:
        value = function(*args)
        if os.getpid() == process:  # not a process that the function has forked
            answering.send((value, None))
    except BaseException as raised:  # SystemExit too: whatever it is, the function raised it
        error = ChildError(traceback.format_exception_only(raised)[-1].strip())
        error.add_note("".join(traceback.format_exception(raised)))
        if os.getpid() == process:
            answering.send((None, error))


def _watch(
    caller: Connection, function: Function, args: Any, seconds: float, memory: int | None
) -> tuple[Any, BaseException | None, str]:
    """Call a function in a fork and end its process group: its result, an error, and what it printed."""
    (answers, answering), (output, printing) = Pipe(duplex=False), Pipe(duplex=False)
    with answers, output, tempfile.TemporaryFile() as trace:
        given = caller, printing, answering, trace, memory, function, args
        child = get_context("fork").Process(target=_child, args=given)
        child.start()
        assert child.pid is not None, "it has started"
        answering.close()
        printing.close()
        deadline, printed, answer = time.monotonic() + seconds, b"", None
        stop: BaseException | None = None
        ready: list[Any] = []
        while stop is None and answers not in ready and child.is_alive():
            ready = wait([answers, output, caller], 0.05)
            if output in ready:
                printed = (printed + os.read(output.fileno(), 65536))[: OUTPUT_LIMIT + 1]
            if caller in ready:  # it says stop, or has ended
                stop = KeyboardInterrupt()
            elif time.monotonic() > deadline:
                stop = TimeoutError(f"it was still running after {seconds:g} s")
        if stop is not None:
            os.kill(child.pid, signal.SIGABRT)  # it writes where it is
        elif answers.poll():
            with suppress(EOFError, OSError):  # it has died, perhaps in the midst of its answer
                answer = answers.recv()
        if answer is None:
            child.join(ABORT_LIMIT_S)
        with suppress(ProcessLookupError):  # nobody is left, or it has no group yet
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.join()
        while len(printed) <= OUTPUT_LIMIT and output.poll() and (more := os.read(output.fileno(), 65536)):
            printed += more
        trace.seek(0)
        where = trace.read().decode(errors="replace")
    text = printed[:OUTPUT_LIMIT].decode(errors="replace") + LEFT_OUT * (len(printed) > OUTPUT_LIMIT)
    code = child.exitcode or 0
    end = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"
    value, error = answer or (None, stop or ChildDiedError(end))
    if error is not None:
        error.add_note(where + text[-2000:])
    return value, error, text
