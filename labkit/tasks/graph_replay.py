"""Lesson 5, exercise "replay": what a graph of kernels takes, predicted from an eager timeline."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from labkit.tasks import Evidence, Wrong, some
from labkit.tasks.graph_replay_hints import HINTS
from labkit.tasks.numbers_said import explained, near, refuse_other_than_number, refuse_other_than_zero

Kernels = tuple[tuple[float, float], ...]


def _eager(lengths: tuple[float, ...], gaps: tuple[float, ...], first: float) -> Kernels:
    """Kernels of these lengths with these gaps after them."""
    kernels, start = [], first
    for length, gap in zip(lengths, (*gaps, 0.0), strict=True):
        kernels.append((start, length))
        start += length + gap
    return tuple(kernels)


SHORT = _eager((2.5, 3.0, 4.5) * 4, (9.0, 7.0, 8.0, 11.0) * 2 + (8.5, 9.5, 10.0), 120.0)
"""Short kernels with a wait for Python after each."""
CASES: tuple[tuple[Kernels, float], ...] = (
    (_eager((6.0,), (), 40.0), 1.5),
    (SHORT, 0.8),
    (_eager((120.0, 90.0, 310.0, 45.0), (3.0, 2.5, 4.0), 7.0), 1.0),
    (_eager((5.0, 8.0, 2.0), (0.0, 0.0), 15.0), 1.25),
    (_eager((3.0, 4.0, 7.0, 2.0), (12.0, 0.0, 0.5), 300.0), 2.0),
    (_eager((9.0, 4.0, 6.0), (5.0, 6.0), 0.0), 0.0),
)
"""Kernels and gap_us: one, many short ones, long ones, back to back, waits of both kinds, no gap."""


@dataclass(frozen=True)
class _Case:
    kernels: Kernels
    gap_us: float
    said: Any = None

    def __str__(self) -> str:
        return f"For {some(len(self.kernels), 'kernel')} with gap_us = {self.gap_us:g}"

    @property
    def lengths(self) -> list[float]:
        return [length for _, length in self.kernels]

    @property
    def busy(self) -> float:
        return sum(self.lengths)

    @property
    def between(self) -> int:
        """How many gaps there are."""
        return len(self.kernels) - 1

    @property
    def span(self) -> float:
        """From the first start to the last end, as it was eagerly."""
        return sum(self.kernels[-1]) - self.kernels[0][0]

    @property
    def waits(self) -> list[float]:
        """The eager gaps."""
        pairs = zip(self.kernels, self.kernels[1:], strict=False)
        return [later[0] - sum(earlier) for earlier, later in pairs]

    @property
    def right(self) -> float:
        return self.busy + self.gap_us * self.between


def check(replay_us: Callable[..., float]) -> Evidence:
    """Compare ``replay_us(kernels, gap_us)`` with kernels and gaps, added up; `Wrong` names what is off."""
    cases = [_Case(*case, replay_us(list(case[0]), case[1])) for case in CASES]
    for case in cases:
        refuse_other_than_number(str(case), case.said, _wrong)
    missed = [case for case in cases if not near(case.said, case.right)]
    if missed:
        raise _wrong(
            explained(cases, _mistakes()) or "wrong-values",
            f"{missed[0]}, the function says {missed[0].said:.6g} microseconds; it should be "
            f"{missed[0].right:.6g}.",
        )
    refuse_other_than_zero("For an empty list of kernels", lambda: replay_us([], 1.5), _wrong)
    return Evidence(_evidence(len(cases) + 1), len(cases) + 1)


def _wrong(reason: str, observed: str) -> Wrong:
    return Wrong(reason, observed, HINTS[reason])


def _mistakes() -> Iterator[tuple[str, Callable[[_Case], float]]]:
    """What would have come out, had this or that mistake been made."""
    yield "eager-span", lambda at: at.span
    yield "n-gaps", lambda at: at.busy + at.gap_us * len(at.kernels)
    yield "gap-too-few", lambda at: at.busy + at.gap_us * max(0, at.between - 1)
    yield "one-gap", lambda at: at.busy + at.gap_us
    yield "no-gaps", lambda at: at.busy
    for ends in (0, 1):
        yield "eager-gaps", lambda at, ends=ends: at.span + at.gap_us * (at.between + ends)  # type: ignore[misc]
    yield "larger-gap", lambda at: at.busy + sum(max(at.gap_us, wait) for wait in at.waits)
    yield "smaller-gap", lambda at: at.busy + sum(min(at.gap_us, wait) for wait in at.waits)
    for gaps in (0, 1):
        yield "starts", lambda at, gaps=gaps: _starts(at) + gaps * at.gap_us * at.between  # type: ignore[misc]
        yield "ends", lambda at, gaps=gaps: _starts(at) + at.busy + gaps * at.gap_us * at.between  # type: ignore[misc]
        yield "longest", lambda at, gaps=gaps: max(at.lengths) + gaps * at.gap_us * at.between  # type: ignore[misc]
        yield "from-zero", lambda at, gaps=gaps: sum(at.kernels[-1]) + gaps * at.gap_us * at.between  # type: ignore[misc]
    yield "saved", lambda at: at.span - at.right
    yield "saved", lambda at: at.span / at.right


def _starts(at: _Case) -> float:
    return sum(start for start, _ in at.kernels)


def _evidence(passed: int) -> str:
    """The finding: what short kernels gain by a graph, and what long ones do."""
    short, long = (_Case(*case) for case in CASES[1:3])
    return (
        f"{passed} cases, one of them without a kernel. {len(short.kernels)} short kernels go from "
        f"{short.span:.0f} to {short.right:.0f} microseconds, {short.span / short.right:.1f} times as fast, "
        f"since only {short.busy / short.span:.0%} of the eager time was work. {len(long.kernels)} long ones "
        f"go from {long.span:.0f} to {long.right:.0f}: a graph takes away waiting, and nothing else."
    )
