"""The loop of every benchmark: draw a size, check each contender against float64, time all that are right.

A size is drawn log-uniformly from an operation's ranges by a seed, in bfloat16 and float32 in turn. There the
contenders are measured as the ways of a lesson are (labkit.measure.session): in one interleaved run beside a
copy of the same bytes. Every contender becomes a row; one that fails, or is wrong, a row without a time and
with a note.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from labkit.measure.clocks import Cache, Clock
from labkit.measure.session import Point, Session, Way
from labkit.work import Shape, Work

Call = Callable[..., Tensor]
Ranges = dict[str, tuple[int, int, int]]
"""For each axis the least and the most size, and what every size is a multiple of."""
Row = dict[str, Any]

LARGE, SMALL = (2**24, 2**29), (2**16, 2**22)
"""Least and most bytes that a forward pass moves; launches hardly count in a large one, and do in a small."""
DTYPES = ("bfloat16", "float32")
ALLOWED_ERROR = {"bfloat16": 2e-2, "float32": 1e-3}
"""A larger relative error, by norms, is a wrong result and no rounding. In float32 cuDNN's GRU was off by up
to 5e-4 in some of the recorded cases, as TF32 is."""
PEERS = {
    "Liger": "liger-kernel",
    "fla, step by step": "fla-core",
    "accelerated-scan": "accelerated-scan",
}
"""Contenders from other packages, and the package of each."""
COLUMNS = (
    *("direction", "dtype", "clock", "cache", "median_us", "p20_us", "p80_us", "note", "noise"),
    *("device", "card", "driver", "torch", "triton", "date"),
)
"""What a row has from the session's row (labkit.measure.tape.Row), by the same name."""


@dataclass(frozen=True)
class Operation:
    """One operation, and all that compute it.

    ``work`` has the inputs for a size, the float64 reference, and the fewest bytes that have to move.
    ``contenders`` are plain functions of the inputs; the one named "torch.compile" is compiled before it is
    called. ``ranges`` are what sizes are drawn from, by the name of the suite; the first has the name "".
    ``works`` has the work of the contenders that keep their inputs in another form. ``only`` has the
    contenders that are not for everything: ``only[name](direction, dtype, size)``. ``bound`` names the roof:
    a "copy" of the same bytes, or a "product", which is cuBLAS's and among the contenders.
    """

    name: str
    work: Work
    contenders: dict[str, Call]
    ranges: dict[str, Ranges]
    directions: tuple[str, ...] = ("forward", "backward")
    works: dict[str, Work] = field(default_factory=dict)
    only: dict[str, Callable[[str, str, Shape], bool]] = field(default_factory=dict)
    bound: str = "copy"

    def draw(self, suite: str, seed: int, number: int) -> tuple[Shape, str]:
        """Size and dtype ``number`` of a suite; "small" has small sizes of the first ranges.

        ValueError where the ranges hold no size that moves as many bytes as it should.
        """
        rng, dtype = random.Random(f"{seed} {self.name} {suite} {number}"), DTYPES[number % len(DTYPES)]
        least, most = SMALL if suite == "small" else LARGE
        for _ in range(10_000):
            size = {}
            for axis, (low, high, step) in self.ranges["" if suite == "small" else suite].items():
                size[axis] = step * round(math.exp(rng.uniform(math.log(low), math.log(high))) / step)
            if least <= self.work.min_bytes(size, getattr(torch, dtype).itemsize, "forward") <= most:
                return size, dtype
        raise ValueError(f"{self.name}: no size of {suite or 'its ranges'} moves {least} to {most} bytes")

    def ways(self, direction: str, dtype: str, size: Shape, peers: bool) -> tuple[Way, ...]:
        """The contenders that are for this, those of other packages only with ``peers``."""
        return tuple(
            Way(name, call, self.works.get(name, self.work))
            for name, call in self.contenders.items()
            if (peers or name not in PEERS)
            and (name not in self.only or self.only[name](direction, dtype, size))
        )


def measure_size(
    operation: Operation, suite: str, seed: int, number: int, *, peers: bool = False
) -> Iterator[Row]:
    """Draw a size, check the contenders and time them: a row for each direction, clock and contender.

    Large sizes are timed by the graph clock with a cold cache, small ones also by the host's, and both warm,
    as between the layers of a small network.
    """
    size, dtype = operation.draw(suite, seed, number)
    clocks: tuple[Clock, ...] = ("graph", "host") if suite == "small" else ("graph",)
    cache: Cache = "warm" if suite == "small" else "cold"
    title, session = f"{operation.name}/{suite}".strip("/"), Session()
    torch.manual_seed(seed)
    for direction, clock in itertools.product(operation.directions, clocks):
        ways = tuple(map(compiled, operation.ways(direction, dtype, size, peers)))
        point = Point(title, ways, size, dtype, direction, clock, cache, ALLOWED_ERROR[dtype])
        for row in session.measure(point):
            yield {
                "suite": title,
                "contender": row.way,
                "shape": size,
                **{name: getattr(row, name) for name in COLUMNS},
                "copy_us": row.copy_us if operation.bound == "copy" else None,
                "peer": peer(row.way),
                "seed": seed,
            }


def compiled(way: Way) -> Way:
    """The way itself, and compiled where it is called so. A session compiles it anew at each size."""
    if way.name != "torch.compile":
        return way
    return Way(way.name, torch.compile(way.call, dynamic=False), way.work)


def peer(name: str) -> str:
    """Package and version of a contender from another package, its name alone where it is missing."""
    try:
        return f"{PEERS[name]} {version(PEERS[name])}" if name in PEERS else ""
    except PackageNotFoundError:
        return PEERS[name]
