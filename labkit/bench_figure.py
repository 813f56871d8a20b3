"""One page: every suite of a benchmark as a share of its floor; ours, the peers, the best of the others."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import pandas as pd

from labkit import bench_shares, plots
from labkit.machine import Roofs
from labkit.rows import Row

TITLE = "Share of the floor, suite by suite"
NOTE = (
    "Median over the shapes and dtypes at which ours was measured beside others. 1 is the time that this "
    "device's measured roofs allow. Picture: ours, every peer, and the best other that does the same work."
)


def page(measured: Sequence[Row], roofs: Mapping[str, Roofs]) -> plots.Picture:
    """The figure, with the roofs of each suite; a peer without a time is a bar with its reason. Host times,
    which have no floor, are left out, and so is a suite without a time of ours."""
    return plots.bars(
        table(measured, roofs),
        title=TITLE,
        value="share_of_floor",
        group="suite",
        floor={"floor": 1.0},
        note=NOTE,
    )


def table(measured: Iterable[Row], roofs: Mapping[str, Roofs]) -> pd.DataFrame:
    """A row for each bar, with the median share of its cases, or the reason why there is none."""
    apart: dict[tuple[str, str], list[Row]] = {}
    for row in measured:
        if row.clock != "host":
            apart.setdefault((row.suite, row.direction), []).append(row)
    lines: list[dict[str, Any]] = []
    for (suite, direction), rows in apart.items():
        works = _works(rows)
        part = f"{bench_shares.title(suite)}, {direction.replace('_', ' and ')}"
        by_name: dict[str, list[Row]] = {}
        for row in rows:
            if works.get(_case(row)) == (row.min_bytes, row.flops):
                by_name.setdefault(row.contender, []).append(row)
        bars = [_bar(part, name, found, roofs[suite]) for name, found in by_name.items()]
        lines += _shown(bars)
    columns = ["suite", "contender", "share_of_floor", "kind", "device", "date", "note"]
    return pd.DataFrame(lines, columns=columns)


def _case(row: Row) -> tuple[Any, ...]:
    """What tells the points of one suite and direction apart, all contenders being measured there."""
    return row.dtype, *row.shape.items()


def _works(rows: Sequence[Row]) -> dict[tuple[Any, ...], tuple[int, int]]:
    """Bytes and operations of ours in each case that has a time of ours: those beside others, if there are
    any."""
    own = [row for row in rows if bench_shares.ours(row) and row.median_us is not None]
    others = {_case(row) for row in rows if not bench_shares.ours(row)}
    works = {_case(row): (row.min_bytes, row.flops) for row in own}
    return {case: work for case, work in works.items() if case in others} or works


def _bar(part: str, name: str, rows: Sequence[Row], roofs: Roofs) -> dict[str, Any]:
    timed = [row for row in rows if row.median_us is not None]
    return {
        "suite": part,
        "contender": name,
        "share_of_floor": median(bench_shares.share(row, roofs) for row in timed) if timed else float("nan"),
        "kind": rows[0].kind,
        "device": rows[0].device,
        "date": rows[0].date,
        "note": "" if timed else rows[0].note,
        "peer": rows[0].peer,
        "ours": bench_shares.ours(rows[0]),
    }


def _shown(bars: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours, then the peers, then the best of the rest."""
    own = [bar for bar in bars if bar["ours"]]
    peers = [bar for bar in bars if bar["peer"]]
    rest = [bar for bar in bars if bar not in own and bar not in peers and bar["share_of_floor"] > 0]
    best = sorted(rest, key=lambda bar: -bar["share_of_floor"])[:1]
    return [*own, *peers, *best] if own else []
