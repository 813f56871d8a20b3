"""Two files of rows side by side: which rows moved beyond their spread."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from labkit import rows
from labkit.plots.words import TIMES, digits, duration
from labkit.rows import Row


@dataclass(frozen=True)
class Moved:
    """A measurement whose two medians are further apart than the larger p80 - p20."""

    before: Row
    after: Row

    @property
    def ratio(self) -> float:
        """Time after over time before: above 1 it has become slower."""
        return _us(self.after) / _us(self.before)


@dataclass
class Comparison:
    """What became of the rows: moved (the slowest first), within the spread, lost, gained, only in one."""

    moved: list[Moved] = field(default_factory=list)
    within: int = 0
    lost: list[Row] = field(default_factory=list)
    """Rows of the second file without a time, where the first has one."""
    gained: list[Row] = field(default_factory=list)
    """Rows of the second file with a time, where the first has none."""
    untimed: int = 0
    """Measurements that have a time in neither file."""
    only_before: list[Row] = field(default_factory=list)
    only_after: list[Row] = field(default_factory=list)


def read(path: Path) -> list[Row]:
    """The rows of a file; ValueError when it is of another schema, cannot be read, or holds no rows or a time
    that is none."""
    try:
        if not path.exists():
            raise FileNotFoundError("there is no such file")
        found = rows.read(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not found:
        raise ValueError(f"{path}: holds no rows of the schema")
    for row in found:
        if row.median_us is not None and not 0 < row.median_us < math.inf:
            raise ValueError(f"{path}: {_named(row)}: {row.median_us} µs is no time")
    return found


def compare(before: Iterable[Row], after: Iterable[Row]) -> Comparison:
    """Match rows by suite, contender, direction, dtype, shape, clock and cache state; the last one counts."""
    first, second = ({row.key: row for row in each} for each in (before, after))
    found = Comparison(
        only_before=[row for key, row in first.items() if key not in second],
        only_after=[row for key, row in second.items() if key not in first],
    )
    for key, row in first.items():
        if key not in second:
            continue
        other = second[key]
        if row.median_us is None or other.median_us is None:
            found.lost += [other] if row.median_us is not None else []
            found.gained += [other] if other.median_us is not None else []
            found.untimed += row.median_us is None and other.median_us is None
        elif abs(other.median_us - row.median_us) > max(spread_us(row), spread_us(other)):
            found.moved.append(Moved(row, other))
        else:
            found.within += 1
    found.moved.sort(key=lambda each: -each.ratio)
    return found


def spread_us(row: Row) -> float:
    """p80 - p20 in microseconds; 0 where they are not known."""
    return row.p80_us - row.p20_us if row.p80_us is not None and row.p20_us is not None else 0.0


def table(found: Comparison) -> Table:
    """A line for each row that moved."""
    shown = Table()
    for name in ("suite", "contender", "direction", "dtype", "shape"):
        shown.add_column(name, overflow="fold")
    for name in ("before", "after", "time", "spread"):
        shown.add_column(name, justify="right", no_wrap=True)
    for each in found.moved:
        row = each.after
        spread = max(spread_us(each.before), spread_us(row))
        shown.add_row(
            row.suite,
            row.contender,
            row.direction,
            row.dtype,
            sizes(row),
            duration(_us(each.before)),
            duration(_us(row)),
            f"{digits(each.ratio)}{TIMES}",
            duration(spread) if spread else "none",
        )
    return shown


def sizes(row: Row) -> str:
    """The shape of a row as it is read: ``batch 256, width 160``."""
    return ", ".join(f"{axis} {size}" for axis, size in row.shape.items())


def machines(found: Iterable[Row]) -> str:
    """What a file's rows were measured on: devices and versions."""
    return "; ".join(
        dict.fromkeys(
            f"{row.device or 'unknown device'}, driver {row.driver or 'unknown'}, "
            f"torch {row.torch or 'unknown'}, triton {row.triton or 'unknown'}"
            for row in found
        )
    )


def summary(found: Comparison) -> list[str]:
    """The comparison in sentences; what is the same in both, or only in one, is counted."""
    slower = sum(each.ratio > 1 for each in found.moved)
    total = len(found.moved) + found.within
    said = [
        f"{len(found.moved)} of {total} rows moved beyond their spread: {slower} slower, "
        f"{len(found.moved) - slower} faster."
    ]
    said += [f"No time any more: {_named(row)}: {row.note or 'no reason given'}" for row in found.lost]
    said += [f"A time now: {_named(row)}" for row in found.gained]
    counts = {
        "have a time in neither file": found.untimed,
        "are only in the first file": len(found.only_before),
        "are only in the second file": len(found.only_after),
    }
    return said + [f"{count} rows {what}." for what, count in counts.items() if count]


def _named(row: Row) -> str:
    return f"{row.suite}, {row.contender}, {row.direction}, {row.dtype}, {sizes(row)}"


def _us(row: Row) -> float:
    assert row.median_us is not None, "only rows with a time are compared"
    return row.median_us
