"""What an exception in an answer means: mistakes that an answer to any exercise may make, with their hints.

A hint may name ``{name}`` (the name that is missing), ``{seen}`` (names that the line sees) and ``{given}``
(what the lesson has for the cell).
"""

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit.exercises.engine import Call, Exercise, Finding, Mistake

COMMON_MISTAKES = {
    "python-loop": Mistake(
        "`at` holds all places of the block, and every operation works on all of them at once.",
        "Leave the loop out, and write what should happen to one element with `at` itself.",
        raises=r"'int' object is not iterable\n.*\bfor\b",
    ),
    "no-jit": Mistake(
        "A kernel is launched with kernel[grid](...). What makes a function a kernel?",
        "Put the line @triton.jit above it, and hand in the kernel without brackets or parentheses.",
        raises="'function' object is not subscriptable",
    ),
    "subscript": Mistake(
        "A kernel gets the address of a tensor's first element, and an address can't be indexed.",
        "What Python writes x[at] is here a load from an address: tl.load(x + at, ...).",
        raises="'int' object is not iterable|is not subscriptable|unsupported tensor index",
    ),
    "one-address": Mistake(
        "tl.load and tl.store want an address for each place of the mask. This is the address of one.",
        "Add the places to it: x + at is a block of addresses. The mask is the next argument.",
        raises="cannot be block type if pointer argument is not a block",
    ),
    "arange": Mistake(
        "A block's size is a power of two, and known when the kernel is compiled. Which number is both?",
        "A tl.constexpr, made with triton.next_power_of_2 at the launch where it depends on a size.",
        raises="arange's (arguments|range)",
    ),
    "mask-of-numbers": Mistake(
        "A mask is a block of true and false. What's in the one that you give to tl.load or tl.store?",
        "A comparison makes it, such as `at < ...`; write mask=... where you give other arguments too.",
        raises="Mask must have boolean|mask has unsupported dtype",
    ),
    "chained": Mistake(
        "How many comparisons has this line, and what stands between them? Python takes & before <.",
        "Put each comparison into parentheses of its own, with one sign in each, and join them by &.",
        raises="two comparisons in one|simultaneous multiple comparison",
    ),
    "block-as-truth": Mistake(
        "A block has many values, and an `if` goes one way for all of them. Who should decide?",
        "tl.where(condition, this, that) decides for each element.",
        raises="a block has many values",
    ),
    "shapes": Mistake(
        "Two blocks on this line have shapes that don't fit. Which shape should come out?",
        "[:, None] makes a column of a block, [None, :] a row. print(block) shows one with its shape.",
        raises=r"[Cc]annot (make_shape_compatible|broadcast)|could not be broadcast|incompatible dimensions",
    ),
    "small-tile": Mistake(
        "tl.dot takes tiles of at least 16 by 16 by 16. How large is yours at the smallest size?",
        "Round the block up: max(16, triton.next_power_of_2(size)), and mask what is too many.",
        raises="K >= 16|shapes? .*at least 16",
    ),
    "loop-carried": Mistake(
        "The loop sets a name to another dtype or shape than it had before the loop. Which name?",
        "A name that a loop sets again keeps its dtype and shape: begin with tl.zeros of both.",
        raises="[Ll]oop-carried variable",
    ),
    "magic": Mistake(
        "The cell is judged outside the notebook, where % and ! lines aren't there.",
        "Take such lines out, or put them into a cell of their own.",
        raises="name 'get_ipython' is not defined",
    ),
    "unset": Mistake(
        "The line uses `{name}`. Which line sets it, and does that one run before?",
        "Move the line that sets `{name}` up, before its first use.",
        raises="UnboundLocalError",
    ),
    "unknown-name": Mistake(
        "The line sees {seen}. Is one of these what you call `{name}`?",
        "The cell is judged by itself: names from other cells aren't there. It sees the lesson's "
        "imports and kernels, such as {given}.",
        raises="NameError",
    ),
}
"""The first one whose pattern fits is told."""


def explain(
    exercise: Exercise,
    error: BaseException,
    file: Path,
    namespace: Mapping[str, Any],
    call: str = "",
    calls: Sequence[Call] = (),
) -> Finding:
    """The finding for an exception, with hints at what it usually means.

    ``namespace`` is what the lesson has for the cell in ``file``; ``call`` describes the call that raised, of
    all ``calls``.
    """
    cause = list(_chain(error))[-1] if type(error).__name__ == "InterpreterError" else error
    text = str(cause)[:500]
    if isinstance(cause, MemoryError):
        text = "it needed more memory than an answer may have, a quarter of this machine's"
    observed = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    line, names = _running_line(error, file, namespace)
    name, hints = matching_mistake(exercise, f"{observed}\n{line}", calls)
    missing = re.search(r"'(\w+)'", observed)
    facts = {
        "name": missing[1] if missing else "it",
        "seen": ", ".join(names) or "none of yours",
        "given": ", ".join(_given_names(namespace)) or "torch, triton and tl",
    }
    hints = tuple(re.sub(r"\{(name|seen|given)\}", lambda m: facts[m[1]], hint) for hint in hints)
    return Finding("error", f"{observed} ({call})" if call else observed, name, line, hints)


def matching_mistake(
    exercise: Exercise, message: str, calls: Sequence[Call] = ()
) -> tuple[str, tuple[str, ...]]:
    """The name and the hints of the mistake that an exception's message and line tell of, both empty if none.

    The line that raised the exception stands below its message.
    """
    for name, each in (*exercise.mistakes.items(), *COMMON_MISTAKES.items()):
        fits = each.raises and re.search(each.raises, message)
        if fits and (each.when is None or (calls and each.when(calls))):
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
