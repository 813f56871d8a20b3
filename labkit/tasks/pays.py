"""Lesson 2, exercise "pays": what fusing an activation into a matmul is worth on a device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from labkit.tasks import Evidence, Wrong
from labkit.tasks.numbers_said import explained, refuse_other_than_number
from labkit.tasks.pays_hints import HINTS

TOLERANCE = 0.02
DEVICES = {
    "an H200": (7.5e14, 4.2e12),
    "an L4": (6e13, 2.4e11),
    "a laptop": (2e13, 4e11),
    "a device with little arithmetic": (1e14, 4e12),
}
"""A matmul's FLOP/s in bfloat16 and the bytes/s of a copy, roughly."""
SHAPES = (
    (8192, 768, 3072),
    (32768, 128, 512),
    (4096, 32, 4096),
    (8192, 4096, 11008),
    (128, 512, 4096),
    (16, 4096, 14336),
)
"""rows, d, h: above most ridges, two below, far above; and few rows, where the weights are the most bytes."""
SMALL = 0.1
"""A gain that the evidence takes for the end of fusing's worth."""


@dataclass(frozen=True)
class _Case:
    device: str
    rate: float
    bandwidth: float
    rows: int
    d: int
    h: int
    said: Any = None

    def __str__(self) -> str:
        return f"On {self.device}, with {self.rows} rows, d = {self.d} and h = {self.h}"

    @property
    def arithmetic_rules(self) -> bool:
        """Whether arithmetic takes longer than memory, with both results written."""
        return RIGHT.arithmetic(self) > RIGHT.gemm_bytes(self) / self.bandwidth

    @property
    def memory_rules(self) -> bool:
        """Whether memory takes longer than arithmetic, even with one result written."""
        return RIGHT.arithmetic(self) < RIGHT.gemm_bytes(self, RIGHT.fused_written) / self.bandwidth


@dataclass(frozen=True)
class _Model:
    """The speedup as two floors give it, and where it may be got wrong."""

    products: int = 2
    operations: int = 2
    itemsize: int = 2
    x: int = 1
    weights: int = 2
    written: int = 2
    """Tensors of rows x h that the matmul alone writes."""
    fused_written: int = 1
    passes: int = 3
    """Tensors of rows x h that the second kernel reads and writes."""
    floor: Callable[..., float] = max

    def arithmetic(self, at: _Case) -> float:
        """Seconds of the products."""
        return self.operations * self.products * at.rows * at.d * at.h / at.rate

    def gemm_bytes(self, at: _Case, written: int | None = None) -> float:
        """Bytes of the products, and of as many tensors written."""
        out = self.written if written is None else written
        elements = self.x * at.rows * at.d + self.weights * at.h * at.d + out * at.rows * at.h
        return self.itemsize * elements

    def seconds(self, at: _Case) -> tuple[float, float, float]:
        """Of the products alone, of the second kernel, of the fused one."""
        gemm = self.floor((self.arithmetic(at), self.gemm_bytes(at) / at.bandwidth))
        fused = self.floor((self.arithmetic(at), self.gemm_bytes(at, self.fused_written) / at.bandwidth))
        pointwise = self.itemsize * self.passes * at.rows * at.h / at.bandwidth
        return gemm, pointwise, fused

    def speedup(self, at: _Case) -> float:
        gemm, pointwise, fused = self.seconds(at)
        return (gemm + pointwise) / fused


RIGHT = _Model()


def check(speedup: Callable[..., float]) -> Evidence:
    """Compare ``speedup(rows, d, h, rate, bandwidth)`` with the two floors; `Wrong` names what is off."""
    if ... in getattr(getattr(speedup, "__code__", None), "co_consts", ()):
        raise _wrong("unfinished", "The function still has three dots.")
    cases = [_said(speedup, device, *shape) for device in DEVICES for shape in SHAPES]
    for case in cases:
        if isinstance(case.said, bool):
            raise _wrong("yes-or-no", f"{case}, the function returned {case.said}.")
        refuse_other_than_number(str(case), case.said, _wrong)
    missed = [case for case in cases if not _near(case.said, RIGHT.speedup(case))]
    if missed:
        raise _wrong(_reason(cases, missed), _observed(missed[0]))
    worst = max(abs(case.said / RIGHT.speedup(case) - 1) for case in cases)
    return Evidence(_evidence(len(cases), worst), len(cases))


def _said(speedup: Callable[..., float], device: str, rows: int, d: int, h: int) -> _Case:
    rate, bandwidth = DEVICES[device]
    said = speedup(rows, d, h, rate, bandwidth)
    return _Case(device, rate, bandwidth, rows, d, h, said)


def _near(said: float, wanted: float) -> bool:
    return abs(said - wanted) <= TOLERANCE * abs(wanted)


def _wrong(reason: str, observed: str) -> Wrong:
    return Wrong(reason, observed, HINTS[reason])


def _observed(case: _Case) -> str:
    rules = "arithmetic" if case.arithmetic_rules else "memory"
    return (
        f"{case}, your function says {case.said:.4g}; the floors give {RIGHT.speedup(case):.4g}. "
        f"The products alone are ruled by {rules} there."
    )


def _reason(cases: list[_Case], missed: list[_Case]) -> str:
    """The mistake that explains what was said of all cases."""
    if found := explained(cases, _mistakes(), _near):
        return found
    if not any(case.arithmetic_rules for case in missed):
        return "bytes"
    return "wrong-values" if any(case.memory_rules for case in missed) else "arithmetic"


def _mistakes() -> Iterator[tuple[str, Callable[[_Case], float]]]:
    """What would have come out, had this or that mistake been made."""
    for reason, other in _models():
        yield reason, other.speedup
    yield "swapped-rates", lambda at: RIGHT.speedup(replace(at, rate=at.bandwidth, bandwidth=at.rate))
    yield "inverse", lambda at: 1 / RIGHT.speedup(at)
    for part in range(3):
        yield "seconds", lambda at, part=part: RIGHT.seconds(at)[part]  # type: ignore[misc]
    yield "seconds", lambda at: sum(RIGHT.seconds(at)[:2])
    yield "seconds", lambda at: sum(RIGHT.seconds(at)[:2]) - RIGHT.seconds(at)[2]
    yield "gain", lambda at: RIGHT.speedup(at) - 1
    yield "gain", lambda at: 100 * (RIGHT.speedup(at) - 1)
    yield "gain", lambda at: 100 * RIGHT.speedup(at)
    yield "gemm-left-out", lambda at: RIGHT.seconds(at)[1] / RIGHT.seconds(at)[2]
    yield "pointwise-left-out", lambda at: RIGHT.seconds(at)[0] / RIGHT.seconds(at)[2]


def _models() -> Iterator[tuple[str, _Model]]:
    """The model with one thing wrong in it."""
    yield "one-product", replace(RIGHT, products=1, weights=1, written=1)
    yield "half-operations", replace(RIGHT, operations=1)
    yield "half-bytes", replace(RIGHT, itemsize=1)
    yield "sum-of-floors", replace(RIGHT, floor=sum)
    yield "smaller-floor", replace(RIGHT, floor=min)
    yield "arithmetic-only", replace(RIGHT, floor=lambda floors: floors[0])
    yield "bytes-only", replace(RIGHT, floor=lambda floors: floors[1])
    yield "both-written", replace(RIGHT, fused_written=2)
    yield "nothing-written", replace(RIGHT, fused_written=0)
    yield "hidden-once", replace(RIGHT, written=1)
    yield "no-output", replace(RIGHT, written=0, fused_written=0)
    yield "no-weights", replace(RIGHT, weights=0)
    yield "one-weight", replace(RIGHT, weights=1)
    yield "no-x", replace(RIGHT, x=0)
    yield "x-twice", replace(RIGHT, x=2)
    yield "one-pass", replace(RIGHT, passes=1)
    yield "two-passes", replace(RIGHT, passes=2)
    yield "too-many-passes", replace(RIGHT, passes=4)
    yield "too-many-passes", replace(RIGHT, passes=5)


def _evidence(passed: int, worst: float) -> str:
    """The finding: it's the width against the device's ridge that decides."""
    gone = []
    for device in ("an H200", "an L4"):
        rate, bandwidth = DEVICES[device]
        gone.append(f"d = {1.5 * rate / bandwidth / SMALL:,.0f} on {device}")
    return (
        f"{passed} cases on {len(DEVICES)} devices, the worst {worst:.1%} off. Two numbers decide: the "
        "width d, and the device's ridge, rate / bandwidth. Where arithmetic rules, the "
        "speedup is 1 + 1.5 * ridge / d, whatever the rows and h, and where memory rules it is at most 5. "
        f"Fusing gains less than {SMALL:.0%} beyond {' and '.join(gone)}."
    )
