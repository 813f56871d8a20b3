"""Lesson 4, exercise "floor": the least time that grouped Linears can take on a device."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from labkit.tasks import Evidence, Wrong
from labkit.tasks.group_floor_hints import HINTS
from labkit.tasks.numbers_said import explained, larger_floor
from labkit.tasks.pays import DEVICES, TOLERANCE

SHAPES = (
    (4096, 64, 32, 48),
    (8192, 16, 64, 256),
    (16, 128, 512, 128),
    (65536, 4, 1024, 2048),
    (8192, 2, 4096, 1024),
    (256, 8, 2048, 512),
)
"""rows, groups, d_in, d_out: narrow groups, few rows (where the weights are the most bytes), wide groups."""
ITEMSIZES = (2, 4)
COMPARED = ("an H200", "an L4")
CLEAR = 2
"""From this lead on a floor that is some way off doesn't hide the other."""


@dataclass(frozen=True)
class _Case:
    device: str
    rate: float
    bandwidth: float
    rows: int
    groups: int
    d_in: int
    d_out: int
    itemsize: int
    said: Any = None

    def __str__(self) -> str:
        shape = f"{self.rows} rows, {self.groups} groups, d_in = {self.d_in}, d_out = {self.d_out}"
        return f"On {self.device}, with {shape} and {self.itemsize} bytes a number"

    @property
    def lead(self) -> float:
        """How many times longer arithmetic takes than memory."""
        moved, computed = RIGHT.seconds(self)
        return computed / moved


Count = Callable[[_Case], float]


@dataclass(frozen=True)
class _Model:
    """The least time as two floors give it, and where it may be got wrong."""

    x: Count = lambda at: at.rows * at.groups * at.d_in
    weights: Count = lambda at: at.groups * at.d_in * at.d_out
    y: Count = lambda at: at.rows * at.groups * at.d_out
    operations: Count = lambda at: 2 * at.rows * at.groups * at.d_in * at.d_out
    itemsize: Count = lambda at: at.itemsize
    floor: Callable[..., float] = max
    unit: float = 1e6

    def seconds(self, at: _Case) -> tuple[float, float]:
        """Of memory, and of arithmetic."""
        numbers = self.x(at) + self.weights(at) + self.y(at)
        return numbers * self.itemsize(at) / at.bandwidth, self.operations(at) / at.rate

    def least(self, at: _Case) -> float:
        return self.floor(self.seconds(at)) * self.unit


RIGHT = _Model()


def check(floor_us: Callable[..., float]) -> Evidence:
    """Compare ``floor_us(rows, ..., rate)`` with the larger of two floors; `Wrong` names what is off."""
    if ... in getattr(getattr(floor_us, "__code__", None), "co_consts", ()):
        raise _wrong("unfinished", "The function still has three dots.")
    cases = list(_cases(floor_us))
    for case in cases:
        if isinstance(case.said, tuple):
            raise _wrong("two-numbers", f"{case}, the function returned {len(case.said)} values.")
        number = isinstance(case.said, (int, float)) and not isinstance(case.said, bool)
        if not number or not math.isfinite(case.said):
            raise _wrong("not-a-number", f"{case}, the function returned {case.said!r}.")
    missed = [case for case in cases if not _near(case.said, RIGHT.least(case))]
    if missed:
        raise _wrong(_reason(cases, missed), _observed(missed[0]))
    worst = max(abs(case.said / RIGHT.least(case) - 1) for case in cases)
    return Evidence(_evidence(len(cases), worst), len(cases))


def _cases(floor_us: Callable[..., float]) -> Iterator[_Case]:
    for device, (rate, bandwidth) in DEVICES.items():
        for shape in SHAPES:
            for itemsize in ITEMSIZES:
                said = floor_us(*shape, itemsize, bandwidth, rate)
                yield _Case(device, rate, bandwidth, *shape, itemsize, said)


def _near(said: float, wanted: float) -> bool:
    return abs(said - wanted) <= TOLERANCE * abs(wanted)


def _wrong(reason: str, observed: str) -> Wrong:
    return Wrong(reason, observed, HINTS[reason])


def _observed(case: _Case) -> str:
    return larger_floor(case, case.lead > 1, RIGHT.least(case))


def _reason(cases: list[_Case], missed: list[_Case]) -> str:
    """The mistake that explains what was said of all cases."""
    if found := explained(cases, _mistakes(), _near):
        return found
    leads = [case.lead for case in missed]
    if max(leads) < CLEAR:
        return "bytes"
    return "arithmetic" if min(leads) > 1 / CLEAR else "wrong-values"


def _mistakes() -> Iterator[tuple[str, Count]]:
    """What would have come out, had this or that mistake been made."""
    for reason, model in _models():
        yield reason, model.least
    yield "swapped-rates", lambda at: RIGHT.least(replace(at, rate=at.bandwidth, bandwidth=at.rate))


def _models() -> Iterator[tuple[str, _Model]]:
    """The model with one thing wrong in it."""
    yield "sum-of-floors", replace(RIGHT, floor=sum)
    yield "smaller-floor", replace(RIGHT, floor=min)
    yield "bytes-only", replace(RIGHT, floor=lambda floors: floors[0])
    yield "arithmetic-only", replace(RIGHT, floor=lambda floors: floors[1])
    for unit in (1.0, 1e3, 1e9):
        yield "other-unit", replace(RIGHT, unit=unit)
    yield "no-itemsize", replace(RIGHT, itemsize=lambda at: 1)
    yield "multiply-adds", replace(RIGHT, operations=lambda at: RIGHT.operations(at) / 2)
    yield "no-weights", replace(RIGHT, weights=lambda at: 0)
    yield "no-x", replace(RIGHT, x=lambda at: 0)
    yield "no-result", replace(RIGHT, y=lambda at: 0)
    yield "per-row", replace(RIGHT, weights=lambda at: at.rows * RIGHT.weights(at))
    yield from (("dense", model) for model in _changed(_dense, "weights", "operations"))
    yield from (("one-group", model) for model in _changed(_of_one_group, "weights", "operations", "x", "y"))
    for one_width in (_only_d_in, _only_d_out):
        yield from (("one-width", model) for model in _changed(one_width, "y", "x", "weights", "operations"))


def _changed(change: Callable[[Count], Count], *names: str) -> Iterator[_Model]:
    """The model with this change in some of the counts."""
    for some in range(1, len(names) + 1):
        for chosen in combinations(names, some):
            changes: dict[str, Any] = {name: change(getattr(RIGHT, name)) for name in chosen}
            yield replace(RIGHT, **changes)


def _dense(count: Count) -> Count:
    return lambda at: at.groups * count(at)


def _of_one_group(count: Count) -> Count:
    return lambda at: count(at) / at.groups


def _only_d_in(count: Count) -> Count:
    return lambda at: count(replace(at, d_out=at.d_in))


def _only_d_out(count: Count) -> Count:
    return lambda at: count(replace(at, d_in=at.d_out))


def _evidence(passed: int, worst: float) -> str:
    """The finding: which groups are ruled by memory whatever is done."""
    widths = [f"D = {ITEMSIZES[0] * DEVICES[name][0] / DEVICES[name][1]:.0f} on {name}" for name in COMPARED]
    return (
        f"{passed} cases on {len(DEVICES)} devices, the worst {worst:.1%} off. With d_in = d_out = D and "
        "many rows a group has D / itemsize operations for each byte moved. Arithmetic overtakes memory "
        f"where that is rate / bandwidth: in bfloat16 at {' and '.join(widths)}. Narrower groups are ruled "
        "by memory: at best they take as long as a copy of x to y."
    )
