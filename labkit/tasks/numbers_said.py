"""Answers that are one number: what is none is refused; the mistake that explains all answers."""

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, Protocol, TypeVar

from labkit.tasks import Wrong, some


class Said(Protocol):
    """A case, and the number that an answer says for it."""

    @property
    def said(self) -> Any: ...


C = TypeVar("C", bound=Said)
CLOSE = 1e-6
"""Relative, and for numbers near zero absolute: the same number, computed in another order."""


def near(said: float, wanted: float) -> bool:
    """Whether it is the number wanted, but for rounding."""
    return math.isclose(said, wanted, rel_tol=CLOSE, abs_tol=CLOSE)


def refuse_other_than_number(where: str, said: Any, wrong: Callable[[str, str], Wrong]) -> None:
    """Raise ``wrong(reason, observed)`` unless ``said`` is one finite number."""
    if said is None:
        raise wrong("unfinished", f"{where}, the function returned None.")
    if isinstance(said, (tuple, list)):
        raise wrong("several-numbers", f"{where}, the function returned {some(len(said), 'value')}.")
    if isinstance(said, bool) or not isinstance(said, Real) or not math.isfinite(said):
        raise wrong("not-a-number", f"{where}, the function returned {said!r}.")


def refuse_other_than_zero(where: str, answer: Callable[[], Any], wrong: Callable[[str, str], Wrong]) -> None:
    """Raise ``wrong("empty", ...)`` unless ``answer()``, of nothing to do, says that it takes no time."""
    try:
        said = answer()
    except Exception as error:
        raise wrong("empty", f"{where}, the function raised {type(error).__name__}: {error}.") from None
    if said is None:
        raise wrong("empty", f"{where}, the function returned None.")
    refuse_other_than_number(where, said, wrong)
    if said != 0:
        raise wrong("empty", f"{where}, the function says {said:g} microseconds.")


def larger_floor(case: Said, arithmetic: bool, least_us: float) -> str:
    """What was observed of an answer that is a floor: what it said, and which of two floors rules."""
    rules = "arithmetic" if arithmetic else "memory"
    return (
        f"{case}, your function says {case.said:.4g} microseconds; "
        f"the larger floor, that of {rules}, is {least_us:.4g}."
    )


def explained(
    cases: Sequence[C],
    mistakes: Iterable[tuple[str, Callable[[C], float]]],
    same: Callable[[float, float], bool] = near,
) -> str | None:
    """The first mistake that would have said the same of all cases; "constant" if one number was said of all.

    None where no mistake explains it.
    """
    if len({case.said for case in cases}) == 1:
        return "constant"
    for reason, other in mistakes:
        if all(same(case.said, other(case)) for case in cases):
            return reason
    return None
