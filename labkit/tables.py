"""Figures taken from tables of measurements, each with its origin; kinds and devices never mix."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import pandas as pd

from labkit import roofline
from labkit.claims import Measured


def _axes(table: pd.DataFrame) -> set[str]:
    return {axis for shape in table["shape"] for axis in shape}


def together(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Tables one below the other."""
    return pd.concat(tables, ignore_index=True)


def at(table: pd.DataFrame, contender: str, column: str = "median_us", **where: Any) -> Measured | None:
    """One figure of a table with its origin, for a claim: ``at(table, "labkit", width=1024)``.

    None when there is no such row, or it is a gap. ValueError when several rows fit.
    """
    fitting = _where(table, {"contender": contender} | where)
    fitting = fitting[fitting[column].notna()]
    if len(fitting) > 1:
        raise ValueError(f"table: {len(fitting)} rows of {contender} fit {where}; name more columns")
    if fitting.empty:
        return None
    row = fitting.iloc[0]
    return Measured(float(row[column]), row["kind"], row["device"])


class _Origin(Protocol):
    """A profile, or a row of a table: it says where it was measured."""

    @property
    def kind(self) -> Any: ...
    @property
    def device(self) -> str: ...


def taken(value: float, origin: _Origin) -> Measured | None:
    """A figure read off a profile or computed from a table's row, with that one's origin, for a claim.

    None when the origin is no device: the launches of the profile were counted, not seen.
    """
    return Measured(value, origin.kind, origin.device) if origin.device else None


def _where(table: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    for name, value in where.items():
        if name not in table:
            return table.iloc[:0]  # an empty table has no columns for the axes
        table = table[table[name] == value]
    return table


def _origin(table: pd.DataFrame) -> tuple[Any, str]:
    """Kind and device of all rows; ValueError when they are of several, which no figure may mix."""
    found = table[["kind", "device"]].drop_duplicates()
    if len(found) > 1:
        raise ValueError(f"table: rows of {' and of '.join(found.agg(' '.join, axis=1))}; select one of them")
    return found["kind"].iloc[0], found["device"].iloc[0]


def quotient(over: Measured | float | None, under: Measured | float | None) -> Measured | None:
    """One figure divided by another, one of them measured, with its origin.

    None when either is missing, or they are of two devices or kinds, which no figure may mix.
    """
    if over is None or under is None:
        return None
    origins = {(v.kind, v.device) for v in (over, under) if isinstance(v, Measured)}
    if len(origins) > 1:
        return None
    measured = over if isinstance(over, Measured) else under
    if not isinstance(measured, Measured):
        raise ValueError("over, under: neither of them was measured")
    top, bottom = (v.value if isinstance(v, Measured) else v for v in (over, under))
    return replace(measured, value=top / bottom)


def ratio(table: pd.DataFrame, of: str, over: str, **where: Any) -> Measured | None:
    """How many times faster ``of`` is than ``over`` at one point, with its origin, for a claim.

    None when either is missing, or when they were timed by different clocks.
    """
    both = _where(table, where)
    both = both[both["contender"].isin([of, over]) & both["median_us"].notna()]
    if both["clock"].nunique() > 1 and "clock" not in where:
        return None
    return quotient(at(table, over, **where), at(table, of, **where))


def worst(table: pd.DataFrame, of: str, over: str) -> Measured | None:
    """The longest time of ``of`` over that of ``over`` among all measured cases, ties counted as 1.

    Cases are told apart by direction, dtype and shape; a tie is a difference inside the larger p80 - p20.
    None unless both were measured in every case of either, by one clock and in one cache state.
    """
    apart = ["direction", "dtype", *(name for name in table if name in _axes(table))]
    ratios: list[float] = []
    for _, case in table[table["contender"].isin([of, over])].groupby(apart, dropna=False):
        both = roofline.paired(case, of, over, "direction")
        if both.empty or case["median_us"].isna().any():
            return None
        for _, row in both.iterrows():
            slower = row["median_us_of"] - row["median_us_over"]
            tie = abs(slower) <= max(row["spread_of"], row["spread_over"])
            ratios.append(1.0 if tie else row["median_us_of"] / row["median_us_over"])
    return Measured(max(ratios), *_origin(table)) if ratios else None


def lowest(table: pd.DataFrame, column: str, **where: Any) -> Measured | None:
    """The smallest figure of a column among the rows that fit, with its origin; None when there is a gap."""
    fitting = _where(table, where)
    if fitting.empty or fitting[column].isna().any():
        return None
    return Measured(float(fitting[column].min()), *_origin(fitting))


def crossover(table: pd.DataFrame, of: str, over: str, x: str = "width", **where: Any) -> Measured | None:
    """From which ``x`` on ``of`` is faster than ``over``, interpolated on log-log axes, with its origin.

    None when they do not change places, or do so more than once.
    """
    both = roofline.paired(_where(table, where), of, over, x)
    if both.empty:
        return None
    ours, theirs = both["median_us_of"].tolist(), both["median_us_over"].tolist()
    points = roofline.crossovers(both[x].tolist(), ours, theirs)
    if len(points) != 1 or ours[-1] >= theirs[-1]:
        return None
    return Measured(points[0], *_origin(both))


def growth(speedups: pd.DataFrame, x: str = "width") -> Measured | None:
    """The power of ``x`` that a speedup grows with, fitted on log-log axes; None below two points."""
    if len(speedups) < 2:
        return None
    return Measured(roofline.slope(speedups[x], speedups["speedup"]), *_origin(speedups))


def speedup(
    table: pd.DataFrame, of: str, over: str, x: str = "width", series: str | None = None
) -> pd.DataFrame:
    """How many times faster ``of`` is than ``over``, as plots.speedups draws it.

    Columns series, contender, ``x``, speedup, low, high, kind, device, date, noise. ``low`` and ``high`` are
    what the spreads of both allow (p20 over p80, and the reverse); ``noise`` is what disturbed either.
    """
    both = roofline.paired(table, of, over, x)
    return pd.DataFrame(
        {
            "series": series or f"{of} over {over}",
            "contender": of,
            x: both[x],
            "speedup": both["median_us_over"] / both["median_us_of"],
            "low": both["p20_us_over"] / both["p80_us_of"],
            "high": both["p80_us_over"] / both["p20_us_of"],
            "kind": both["kind"],
            "device": both["device"],
            "date": both["date_of"],
            "source": "",
            "noise": both["noise_of"].where(both["noise_of"] != "", both["noise_over"]),
        }
    )


def pivot(
    table: pd.DataFrame, value: str, rows: str | list[str], columns: str | list[str], digits: int = 2
) -> pd.DataFrame:
    """One figure of each row as a table to read, in the order in which the rows were measured."""
    if not table.empty:
        _origin(table)  # refuses a mixture
    wide = table.pivot_table(value, rows, columns, sort=False, aggfunc="first")
    return wide.round(digits)


def relative(table: pd.DataFrame, over: str) -> pd.DataFrame:
    """The table with a column ``times_as_long``: each time over that of ``over`` in the same case.

    Cases are told apart by direction, dtype, clock, cache and shape; NaN where ``over`` has no time.
    """
    apart = ["direction", "dtype", "clock", "cache", *(name for name in table if name in _axes(table))]
    base = table.loc[table["contender"] == over, [*apart, "median_us"]]
    both = table.merge(base, on=apart, how="left", suffixes=("", "_over"))
    return both.assign(times_as_long=both["median_us"] / both["median_us_over"]).drop(
        columns="median_us_over"
    )


def sized(table: pd.DataFrame) -> pd.DataFrame:
    """The table with a column ``sizes``, a heading for each shape: "8192 x 768 x 3072"."""
    return table.assign(sizes=[" x ".join(str(size) for size in shape.values()) for shape in table["shape"]])


def speedups(
    table: pd.DataFrame, of: str, over: str, rows: str | list[str], columns: str | list[str]
) -> pd.DataFrame:
    """How many times faster ``of`` is than ``over``, as a table to read."""
    slow, fast = (pivot(table[table["contender"] == n], "median_us", rows, columns, 9) for n in (over, of))
    return (slow / fast).round(2)
