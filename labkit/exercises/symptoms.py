"""What a wrong answer tells of itself, whatever the exercise is: by its result, or by its exception.

An answer whose mistake an exercise does not know may still tell by its result which input it forgot, by which
number it is off, and which results have changed places. Each of these is a mistake like the exercise's own.
An exception has the learner's line that raised it, and hints at what it usually means.
"""

import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from labkit.exercises import common_hints
from labkit.exercises.engine import Call, Exercise, Finding, Mistake, difference, tolerance

# ---- results -----------------------------------------------------------------------------------------------


def of(exercise: Exercise, calls: Sequence[Call]) -> dict[str, Mistake]:
    """The mistakes by name, for an answer that was called so."""
    finished = [call for call in calls if call.error is None]
    found = {f"without-{name}": mistake for name, mistake in _forgotten(exercise, finished)}
    results = finished[0].want if finished else None
    if isinstance(results, tuple):
        orders = [order for order in permutations(range(len(results))) if list(order) != sorted(order)]
        found["exchanged"] = Mistake(
            "Each of your results is one of those that are asked for. In which order are they asked for?",
            gives=tuple(_reordered(exercise, order) for order in orders),
        )
    if factor := _factor(exercise, finished):
        found["scaled"] = Mistake(
            f"All of your result is the right one times the same number, here {factor:.6g}. Which term or "
            "factor of yours is too large, or too small, by that much?",
            "Is something counted, divided or multiplied once too often, or not at all?",
            when=lambda calls: True,
        )
    return found


def _forgotten(exercise: Exercise, calls: Sequence[Call]) -> Iterator[tuple[str, Mistake]]:
    """For each input the mistake to leave it out: the result is that for zeros, or for ones, in its place."""
    for position, (name, value) in enumerate(calls[0].originals.items() if calls else ()):
        fills: tuple[int, ...] = ()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.dtype is torch.bool):
            fills = (0, 1)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and calls[0].dtype is None:
            fills = (1,)
        yield (
            name,
            Mistake(
                f"Your result is what would be right if `{name}` were {' or '.join(map(str, fills))} "
                "everywhere. Where does it come in?",
                f"Which term, or which factor, is `{name}` in the text above the cell? Is it in yours?",
                gives=tuple(_with(exercise, position, fill) for fill in fills),
            ),
        )


def _with(exercise: Exercise, position: int, fill: int) -> Callable[..., Any]:
    """The right result for an input that is this number everywhere."""

    def gives(*given: Any) -> Any:
        old = given[position]
        new = torch.full_like(old, fill) if isinstance(old, Tensor) else fill
        return exercise.reference(*given[:position], new, *given[position + 1 :])

    return gives


def _reordered(exercise: Exercise, order: Sequence[int]) -> Callable[..., Any]:
    def gives(*given: Any) -> Any:
        right = exercise.reference(*given)
        return tuple(right[place] for place in order)

    return gives


def _factor(exercise: Exercise, calls: Sequence[Call]) -> float:
    """By which number the result of the first wrong case has to be divided to be right; 0 if by none.

    Of tensors it may be another one in each case. Single numbers are off by some factor whatever they are, so
    there it has to be the same one.
    """
    factors: list[float] = []
    for call in calls:
        got, want = call.got, call.want
        if isinstance(want, Tensor) and want.numel() == 1:  # which is off by some factor whatever it is
            continue
        allowed = 4 * tolerance(exercise, call)
        if isinstance(want, Tensor) and isinstance(got, Tensor) and got.shape == want.shape:
            got, want = got.double(), want.double()
            factor = float((got * want).sum() / want.square().sum()) if want.numel() else 1.0
            alike = factor != 0 and not difference(got, factor * want, allowed)
        elif isinstance(want, (int, float)) and isinstance(got, (int, float)) and want:
            factor = got / want
            alike = factor != 0 and abs(factor / (factors or [factor])[0] - 1) <= allowed
        else:
            return 0.0
        if not alike:
            return 0.0
        factors.append(factor)
    return next((each for each in factors if abs(each - 1) > allowed), 0.0)


# ---- exceptions --------------------------------------------------------------------------------------------

COMMON_MISTAKES = {name: Mistake(*hints, raises=pattern) for name, pattern, *hints in common_hints.EXCEPTIONS}


def of_exception(
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
