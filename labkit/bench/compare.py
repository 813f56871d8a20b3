"""Two files of rows side by side: which rows moved beyond their spread."""

from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from labkit.bench.report import read, with_sizes
from labkit.measure import rows
from labkit.plots.formatting import TIMES_SIGN, format_duration, format_number
from labkit.runs.console import say

KEY = ["suite", "contender", "direction", "dtype", "sizes", "clock", "cache"]
"""What was measured, whenever and wherever that was."""


def compare(before: list[rows.Row], after: list[rows.Row]) -> pd.DataFrame:
    """A line for each measurement of either file, the last one of each counting; the slowest first.

    ``fate`` is moved (the medians are further apart than the larger p80 - p20), within, lost (a time in the
    first file only), gained, untimed, first or second (in that file only); ``ratio`` is time after over time
    before. Columns of the second file end in ``_after``.
    """
    first, second = (with_sizes(each).drop_duplicates(KEY, keep="last") for each in (before, after))
    found = first.merge(second, how="outer", on=KEY, suffixes=("", "_after"), indicator="fate", sort=False)
    was, now = found["median_us"].astype(float), found["median_us_after"].astype(float)
    spreads = [
        found["p80_us" + end].astype(float) - found["p20_us" + end].astype(float) for end in ("", "_after")
    ]
    found["spread"] = pd.concat(spreads, axis=1).max(axis=1).fillna(0.0)
    found["ratio"] = now / was
    found["fate"] = np.select(
        [
            found["fate"] == "left_only",
            found["fate"] == "right_only",
            was.isna() & now.isna(),
            now.isna(),
            was.isna(),
            (now - was).abs() > found["spread"],
        ],
        ["first", "second", "untimed", "lost", "gained", "moved"],
        "within",
    )
    return found.sort_values("ratio", ascending=False, kind="stable", ignore_index=True)


def show(console: Console, before: Path, after: Path) -> None:
    """Print what two files were measured on, a table of the rows that moved, and the rest in sentences.

    ValueError for a file that is not of the schema, holds no rows, or a time that is none, and for one file
    named twice.
    """
    if before.resolve() == after.resolve():
        raise ValueError("--compare names one file twice: give it two")
    files = [read(path) for path in (before, after)]
    for path, measured in zip((before, after), files, strict=True):
        say(console, f"{path}: {machines(measured)}")
    found = compare(*files)
    moved, counts = found[found["fate"] == "moved"], found["fate"].value_counts()
    if len(moved):
        table = Table(*KEY[:5], "before", "after", "time", "spread")
        for row in moved.to_dict("records"):
            times = [format_duration(row[each]) for each in ("median_us", "median_us_after", "spread")]
            cells = [
                *(row[name] for name in KEY[:5]),
                *times[:2],
                format_number(row["ratio"]) + TIMES_SIGN,
                times[2],
            ]
            table.add_row(*map(Text, cells))
        console.print(table)
    slower, timed = (moved["ratio"] > 1).sum(), len(moved) + counts.get("within", 0)
    say(
        console,
        f"{len(moved)} of {timed} rows moved beyond their spread: {slower} slower, "
        f"{len(moved) - slower} faster.",
    )
    for fate, what in {"lost": "No time any more", "gained": "A time now"}.items():
        for row in found[found["fate"] == fate].to_dict("records"):
            why = f": {row['note_after'] or 'no reason given'}" if fate == "lost" else ""
            say(console, f"{what}: {', '.join(row[name] for name in KEY[:5])}{why}")
    said = {
        "untimed": "have a time in neither file",
        "first": "are only in the first file",
        "second": "are only in the second file",
    }
    for fate, what in said.items():
        if fate in counts:
            say(console, f"{counts[fate]} rows {what}.")


def machines(measured: list[rows.Row]) -> str:
    """What a file's rows were measured on: devices and versions."""
    named = (
        f"{row.device or 'unknown device'}, driver {row.driver or 'unknown'}, "
        f"torch {row.torch or 'unknown'}, triton {row.triton or 'unknown'}"
        for row in measured
    )
    return "; ".join(dict.fromkeys(named))
