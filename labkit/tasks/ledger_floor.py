"""Lesson 9, exercise "floor": the time below which no network of some layers can stay."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from labkit import network_works as work
from labkit.tasks import Evidence, Wrong, some
from labkit.tasks.ledger_floor_hints import HINTS
from labkit.tasks.numbers_said import CLOSE, explained, larger_floor, refuse_other_than_number
from labkit.tasks.pays import DEVICES

CLEAR = 2
"""From this lead on a floor that is some way off doesn't hide the other."""
ITEMSIZES = (2, 4)


@dataclass(frozen=True)
class Network:
    """Some rows, the multiplications of each layer for one, and the numbers that cross memory."""

    rows: int
    multiplications: tuple[int, ...]
    in_and_out: int
    weights: int


def of_width(rows: int, width: int) -> Network:
    """The lesson's network."""
    layers = tuple(work.products(width).values())
    small = 5 * width + work.OUTPUTS  # biases and gains
    return Network(rows, layers, width + work.OUTPUTS, sum(layers) + small)


TOLD = of_width(16 * 64, 128)
"""The network that the evidence speaks of."""
NETWORKS = (
    of_width(1, 64),
    of_width(65536, 32),
    TOLD,
    of_width(16, 1024),
    of_width(4096, 512),
    Network(2048, (4096, 262144, 1024), 96, 267400),
    Network(300, (640,), 72, 672),
    Network(3, (4_000_000, 1_000_000), 96, 5_000),
)
"""Ruled by weights, by what comes and goes, and by arithmetic; one whose middle layer is by far the largest,
one of a single layer, and one that uses few weights often."""


@dataclass(frozen=True)
class _Case:
    device: str
    bytes_per_us: float
    flops_per_us: float
    itemsize: int
    network: Network
    said: Any = None

    def __str__(self) -> str:
        layers = some(len(self.network.multiplications), "layer")
        rows = some(self.network.rows, "row")
        return f"On {self.device}, with {rows}, {layers} and {self.itemsize} bytes a number"

    @property
    def layers(self) -> tuple[int, ...]:
        return self.network.multiplications

    @property
    def lead(self) -> float:
        """How many times longer arithmetic takes than memory."""
        moved, done = RIGHT.times(self)
        return done / moved


Count = Callable[[_Case], float]


@dataclass(frozen=True)
class _Model:
    """The floor as memory and arithmetic give it, and where it may be got wrong."""

    through: Count = lambda at: at.network.rows * at.network.in_and_out
    held: Count = lambda at: at.network.weights
    each_through: Count = lambda at: at.itemsize
    each_held: Count = lambda at: at.itemsize
    done: Count = lambda at: 2 * at.network.rows * sum(at.layers)
    floor: Callable[..., float] = max
    unit: float = 1.0

    def moved(self, at: _Case) -> float:
        """Bytes that cross memory."""
        return self.through(at) * self.each_through(at) + self.held(at) * self.each_held(at)

    def times(self, at: _Case) -> tuple[float, float]:
        """Of memory, and of arithmetic."""
        return self.moved(at) / at.bytes_per_us, self.done(at) / at.flops_per_us

    def least(self, at: _Case) -> float:
        return self.floor(self.times(at)) * self.unit


RIGHT = _Model()


def check(floor_us: Callable[..., float]) -> Evidence:
    """Compare ``floor_us(rows, ...)`` with the larger of two floors; `Wrong` names what is off."""
    cases = list(_cases(floor_us))
    for case in cases:
        refuse_other_than_number(str(case), case.said, _wrong)
    missed = [case for case in cases if not _near(case.said, RIGHT.least(case))]
    if missed:
        raise _wrong(_reason(cases, missed), _observed(missed[0]))
    return Evidence(_evidence(len(cases)), len(cases))


def _cases(floor_us: Callable[..., float]) -> Iterator[_Case]:
    for device, (rate, bandwidth) in DEVICES.items():
        for network, itemsize in product(NETWORKS, ITEMSIZES):
            case = _Case(device, bandwidth / 1e6, rate / 1e6, itemsize, network)
            counts = network.rows, list(network.multiplications), network.in_and_out, network.weights
            yield replace(case, said=floor_us(*counts, itemsize, case.bytes_per_us, case.flops_per_us))


def _near(said: float, wanted: float) -> bool:
    return math.isclose(said, wanted, rel_tol=CLOSE)


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
    for numbers in _LAYER_NUMBERS:
        yield "cut-by-layer", lambda at, numbers=numbers: sum(_by_layer(at, numbers))  # type: ignore[misc]
        yield "one-layer", lambda at, numbers=numbers: max(_by_layer(at, numbers))  # type: ignore[misc]
    yield (
        "swapped-rates",
        lambda at: RIGHT.least(replace(at, bytes_per_us=at.flops_per_us, flops_per_us=at.bytes_per_us)),
    )
    for turned in product((1, -1), repeat=2):  # what a count is divided by: the rate, or one over it
        if turned != (1, 1):
            yield "times-rate", lambda at, turned=turned: RIGHT.least(_turned(at, *turned))  # type: ignore[misc]
    yield "times-rate", lambda at: max(1 / time for time in RIGHT.times(at))
    yield "whole-numbers", lambda at: max(time // 1 for time in RIGHT.times(at))


def _turned(at: _Case, of_bytes: int, of_flops: int) -> _Case:
    return replace(at, bytes_per_us=at.bytes_per_us**of_bytes, flops_per_us=at.flops_per_us**of_flops)


def _models() -> Iterator[tuple[str, _Model]]:
    """The model with one thing wrong in it."""
    yield "sum-of-floors", replace(RIGHT, floor=sum)
    yield "smaller-floor", replace(RIGHT, floor=min)
    yield "bytes-only", replace(RIGHT, floor=lambda floors: floors[0])
    yield "arithmetic-only", replace(RIGHT, floor=lambda floors: floors[1])
    for unit in (1e6, 1e-6, 1e3, 1e-3):
        yield "other-unit", replace(RIGHT, unit=unit)
    yield "multiply-adds", replace(RIGHT, done=lambda at: RIGHT.done(at) / 2)
    for of in _ONE_OF_THEM:
        yield "one-layer", replace(RIGHT, done=lambda at, of=of: 2 * at.network.rows * of(at.layers))  # type: ignore[misc]
    yield "no-itemsize", replace(RIGHT, each_through=_one, each_held=_one)
    yield "no-itemsize", replace(RIGHT, each_through=_one)
    yield "no-itemsize", replace(RIGHT, each_held=_one)
    yield "no-weights", replace(RIGHT, held=lambda at: 0)
    yield "per-row", replace(RIGHT, held=lambda at: at.network.rows * at.network.weights)
    yield "own-weights", replace(RIGHT, held=lambda at: sum(at.layers))
    yield "weights-only", replace(RIGHT, through=lambda at: 0)
    yield "twice", replace(RIGHT, through=lambda at: 2 * RIGHT.through(at))
    one_row = {"through": lambda at: at.network.in_and_out, "done": lambda at: 2 * sum(at.layers)}
    for names in (["through"], ["done"], ["through", "done"]):
        changes: dict[str, Any] = {name: one_row[name] for name in names}
        yield "one-row", replace(RIGHT, **changes)


def _one(at: _Case) -> float:
    return 1


_ONE_OF_THEM: tuple[Callable[[tuple[int, ...]], float], ...] = (
    max,
    min,
    lambda layers: layers[0],
    lambda layers: layers[-1],
    lambda layers: sum(layers) / len(layers),
)
"""What one may take in place of all layers' sum."""
_LAYER_NUMBERS: tuple[Callable[[_Case, int], float], ...] = (
    lambda at, own: RIGHT.through(at) + at.network.weights,
    lambda at, own: (RIGHT.through(at) + at.network.weights) / len(at.layers),
    lambda at, own: RIGHT.through(at) + own,
    lambda at, own: RIGHT.through(at) / len(at.layers) + own,
    lambda at, own: RIGHT.through(at) + at.network.weights / len(at.layers),
    lambda at, own: RIGHT.through(at),
    lambda at, own: own,
)
"""How many numbers one layer moves, as one may take it, by its multiplications for a row."""


def _by_layer(at: _Case, numbers: Callable[[_Case, int], float]) -> Iterator[float]:
    """The floor of each layer alone."""
    for own in at.layers:
        moved = numbers(at, own) * at.itemsize
        yield max(moved / at.bytes_per_us, 2 * at.network.rows * own / at.flops_per_us)


def _evidence(passed: int) -> str:
    """The finding: how far below a launch the network's floor lies, and what rules it."""
    rate, bandwidth = DEVICES["an H200"]
    whole = _Case("an H200", bandwidth / 1e6, rate / 1e6, 2, TOLD)
    step = replace(whole, network=replace(TOLD, rows=1))
    (moved, done), (of_one, _) = RIGHT.times(whole), RIGHT.times(step)
    return (
        f"{passed} cases on {len(DEVICES)} devices. In bfloat16 on an H200 the lesson's network at width 128 "
        f"can't do {TOLD.rows:,} rows in less than {max(moved, done):.2f} microseconds: memory alone takes "
        f"{moved:.2f}, arithmetic {done:.2f}. A single row takes {of_one:.3f}, nearly all of it for the "
        "weights. The launch of one kernel takes longer than either."
    )
