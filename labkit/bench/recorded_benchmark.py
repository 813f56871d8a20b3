"""The full run that is kept beside the tapes: whether its code is the present one, and the pages made of it.

    python -m labkit.bench.recorded_benchmark

makes docs/benchmark.md, its picture, and the README's lines; `labkit bench --record` does so itself. Where no
run is kept, looking for it loads neither torch nor a lesson.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.lessons.stamps import RecordingState
from labkit.measure import rows
from labkit.measure.rows import Row

FILE = "bench.jsonl"
BEGIN, END = "<!-- made by labkit/bench/recorded_benchmark.py -->\n", "<!-- end of the benchmark -->\n"
NOTHING = "*No full run is recorded yet.*\n"


def pages() -> tuple[Path, Path]:
    """The README and the benchmark's page."""
    return paths.CHECKOUT / "README.md", paths.CHECKOUT / "docs" / "benchmark.md"


def keep(measured: Iterable[Row]) -> list[Path]:
    """Put a full run in the place of the last one of each device that it has rows of, and renew the pages;
    gives the files.

    Of what was measured twice on one kind of device the first is kept.
    """
    from labkit.measure import machine

    taped: dict[Path, dict[tuple[Any, ...], Row]] = {}
    for row in measured:
        path = paths.RECORDED / machine.slug(row.device) / FILE
        taped.setdefault(path, {}).setdefault(row.key, replace(row, kind=rows.RECORDED))
    for path, of_device in taped.items():
        rows.write(path, of_device.values())
    write()
    return list(taped)


def states(tapes: Path) -> dict[Path, RecordingState]:
    """Whether each full run that is kept was measured with the present code, all suites of it.

    ValueError where a suite cannot be made.
    """
    found = sorted(tapes.glob(f"*/{FILE}"))
    if not found:
        return {}
    from labkit.bench import run, suites

    code = run.sources(part for name in suites.SUITES for part in suites.parts(name, peers=True))
    return {path: _state(path, code) for path in found}


def _state(path: Path, code: dict[tuple[str, str], str]) -> RecordingState:
    from labkit.bench import report

    name = f"{path.parent.name}/{path.name}"
    try:
        measured = report.read(path)
    except ValueError as error:
        return RecordingState(name, "stale", str(error))
    edited = {f"{r.contender} of {r.suite}" for r in measured if r.source != code.get((r.suite, r.contender))}
    if edited:
        first_two = ", ".join(sorted(edited)[:2])
        return RecordingState(name, "stale", f"{len(edited)} contenders with other code: {first_two}")
    lacking = {suite for suite, _ in code} - {row.suite for row in measured}
    if lacking:
        return RecordingState(name, "stale", f"has no rows of {', '.join(sorted(lacking))}")
    return RecordingState(name, "recorded", report.origin(measured))


def strip_stale(tapes: Path) -> list[str]:
    """Remove full runs of other code, and what the pages say of them; gives their names."""
    stale = {path: state.name for path, state in states(tapes).items() if state.status == "stale"}
    if stale:
        check()
        for path in stale:
            path.unlink()
        write()
    return list(stale.values())


def renewed(path: Path, block: str) -> str:
    """The text of a page with this block between its marks; ValueError where it lacks them."""
    made = re.compile(f"(?s)(?<={BEGIN}).*(?={END})")
    text, count = made.subn(lambda _: block, path.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{path}: a page has not one line {BEGIN.strip()} and then one line {END.strip()}")
    return text


def check() -> None:
    """ValueError unless both pages have a place for what is made of the run."""
    for path in pages():
        renewed(path, "")


def write() -> None:
    """Bring both pages, and the picture, in line with the run that is kept: that of the first recorded device
    which has one. ValueError for a page without marks, or a run that cannot be read."""
    readme, page = pages()
    picture = page.with_suffix(".png")
    made = {readme: renewed(readme, NOTHING), page: renewed(page, NOTHING)}
    found = sorted(paths.RECORDED.glob(f"*/{FILE}"))
    if not found:
        picture.unlink(missing_ok=True)
    else:
        from labkit.bench import report

        measured = report.read(found[0])
        made = {readme: renewed(readme, report.summary(measured)), page: renewed(page, report.page(measured))}
        report.picture(report.cases(measured)).save(picture)
    for path, text in made.items():
        paths.write_text(path, text)


if __name__ == "__main__":
    write()
