"""The rows of a sweep as a table that answers questions: a time, a ratio, a crossover, with their origin."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from labkit import sweeps, tables
from labkit.measure.measured import MISSING, Measured
from labkit.sweeps import Contender, Shape


class Results(pd.DataFrame):
    """A DataFrame with a row for each measured point; what pandas does with one, it does with this.

    ``where`` names columns and their values: ``results.time("eager", batch=256, clock="host")``. Each answer
    is a `Measured`, and `MISSING` where no row fits, or the rows come from different devices or clocks.
    ValueError where several rows fit.
    """

    @property
    def _constructor(self) -> type["Results"]:
        return Results

    def _ask(self, question: Callable[..., Measured | None], *args: Any, **where: Any) -> Measured:
        return (question(self, *args, **where) if len(self) else None) or MISSING

    def time(self, contender: str, **where: Any) -> Measured:
        """The median time of a contender in microseconds."""
        return self._ask(tables.at, contender, **where)

    def speedup(self, of: str, over: str, **where: Any) -> Measured:
        """How many times as fast as ``over`` is ``of``."""
        return self._ask(tables.ratio, of, over, **where)

    def share(self, contender: str, **where: Any) -> Measured:
        """The time of a copy of the same bytes over that of a contender: 1 is as fast as copying."""
        return self._ask(tables.at, contender, "copy_us", **where) / self.time(contender, **where)

    def crossover(self, of: str, over: str, x: str = "width", **where: Any) -> Measured:
        """From which ``x`` on ``of`` is faster than ``over``, interpolated on logarithmic axes."""
        return self._ask(tables.crossover, of, over, x, **where)

    def growth(self, of: str, over: str, x: str = "width") -> Measured:
        """The power of ``x`` that the speedup of ``of`` over ``over`` grows with, fitted on log axes."""
        return self._ask(lambda table: tables.growth(tables.speedup(table, of, over, x), x))

    def speedups(self, of: str, over: str, x: str = "width", series: str | None = None) -> pd.DataFrame:
        """The speedup of ``of`` over ``over`` at each ``x``, with its spread, for ``plot.speedups``."""
        return tables.speedup(self, of, over, x, series)


def sweep(suite: str, contenders: Sequence[Contender], points: Iterable[Shape], **options: Any) -> Results:
    """Measure every contender at every point, beside a copy of the same bytes; rows of the contract's schema.

    ``options`` are those of :func:`labkit.sweeps.run`: dtype, direction ("forward", "backward"), clock
    ("graph", "events", "host") and cache ("cold", "warm"). A tuple of values measures one after the other.
    Without a GPU the rows are those of a recorded one.
    """
    return Results(sweeps.grid(suite, contenders, points, **options))
