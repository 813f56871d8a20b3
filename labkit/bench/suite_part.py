"""A part of a suite: contenders that do the same work, sizes, and how they are measured."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from labkit.measure import rows
from labkit.measure.clocks import Cache, Clock
from labkit.measure.contender import Contender, Shape
from labkit.measure.rows import Key

TUNE_THEMSELVES = ("fla-core",)
"""Packages whose kernels tune themselves at their first call for a width: before anything is timed, and not
at a check, which is smaller."""
LEAST_BYTES, MOST_BYTES = 16 * 2**20, 2**31
"""The work at a size that is drawn moves so many bytes forward; smaller sizes are a suite of their own."""
DRAWN_DTYPES = ("bfloat16", "float32")
"""Half of the sizes that are drawn are for each of these."""
SLOW_SIZES = 10
"""Contenders that are slow to get ready are measured at so many of the sizes that are drawn."""

Ranges = dict[str, tuple[int, int, int]]
"""For each axis least and most size, and what every size is a multiple of, these two included."""


@dataclass(frozen=True)
class SuitePart:
    """Contenders that do the same work, the shapes, and every combination of dtype, direction and clock.

    ``suite`` tells the rows of a suite's parts apart. ``ranges`` are what sizes are drawn from, for each of
    DRAWN_DTYPES in turn.
    """

    contenders: tuple[Contender, ...]
    shapes: tuple[Shape, ...] = ()
    suite: str = ""
    dtypes: tuple[str, ...] = ("bfloat16",)
    directions: tuple[str, ...] = ("forward",)
    clocks: tuple[Clock, ...] = ("graph",)
    cache: Cache = "cold"
    ranges: Ranges = field(default_factory=dict)

    def runs(self) -> Iterator[dict[str, Any]]:
        """Options of sweeps.run, one set for each combination that any contender takes part in."""
        for dtype, direction, clock in itertools.product(self.dtypes, self.directions, self.clocks):
            if any(one.takes(dtype) for one in self.contenders):
                yield {"dtype": dtype, "direction": direction, "clock": clock, "cache": self.cache}

    def planned(self) -> dict[Key, Contender]:
        """The key of each row, in order, where a graph can hold the call, and whose it is."""
        return {
            rows.key(self.suite, one.name, shape=shape, **options): one
            for options in self.runs()
            for shape in self.shapes
            for one in self.contenders
            if one.takes(options["dtype"]) and one.fits(shape)
        }

    def tuning(self) -> tuple[list[Contender], list[Shape]]:
        """The contenders that tune themselves, and the shapes to do so at: the first of each width."""
        peers = [one for one in self.contenders if one.peer in TUNE_THEMSELVES]
        tuners = [one for one in peers if any(map(one.takes, self.dtypes))]
        first = {shape["width"]: shape for shape in reversed(self.shapes)} if tuners else {}
        return tuners, list(first.values())

    def drawn(self, count: int, rng: np.random.Generator, *, small: bool) -> list["SuitePart"]:
        """The part at ``count`` shapes drawn from ``ranges``, for its dtypes in turn.

        Contenders that are compiled, tune themselves or are for some sizes only are at the first SLOW_SIZES
        shapes, all others at every one. ValueError where the ranges hold too few such shapes.
        """
        slow = [one for one in self.contenders if one.compiled or one.sizes or one.peer in TUNE_THEMSELVES]
        quick = tuple(one for one in self.contenders if one not in slow)
        made = []
        for turn, dtype in enumerate(DRAWN_DTYPES):
            numbers = range(turn, count, len(DRAWN_DTYPES))
            few = sum(number < SLOW_SIZES for number in numbers)
            shapes = self._draw(len(numbers), rng, small, dtype)
            made.append(replace(self, shapes=shapes[:few], dtypes=(dtype,)))
            made.append(replace(self, shapes=shapes[few:], dtypes=(dtype,), contenders=quick))
        return [part for part in made if part.shapes]

    def _draw(self, count: int, rng: np.random.Generator, small: bool, dtype: str) -> tuple[Shape, ...]:
        """Different shapes, each axis log-uniform and rounded to its multiple."""
        work, itemsize = self.contenders[0].work, getattr(torch, dtype).itemsize
        found: dict[tuple[int, ...], Shape] = {}
        for _ in range(500 * count):
            if len(found) == count:
                break
            shape = {}
            for axis, (least, most, step) in self.ranges.items():
                size = np.exp(rng.uniform(np.log(least), np.log(most)))
                shape[axis] = int(step * round(size / step))
            moved = work.min_bytes(shape, itemsize, "forward")
            if (moved < LEAST_BYTES) == small and moved <= MOST_BYTES:
                found[tuple(shape.values())] = shape
        if len(found) < count:
            raise ValueError(f"{self.suite}: its ranges hold fewer than {count} such sizes")
        return tuple(found.values())
