"""Rows put into words: where numbers come from, what they have in common, what is missing and why."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.measure.rows import COLUMNS, KINDS, PUBLISHED

TIMES = "\N{MULTIPLICATION SIGN}"
RING = "\N{LARGE CIRCLE}"
NOTHING = "nothing measured yet"
_TEXTS = (
    *("contender", "series", "kind", "note", "noise", "source"),
    *("device", "date", "direction", "dtype", "clock", "cache"),
)


def duration(us: float) -> str:
    """Microseconds as a person says them: ``6.7 µs``, ``25.8 ms``."""
    units = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))
    scale, unit = next((pair for pair in units if us >= pair[0] * 0.9995), (1e-3, "ns"))
    return f"{digits(us / scale)} {unit}"


def digits(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    if value == 0 or not np.isfinite(value):
        return f"{value:g}"
    places = max(0, 2 - int(np.floor(np.log10(abs(value)))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def factor(value: float) -> str:
    """A ratio with its multiplication sign."""
    return digits(value) + TIMES


def cut(text: str, most: int) -> str:
    """The text in one line of at most ``most`` characters, with an ellipsis where some are left out."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"


def plain(value: Any) -> str:
    """A shape's number without the ``.0`` that a table with gaps gives it."""
    whole = isinstance(value, (int, float, np.number)) and float(value).is_integer()
    return f"{value:.0f}" if whole else str(value)


def named(axis: str, value: Any) -> str:
    """A value that explains itself: ``bf16``, but ``batch 256``."""
    return str(value) if axis in COLUMNS else f"{axis} {plain(value)}"


def good(table: pd.DataFrame, column: str) -> "pd.Series[bool]":
    """Which rows have a value that can be drawn; all others are gaps."""
    return np.isfinite(table[column].astype(float)) & (table[column] > 0)


def prepared(table: pd.DataFrame, needed: Iterable[str], numbers: Iterable[str]) -> pd.DataFrame:
    """A copy with every column that drawing reads.

    ValueError where one of ``needed`` is missing from a table that has rows, or a kind is unknown.
    """
    table = table.copy()
    for name, other in (("series", "contender"), ("contender", "series")):
        if other in table:
            table[name] = table[name].fillna(table[other]) if name in table else table[other]
    for name in (*needed, "contender", "kind"):
        if name not in table and len(table):
            raise ValueError(f"table: no column {name!r} among {', '.join(map(str, table.columns))}")
    for name in numbers:
        table[name] = pd.to_numeric(table[name]) if name in table else np.nan
    for name in _TEXTS:
        table[name] = table[name].fillna("") if name in table else ""
    unknown = sorted(set(table["kind"]) - set(KINDS))
    if unknown:
        raise ValueError(f"kind: {unknown[0]!r} is none of {', '.join(KINDS)}")
    return table


def extra_axes(table: pd.DataFrame) -> list[str]:
    """Columns that are axes of the shape: whole numbers, and not of the schema of rows."""
    known = {*COLUMNS, "series", "speedup", "low", "high", "traffic", "launches", "programs", "moved"}
    return [
        name
        for name in table.columns
        if name not in known
        and pd.api.types.is_numeric_dtype(table[name])
        and table[name].notna().any()
        and bool((table[name].dropna() % 1 == 0).all())
    ]


def distinct(table: pd.DataFrame, column: str) -> list[str]:
    """The different values of a column, without empty ones, as text."""
    return [str(value) for value in table[column].unique() if value != "" and not pd.isna(value)]


def origin(rows: pd.DataFrame, kind: str) -> str:
    """Where rows of one kind come from: on what, when, by which clock; for published ones the source."""
    days = sorted(date[:10] for date in distinct(rows, "date"))
    when = [days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"] if days else []
    device = " and ".join(distinct(rows, "device"))
    clocks, caches = distinct(rows, "clock"), distinct(rows, "cache")
    if kind == PUBLISHED:
        source = "; ".join(distinct(rows, "source")) or "source unknown"
        return ", ".join([f"published: {source}", *([device] if device else [])])
    how = [f"{clocks[0]} clock"] if len(clocks) == 1 else []
    how += [f"{caches[0]} cache"] if len(caches) == 1 else []
    return ", ".join([f"{kind} on {device}" if device else kind, *when, *how])


def origins(table: pd.DataFrame) -> list[tuple[str, str]]:
    """Kind and words for each device that measured and each source that published.

    Where several published, the words name whose points are whose.
    """
    found = []
    for kind in KINDS:
        rows = table[table["kind"] == kind]
        parts = [part for _, part in rows.groupby("source" if kind == PUBLISHED else "device", sort=False)]
        for part in parts:
            whose = (
                f" ({', '.join(distinct(part, 'series'))})" if kind == PUBLISHED and len(parts) > 1 else ""
            )
            found.append((kind, origin(part, kind) + whose))
    return found


def conditions(table: pd.DataFrame, varying: Iterable[str | None]) -> str:
    """What is the same for every row: direction, dtype, the axes of the shape that do not vary."""
    if table.empty:
        return ""
    fixed = [name for name in ("direction", "dtype", *extra_axes(table)) if name not in varying]
    values = {name: table[name].replace("", np.nan).dropna().unique() for name in fixed}
    return ", ".join(named(name, found[0]) for name, found in values.items() if len(found) == 1)


def gap_notes(gaps: pd.DataFrame, x: str, split: Sequence[str] = ()) -> list[str]:
    """One note for each reason: what has no value, where (on ``x``, and in which panels) and why."""
    return _notes(gaps, gaps["note"].where(gaps["note"] != "", "no value"), x, split)


def noise_notes(noisy: pd.DataFrame, x: str, split: Sequence[str] = ()) -> list[str]:
    """One note for each disturbance: what disturbed which points."""
    return _notes(noisy, noisy["noise"], x, split)


def _notes(rows: pd.DataFrame, reasons: "pd.Series[str]", x: str, split: Sequence[str]) -> list[str]:
    notes = []
    for reason, group in rows.groupby(reasons, sort=False):
        who: dict[str, list[str]] = {}
        for series, part in group.groupby("series", sort=False):
            who.setdefault(_places(part, x, split), []).append(str(series))
        what = "; ".join(f"{' and '.join(names)} at {places}" for places, names in who.items())
        notes.append(f"{cut(str(reason), 60)}: {what}")
    return notes


def _places(rows: pd.DataFrame, x: str, split: Sequence[str]) -> str:
    """``width 4096, 8192 (fp32; bf16)``."""
    panels: dict[str, list[str]] = {}
    for values, part in rows.groupby(list(split), sort=False) if split else [((), rows)]:
        where = ", ".join(named(axis, value) for axis, value in zip(split, values, strict=True))
        at = ", ".join(plain(place) for place in sorted(part[x].dropna().unique()))
        panels.setdefault(at, []).append(where)
    return "; ".join(
        f"{x} {at}" + (f" ({'; '.join(names)})" if split else "") for at, names in panels.items()
    )


def missing(notes: Sequence[str]) -> str:
    """Notes on gaps as a sentence of alt text, empty without gaps."""
    return f" Missing: {'. '.join(notes)}." if notes else ""


def disturbed(notes: Sequence[str]) -> str:
    """Notes on noise as a sentence of alt text, empty where all is quiet."""
    return f" Disturbed: {'. '.join(notes)}." if notes else ""


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def shortlist(items: list[str], most: int) -> str:
    """The first items, and how many more there are."""
    return ", ".join(items[:most]) + (f", and {len(items) - most} more" if len(items) > most else "")
