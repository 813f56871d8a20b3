"""Makes the generated part of docs/benchmark.md, its picture, and the README's lines from what is recorded.

python -m benchmarks.page
"""

import json
import re
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.run import Row

ROOT = Path(__file__).resolve().parent.parent
RECORDED = Path(__file__).parent / "recorded"
BEGIN, END = "<!-- made by benchmarks/page.py -->\n", "<!-- end of the benchmark -->\n"
GROUP = ["suite", "direction", "dtype"]
CASE = [*GROUP, "clock", "shape", "device"]


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def cases(rows: list[Row]) -> pd.DataFrame:
    """A line for each suite, direction, dtype, clock, shape and device at which ours has a time.

    ``ratio`` is our time over that of the fastest other, none where there is no other; ``share`` the time of
    a copy of the same bytes over ours, none by the host's clock and where the roof is a product. Of what was
    measured twice the last counts. A suite by the host's clock says so in its name.
    """
    found = pd.DataFrame(rows).astype({"median_us": float, "copy_us": float}).dropna(subset="median_us")
    found["shape"] = [", ".join(f"{axis} {size}" for axis, size in shape.items()) for shape in found["shape"]]
    found["suite"] += (found["clock"] == "host").map({True: ", host", False: ""})
    found = found.drop_duplicates([*CASE, "contender"], keep="last")
    is_ours = found["contender"] == "labkit"
    ours = found[is_ours].set_index(CASE)
    ours["ratio"] = ours["median_us"] / found[~is_ours].groupby(CASE)["median_us"].min()
    ours["share"] = ours["copy_us"] / ours["median_us"]
    return ours.reset_index()


def groups(found: pd.DataFrame) -> pd.DataFrame:
    """A line for each suite, direction and dtype: how many cases, and of ratio and share median and worst."""
    columns = {"cases": ("shape", "size"), "ratio": ("ratio", "median"), "worst": ("ratio", "max")}
    shares = {"share": ("share", "median"), "least": ("share", "min")}
    return found.groupby(GROUP, sort=False).agg(**columns, **shares).reset_index()


def origin(rows: list[Row]) -> str:
    """Device, dates, versions, how sizes were chosen, how many rows: a sentence."""
    days = sorted({row["date"][:10] for row in rows})
    peers = sorted({row["peer"] for row in rows if row["peer"] and row["median_us"]})
    versions = [f"torch {rows[-1]['torch'].partition('+')[0]}", f"triton {rows[-1]['triton']}", *peers]
    seeds = sorted({str(row["seed"]) for row in rows if row["seed"] is not None})
    sizes = f"sizes drawn by seed {', '.join(seeds)}" if seeds else "fixed sizes"
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    return f"Measured on an {rows[0]['device']} ({when}, {', '.join(versions)}): {len(rows)} rows, {sizes}."


def summary(rows: list[Row]) -> str:
    """The README's lines."""
    found = cases(rows)
    beside = found.dropna(subset="ratio").sort_values("ratio")
    ratio, named = beside["ratio"], beside[[*GROUP, "shape"]].agg(", ".join, axis=1)
    return (
        f"- {origin(rows)}\n"
        f"- Our time over the best other's: median {ratio.median():.3g} of {len(ratio)} cases; "
        f"above 1.03 in {(ratio > 1.03).sum()}, at worst {ratio.iloc[-1]:.3g} ({named.iloc[-1]}).\n"
        f"- The time of a copy of the same bytes over ours: median {found['share'].median():.3g}.\n"
    )


def picture(found: pd.DataFrame, path: Path) -> str:
    """Draw a dot for each case over its ratio, on a line for each suite; gives the alt text."""
    suites = list(dict.fromkeys(found["suite"]))
    drawn = found.dropna(subset="ratio").sort_values("suite", key=lambda each: each.map(suites.index))
    names = drawn["suite"]
    figure = Figure(figsize=(8, 1 + 0.22 * names.nunique()), layout="constrained")
    axes = figure.subplots()
    axes.plot(drawn["ratio"], names, "o", color="#C8321E", alpha=0.5, markersize=4)
    axes.axvline(1.0, color="#4A4A4A")
    axes.set(xscale="log", xlabel="our time over the best other's: lower is better")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params("y", labelsize=8)
    axes.margins(y=0.02)
    axes.invert_yaxis()
    figure.savefig(path, dpi=96)
    least, most = drawn["ratio"].min(), drawn["ratio"].max()
    return f"Our time over the best other's, a dot a case, from {least:.3g} to {most:.3g}."


def part(rows: list[Row], image: Path) -> str:
    """What the page says of one device: where its rows are from, the picture, a table, who has no time."""
    found = cases(rows)
    shown = groups(found).map(
        lambda each: each if isinstance(each, str) else f"{each:.3g}".replace("nan", "")
    )
    lines = [list(shown), ["---"] * shown.shape[1], *shown.to_numpy().tolist()]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    lost = {f"- {r['suite']}, {r['contender']}: {r['note']}\n": 0 for r in rows if r["median_us"] is None}
    without = f"\nWithout a time:\n\n{''.join(lost)}" if lost else ""
    return f"{origin(rows)}\n\n![{picture(found, image)}]({image.name})\n\n{table}{without}"


def renew(path: Path, block: str) -> None:
    """Put a block between a page's marks; ValueError where it lacks them."""
    made, count = re.subn(f"(?s)(?<={BEGIN}).*(?={END})", lambda _: block, path.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{path}: a page has not one line {BEGIN.strip()} and then one line {END.strip()}")
    path.write_text(made, encoding="utf-8")


def make(recorded: Path = RECORDED, root: Path = ROOT) -> None:
    """Renew the page and its pictures, a part for each recorded device, and the README from the first."""
    files = [read(path) for path in sorted(recorded.glob("*.jsonl"))]
    images = [root / "docs" / f"benchmark{number or ''}.png" for number in range(len(files))]
    renew(root / "docs" / "benchmark.md", "\n".join(map(part, files, images)))
    renew(root / "README.md", summary(files[0]))


if __name__ == "__main__":
    make()
