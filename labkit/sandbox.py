"""Starts the process that judges answers (``labkit.attempt``), and ends those that take too long."""

import codecs
import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit import places

START_LIMIT_S = 180.0
"""Longest wait for a process to load its lesson, which takes three seconds on an idle machine."""
END_LIMIT_S = 10.0
"""Longest wait for a killed answer to be gone."""
PRINT_LIMIT = 20_000
"""Characters of an answer's prints that are shown."""


class Process:
    """Loads the lesson once, at once, and judges answers, one at a time: each in a fork of its own."""

    def __init__(self, lesson: str) -> None:
        reading, writing = os.pipe()
        # A file, not a number: when nobody refers to this any more its pipes close, and the process ends.
        self._findings = os.fdopen(reading, "rb", buffering=0)
        # A session of its own: the Jupyter stop button interrupts the kernel's whole process group, and here
        # only the waiting parent decides.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "labkit.attempt", lesson, str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=(writing,),
            start_new_session=True,
            env=_environment(),
        )
        os.close(writing)
        self._lesson = lesson
        self._ready = False
        self._fork: int | None = 0
        """What judges an answer now: 0 if nothing does, None while its number is not told yet."""
        self._received = b""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    @property
    def free(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None and self._fork == 0

    def judge(self, task: str, file: Path, limit_s: float, show: Callable[[str], None]) -> dict[str, Any]:
        """The finding of ``attempt.judge``, or status stopped, crashed or interrupted (with where).

        ``show`` gets what the answer prints, as it comes.
        """
        said: list[str] = []
        trace, shown = file.with_suffix(".trace"), _limited(show)
        self._fork = None
        try:
            if not self._ready and self._message(START_LIMIT_S, said.append) is None:
                return {"status": "raised", "observed": self._not_loaded("".join(said))}
            self._ready = True
            job = {"task": task, "file": str(file), "trace": str(trace), "limit_s": limit_s}
            with contextlib.suppress(BrokenPipeError):  # then no message comes, and it is told as a crash
                self._stdin.write(json.dumps(job).encode() + b"\n")
            finding = self._message(START_LIMIT_S, shown)
            if finding and "pid" in finding:  # else it was over before it could say that it has begun
                self._fork = finding["pid"]
                finding = self._message(limit_s, shown)
        except TimeoutError:
            return {"status": "stopped", "where": self._interrupted_at(file, trace)}
        except KeyboardInterrupt:
            return {"status": "interrupted", "where": self._interrupted_at(file, trace)}
        else:
            if finding is None:
                finding = {"ended": self._process.wait(10)}
            if "ended" in finding:
                observed = _end(finding["ended"])
                return {"status": "crashed", "observed": observed, "where": _traced(file, trace)}
            return finding
        finally:
            self._end_fork(shown)
            trace.unlink(missing_ok=True)

    def close(self) -> None:
        """End the process, with the answer that it judges and what that started."""
        alive = self._process.poll() is None  # else its number may be another's by now
        for group in filter(None, (alive and self._process.pid, self._fork)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._fork = 0
        self._process.wait()
        self._findings.close()
        self._stdin.close()
        self._stdout.close()

    def _end_fork(self, show: Callable[[str], None]) -> None:
        """End what judges the answer, and wait until it is told that nothing of it is left."""
        with contextlib.suppress(TimeoutError):
            while self._fork:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._fork, signal.SIGKILL)
                if self._message(END_LIMIT_S, show) is None:
                    break
        if self._fork != 0:
            self.close()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    @property
    def _stdout(self) -> Any:
        return self._process.stdout

    def _message(self, limit_s: float, show: Callable[[str], None]) -> dict[str, Any] | None:
        """The next message, None when the process ended without one; TimeoutError after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._findings, selectors.EVENT_READ)
            waiting.register(self._stdout, selectors.EVENT_READ)
            ended = False
            while b"\n" not in self._received and not ended:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                ready = {key.fileobj for key, _ in waiting.select(left)}
                if self._stdout in ready and not self._show(show):
                    waiting.unregister(self._stdout)
                if self._findings in ready:
                    chunk = self._findings.read(65536)
                    self._received, ended = self._received + chunk, not chunk
        self._show_rest(show)
        if b"\n" not in self._received:
            return None
        line, self._received = self._received.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        if "ended" in message:
            self._fork = 0
        return message

    def _show(self, show: Callable[[str], None]) -> bool:
        """Pass on what was printed; whether more may come."""
        chunk = os.read(self._stdout.fileno(), 65536)
        show(self._decode(chunk))
        return bool(chunk)

    def _show_rest(self, show: Callable[[str], None]) -> None:
        """Pass on what was printed before the message came."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._stdout, selectors.EVENT_READ)
            while waiting.select(0) and self._show(show):
                pass

    def _interrupted_at(self, file: Path, trace: Path) -> str:
        """The line of the answer that is running, "" if it can't be told."""
        if self._fork and trace.exists():  # before that, the signal would end the process without a word
            os.kill(self._fork, signal.SIGUSR1)
        for _ in range(20):
            if where := _traced(file, trace):
                return where
            time.sleep(0.05)
        return ""

    def _not_loaded(self, printed: str) -> str:
        last = printed.strip().rpartition("\n")[2] or "it said nothing"
        return (
            f"The lesson's own cells of kernels, as they were last saved, do not run by themselves: {last}\n"
            f"Undo what you changed there, or restart from a fresh copy of {self._lesson}."
        )


def _end(status: int) -> str:
    """How a process ended, by its exit status or the negative number of a signal."""
    if status >= 0:
        return f"it ended with status {status}"
    return f"it was ended by {signal.Signals(-status).name}"


def _traced(file: Path, trace: Path) -> str:
    """The answer's innermost line in what faulthandler wrote, "line 3: ..."; "" where there is none."""
    if not trace.exists():
        return ""
    found = re.search(rf'File "{re.escape(str(file))}", line (\d+) in', trace.read_text(errors="replace"))
    if found is None:
        return ""
    number = int(found[1])
    return f"line {number}: {file.read_text(encoding='utf-8').splitlines()[number - 1].strip()}"


def _limited(show: Callable[[str], None]) -> Callable[[str], None]:
    """``show``, up to a number of characters."""
    left = PRINT_LIMIT

    def limited(text: str) -> None:
        nonlocal left
        if left > 0 and text:
            show(text[:left])
            if len(text) > left:
                show("\n[the rest of what your code printed was left out]\n")
        left -= len(text)

    return limited


def _environment() -> dict[str, str]:
    """The same on every machine: Triton interprets, no GPU is seen, nobody presses buttons."""
    return os.environ | {
        "PYTHONPATH": places.python_path(),
        "PYTHONUNBUFFERED": "1",  # what was printed before a crash has arrived
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "LABKIT_HEADLESS": "1",
        "MPLBACKEND": "Agg",
    }
