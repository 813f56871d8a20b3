"""The README's table of the benchmark, made from the last full run of a recorded device.

    python -m labkit.bench_table

Run it after `labkit bench --record` on a GPU, which does so itself, or after removing bench.jsonl.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from labkit import bench_record, bench_shares, machine, places, rows
from labkit.bench_shares import Case, Group
from labkit.machine import Roofs
from labkit.plots.words import TIMES, digits
from labkit.rows import Row

README = places.CHECKOUT / "README.md"
BEGIN, END = "<!-- made by labkit/bench_table.py -->\n", "<!-- end of the benchmark -->\n"
NOTHING = "*The table is shown here when a full run is recorded.*\n"
HEAD = (
    "| Suite | Direction | dtype | Clock | Shapes | Share of floor | Times as fast as the best other "
    "| Best other |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def recorded() -> list[Row]:
    """The rows of the last full run; none when there was none. ValueError for another schema."""
    path = bench_record.recorded_file()
    return rows.read(path) if path else []


def block(measured: Sequence[Row], roofs: Mapping[str, Roofs]) -> str:
    """What stands between the marks: where the rows are from, the table, and what its columns mean."""
    if not measured:
        return NOTHING
    lines = "".join(_line(group, roofs.get(group.suite)) for group in bench_shares.groups(measured))
    return f"{_origin(measured)}\n\n{HEAD}{lines}\n{_legend()}\n"


def renew(readme: str, measured: Sequence[Row], roofs: Mapping[str, Roofs]) -> str:
    """The README's text with the table of these rows; ValueError unless it has both marks once, in order."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or readme.count(BEGIN) + readme.count(END) > 2:
        raise ValueError(f"README.md has not one line {BEGIN.strip()} and then one line {END.strip()}")
    return before + begin + block(measured, roofs) + end + after


def write() -> None:
    """Bring the README in line with the last full run. ValueError for rows of another schema, or for a README
    without the marks."""
    measured = recorded()
    places.write_text(README, renew(_readme(), measured, roofs_of(measured)))


def check() -> None:
    """ValueError unless the README has a place for the table."""
    renew(_readme(), [], {})


def _readme() -> str:
    try:
        return README.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{README} cannot be read: {error.strerror}") from error


def roofs_of(measured: Sequence[Row]) -> dict[str, Roofs]:
    """The roofs of the machine that each suite was measured on; none where they are not known here."""
    suites = dict.fromkeys(row.suite for row in measured)
    found = {
        suite: machine.roofs_of(rows.table(row for row in measured if row.suite == suite)) for suite in suites
    }
    return {suite: roofs for suite, roofs in found.items() if roofs}


def _origin(measured: Sequence[Row]) -> str:
    last = measured[-1]
    days = sorted({row.date[:10] for row in measured})
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    peers = sorted({f"{row.peer} {row.peer_version}" for row in measured if row.peer and row.peer_version})
    versions = [f"torch {last.torch.partition('+')[0]}", f"triton {last.triton}", *peers]
    return f"Recorded on an {last.device} ({when}, {', '.join(versions)}), {len(measured)} rows."


def _legend() -> str:
    return (
        "Ranges go from the least to the most of the shapes. *Share of floor*: the time that the device's "
        "measured roofs allow for the bytes and operations, over ours. *Best other*: the fastest contender "
        "that is not ours and does the same work, peers included; above 1 ours is faster."
    )


def _line(group: Group, roofs: Roofs | None) -> str:
    cases = group.cases
    whole = len(cases) + group.missing
    count = str(whole) if not group.missing else f"{len(cases)} of {whole}"
    # a host's time has other floors than the device's
    shares = (
        [bench_shares.share(case.ours, roofs) for case in cases] if roofs and group.clock != "host" else []
    )
    ratios = [case.times_as_fast for case in cases if case.times_as_fast is not None]
    cells = (
        bench_shares.title(group.suite),
        group.direction.replace("_", " and "),
        group.dtype,
        group.clock,
        count,
        _range(shares),
        _range(ratios, TIMES),
        _best(cases),
    )
    return f"| {' | '.join(cell.replace('|', '/').replace('*', chr(92) + '*') for cell in cells)} |\n"


def _range(values: Iterable[float], unit: str = "") -> str:
    ordered = sorted(values)
    if not ordered:
        return ""
    least, most = (digits(float(f"{value:.2g}")) + unit for value in (ordered[0], ordered[-1]))
    return least if least == most else f"{least} to {most}"


def _best(cases: Iterable[Case]) -> str:
    """Who was the best other, the most frequent first; at most two names."""
    counted = Counter(case.best.contender for case in cases if case.best)
    names = [name for name, _ in counted.most_common()]
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


if __name__ == "__main__":
    write()
