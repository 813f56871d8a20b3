"""How ours stands to the best other in each case: printed, and as a page with one picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from labkit import paths
from labkit.measure import roofline, rows
from labkit.measure.rows import Row
from labkit.plots.formatting import TIMES_SIGN, format_number
from labkit.plots.style import INK, MUTED, OURS, WIDTH, Picture, course_style
from labkit.runs.console import say

CASE = ["suite", "direction", "dtype", "clock", "sizes", "device"]
GROUP = CASE[:4]
WORK = ["min_bytes", "flops"]
WORST = 10
"""Cases that are printed one by one."""
READING = (
    "*Ours over the best other*: our time over that of the fastest contender that is not ours and does the "
    "same work in the same case; below 1 ours is faster. *Share*: the time of a copy of the same bytes, or "
    "of the same operations at the rate of a large cuBLAS product, whichever is longer, over ours."
)


def read(path: Path) -> list[Row]:
    """The rows of a file; ValueError where it is of another schema, cannot be read, or holds no rows or a
    time that is none."""
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
            raise ValueError(f"{path}: {row.suite}, {_sizes(row)}: {row.median_us} µs is no time")
    return found


def _sizes(row: Row) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sorted(row.shape.items()))


def with_sizes(measured: Sequence[Row]) -> pd.DataFrame:
    """Rows as a table, the shape in words in the column ``sizes``."""
    return rows.table(measured).assign(sizes=[_sizes(row) for row in measured])


def cases(measured: Sequence[Row]) -> pd.DataFrame:
    """A line for each case in which ours has a time, the worst first.

    A case is a suite, direction, dtype, clock, shape and device. ``ratio`` is the time of ours, the fastest
    where there are several, over that of the fastest other of the same bytes and operations, which
    ``contender_other`` names; none where there is no other. ``share`` is what the device's copy, or cuBLAS
    for the operations, would take over ours; none by the host's clock.
    """
    timed = with_sizes(measured).dropna(subset="median_us").sort_values("median_us", kind="stable")
    own = timed["contender"].str.split(",").str[0] == "labkit"
    ours = timed[own].drop_duplicates(CASE)
    others = timed[~own].drop_duplicates([*CASE, *WORK])[[*CASE, *WORK, "contender", "median_us"]]
    found = ours.merge(others, how="left", on=[*CASE, *WORK], suffixes=("", "_other"))
    found = found.astype({"copy_us": float})
    found["suite"] = found["suite"].str.removeprefix("bench/")
    found["ratio"] = found["median_us"] / found["median_us_other"].astype(float)
    roofs = {device: roofline.roofs_of(part) for device, part in found.groupby("device")}
    found["share"] = [_share(row, roofs[row["device"]]) for row in found.to_dict("records")]
    return found.sort_values("ratio", ascending=False, kind="stable", ignore_index=True)


def _share(row: dict[str, Any], roofs: roofline.Roofs | None) -> float:
    if row["clock"] == "host":
        return math.nan
    computed = row["flops"] / roofs.matmul[row["dtype"]] * 1e6 if roofs else math.nan
    return float(np.fmax(row["copy_us"], computed) / row["median_us"])


def groups(found: pd.DataFrame) -> pd.DataFrame:
    """A line for each suite, direction, dtype and clock, with its cases, ratio and share; the worst first."""
    named = {"cases": ("sizes", "size"), "median": ("ratio", "median"), "worst": ("ratio", "max")}
    shares = {"share": ("share", "median"), "least": ("share", "min")}
    return found.groupby(GROUP, sort=False).agg(**named, **shares).reset_index()


def gaps(measured: Sequence[Row]) -> list[str]:
    """Who has no time and why, a line for each contender and reason: how many rows, of which suites."""
    lost = [row for row in measured if row.median_us is None]
    return [
        f"{contender}, {len(part)} of {', '.join(part['suite'].unique())}: {note or 'no reason given'}"
        for (contender, note), part in rows.table(lost).groupby(["contender", "note"], sort=False)
    ]


def _number(value: Any, unit: str = "") -> str:
    return (
        str(value)
        if isinstance(value, str | int)
        else ""
        if math.isnan(value)
        else format_number(value) + unit
    )


def show(console: Console, measured: Sequence[Row]) -> None:
    """Print a line for each group, the worst cases, and who has no time; write the page to build/."""
    found = cases(measured)
    worst = found.dropna(subset="ratio").head(WORST)
    columns = ["suite", "direction", "dtype", "sizes", "contender_other", "ratio", "share"]
    by_group = groups(found).drop(columns=["clock", "least"])
    tables = {"ours over the best other": by_group, "the worst cases": worst[columns]}
    for title, table in tables.items():
        if len(table):
            printed = Table(*(Column(name, overflow="fold") for name in table.columns), title=title)
            for row in table.itertuples(index=False):
                printed.add_row(*(Text(_number(value)) for value in row))
            console.print(printed)
    for gap in gaps(measured):
        say(console, f"no time: {gap}")
    picture(found).save(paths.BUILD / "benchmark.png")
    paths.write_text(paths.BUILD / "benchmark.md", f"# Benchmark\n\n{page(measured)}")
    say(console, f"Report: {paths.BUILD / 'benchmark.md'}")


@course_style()
def picture(found: pd.DataFrame) -> Picture:
    """A dot for each case over its ratio, on a line for each group; the group with the worst is on top."""
    drawn = found.dropna(subset="ratio")
    named = [(", ".join(name), part["ratio"]) for name, part in drawn.groupby(GROUP, sort=False)]
    figure = Figure(figsize=(WIDTH, 1.2 + 0.24 * len(named)), layout="constrained")
    axes = figure.subplots()
    for place, (_, ratios) in enumerate(named):
        axes.plot(ratios, [place] * len(ratios), "o", color=OURS.colour, alpha=0.5, markersize=5)
        axes.plot(ratios.median(), place, "|", color=INK, markersize=12, markeredgewidth=2)
    axes.axvline(1.0, color=MUTED)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: format_number(ratio)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(named)), [name for name, _ in named], fontsize=8)
    axes.set_ylim(max(len(named), 1) - 0.5, -0.5)
    axes.set_xlabel("our time over the best other's (lower is better); a bar is the median")
    said = [f"{name} {format_number(ratios.max())}" for name, ratios in named[:5]]
    return Picture(
        figure, f"Our time over the best other's, a dot a case. The worst: {'; '.join(said) or 'none'}."
    )


def page(measured: Sequence[Row]) -> str:
    """The report in Markdown: where the rows are from, the picture, a line a group, who has no time."""
    found = cases(measured)
    table = groups(found)
    lines = [
        [
            "suite",
            "direction",
            "dtype",
            "clock",
            "cases",
            "ours over the best other: median",
            "worst",
            "share: median",
            "least",
        ],
        ["---"] * 9,
        *([_number(value) for value in row] for row in table.itertuples(index=False)),
    ]
    shown = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    lost = "".join(f"- {gap}\n" for gap in gaps(measured))
    without = f"\nWithout a time:\n\n{lost}" if lost else ""
    return f"{origin(measured)}\n\n![{picture(found).alt}](benchmark.png)\n\n{shown}\n\n{READING}\n{without}"


def summary(measured: Sequence[Row]) -> str:
    """The README's five lines."""
    found = cases(measured)
    beside = found.dropna(subset="ratio")
    if beside.empty:
        return f"- {origin(measured)}\n"
    worst, best = beside.iloc[0], beside.iloc[-1]
    named = [
        f"{row['suite']}, {row['direction']}, {row['dtype']}, {row['sizes']}: "
        f"{_number(row['ratio'], TIMES_SIGN)}"
        for row in (worst, best)
    ]
    return (
        f"- {origin(measured)}\n"
        f"- Our time over the best other's, median of {len(beside)} cases: "
        f"{_number(beside['ratio'].median(), TIMES_SIGN)}; above 1.02 in {(beside['ratio'] > 1.02).sum()}.\n"
        f"- The worst: {named[0]}.\n- The best: {named[1]}.\n"
        f"- Share of a copy or of cuBLAS, median: {_number(found['share'].median())}.\n"
    )


def origin(measured: Sequence[Row]) -> str:
    """Device, dates, versions and how many rows, as a sentence."""
    days = sorted({row.date[:10] for row in measured})
    peers = sorted({f"{row.peer} {row.peer_version}" for row in measured if row.peer and row.peer_version})
    last = measured[-1]
    versions = [f"torch {last.torch.partition('+')[0]}", f"triton {last.triton}", *peers]
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    devices = " and ".join(dict.fromkeys(row.device for row in measured))
    return f"Measured on an {devices} ({when}, {', '.join(versions)}), {len(measured)} rows."
