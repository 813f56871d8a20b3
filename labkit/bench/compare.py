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
    """A line for each measurement of either file, the last one of each counting; the slowest first.

    ``outcome`` is moved (the medians are further apart than the larger p80 - p20), within, lost (a time in
    the first file only), gained, untimed, first or second (in that file only); ``ratio`` is time after over
    time before. Columns of the second file end in ``_after``.
    """
    first, second = (with_sizes(each).drop_duplicates(KEY, keep="last") for each in (before, after))
    found = first.merge(second, how="outer", on=KEY, suffixes=("", "_after"), indicator="file", sort=False)
    was, now = found["median_us"], found["median_us_after"]
    spreads = found["p80_us"] - found["p20_us"], found["p80_us_after"] - found["p20_us_after"]
    found["spread"] = np.fmax(*spreads).fillna(0.0)
    found["ratio"] = now / was
    outcomes = {
        "first": found["file"] == "left_only",
        "second": found["file"] == "right_only",
        "untimed": was.isna() & now.isna(),
        "lost": now.isna(),
        "gained": was.isna(),
        "moved": (now - was).abs() > found["spread"],
    }
    found["outcome"] = np.select(list(outcomes.values()), list(outcomes), "within")
    return found.sort_values("ratio", ascending=False, kind="stable", ignore_index=True)


def show(console: Console, before: Path, after: Path) -> None:
    """Print what two files were measured on, a table of the rows that moved, and the rest in sentences.

    ValueError for a file that is not of the schema, or holds no rows.
    """
    files = {path: read(path) for path in (before, after)}
    for path, measured in files.items():
        say(console, f"{path}: {machines(measured)}")
    found = compare(files[before], files[after])
    moved, counts = found[found["outcome"] == "moved"], found["outcome"].value_counts()
    table = moved[KEY[:5]].assign(
        before=moved["median_us"].map(format_duration),
        after=moved["median_us_after"].map(format_duration),
        time=moved["ratio"].map(format_ratio),
        spread=moved["spread"].map(format_duration),
    )
    print_table(console, table)
    slower, timed = (moved["ratio"] > 1).sum(), len(moved) + counts.get("within", 0)
    faster = len(moved) - slower
    say(console, f"{len(moved)} of {timed} rows moved beyond their spread: {slower} slower, {faster} faster.")
    for outcome, what in {"lost": "No time any more", "gained": "A time now"}.items():
        for row in found[found["outcome"] == outcome].to_dict("records"):
            why = f": {row['note_after'] or 'no reason given'}" if outcome == "lost" else ""
            say(console, f"{what}: {', '.join(row[name] for name in KEY[:5])}{why}")
    said = {
        "untimed": "have a time in neither file",
        "first": "are only in the first file",
        "second": "are only in the second file",
    }
    for outcome, where in said.items():
        if outcome in counts:
            say(console, f"{counts[outcome]} rows {where}.")


def machines(measured: list[Row]) -> str:
    """What a file's rows were measured on: devices and versions."""
    named = (
        f"{row.device or 'unknown device'}, driver {row.driver or 'unknown'}, "
        f"torch {row.torch or 'unknown'}, triton {row.triton or 'unknown'}"
        for row in measured
    )
    return "; ".join(dict.fromkeys(named))
