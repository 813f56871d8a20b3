"""A part of a benchmark: contenders, shapes and how they are measured, and about how long that takes."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from labkit import rows, sweeps
from labkit.clocks import Cache, Clock
from labkit.measure.journal import Key
from labkit.sweeps import Contender, Shape

ROW_S, COMPILE_S, TUNE_S = 0.5, 3.0, 10.0
"""Seconds for a row, more for one that torch.compile makes, and for a peer to tune itself at one shape."""
LIMIT_S = 8 * 60.0
"""Seconds that a suite may be planned for."""


@dataclass(frozen=True)
class Part:
    """Contenders that do the same work, the shapes, and every combination of dtype, direction and clock.

    ``suite`` tells the rows of a suite's parts apart. ``tuned`` are shapes at which the contenders named in
    ``tuning`` are called before anything is timed, so that they tune themselves there and not at a check.
    """

    contenders: tuple[Contender, ...]
    shapes: tuple[Shape, ...]
    suite: str = ""
    dtypes: tuple[str, ...] = ("bfloat16",)
    directions: tuple[str, ...] = ("forward",)
    clocks: tuple[Clock, ...] = ("graph",)
    cache: Cache = "cold"
    tuning: tuple[str, ...] = ()
    tuned: tuple[Shape, ...] = ()

    def without_peers(self) -> "Part":
        """The same without contenders from other packages."""
        return replace(self, contenders=tuple(one for one in self.contenders if one.peer is None))

    def runs(self) -> Iterator[dict[str, Any]]:
        """Options of sweeps.run, one set for each combination that any contender takes part in."""
        for dtype, direction, clock in itertools.product(self.dtypes, self.directions, self.clocks):
            if any(one.takes(dtype) for one in self.contenders):
                yield {"dtype": dtype, "direction": direction, "clock": clock, "cache": self.cache}

    def rows(self) -> list[tuple[Contender, Shape, dict[str, Any]]]:
        """What is measured, in order: contender, shape and the options of its run."""
        return [
            (one, shape, options)
            for options in self.runs()
            for shape in self.shapes
            for one in self.contenders
            if one.takes(options["dtype"]) and one.fits(shape)
        ]

    def planned(self) -> dict[Key, Contender]:
        """The key of each row, in order, where a graph can hold the call, and whose it is."""
        return {
            rows.key(self.suite, one.name, shape=shape, **options): one for one, shape, options in self.rows()
        }

    def tuners(self) -> list[Contender]:
        """The contenders that tune themselves at ``tuned`` before anything is timed."""
        return [one for one in self.contenders if one.name in self.tuning]

    def seconds(self) -> float:
        """About how many seconds it takes on an H200."""
        tuning = TUNE_S * len(self.tuners()) * len(self.tuned)
        return tuning + sum(row_seconds(one.compiled) for one, _, _ in self.rows())


def sources(parts: Iterable[Part]) -> dict[tuple[str, str], str]:
    """The source that a row measured now would name, by suite and contender."""
    return {(part.suite, one.name): sweeps.code(one) for part in parts for one in part.contenders}


def row_seconds(compiled: bool) -> float:
    """About how many seconds a row takes on an H200; one that torch.compile makes takes longer."""
    return ROW_S + COMPILE_S * compiled
