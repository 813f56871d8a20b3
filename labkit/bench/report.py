"""How ours stands to the best other in each case: printed, and as a page with one picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich.console import Console

from labkit import paths
from labkit.measure import roofline, rows
from labkit.measure.rows import Row
from labkit.plots.formatting import format_number
from labkit.plots.style import INK, MUTED, OURS, WIDTH, Picture, course_style
from labkit.runs.console import print_table, say

CASE = ["suite", "direction", "dtype", "clock", "sizes", "device"]
GROUP = CASE[:3]
"""A suite that is timed by the host's clock says so in its name."""
WORK = ["min_bytes", "flops"]
WORST = 10
"""Cases that are printed one by one."""
READING = (
    "*Ours over the best other*: our time over that of the fastest contender that is not ours and does the "
    "same work in the same case; below 1 ours is faster. *Share*: the time of a copy of the same bytes, or "
    "of the same operations at the rate of a large cuBLAS product, whichever is longer, over ours. Suites "
    "named *host* are timed by the host's clock, the others as CUDA graphs."
)


def read(path: Path) -> list[Row]:
    """The rows of a file; ValueError where it is of another schema, cannot be read, or holds no rows."""
    try:
        found = rows.read(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not found:
        why = "holds no rows of the schema" if path.exists() else "there is no such file"
        raise ValueError(f"{path}: {why}")
    return found


def with_sizes(measured: Sequence[Row]) -> pd.DataFrame:
    """Rows as a table, times as numbers, the shape in words in the column ``sizes``."""
    sizes = [", ".join(f"{axis} {size}" for axis, size in sorted(row.shape.items())) for row in measured]
    times = dict.fromkeys(["median_us", "p20_us", "p80_us", "copy_us"], float)
    return rows.as_results(measured).assign(sizes=sizes).astype(times)


def cases(measured: Sequence[Row]) -> pd.DataFrame:
    """A line for each case in which ours has a time, the worst first.

    A case is a suite, direction, dtype, clock, shape and device. ``ratio`` is the time of ours, the fastest
    where there are several, over that of the fastest other of the same bytes and operations, which
    ``contender_other`` names; none where there is no other. ``share`` is what the device's copy, or cuBLAS
    for the operations, would take over ours; none by the host's clock.
    """
    timed = with_sizes(measured).dropna(subset="median_us").sort_values("median_us", kind="stable")
    own = timed["contender"].str.split(",").str[0] == "labkit"
    others = timed.loc[~own, [*CASE, *WORK, "contender", "median_us"]].drop_duplicates([*CASE, *WORK])
    ours = timed[own].drop_duplicates(CASE)
    found = ours.merge(others, how="left", on=[*CASE, *WORK], suffixes=("", "_other"))
    found["suite"] = found["suite"].str.removeprefix("bench/")
    found["ratio"] = found["median_us"] / found["median_us_other"]
    found["computed_us"] = math.nan
    for _, part in found.groupby("device"):
        roofs = roofline.roofs_of(part)
        if roofs:
            found.loc[part.index, "computed_us"] = part["flops"] / part["dtype"].map(roofs.matmul) * 1e6
    share = np.fmax(found["copy_us"], found["computed_us"]) / found["median_us"]
    found["share"] = share.where(found["clock"] != "host")
    return found.sort_values("ratio", ascending=False, kind="stable", ignore_index=True)


def groups(found: pd.DataFrame) -> pd.DataFrame:
    """A line for each suite, direction and dtype, with its cases, ratio and share; the worst first."""
    named = {"cases": ("sizes", "size"), "median": ("ratio", "median"), "worst": ("ratio", "max")}
    shares = {"share": ("share", "median"), "least": ("share", "min")}
    return found.groupby(GROUP, sort=False).agg(**named, **shares).reset_index()


def gaps(measured: Sequence[Row]) -> list[str]:
    """Who has no time and why, a line for each contender and reason: how many rows, of which suites."""
    lost = rows.as_results(row for row in measured if row.median_us is None)
    return [
        f"{contender}, {len(part)} of {', '.join(part['suite'].unique())}: {note or 'no reason given'}"
        for (contender, note), part in lost.groupby(["contender", "note"], sort=False)
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if math.isnan(value) else format_number(value)


def show(console: Console, measured: Sequence[Row]) -> None:
    """Print a line for each group, the worst cases, and who has no time; write the page to build/."""
    found = cases(measured)
    columns = ["suite", "direction", "dtype", "sizes", "contender_other", "ratio", "share"]
    worst = found.dropna(subset="ratio").head(WORST)[columns]
    by_group = groups(found).drop(columns="least")
    print_table(console, by_group.map(_text), "ours over the best other")
    print_table(console, worst.map(_text), "the worst cases")
    for gap in gaps(measured):
        say(console, f"no time: {gap}")
    picture(found).save(paths.BUILD / "benchmark.png")
    paths.write_text(paths.BUILD / "benchmark.md", f"# Benchmark\n\n{page(measured)}")
    say(console, f"Report: {paths.BUILD / 'benchmark.md'}")


@course_style()
def picture(found: pd.DataFrame) -> Picture:
    """A dot for each case over its ratio, on a line for each group; the group with the worst is on top."""
    drawn = found.dropna(subset="ratio")
    names = drawn[GROUP].apply(", ".join, axis=1) if len(drawn) else drawn["suite"]
    ratios = drawn["ratio"].groupby(names, sort=False)
    figure = Figure(figsize=(WIDTH, 1.2 + 0.24 * len(ratios)), layout="constrained")
    axes = figure.subplots()
    axes.plot(drawn["ratio"], names, "o", color=OURS.colour, alpha=0.5, markersize=5)
    axes.plot(ratios.median(), list(ratios.groups), "|", color=INK, markersize=12, markeredgewidth=2)
    axes.axvline(1.0, color=MUTED)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda ratio, _: format_number(ratio))
    axes.minorticks_off()
    axes.tick_params("y", labelsize=8)
    axes.set_ylim(max(len(ratios), 1) - 0.5, -0.5)
    axes.set_xlabel("our time over the best other's (lower is better); a bar is the median")
    said = "; ".join(f"{name} {format_number(worst)}" for name, worst in ratios.max().head().items())
    return Picture(figure, f"Our time over the best other's, a dot a case. The worst: {said or 'none'}.")


def page(measured: Sequence[Row]) -> str:
    """The report in Markdown: where the rows are from, the picture, a line a group, who has no time."""
    found = cases(measured)
    titles = {"median": "ours over the best other: median", "share": "share: median"}
    table = groups(found).map(_text).rename(columns=titles)
    lines = [list(table), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    lost = "".join(f"- {gap}\n" for gap in gaps(measured))
    without = f"\nWithout a time:\n\n{lost}" if lost else ""
    return f"{origin(measured)}\n\n![{picture(found).alt}](benchmark.png)\n\n{shown}\n\n{READING}\n{without}"


def origin(measured: Sequence[Row]) -> str:
    """Device, dates, versions and how many rows, as a sentence."""
    days = sorted({row.date[:10] for row in measured})
    peers = sorted({f"{row.peer} {row.peer_version}" for row in measured if row.peer and row.peer_version})
    last = measured[-1]
    versions = [f"torch {last.torch.partition('+')[0]}", f"triton {last.triton}", *peers]
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    devices = " and ".join(dict.fromkeys(row.device for row in measured))
    return f"Measured on an {devices} ({when}, {', '.join(versions)}), {len(measured)} rows."
