"""Floors from bytes, operations and launches; where two curves cross; the finding in a sentence."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from labkit.machine import Roofs


def floor_us(
    roofs: Roofs, *, min_bytes: float, flops: float = 0.0, dtype: str = "float32", launches: int = 1
) -> float:
    """No version runs faster: the largest of launch, memory and arithmetic floor, in microseconds.

    ``min_bytes`` must cross device memory at least once (each input read, each output written), at the
    rate of a large copy; ``flops`` are done at the rate of a large matmul in ``dtype`` ("tf32" for float32
    on the tensor cores).
    The roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009; here as time, with launches.
    """
    arithmetic = flops / roofs.matmul[dtype] * 1e6 if flops else 0.0
    return max(launches * roofs.node_us, min_bytes / roofs.bandwidth * 1e6, arithmetic)


def regimes(
    xs: Sequence[float], floors: Mapping[str, Callable[[float], float]]
) -> list[tuple[float, float, str]]:
    """Where each of several floors is the highest one: (from, to, name), in order of ``xs``."""
    spans: list[tuple[float, float, str]] = []
    for x in xs:
        name = max(floors, key=lambda n: floors[n](x))
        if spans and spans[-1][2] == name:
            spans[-1] = (spans[-1][0], x, name)
        else:
            start = spans[-1][1] if spans else x
            spans.append((start, x, name))
    return spans


def crossovers(xs: Sequence[float], first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Where the curve ``first`` crosses ``second``: interpolated on log-log axes, ascending.

    ValueError unless the three have one length and hold positive numbers.
    """
    if not len(xs) == len(first) == len(second):
        raise ValueError("crossovers: xs, first and second must have one length")
    columns = np.array([xs, first, second], dtype=float)
    if not (columns > 0).all():
        raise ValueError("crossovers: xs, first and second must be positive")
    x, a, b = np.log(columns[:, np.argsort(columns[0])])
    gap = a - b
    apart = np.flatnonzero(gap)
    found = []
    for i, j in pairwise(apart):
        if gap[i] * gap[j] < 0:
            equal = x[i + 1 : j]  # where they meet at measured points, the middle of those
            between = x[i] - gap[i] * (x[j] - x[i]) / (gap[j] - gap[i])
            found.append(float(np.exp((equal[0] + equal[-1]) / 2 if len(equal) else between)))
    return found


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Exponent p of the power law y ~ x**p that fits best, by least squares on log-log axes."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def finding(table: pd.DataFrame, of: str, over: str, x: str = "width") -> str:
    """Who wins where, and by how much, from a table of one dtype, direction and clock.

    "labkit is faster than nn.Linear from width 412 on: 21.4x at 1024." Differences inside the larger
    p80 - p20 count as ties.
    """
    both = paired(table, of, over, x)
    if both.empty:
        return f"No {x} was measured for both {of} and {over}."
    ratio = (both["median_us_over"] / both["median_us_of"]).to_numpy()
    xs = both[x].to_numpy(float)
    spread = both[["spread_of", "spread_over"]].max(axis=1).to_numpy()
    tie = np.abs(both["median_us_over"] - both["median_us_of"]).to_numpy() <= spread
    best = int(np.argmax(ratio))
    peak = (
        f"{ratio[best]:.2g}x at {x} {xs[best]:g}"
        if ratio[best] < 10
        else f"{ratio[best]:.0f}x at {x} {xs[best]:g}"
    )
    if tie.all():
        return f"{of} and {over} tie at every measured {x}."
    if (tie | (ratio > 1)).all():
        return f"{of} is never slower than {over}, and {peak}."
    if (tie | (ratio < 1)).all():
        worst = int(np.argmin(ratio))
        slower = f"{1 / ratio[worst]:.2g}x as long at {x} {xs[worst]:g}"
        return f"{of} is never faster than {over}; it takes {slower}."
    ours = both["median_us_of"].to_numpy()
    points = crossovers(xs, ours.tolist(), np.where(tie, ours, both["median_us_over"]).tolist())
    if len(points) == 1 and ratio[~tie][-1] > 1:
        return f"{of} is faster than {over} from {x} {points[0]:.0f} on: {peak}."
    if len(points) == 1:
        return f"{of} is faster than {over} below {x} {points[0]:.0f}: {peak}."
    places = ", ".join(f"{point:.0f}" for point in points)
    return f"{of} and {over} change places at {x} {places}; {of} is at best {peak}."


def paired(table: pd.DataFrame, of: str, over: str, x: str = "width") -> pd.DataFrame:
    """The two contenders side by side where both were measured, on the same device and in the same way."""
    good = table[table["median_us"].notna()].copy()
    good["spread"] = good["p80_us"] - good["p20_us"]
    same = ["kind", "device", *(name for name in ("clock", "cache") if name in table), x]
    good["noise"] = good["noise"].fillna("") if "noise" in good else ""
    columns = [*same, "median_us", "p20_us", "p80_us", "spread", "date", "noise"]
    left, right = (good.loc[good["contender"] == name, columns] for name in (of, over))
    for name, part in ((of, left), (over, right)):
        if part.duplicated(["kind", "device", x]).any():
            raise ValueError(
                f"table: several rows of {name} for one {x}; select one dtype, direction and clock"
            )
    return left.merge(right, on=same, suffixes=("_of", "_over")).sort_values(x, ignore_index=True)
