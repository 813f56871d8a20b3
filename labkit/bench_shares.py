"""How near to its floor a row is, and how it stands to the others that do the same work."""

from collections.abc import Iterable
from dataclasses import dataclass

from labkit import roofline
from labkit.machine import Roofs
from labkit.rows import Row


@dataclass(frozen=True)
class Case:
    """One point of a benchmark: ours, the fastest where there are several, and the best that is not ours."""

    ours: Row
    best: Row | None

    @property
    def times_as_fast(self) -> float | None:
        """Time of the best other over ours; None where there is no other."""
        return us(self.best) / us(self.ours) if self.best else None


@dataclass(frozen=True)
class Group:
    """The cases of one suite, direction, dtype and clock, and how many of them have no time of ours."""

    suite: str
    direction: str
    dtype: str
    clock: str
    cases: tuple[Case, ...]
    missing: int


def ours(row: Row) -> bool:
    """Whether it is one of the course's own kernels: ``labkit``, or ``labkit, one launch``."""
    return row.contender.partition(",")[0] == "labkit"


def title(suite: str) -> str:
    """A suite as it is read: ``linear, matmul`` for bench/linear/matmul."""
    return suite.removeprefix("bench/").replace("/", ", ").replace("_", " ")


def share(row: Row, roofs: Roofs) -> float:
    """Floor over time: 1 is the roofline floor of the row's bytes and operations. Raises for a gap."""
    # TF32 is off unless a row says so, and it says so in its name
    dtype = "tf32" if "TF32" in row.contender else row.dtype
    floor = roofline.floor_us(roofs, min_bytes=row.min_bytes, flops=row.flops, dtype=dtype)
    return floor / us(row)


def us(row: Row) -> float:
    """The median in microseconds; ValueError for a gap."""
    if row.median_us is None:
        raise ValueError(f"{row.suite}: {row.contender} has no time")
    return row.median_us


def groups(measured: Iterable[Row]) -> list[Group]:
    """The rows by suite, direction, dtype and clock, in their order; groups without a row of ours left out.

    Only contenders of the same bytes and operations stand beside ours. A row that was to be timed by graph
    and was timed by events counts as its own clock.
    """
    found: dict[tuple[str, str, str, str], dict[tuple[tuple[str, int], ...], list[Row]]] = {}
    for row in measured:
        cases = found.setdefault((row.suite, row.direction, row.dtype, row.clock), {})
        cases.setdefault(tuple(row.shape.items()), []).append(row)
    made = [Group(*key, *_cases(cases.values())) for key, cases in found.items()]
    return [group for group in made if group.cases or group.missing]


def _cases(points: Iterable[list[Row]]) -> tuple[tuple[Case, ...], int]:
    cases, missing = [], 0
    for rows in points:
        own, timed = [row for row in rows if ours(row)], [row for row in rows if row.median_us is not None]
        mine = min((row for row in timed if ours(row)), key=us, default=None)
        if mine is None:
            missing += bool(own)
            continue
        same = (mine.min_bytes, mine.flops)
        others = [row for row in timed if not ours(row) and (row.min_bytes, row.flops) == same]
        cases.append(Case(mine, min(others, key=us, default=None)))
    return tuple(cases), missing
