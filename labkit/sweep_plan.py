"""What a sweep panel offers, what is chosen of it, and what is known for a choice: no widgets here."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from labkit import device, places, rows, sweeps, tables
from labkit.clocks import Cache, Clock
from labkit.measure import journal
from labkit.plots.curves import Models, Regime
from labkit.plots.words import named
from labkit.rows import LIVE, RECORDED, Row
from labkit.sweeps import Contender, Shape

TIME, SPEEDUP, TRAFFIC = "time", "speedup", "traffic"
CLOCKS: dict[Clock, str] = {
    "graph": "graph: device time, cold cache",
    "events": "events: with the device's waiting, cold cache",
    "host": "host: wall clock, warm cache",
}


@dataclass(frozen=True)
class Selection:
    """One sweep over the axis: who, where, and by which clock."""

    contenders: tuple[str, ...]
    values: tuple[int, ...]
    others: Mapping[str, int]
    """One size for each other axis of the shape."""
    dtype: str
    direction: str
    clock: Clock

    @property
    def cache(self) -> Cache:
        """Launches do not care for the cache, and cold copies of small inputs are thousands."""
        return "warm" if self.clock == "host" else "cold"

    def points(self, x: str) -> list[Shape]:
        """The shapes of the sweep."""
        return [{**self.others, x: value} for value in self.values]

    def includes(self, row: Row, x: str) -> bool:
        """Whether a row belongs to this sweep."""
        how = (
            row.contender in self.contenders,
            row.dtype,
            row.direction,
            journal.asked_clock(row),
            row.cache,
        )
        shape = {axis: size for axis, size in row.shape.items() if axis != x}
        mine = (True, self.dtype, self.direction, self.clock, self.cache)
        return how == mine and shape == self.others and row.shape.get(x) in self.values

    def only(self, points: Iterable[Row], x: str) -> list["Selection"]:
        """Sweeps of these points and no others: one for those that are of the same contenders."""
        who: dict[int, list[str]] = {}
        for row in points:
            who.setdefault(row.shape[x], []).append(row.contender)
        values: dict[tuple[str, ...], list[int]] = {}
        for value in sorted(who):
            names = tuple(name for name in self.contenders if name in who[value])
            values.setdefault(names, []).append(value)
        return [replace(self, contenders=names, values=tuple(at)) for names, at in values.items()]

    def __str__(self) -> str:
        return ", ".join([self.dtype, *(named(axis, size) for axis, size in self.others.items())])


def place(row: Row) -> object:
    """What a row is the measurement of: two of one place are never shown together."""
    return journal.asked_key(row)


@dataclass(frozen=True)
class Look:
    """How a selection is looked at: time, speedup or traffic, and what is drawn beside this machine's own."""

    view: str = TIME
    tape: bool = True
    published: bool = True
    floor: bool = True


@dataclass(frozen=True)
class Plan:
    """Everything that a panel can sweep. ``of`` and ``over`` are the two that its sentence is about."""

    suite: str
    contenders: Sequence[Contender]
    x: str
    values: Sequence[int]
    others: Mapping[str, Sequence[int]]
    title: str
    of: str
    over: str
    dtypes: Sequence[str] = ("float32",)
    directions: Sequence[str] = ("forward",)
    clocks: Sequence[Clock] = ("graph", "events", "host")
    published: pd.DataFrame = field(default_factory=pd.DataFrame)
    floor: Callable[[pd.DataFrame], Models] = lambda _: {}
    regimes: Callable[[pd.DataFrame], Sequence[Regime]] = lambda _: ()
    expected: Models = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [contender.name for contender in self.contenders]
        for role, name in (("of", self.of), ("over", self.over)):
            if name not in names:
                raise ValueError(f"{role}: {name!r} is none of the contenders {', '.join(names)}")
        for role, given in {"values": self.values, **self.others}.items():
            if not given or list(given) != sorted(set(given)) or given[0] < 1:
                raise ValueError(f"{role}: {given!r} has to be increasing sizes, at least one")
        if not self.clocks or not set(self.clocks) <= set(CLOCKS):
            raise ValueError(f"clocks: {self.clocks!r} has to be one or more of {', '.join(CLOCKS)}")

    def first(self) -> Selection:
        """What is chosen before anybody chose: the largest size of each other axis, the first of the rest."""
        others = {axis: sizes[-1] for axis, sizes in self.others.items()}
        return self._whole(others, self.dtypes[0], self.directions[0])

    def everything(self) -> list[Selection]:
        """Every dtype, direction and size of the other axes, by the first clock."""
        sizes = [
            dict(zip(self.others, found, strict=True)) for found in itertools.product(*self.others.values())
        ]
        return [
            self._whole(others, dtype, direction)
            for dtype, direction, others in itertools.product(self.dtypes, self.directions, sizes)
        ]

    def _whole(self, others: Mapping[str, int], dtype: str, direction: str) -> Selection:
        names = tuple(contender.name for contender in self.contenders if contender.takes(dtype))
        return Selection(names, tuple(self.values), others, dtype, direction, self.clocks[0])

    def chosen(self, selection: Selection) -> list[Contender]:
        """The contenders of a selection that are for its dtype."""
        named_ = [c for c in self.contenders if c.name in selection.contenders]
        return [contender for contender in named_ if contender.takes(selection.dtype)]


class Kept:
    """Rows that this machine measured for a panel, on disk as they come, of whatever code it had then."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.path: Path = places.cache() / "panels" / f"{slug(plan.suite)}.jsonl"

    def add(self, row: Row) -> None:
        """Put a row on the disk."""
        rows.append(self.path, row)

    def rows(self) -> list[Row]:
        """The latest row of each measurement by the present code on this machine.

        What is younger than an hour counts as live, as it does for a sweep that is continued.
        """
        if not device.has_gpu():
            return []
        ways = {contender.name: sweeps.way(contender) for contender in self.plan.contenders}
        latest: dict[object, Row] = {}
        for row in rows.readable(self.path):
            if row.suite == self.plan.suite and journal.way_of(row) == ways.get(row.contender):
                latest[place(row)] = row
        return [replace(row, kind=LIVE if _fresh(row) else RECORDED) for row in latest.values()]


def _fresh(row: Row) -> bool:
    return row.age_s() < journal.RESUME_WITHIN_S


@dataclass(frozen=True)
class Known:
    """What there is to show for a plan: measured here, and on the tape of a recorded device."""

    plan: Plan
    own: Sequence[Row]
    tape: Sequence[Row]

    def table(self, selection: Selection, *, tape: bool = True) -> pd.DataFrame:
        """Rows of one selection: this machine's, and the tape's where it is of another machine.

        Where nothing is recorded by the chosen clock the tape shows the plan's first one.
        """
        own = [row for row in self.own if selection.includes(row, self.plan.x)]
        taped = [row for row in self.tape if selection.includes(row, self.plan.x)]
        if not own and not taped:
            usual = replace(selection, clock=self.plan.clocks[0])
            taped = [row for row in self.tape if usual.includes(row, self.plan.x)]
        devices = {row.device for row in own}
        shown = own + [row for row in taped if (tape or not own) and row.device not in devices]
        return rows.table(shown, [*self.plan.others, self.plan.x])

    def measured(self) -> pd.DataFrame:
        """Of every selection by the first clock the rows of one origin.

        They are live where ``of`` and ``over`` were measured everywhere; else of an older sweep of this
        machine; else recorded. A sweep that was stopped early takes no claim's numbers away.
        """
        return tables.together([self._one_origin(selection) for selection in self.plan.everything()])

    def _one_origin(self, selection: Selection) -> pd.DataFrame:
        own = [row for row in self.own if selection.includes(row, self.plan.x)]
        live = [row for row in own if row.kind == LIVE]
        taped = [row for row in self.tape if selection.includes(row, self.plan.x)]
        sources = [live, [row for row in own if row.kind != LIVE], taped]
        whole = (found for found in sources if self._is_whole(found, selection))
        found = next(whole, live or own or taped)
        return rows.table(found, [*self.plan.others, self.plan.x])

    def _is_whole(self, found: Sequence[Row], selection: Selection) -> bool:
        there = {(row.contender, row.shape[self.plan.x]) for row in found}
        return all((name, x) in there for name in (self.plan.of, self.plan.over) for x in selection.values)


def slug(text: str) -> str:
    """The text as a file's name."""
    return "-".join(re.findall(r"[A-Za-z0-9]+", text))


def tape(plan: Plan) -> list[Row]:
    """What a recorded device left for this suite, as it stands on its tape."""
    return [row for row in rows.recorded(plan.suite) if row.suite == plan.suite]  # not those below it
