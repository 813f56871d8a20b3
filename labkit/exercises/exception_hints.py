"""Findings for exceptions: the learner's line that raised it, and hints at what it usually means."""

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit.exercises import common_hints
from labkit.exercises.engine import Exercise, Finding, Mistake

COMMON_MISTAKES = {name: Mistake(*hints, raises=pattern) for name, pattern, *hints in common_hints.EXCEPTIONS}


def explain(
    exercise: Exercise,
    error: BaseException,
    file: Path,
    namespace: Mapping[str, Any],
    call: str = "",
) -> Finding:
    """The finding for an exception, with hints at what it usually means.

    ``namespace`` is what the lesson has for the cell in ``file``; ``call`` describes the call that raised.
    """
    cause = list(_chain(error))[-1] if type(error).__name__ == "InterpreterError" else error
    text = str(cause)[:500]
    if isinstance(cause, MemoryError):
        text = "it needed more memory than an answer may have, a quarter of this machine's"
    observed = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    line, names = _running_line(error, file, namespace)
    name, hints = matching_mistake(exercise, f"{observed}\n{line}")
    missing = re.search(r"'(\w+)'", observed)
    facts = {
        "name": missing[1] if missing else "it",
        "seen": ", ".join(names) or "none of yours",
        "given": ", ".join(_given_names(namespace)) or "torch, triton and tl",
    }
    hints = tuple(re.sub(r"\{(name|seen|given)\}", lambda m: facts[m[1]], hint) for hint in hints)
    return Finding("error", f"{observed} ({call})" if call else observed, name, line, hints)


def matching_mistake(exercise: Exercise, message: str) -> tuple[str, tuple[str, ...]]:
    """The name and the hints of the mistake that an exception's message and line tell of, both empty if none.

    The line that raised the exception stands below its message.
    """
    for name, each in (*exercise.mistakes.items(), *COMMON_MISTAKES.items()):
        if each.raises and re.search(each.raises, message):
            return name, each.hints
    return "", ()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it, the last one first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _running_line(error: BaseException, file: Path, namespace: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The answer's own line that was running, "line 3: ...", and the answer's names that it sees.

    Both are empty when none of its lines was running.
    """
    for one in reversed(list(_chain(error))):
        if isinstance(one, SyntaxError) and one.filename == str(file):
            return f"line {one.lineno}: {(one.text or '').strip()}", []
        frames = traceback.walk_tb(one.__traceback__)
        own = [(frame, number) for frame, number in frames if frame.f_code.co_filename == str(file)]
        if own:
            frame, number = own[-1]
            names = [name for name in frame.f_locals if not name.startswith("_")]
            if frame.f_code.co_name == "<module>":
                names = [name for name in names if name not in namespace]
            return f"line {number}: {linecache.getline(str(file), number).strip()}", names
    return "", []


def _given_names(namespace: Mapping[str, Any]) -> list[str]:
    """What the lesson has for the cell: modules from elsewhere, and its own functions and kernels."""

    def is_given(value: Any) -> bool:
        if isinstance(value, ModuleType):
            return not value.__name__.startswith("labkit")
        return getattr(getattr(value, "fn", value), "__module__", None) == namespace.get("__name__")

    return sorted(name for name, value in namespace.items() if not name.startswith("_") and is_given(value))
