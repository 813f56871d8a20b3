"""Two files of rows side by side: which rows moved beyond their spread."""

from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console

from labkit.bench.report import read, with_sizes
from labkit.measure.rows import Row
from labkit.plots.formatting import format_duration, format_ratio
from labkit.runs.console import print_table, say

KEY = ["suite", "contender", "direction", "dtype", "sizes", "clock", "cache"]
"""What was measured, whenever and wherever that was."""


def compare(before: list[Row], after: list[Row]) -> pd.DataFrame:
    """A line for each measurement that has a time in both files, the last one of each; the slowest first.

    ``ratio`` is time after over time before. ``moved`` says whether the medians are further apart than the
    larger p80 - p20, the ``spread``. Columns of the second file end in ``_after``.
    """
    first, second = (
        with_sizes(each).dropna(subset="median_us").drop_duplicates(KEY, keep="last")
        for each in (before, after)
    )
    found = first.merge(second, on=KEY, suffixes=("", "_after"), sort=False)
    spreads = found["p80_us"] - found["p20_us"], found["p80_us_after"] - found["p20_us_after"]
    found["spread"] = np.fmax(*spreads).fillna(0.0)
    found["ratio"] = found["median_us_after"] / found["median_us"]
    found["moved"] = (found["median_us_after"] - found["median_us"]).abs() > found["spread"]
    return found.sort_values("ratio", ascending=False, kind="stable", ignore_index=True)


def show(console: Console, before: Path, after: Path) -> None:
    """Print what two files were measured on, and a table of the rows that moved.

    ValueError for a file that is not of the schema, or holds no rows.
    """
    files = {path: read(path) for path in (before, after)}
    for path, measured in files.items():
        say(console, f"{path}: {machines(measured)}")
    found = compare(files[before], files[after])
    moved = found[found["moved"]]
    table = moved[KEY[:5]].assign(
        before=moved["median_us"].map(format_duration),
        after=moved["median_us_after"].map(format_duration),
        time=moved["ratio"].map(format_ratio),
        spread=moved["spread"].map(format_duration),
    )
    print_table(console, table)
    slower = (moved["ratio"] > 1).sum()
    faster = len(moved) - slower
    said = f"{len(moved)} of {len(found)} rows moved beyond their spread: {slower} slower, {faster} faster."
    say(console, said)
    for path, measured in files.items():
        others = len(measured) - len(found)
        if others:
            say(console, f"{path}: {others} rows more, without a time or not in the other file.")


def machines(measured: list[Row]) -> str:
    """What a file's rows were measured on: devices and versions."""
    named = (
        f"{row.device or 'unknown device'}, driver {row.driver or 'unknown'}, "
        f"torch {row.torch or 'unknown'}, triton {row.triton or 'unknown'}"
        for row in measured
    )
    return "; ".join(dict.fromkeys(named))
