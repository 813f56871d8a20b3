"""The rows of a sweep as a table that answers questions: a time, a ratio, a finding, with their origin."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd


def _arithmetic(
    operation: Callable[[float, float], float],
) -> Callable[["Measured", "Measured | float"], "Measured"]:
    """A method that applies an operation to a figure and another one, or a plain number."""

    def method(self: "Measured", other: "Measured | float") -> "Measured":
        if not isinstance(other, Measured):
            return replace(self, value=operation(self.value, other))
        if (self.kind, self.device) != (other.kind, other.device):
            return MISSING
        return replace(self, value=operation(self.value, other.value))

    return method


@dataclass(frozen=True, order=True)
class Measured:
    """A figure and where it comes from: measured now (live), read from a tape, or published by somebody.

    It adds, subtracts, multiplies and divides with plain numbers, and with figures of the same origin. With
    one of another device or kind the result is `MISSING`, as no figure may mix them.
    """

    value: float
    kind: Literal["live", "recorded", "published"]
    device: str
    """Empty for a figure that nobody measured."""

    __add__ = __radd__ = _arithmetic(operator.add)
    __mul__ = __rmul__ = _arithmetic(operator.mul)
    __sub__ = _arithmetic(operator.sub)
    __rsub__ = _arithmetic(lambda value, other: other - value)
    __truediv__ = _arithmetic(operator.truediv)
    __rtruediv__ = _arithmetic(lambda value, other: other / value)

    def __getitem__(self, name: str) -> "Measured":
        """Of a table that nobody measured every entry is missing, too."""
        if self.device:
            raise TypeError("a figure is no table")
        return self

    def __float__(self) -> float:
        """The number; nan where nobody measured it."""
        return self.value

    def __format__(self, spec: str) -> str:
        """The number as ``f"{time:.1f}"`` writes it; nan where nobody measured it."""
        return format(self.value, spec) if spec else str(self)


MISSING = Measured(math.nan, "live", "")
"""A figure that nobody measured; what is computed from it is missing, too."""


def measured(value: float, like: Any) -> Measured:
    """A figure read off a profile or computed from a table's row, with the kind and device of that.

    `MISSING` when the device is empty: the launches of the profile were counted, not seen.
    """
    return Measured(value, like.kind, like.device) if like.device else MISSING


def number(value: Measured | float | None) -> float | None:
    """The plain number; None for what nobody measured."""
    if isinstance(value, Measured):
        return value.value if value.device else None
    return value


SIDE = ("median_us", "p20_us", "p80_us", "spread", "date", "noise")
"""What is known of either contender where two are set side by side."""


class Results(pd.DataFrame):
    """A DataFrame with a row for each measured point; what pandas does with one, it does with this.

    ``where`` names columns and their values: ``results.time("eager", batch=256, clock="host")``. Each answer
    is a `Measured`, and `MISSING` where no row fits, where the one that fits is a gap, or where the rows come
    from different devices or clocks. ValueError where several rows fit.
    """

    @property
    def _constructor(self) -> type["Results"]:
        return Results

    # ---- one figure ----------------------------------------------------------------------------------------

    def time(self, contender: str, **where: Any) -> Measured:
        """The median time of a contender in microseconds."""
        fitting = self._where(contender=contender, **where)
        if fitting.empty or fitting["median_us"].isna().all():
            return MISSING
        fitting = fitting[fitting["median_us"].notna()]
        if len(fitting) > 1:
            raise ValueError(f"table: {len(fitting)} rows of {contender} fit {where}; name more columns")
        return measured(float(fitting["median_us"].iloc[0]), fitting.iloc[0])

    def speedup(self, of: str, over: str, **where: Any) -> Measured:
        """How many times as fast as ``over`` is ``of``, both timed by one clock."""
        found = self._where(**where)
        if not found.empty:
            timed = found[found["contender"].isin([of, over]) & found["median_us"].notna()]
            if timed["clock"].nunique() > 1:
                return MISSING
        return self.time(over, **where) / self.time(of, **where)

    # ---- tables --------------------------------------------------------------------------------------------

    def speedups(self, of: str, over: str, x: str = "width", series: str | None = None) -> pd.DataFrame:
        """How many times as fast as ``over`` is ``of`` at each ``x``, as ``plot.speedups`` draws it.

        Columns series, contender, ``x``, speedup, low, high, kind, device, date, noise. ``low`` and ``high``
        are what the spreads of both allow (p20 over p80, and the reverse); ``noise`` disturbed either.
        """
        both = self.paired(of, over, x)
        found = pd.DataFrame({"series": series or f"{of} over {over}", "contender": of, x: both[x]})
        ratios = {"speedup": ("median", "median"), "low": ("p20", "p80"), "high": ("p80", "p20")}
        for name, (above, below) in ratios.items():
            found[name] = both[f"{above}_us_over"] / both[f"{below}_us_of"]
        noise = both["noise_of"].where(both["noise_of"] != "", both["noise_over"])
        return found.assign(**both[["kind", "device"]], date=both["date_of"], source="", noise=noise)

    def describe_speedup(self, of: str, over: str, x: str = "width") -> str:
        """Who wins where, and by how much, of one dtype, direction and clock.

        "labkit is faster than nn.Linear from width 512 on: 21x at width 1024." Places are measured ones.
        Differences inside the larger p80 - p20 count as ties.
        """
        both = self.paired(of, over, x)
        if both.empty:
            return f"No {x} was measured for both {of} and {over}."
        ratio = (both["median_us_over"] / both["median_us_of"]).to_numpy()  # per x, above 1 where ``of`` wins
        xs, tie = both[x].to_numpy(float), _is_tie(both).to_numpy()
        best, worst = int(ratio.argmax()), int(ratio.argmin())
        times = f"{ratio[best]:.2g}" if ratio[best] < 10 else f"{ratio[best]:.0f}"
        peak = f"{times}x at {x} {xs[best]:g}"
        if tie.all():
            return f"{of} and {over} tie at every measured {x}."
        if (tie | (ratio > 1)).all():
            return f"{of} is never slower than {over}, and {peak}."
        if (tie | (ratio < 1)).all():
            slower = f"{1 / ratio[worst]:.2g}x as long at {x} {xs[worst]:g}"
            return f"{of} is never faster than {over}; it takes {slower}."
        decided = np.flatnonzero(~tie)
        wins = ratio[decided] > 1
        changes = xs[decided[1:]][np.diff(wins)]  # the first ``x`` at which the other one wins
        places = ", ".join(f"{place:g}" for place in changes)
        if len(changes) > 1:
            return f"{of} and {over} change places at {x} {places}; {of} is at best {peak}."
        where = f"from {x} {places} on" if wins[-1] else f"below {x} {places}"
        return f"{of} is faster than {over} {where}: {peak}."

    def paired(self, of: str, over: str, x: str = "width") -> "Results":
        """The two contenders side by side where both were measured, on one device and in the same way."""
        if self.empty:
            sides = [f"{name}_{side}" for side in ("of", "over") for name in SIDE]
            return Results(columns=["kind", "device", x, *sides])
        good = self[self["median_us"].notna()].copy()
        good["spread"] = good["p80_us"] - good["p20_us"]
        same = ["kind", "device", *(name for name in ("clock", "cache") if name in self), x]
        good["noise"] = good["noise"].fillna("") if "noise" in good else ""
        columns = [*same, *SIDE]
        left, right = (good.loc[good["contender"] == name, columns] for name in (of, over))
        for name, part in ((of, left), (over, right)):
            if part.duplicated(["kind", "device", x]).any():
                several = f"several rows of {name} for one {x}"
                raise ValueError(f"table: {several}; select one dtype, direction and clock")
        both = left.merge(right, on=same, suffixes=("_of", "_over"))
        return Results(both.sort_values(x, ignore_index=True))

    # ---- what the above share ------------------------------------------------------------------------------

    def _where(self, **where: Any) -> "Results":
        found = self
        for name, value in where.items():
            if name not in found:
                return Results(found.iloc[:0])  # an empty table has no columns for the axes
            found = found[found[name] == value]
        return found


def _is_tie(paired: pd.DataFrame) -> "pd.Series[bool]":
    """Where two paired contenders tie: their medians differ by no more than the larger p80 - p20."""
    difference = paired["median_us_of"] - paired["median_us_over"]
    return difference.abs() <= paired[["spread_of", "spread_over"]].max(axis=1)
