"""Judges answers to exercises, each in a process of its own: ``python -m labkit.attempt LESSON FD``.

Here Triton interprets and no GPU is seen, so a verdict is the same on every machine. It loads the lesson's
setup and kernel cells, which takes seconds, writes ``{"ready": true}`` to the file descriptor FD, and waits
for jobs: lines of JSON on stdin (task, file, trace, limit_s). A fork judges each, so that whatever an answer
does ends with it. For a job up to three lines go to FD: ``{"pid": ...}``, the fork; its finding, unless it
came to another end; ``{"ended": status}``, when nothing of it is left. It is not reaped before the next job:
until then its pid is nobody else's. The answer's prints go to stdout; where it was when it crashed, or when
SIGUSR1 came, to the file ``trace``.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from labkit import lessons
from labkit.tasks import Task, Wrong, find, slips

GRACE_S = 5
"""This long after the limit the process ends by itself, should nobody be left who could end it."""


class _HandedIn(BaseException):
    """Leaves the cell at its check; not an Exception, which the cell itself might catch."""

    def __init__(self, answers: tuple[Any, ...]) -> None:
        self.answers = answers


class _Desk:
    """Stands for ``tasks`` in the cell."""

    def __init__(self, lesson: str, name: str) -> None:
        self._lesson, self._name = lesson, name

    def check(self, name: str, *answers: Any) -> None:
        if name == self._name:
            raise _HandedIn(answers)

    def solution(self, name: str) -> None:
        """Nothing to show here; the learner's notebook shows it."""

    def answer(self, name: str) -> Any:
        """The solution's function: the learner's own lives in the notebook."""
        from labkit import exercises  # which needs IPython, and only this does

        return exercises.of(self._lesson).answer(name)


def judge(lesson: str, namespace: dict[str, Any], name: str, task: Task, file: Path) -> dict[str, Any]:
    """Run a cell's source from its file, in a copy of ``namespace``, and check what it hands in.

    The finding: ``status`` right (with evidence, passed), wrong (reason, observed, hints), raised (observed,
    where, reason, hints) or unchecked.
    """
    try:
        answers = _run(lesson, namespace, name, file)
        if answers is None:
            return {"status": "unchecked"}
        evidence = task.check(*answers)
    except Wrong as wrong:
        finding = {"status": "wrong", "reason": wrong.reason, "observed": wrong.observed}
        return finding | {"hints": list(wrong.hints)}
    except BaseException as error:  # SystemExit too: whatever it is, the learner's code raised it
        return _raised(error, file, task, namespace)
    return {"status": "right", "evidence": evidence.sentence, "passed": evidence.passed}


def _run(lesson: str, namespace: dict[str, Any], name: str, file: Path) -> tuple[Any, ...] | None:
    """What the cell hands in; None when it ends without a check."""
    # A module by this name: Triton, inspect and dataclasses look the source up through it.
    title = f"labkit_attempt_{name}"
    module = ModuleType(title)
    module.__dict__.update(
        namespace | {"__name__": title, "__file__": str(file), "tasks": _Desk(lesson, name)}
    )
    sys.modules[title] = module
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)
    except _HandedIn as handed:
        return handed.answers
    return None


def _raised(error: BaseException, file: Path, task: Task, namespace: dict[str, Any]) -> dict[str, Any]:
    """The finding for an exception, with hints at what it usually means."""
    observed, where = _message(error), _where(error, file)
    slip = slips.explain(task.slips, observed, where)
    missing = re.search(r"'(\w+)'", observed)
    facts = {
        "name": missing[1] if missing else "it",
        "seen": ", ".join(_seen(error, file, namespace)) or "none of yours",
        "given": ", ".join(_given(namespace)),
    }
    hints = [hint.format_map(facts) for hint in slip.hints]
    return {"status": "raised", "observed": observed, "where": where, "reason": slip.reason, "hints": hints}


def _seen(error: BaseException, file: Path, namespace: dict[str, Any]) -> list[str]:
    """The answer's own names at its line that was running."""
    for one in reversed(list(_chain(error))):
        frames = [frame for frame, _ in traceback.walk_tb(one.__traceback__)]
        own = [frame for frame in frames if frame.f_code.co_filename == str(file)]
        if own:
            names = [name for name in own[-1].f_locals if not name.startswith("_")]
            return names if own[-1].f_code.co_name != "<module>" else [n for n in names if n not in namespace]
    return []


def _given(namespace: dict[str, Any]) -> list[str]:
    """What the lesson has for the cell: modules from elsewhere, and its own functions and kernels."""

    def fits(value: Any) -> bool:
        if isinstance(value, ModuleType):
            return not value.__name__.startswith("labkit")
        return getattr(getattr(value, "fn", value), "__module__", None) == namespace["__name__"]

    return sorted(name for name, value in namespace.items() if not name.startswith("_") and fits(value))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it, the last one first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _message(error: BaseException) -> str:
    cause = list(_chain(error))[-1] if type(error).__name__ == "InterpreterError" else error
    text = str(cause)
    if len(text) > 500:
        text = text[:500] + "..."
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _where(error: BaseException, file: Path) -> str:
    """The answer's own line that was running, "line 3: ..."; empty when none of its lines was."""
    for one in reversed(list(_chain(error))):
        if isinstance(one, SyntaxError) and one.filename == str(file):
            return f"line {one.lineno}: {(one.text or '').strip()}"
        frames = [frame for frame in traceback.extract_tb(one.__traceback__) if frame.filename == str(file)]
        if frames:
            return f"line {frames[-1].lineno}: {frames[-1].line}"
    return ""


def main(lesson: str, descriptor: int) -> None:
    """Load the lesson, then judge answers until stdin is closed."""
    os.set_inheritable(descriptor, False)  # what an answer starts has no say
    lessons.load(lesson)
    with os.fdopen(descriptor, "w", encoding="utf-8") as answers:
        _say(answers, {"ready": True})
        fork = 0
        for line in sys.stdin:
            if fork:
                os.waitpid(fork, 0)
            fork = _fork()
            if fork == 0:
                _judge_and_end(lesson, json.loads(line), answers)
            ended = os.waitid(os.P_PID, fork, os.WEXITED | os.WNOWAIT)
            assert ended is not None  # which it is with WNOHANG only
            with contextlib.suppress(ProcessLookupError):  # it came to its end before its first step
                os.killpg(fork, signal.SIGKILL)
            sign = 1 if ended.si_code == os.CLD_EXITED else -1
            _say(answers, {"ended": sign * ended.si_status})


def _fork() -> int:
    """Without the warning of Python 3.12, which learners would see: the threads of libraries hold no lock."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _judge_and_end(lesson: str, job: dict[str, Any], answers: TextIO) -> NoReturn:
    """What a fork does; whatever happens, it does not come back."""
    try:
        os.setsid()  # a group that can be killed as one
        _say(answers, {"pid": os.getpid()})
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the jobs are not the answer's to read
        signal.alarm(round(job["limit_s"]) + GRACE_S)  # even if the notebook's kernel is gone
        trace = open(job["trace"], "w")  # noqa: SIM115  # for as long as the process lives
        faulthandler.enable(trace)
        faulthandler.register(signal.SIGUSR1, trace)
        namespace = vars(lessons.load(lesson))  # again: the notebook may have been saved meanwhile
        finding = judge(lesson, namespace, job["task"], find(lesson)[job["task"]], Path(job["file"]))
        with contextlib.suppress(OSError):  # the pipe may be closed, the finding counts
            sys.stdout.flush()
        _say(answers, finding)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # threads and exit handlers that the answer left behind do not matter


def _say(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
