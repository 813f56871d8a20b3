"""What a sweep panel offers, what is chosen of it, and what is known for a choice: no widgets here."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import pandas as pd

from labkit.measure import rows
from labkit.measure.clocks import Cache, Clock
from labkit.measure.contender import Contender, Shape
from labkit.measure.results import Results
from labkit.plots.curves import ReferenceLines

CLOCKS: dict[Clock, str] = {
    "graph": "graph: device time, cold cache",
    "events": "events: with the device's waiting, cold cache",
    "host": "host: wall clock, warm cache",
}


@dataclass(frozen=True)
class Selection:
    """One sweep over the axis ``x``: which contenders at which sizes, and by which clock."""

    x: str
    contenders: tuple[str, ...]
    values: tuple[int, ...]
    others: Mapping[str, int]
    """One size for each other axis of the shape."""
    dtype: str
    clock: Clock

    @property
    def cache(self) -> Cache:
        """Launches do not care for the cache, and cold copies of small inputs are thousands."""
        return "warm" if self.clock == "host" else "cold"

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the sweep, one for each size of ``x``."""
        return [{**self.others, self.x: value} for value in self.values]

    def matching(self, found: Sequence[rows.Row]) -> list[rows.Row]:
        """The rows that belong to this sweep."""
        selected = (self.dtype, "forward", self.clock, self.cache)
        return [
            row
            for row in found
            if (row.dtype, row.direction, row.asked_clock, row.cache) == selected
            and row.contender in self.contenders
            and row.shape in self.shapes
        ]


@dataclass(frozen=True)
class SweepPlan:
    """Everything that a panel can sweep: the forward pass of ``contenders`` over ``values`` of an axis ``x``.

    ``of`` and ``over`` name the contenders that the sentence compares; speedups are over ``over``.
    ``others`` are the other axes of the shape, each with the sizes to choose from, the usual one last.
    ``reference_lines`` are those of :func:`labkit.plots.curves` for times. ``budget_s`` is the time that one
    contender is measured for at one size.

    Raises ValueError for sizes that do not increase, or names that are no contenders.
    """

    suite: str
    contenders: Sequence[Contender]
    values: Sequence[int]
    _: KW_ONLY
    title: str
    of: str
    over: str
    x: str = "width"
    others: Mapping[str, Sequence[int]] = field(default_factory=dict)
    dtypes: Sequence[str] = ("float32",)
    clocks: Sequence[Clock] = ("graph", "events", "host")
    reference_lines: Callable[[pd.DataFrame], ReferenceLines] = lambda _: {}
    budget_s: float = 0.15

    def __post_init__(self) -> None:
        names = [contender.name for contender in self.contenders]
        for role, name in (("of", self.of), ("over", self.over)):
            if name not in names:
                raise ValueError(f"{role}: {name!r} is none of the contenders {', '.join(names)}")
        for role, sizes in {"values": self.values, **self.others}.items():
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError(f"{role}: {sizes!r} has to be increasing sizes, at least one")

    def all_selections(self) -> list[Selection]:
        """Every dtype and size of the other axes, by the first clock."""
        sizes = itertools.product(*self.others.values())
        axes = [dict(zip(self.others, chosen, strict=True)) for chosen in sizes]
        return [self._selection(dtype, others) for dtype in self.dtypes for others in axes]

    def usual_selection(self) -> Selection:
        """The first dtype at the usual size of each other axis, by the first clock."""
        return self._selection(self.dtypes[0], {axis: sizes[-1] for axis, sizes in self.others.items()})

    def _selection(self, dtype: str, others: Mapping[str, int]) -> Selection:
        names = tuple(contender.name for contender in self.contenders)
        return Selection(self.x, names, tuple(self.values), others, dtype, self.clocks[0])

    def selected(self, selection: Selection) -> list[Contender]:
        """The contenders of a selection."""
        return [contender for contender in self.contenders if contender.name in selection.contenders]

    def calls(self, selection: Selection) -> list[tuple[Contender, Shape]]:
        """What a selection measures, size by size."""
        contenders = self.selected(selection)
        return [(one, shape) for shape in selection.shapes for one in contenders if one.fits(shape)]

    # -- what is known

    def recorded_rows(self) -> list[rows.Row]:
        """What a recorded device left for this suite, and not for those below it."""
        return [row for row in rows.recorded_rows(self.suite) if row.suite == self.suite]

    def table(self, found: Sequence[rows.Row]) -> Results:
        """Rows as a table with the axes of this plan, also where there are none."""
        return rows.as_results(found, [*self.others, self.x])

    def results(self, own: Sequence[rows.Row], recorded: Sequence[rows.Row]) -> Results:
        """For every selection by the first clock the rows of one origin.

        They are live where ``of`` and ``over`` were measured everywhere, else recorded. A sweep that was
        stopped early takes no claim's numbers away.
        """
        rows_found: list[rows.Row] = []
        for selection in self.all_selections():
            needed = {(name, size) for name in (self.of, self.over) for size in selection.values}
            found = [selection.matching(source) for source in (own, recorded)]
            whole = [part for part in found if needed <= {(row.contender, row.shape[self.x]) for row in part}]
            rows_found += next(filter(None, [*whole, *found]), [])
        return self.table(rows_found)
