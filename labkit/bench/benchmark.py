"""A part of a suite: contenders that do the same work, sizes, and how they are measured."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from labkit.measure import rows
from labkit.measure.clocks import Cache, Clock
from labkit.measure.contender import Contender, Shape
from labkit.measure.rows import Key

ROW_S, COMPILE_S, TUNE_S = 0.5, 3.0, 10.0
"""Seconds for a row on an H200, more for one that torch.compile makes, and for a peer to tune itself once."""
TUNE_THEMSELVES = ("fla-core",)
"""Packages whose kernels tune themselves at their first call for a width: before anything is timed, and not
at a check, which is smaller."""
LEAST_BYTES, MOST_BYTES = 16 * 2**20, 2**30
"""Bytes of the largest tensor of a size that is drawn; smaller ones are a suite of their own."""
SLOW_SIZES = 10
"""Contenders that are slow to get ready are measured at so many of the sizes that are drawn."""

Range = tuple[int, int, int]
"""Least and most size of an axis, and what every size is a multiple of, these two included."""


@dataclass(frozen=True)
class Benchmark:
    """Contenders that do the same work, the shapes, and every combination of dtype, direction and clock.

    ``suite`` tells the rows of a suite's parts apart. ``ranges`` are what sizes are drawn from instead of
    ``shapes``; ``product`` says that their axes are those of a matrix product, each tensor having two.
    """

    contenders: tuple[Contender, ...]
    shapes: tuple[Shape, ...] = ()
    suite: str = ""
    dtypes: tuple[str, ...] = ("bfloat16",)
    directions: tuple[str, ...] = ("forward",)
    clocks: tuple[Clock, ...] = ("graph",)
    cache: Cache = "cold"
    ranges: Mapping[str, Range] = field(default_factory=dict)
    product: bool = False

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

    def seconds(self) -> float:
        """About how many seconds it takes on an H200."""
        tuners, shapes = self.tuning()
        return TUNE_S * len(tuners) * len(shapes) + sum(map(row_seconds, self.planned().values()))

    def tensor_bytes(self, shape: Shape, dtype: str) -> int:
        """Bytes of the largest tensor."""
        sizes = sorted(size for axis, size in shape.items() if axis != "groups")
        elements = math.prod(sizes[-2:] if self.product else sizes) * shape.get("groups", 1)
        return elements * int(getattr(torch, dtype).itemsize)

    def drawn(self, count: int, rng: np.random.Generator, *, small: bool) -> list["Benchmark"]:
        """The part at ``count`` shapes drawn from ``ranges``, for its dtypes in turn.

        The largest tensor has LEAST_BYTES to MOST_BYTES, or with ``small`` less. Contenders that are
        compiled, tune themselves or are for some sizes only are at the first SLOW_SIZES shapes, all others at
        every one.
        ValueError where the ranges hold too few such shapes.
        """
        quick = tuple(
            one for one in self.contenders if not (one.compiled or one.sizes or one.peer in TUNE_THEMSELVES)
        )
        made = []
        for turn, dtype in enumerate(self.dtypes):
            numbers = range(turn, count, len(self.dtypes))
            few = sum(number < SLOW_SIZES for number in numbers)
            shapes = self._draw(len(numbers), rng, small, dtype)
            made.append(replace(self, shapes=shapes[:few], dtypes=(dtype,)))
            made.append(replace(self, shapes=shapes[few:], dtypes=(dtype,), contenders=quick))
        return [part for part in made if part.shapes]

    def _draw(self, count: int, rng: np.random.Generator, small: bool, dtype: str) -> tuple[Shape, ...]:
        """Different shapes, each axis log-uniform and rounded to its multiple."""
        found: dict[tuple[int, ...], Shape] = {}
        for _ in range(500 * count):
            if len(found) == count:
                break
            drawn = {axis: np.exp(rng.uniform(*np.log(ends))) for axis, (*ends, _) in self.ranges.items()}
            shape = {axis: int(step * round(drawn[axis] / step)) for axis, (*_, step) in self.ranges.items()}
            size = self.tensor_bytes(shape, dtype)
            if (size < LEAST_BYTES) == small and size <= MOST_BYTES:
                found[tuple(shape.values())] = shape
        if len(found) < count:
            raise ValueError(f"{self.suite}: its ranges hold fewer than {count} such sizes")
        return tuple(found.values())


def row_seconds(one: Contender) -> float:
    """About how many seconds a row takes on an H200; one that torch.compile makes takes longer."""
    return ROW_S + COMPILE_S * one.compiled
