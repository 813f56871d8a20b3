"""Renews docs/benchmark.md, its picture, and the README's lines, from the full run that is kept.

    python -m docs.benchmark

Run it after `labkit bench --record`, or after the run was stripped: until then a test of the report fails.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from labkit import paths
from labkit.bench import recorded_benchmark, report
from labkit.measure.rows import Row
from labkit.plots.formatting import format_number, format_ratio

README, PAGE = paths.CHECKOUT / "README.md", paths.CHECKOUT / "docs" / "benchmark.md"
BEGIN, END = "<!-- made by docs/benchmark.py -->\n", "<!-- end of the benchmark -->\n"
NOTHING = "*No full run is recorded yet.*\n"


def summary(measured: Sequence[Row]) -> str:
    """The README's five lines."""
    found = report.cases(measured)
    share = found["share"].median()
    beside = found.dropna(subset="ratio")
    if beside.empty:
        return f"- {report.origin(measured)}\n"
    worst, best = (
        f"{row.suite}, {row.direction}, {row.dtype}, {row.sizes}: {format_ratio(row.ratio)}"
        for row in beside.iloc[[0, -1]].itertuples()
    )
    return (
        f"- {report.origin(measured)}\n"
        f"- Our time over the best other's, median of {len(beside)} cases: "
        f"{format_ratio(beside['ratio'].median())}; above 1.02 in {(beside['ratio'] > 1.02).sum()}.\n"
        f"- The worst: {worst}.\n- The best: {best}.\n"
        f"- Share of a copy or of cuBLAS, median: {'' if math.isnan(share) else format_number(share)}.\n"
    )


def renewed(path: Path, block: str) -> str:
    """The text of a page with this block between its marks; ValueError where it lacks them."""
    made = re.compile(f"(?s)(?<={BEGIN}).*(?={END})")
    text, count = made.subn(lambda _: block, path.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{path}: a page has not one line {BEGIN.strip()} and then one line {END.strip()}")
    return text


def pages() -> dict[Path, str]:
    """The README and the benchmark's page, in line with the run that is kept: the first recorded device's."""
    kept = sorted(paths.RECORDED.glob(f"*/{recorded_benchmark.FILE}"))
    if not kept:
        return {page: renewed(page, NOTHING) for page in (README, PAGE)}
    measured = report.read(kept[0])
    lacking = recorded_benchmark.not_measured(measured, recorded_benchmark.present_code())
    lines = summary(measured) + (f"- {lacking}\n" if lacking else "")
    page = report.page(measured) + (f"\n{lacking}\n" if lacking else "")
    return {README: renewed(README, lines), PAGE: renewed(PAGE, page)}


def main() -> None:
    """Bring both pages, and the picture, in line with the run."""
    for path, text in pages().items():
        paths.write_text(path, text)
    picture, kept = PAGE.with_suffix(".png"), sorted(paths.RECORDED.glob(f"*/{recorded_benchmark.FILE}"))
    picture.unlink(missing_ok=True)
    if kept:
        report.picture(report.cases(report.read(kept[0]))).save(picture)


if __name__ == "__main__":
    main()
