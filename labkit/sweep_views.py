"""What a sweep panel shows of a table: the figure, a sentence for each of its parts, the numbers."""

import html
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from labkit import plots, roofline, rows, tables
from labkit.plots import Picture
from labkit.plots.words import named, noise_notes, origin
from labkit.rows import Row
from labkit.sweep_plan import SPEEDUP, TIME, TRAFFIC, Look, Plan, Selection

_NO_SPEEDUP = pd.DataFrame(columns=["series", "contender", "speedup", "low", "high", "kind", "device"])


def picture(plan: Plan, table: pd.DataFrame, look: Look, selection: Selection | None = None) -> Picture:
    """The figure of a table; several dtypes, directions or sizes of another axis become panels.

    With the ``selection`` that the table is of, the axis reaches over its values from the first point on, so
    that it stands still while points appear.
    """
    facet, down = _facets(plan, table)
    over = f"{plan.title}: times faster than {plan.over}"
    titles = {TIME: plan.title, SPEEDUP: over, TRAFFIC: f"{plan.title}: bytes moved"}
    values = selection.values if selection else ()
    how: dict[str, Any] = {"title": titles[look.view], "facet": facet, "rows": down, "values": values}
    if look.view == TRAFFIC:
        return plots.traffic(table, plan.x, **how)
    column = "median_us" if look.view == TIME else "speedup"
    posted = _posted(plan, table, column, selection) if look.published else []
    if look.view == TIME:
        timed = tables.together([table, *posted])
        shaded = plan.regimes if look.floor else ()
        return plots.curves(timed, plan.x, floor=plan.floor if look.floor else None, regimes=shaded, **how)
    ratios = [*speedups(plan, table), *posted]
    found = tables.together(ratios) if ratios else _NO_SPEEDUP
    return plots.speedups(found, plan.x, naive=plan.expected if look.floor else None, **how)


def _facets(plan: Plan, table: pd.DataFrame) -> tuple[str | None, str | None]:
    varying = [
        name for name in ("dtype", "direction", *plan.others) if name in table and table[name].nunique() > 1
    ]
    return (varying[0] if varying else None), (varying[1] if len(varying) > 1 else None)


def _posted(plan: Plan, table: pd.DataFrame, column: str, selection: Selection | None) -> list[pd.DataFrame]:
    """What was published, in each panel of the figure whose dtype, direction and sizes it does not deny.

    While there are no rows, and so no panels, the selection says what would be shown.
    """
    if column not in plan.published:
        return []
    published = plan.published[plan.published[column].notna()]
    if table.empty:
        asked = (
            {"dtype": selection.dtype, "direction": selection.direction, **selection.others}
            if selection
            else {}
        )
        return [_fitting(published, asked)]
    apart = [name for name in ("dtype", "direction", *plan.others) if name in table]
    panels = table[apart].drop_duplicates().to_dict("records")
    parts = [_fitting(published, where).assign(**where) for where in panels]
    return [part for part in parts if len(part)]


def _fitting(published: pd.DataFrame, where: Mapping[Any, Any]) -> pd.DataFrame:
    """The rows that say nothing else about these columns; what they leave unsaid fits."""
    for name, value in where.items():
        if name in published:
            published = published[published[name].isna() | (published[name] == value)]
    return published


def speedups(plan: Plan, table: pd.DataFrame) -> list[pd.DataFrame]:
    """How many times faster than ``over`` each contender is, one table each."""
    apart = [name for name in ("dtype", "direction", *plan.others) if name in table]
    found = []
    for values, part in table.groupby(apart, sort=False):
        for name in part["contender"].unique():
            if name != plan.over:
                ratio = tables.speedup(part, str(name), plan.over, plan.x, series=str(name))
                found.append(ratio.assign(**dict(zip(apart, values, strict=True))))
    return found


def sentences(plan: Plan, table: pd.DataFrame) -> list[str]:
    """What the figure says, in words: one sentence for each origin and panel that has both to compare."""
    found = []
    apart = [name for name in ("kind", "device", "dtype", "direction", *plan.others) if name in table]
    parts = [part for _, part in table.groupby(apart, sort=False)]
    for part in [part for part in parts if {plan.of, plan.over} <= set(part["contender"])] or parts:
        where = [str(part["dtype"].iloc[0]), *(named(axis, part[axis].iloc[0]) for axis in plan.others)]
        what = roofline.finding(part, plan.of, plan.over, plan.x)
        found.append(f"{', '.join(where)}: {what} ({origin(part, str(part['kind'].iloc[0]))})")
    return found or ["Nothing was measured here yet, and nothing is recorded for this choice."]


def noise(plan: Plan, noisy: Iterable[Row]) -> list[str]:
    """What disturbed which points, a line each."""
    table = rows.table(noisy, [plan.x])
    return noise_notes(table.assign(series=table["contender"]), plan.x)


def readout(plan: Plan, table: pd.DataFrame) -> pd.DataFrame:
    """Microseconds per call: contenders across; the axis, and what else differs, down."""
    apart = [name for name in ("kind", "device", "dtype", "direction", *plan.others) if name in table]
    down = [*(name for name in apart if table[name].nunique() > 1), plan.x]
    wide = table.pivot_table("median_us", down, "contender", sort=False, aggfunc="first")
    return wide.sort_index().round(2)


def page(plan: Plan, table: pd.DataFrame, look: Look, selection: Selection | None = None) -> tuple[str, str]:
    """The figure, the sentences and the numbers of a table, as HTML and as text."""
    shown = picture(plan, table, look, selection)
    if look.view == TRAFFIC:
        said, listing = ["Counted, not timed."], ""
    else:
        said, numbers = sentences(plan, table), readout(plan, table).to_html(na_rep="—")
        listing = f"<details><summary>Microseconds per call, as a table</summary>{numbers}</details>"
    lines = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in said)
    return f"{shown._repr_html_()}<ul>{lines}</ul>{listing if len(table) else ''}", "\n".join(
        [shown.alt, *said]
    )
