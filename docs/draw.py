"""Redraws the picture in the README, and the findings beneath it, from the recorded tape of lesson 1.

    python -m docs.draw

Run it after lesson 1 was recorded or its tape stripped: until then tests/test_readme.py fails.
"""

from dataclasses import replace
from pathlib import Path

import pandas as pd

from labkit import paths, plots
from labkit.measure import rows
from labkit.plots.formatting import format_duration

README = paths.CHECKOUT / "README.md"
PICTURE = paths.CHECKOUT / "docs" / "width_sweep.png"
NAME = "launch_overhead.jsonl"
TAPE = next(iter(sorted(paths.RECORDED.glob(f"*/{NAME}"))), paths.RECORDED / NAME)
"""Of the device that lessons were recorded on; not there when nothing is recorded."""
BEGIN, END = "<!-- made by docs/draw.py -->\n", "<!-- end -->\n"
BATCH = 32768
CONTENDERS = ("nn.Linear", "x*w+b eager", "torch.compile", "labkit")
NOTHING = "*The sweep over the width is shown here when lesson 1 is recorded.*\n"


def swept(tape: Path = TAPE) -> pd.DataFrame:
    """The rows of the sweep over the width that the picture shows; empty when nothing is recorded."""
    table = rows.as_results(rows.read(tape), axes=("batch", "width"))
    wanted = (table["suite"] == "launch_overhead/width") & (table["batch"] == BATCH)
    return table[wanted & table["contender"].isin(CONTENDERS)]


def figure(table: pd.DataFrame) -> plots.Picture:
    """Time against width, a panel for each dtype."""

    def copy_line(panel: pd.DataFrame) -> dict[str, list[tuple[float, float]]]:
        ours = panel[panel["contender"] == "labkit"]
        return {"copy": list(zip(ours["width"], ours["copy_us"], strict=True))}

    title = "nn.Linear, x*w+b computed in three ways, and a copy of the same bytes"
    return replace(
        plots.curves(table, facet="dtype", reference_lines=copy_line, title=title), alt=described(table)
    )


def described(table: pd.DataFrame) -> str:
    """The alt text: what is drawn, and where the curves end."""
    ends = []
    for dtype, panel in table.groupby("dtype", sort=False):
        last = panel[panel["width"] == panel["width"].max()].sort_values("median_us", ascending=False)
        times = (f"{row.contender} {format_duration(row.median_us)}" for row in last.itertuples())
        ends.append(f"{dtype} at width {last['width'].iloc[0]:.0f}: {', '.join(times)}.")
    return (
        "Time per call against width, both axes logarithmic, float32 and bfloat16 side by side, recorded on "
        f"an {table['device'].iloc[0]}. nn.Linear rises more steeply than x*w+b, whose curves are parallel "
        f"to a copy of the same bytes. {' '.join(ends)}"
    )


def block(table: pd.DataFrame) -> str:
    """What stands between the marks in the README: the picture with its alt text, and findings."""
    if table.empty:
        return NOTHING
    alt = described(table).replace("*", r"\*")  # two of them would mean emphasis
    return f"![{alt}]({PICTURE.relative_to(README.parent).as_posix()})\n\n{findings(table)}\n"


def findings(table: pd.DataFrame) -> str:
    """The picture in words, its numbers rounded to two digits."""

    def times(of: str, over: str, dtype: str, width: int) -> str:
        found = table.speedup(of, over, dtype=dtype, width=width)
        if found is None:
            raise ValueError(f"{TAPE.name}: no time of {of} or {over}, {dtype}, width {width}")
        return f"{float(f'{found.value:.2g}'):g}"

    ours, eager = (
        [times(name, "nn.Linear", "float32", width) for width in (1024, 16384)]
        for name in ("labkit", "x*w+b eager")
    )
    slower = times("nn.Linear", "x*w+b eager", "bfloat16", 1024)
    last = table.iloc[-1]
    versions = f"torch {last['torch'].partition('+')[0]}, triton {last['triton']}"
    return (
        f"Recorded on an {last['device']} ({last['date'][:10]}, {versions}), batch {BATCH}; `labkit` is the "
        "finished form of the kernel that you write in lesson 1. `x*w+b` multiplies N times per row where "
        "`nn.Linear` multiplies "
        f"N² times. In fp32 (TF32 off) that kernel is about {ours[0]} times faster than `nn.Linear` at width "
        f"1024 and {ours[1]} times at 16384; eager PyTorch's `x*w+b` is {eager[0]} and {eager[1]} times "
        f"faster. In bf16 at width 1024 eager `x*w+b` takes {slower} times as long as `nn.Linear`. Lesson 1 "
        "finds out why."
    )


def renew(readme: str, table: pd.DataFrame) -> str:
    """The README's text with the block of this table; ValueError where its marks are missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no lines {BEGIN.strip()} and {END.strip()}")
    return before + begin + block(table) + end + after


def main() -> None:
    """Bring README and picture in line with the tape."""
    table = swept()
    paths.write_text(README, renew(README.read_text(encoding="utf-8"), table))
    if table.empty:
        PICTURE.unlink(missing_ok=True)
    else:
        figure(table).save(PICTURE)


if __name__ == "__main__":
    main()
