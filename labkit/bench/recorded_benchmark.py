"""The full run that is kept beside the tapes: whether its code is the present one, and the pages made of it.

    python -m labkit.bench.recorded_benchmark

makes docs/benchmark.md, its picture, and the README's lines; `labkit bench --record` does so itself. Where no
run is kept, looking for it loads neither torch nor a lesson.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.measure import rows
from labkit.measure.rows import Row
from labkit.runs.record import State

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


def states(tapes: Path) -> dict[Path, State]:
    """Whether each full run that is kept was measured with the present code, all suites of it.

    ValueError where a suite cannot be made.
    """
    found = sorted(tapes.glob(f"*/{FILE}"))
    if not found:
        return {}
    from labkit.bench import run, suites

    code = run.sources(part for name in suites.SUITES for part in suites.parts(name, peers=True))
    return {path: _state(path, code) for path in found}


def _state(path: Path, code: dict[tuple[str, str], str]) -> State:
    from labkit.bench import report

    name = f"{path.parent.name}/{path.name}"
    try:
        measured = report.read(path)
    except ValueError as error:
        return State(name, "stale", str(error))
    changed = sorted(
        {f"{r.contender} of {r.suite}" for r in measured if r.source != code.get((r.suite, r.contender))}
    )
    lacking = sorted({suite for suite, _ in code} - {row.suite for row in measured})
    if changed:
        return State(name, "stale", f"{len(changed)} contenders with other code: {', '.join(changed[:2])}")
    if lacking:
        return State(name, "stale", f"has no rows of {', '.join(lacking)}")
    return State(name, "recorded", report.origin(measured))


def strip_stale(tapes: Path) -> list[str]:
    """Remove full runs of other code, and what the pages say of them; gives their names."""
    stale = {path: state.name for path, state in states(tapes).items() if state.status == "stale"}
    if stale:
        check()
        for path in stale:
            path.unlink()
        write()
    return list(stale.values())


def renew(text: str, block: str) -> str:
    """A page with this between its marks; ValueError unless it has both of them once, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or text.count(BEGIN) + text.count(END) > 2:
        raise ValueError(f"a page has not one line {BEGIN.strip()} and then one line {END.strip()}")
    return before + begin + block + end + after


def check() -> None:
    """ValueError unless both pages have a place for what is made of the run."""
    for path in pages():
        try:
            renew(path.read_text(encoding="utf-8"), "")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


def blocks() -> tuple[str, str]:
    """What the README and the page say of the last full run of the first recorded device that has one."""
    path = next(iter(sorted(paths.RECORDED.glob(f"*/{FILE}"))), None)
    if path is None:
        return NOTHING, NOTHING
    from labkit.bench import report

    measured = report.read(path)
    return report.summary(measured), report.page(measured)


def write() -> None:
    """Bring both pages, and the picture, in line with the run that is kept. ValueError as read and check."""
    check()
    made = blocks()
    for path, block in zip(pages(), made, strict=True):
        paths.write_text(path, renew(path.read_text(encoding="utf-8"), block))
    picture = pages()[1].with_suffix(".png")
    picture.unlink(missing_ok=True)
    if made[0] != NOTHING:
        from labkit.bench import report

        path = min(paths.RECORDED.glob(f"*/{FILE}"))
        report.picture(report.cases(report.read(path))).save(picture)


if __name__ == "__main__":
    write()
