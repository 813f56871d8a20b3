"""Lesson 9, exercise "wall": when the last of some kernels ends, while the host launches them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from labkit.tasks import Evidence, Wrong
from labkit.tasks.ledger_wall_hints import HINTS
from labkit.tasks.numbers_said import explained, near, refuse_other_than_number, refuse_other_than_zero

Times = tuple[float, ...]

SHORT: tuple[Times, Times] = ((5.0, 4.5, 6.0, 5.5) * 3, (2.0, 1.5, 3.0, 2.5) * 3)
"""Kernels shorter than their launches."""
LONG: tuple[Times, Times] = ((6.0, 5.0, 4.5, 5.0, 5.5), (40.0, 25.0, 90.0, 60.0, 30.0))
"""Kernels behind which all launches but the first are hidden."""
CASES: tuple[tuple[Times, Times], ...] = (
    ((5.0,), (3.0,)),
    SHORT,
    LONG,
    ((5.0, 5.0, 30.0, 5.0, 5.0), (20.0, 3.0, 25.0, 25.0, 2.0)),
    ((4.0, 6.0, 5.0), (30.0, 1.0, 2.0)),
    ((5.0, 5.0, 5.0), (5.0, 5.0, 5.0)),
    ((12.0, 0.0, 0.0, 0.0), (3.0, 4.0, 2.0, 6.0)),
)
"""Launches and kernels: one; short ones; long ones; one launched late, with long ones behind it; a long one
first; all the same; and a graph, whose launch is the only one."""


@dataclass(frozen=True)
class _Case:
    launches: Times
    kernels: Times
    said: Any = None

    def __str__(self) -> str:
        launches, kernels = (
            "[" + ", ".join(f"{time:g}" for time in times) + "]" for times in (self.launches, self.kernels)
        )
        return f"For launches {launches} and kernels {kernels}"

    @property
    def pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.launches, self.kernels, strict=True))

    @property
    def right(self) -> float:
        return _walked(self, lambda ready, done, launch, kernel: max(done, ready) + kernel)


Step = Callable[[float, float, float, float], float]
"""When a kernel ends: from when its launch is over and when the kernel before it ended, and how long launch
and kernel take."""


def _walked(at: _Case, step: Step) -> float:
    ready = done = 0.0
    for launch, kernel in at.pairs:
        ready += launch
        done = step(ready, done, launch, kernel)
    return done


def check(wall_us: Callable[..., float]) -> Evidence:
    """Compare ``wall_us(launches, kernels)`` with a walk through both; `Wrong` names what is off."""
    cases = []
    for launches, kernels in CASES:
        given = list(launches), list(kernels)
        case = _Case(launches, kernels, wall_us(*given))
        refuse_other_than_number(str(case), case.said, _wrong)
        if given != (list(launches), list(kernels)):
            raise _wrong("changes-lists", f"{case}, the function changed a list that it was given.")
        cases.append(case)
    missed = [case for case in cases if not near(case.said, case.right)]
    if missed:
        raise _wrong(
            explained(cases, _mistakes()) or "wrong-values",
            f"{missed[0]}, the function says {missed[0].said:.6g} microseconds; "
            f"it should be {missed[0].right:.6g}.",
        )
    refuse_other_than_zero("For no launch and no kernel", lambda: wall_us([], []), _wrong)
    return Evidence(_evidence(len(cases) + 1), len(cases) + 1)


def _wrong(reason: str, observed: str) -> Wrong:
    return Wrong(reason, observed, HINTS[reason])


def _mistakes() -> Iterator[tuple[str, Callable[[_Case], float]]]:
    """What would have come out, had this or that mistake been made."""
    yield "in-turn", lambda at: sum(at.launches) + sum(at.kernels)
    yield "launches-alone", lambda at: sum(at.launches)
    yield "kernels-alone", lambda at: sum(at.kernels)
    yield "larger-sum", _larger
    yield "larger-sum-and-end", lambda at: _larger(at) + at.kernels[-1]
    yield "larger-sum-and-end", lambda at: at.launches[0] + _larger(at)
    yield "larger-sum-and-end", lambda at: at.launches[0] + _larger(at) + at.kernels[-1]
    yield "host-bound", _host_bound
    yield "device-bound", _device_bound
    yield "two-bounds", lambda at: max(_host_bound(at), _device_bound(at))
    for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
        yield "pairs", lambda at, ends=(first, last): _pairs(at) + _ends(at, *ends)  # type: ignore[misc]
    yield "one-ahead", _one_ahead
    for reason, step in _STEPS.items():
        yield reason, lambda at, step=step: _walked(at, step)  # type: ignore[misc]
    yield "only-first", lambda at: sum(at.pairs[0])
    yield "anew", lambda at: sum(at.pairs[-1])
    yield "waiting", lambda at: at.right - sum(at.kernels)
    yield "from-first", lambda at: at.right - at.launches[0]
    yield "swapped", lambda at: _Case(at.kernels, at.launches).right


_STEPS: dict[str, Step] = {
    "before-launched": lambda ready, done, launch, kernel: max(done, ready - launch) + kernel,
    "not-added-up": lambda ready, done, launch, kernel: max(done, launch) + kernel,
    "kernel-in-max": lambda ready, done, launch, kernel: max(done + kernel, ready),
    "at-once": lambda ready, done, launch, kernel: max(done, ready + kernel),
}


def _larger(at: _Case) -> float:
    return max(sum(at.launches), sum(at.kernels))


def _host_bound(at: _Case) -> float:
    return sum(at.launches) + at.kernels[-1]


def _device_bound(at: _Case) -> float:
    return at.launches[0] + sum(at.kernels)


def _pairs(at: _Case) -> float:
    return sum(max(pair) for pair in at.pairs)


def _ends(at: _Case, first: int, last: int) -> float:
    return first * at.launches[0] + last * at.kernels[-1]


def _one_ahead(at: _Case) -> float:
    """The host begins a launch when the kernel before the last one has ended."""
    overlaps = zip(at.launches[1:], at.kernels, strict=False)
    return at.launches[0] + sum(max(pair) for pair in overlaps) + at.kernels[-1]


def _evidence(passed: int) -> str:
    """The finding: what faster kernels and fewer launches are worth, where kernels are short and long."""
    parts = []
    for kind, (launches, kernels) in (("short", SHORT), ("long", LONG)):
        halved = tuple(time / 2 for time in launches), tuple(time / 2 for time in kernels)
        now = _Case(launches, kernels).right
        faster, cheaper = _Case(launches, halved[1]).right, _Case(halved[0], kernels).right
        parts.append(
            f"{len(kernels)} {kind} kernels are over after {now:g} microseconds; after {faster:g} if each of "
            f"them takes half as long, after {cheaper:g} if each launch does"
        )
    return (
        f"{passed} cases, one of them without a kernel. {parts[0]}: the host decides. {parts[1]}: the GPU "
        "does. Before you make anything faster, find out who is waiting."
    )
