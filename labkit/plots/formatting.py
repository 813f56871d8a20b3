"""Rows as text: numbers, where they were measured, what they have in common, what is missing and why."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.measure.rows import COLUMNS, KINDS, PUBLISHED

TIMES_SIGN = "\N{MULTIPLICATION SIGN}"
RING_SIGN = "\N{LARGE CIRCLE}"
NOTHING_MEASURED = "nothing measured yet"
_TEXT_COLUMNS = (
    *("contender", "series", "kind", "note", "noise", "source"),
    *("device", "date", "direction", "dtype", "clock", "cache"),
)
_RESULT_COLUMNS = ("series", "speedup", "low", "high", "traffic", "launches", "programs", "moved")

# --- numbers and texts ------------------------------------------------------------------------------


def format_duration(us: float) -> str:
    """Microseconds with three digits and the unit that suits them: ``6.7 µs``, ``25.8 ms``."""
    units = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))
    scale, unit = next((pair for pair in units if us >= pair[0] * 0.9995), (1e-3, "ns"))
    return f"{format_number(us / scale)} {unit}"


def format_number(value: float) -> str:
    """Three significant digits, never in powers of ten: ``0.25``, ``33.3``, ``16384``."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def format_ratio(value: float) -> str:
    """A ratio with its multiplication sign: ``2.5×``."""
    return format_number(value) + TIMES_SIGN


def format_size(value: Any) -> str:
    """A size without the ``.0`` that it has in a table with gaps; anything else as it is."""
    is_whole = isinstance(value, (int, float, np.number)) and float(value).is_integer()
    return f"{value:.0f}" if is_whole else str(value)


def axis_value(axis: str, value: Any) -> str:
    """A value with the name of its axis where it needs one: ``bf16``, but ``batch 256``."""
    return str(value) if axis in COLUMNS else f"{axis} {format_size(value)}"


def shorten(text: str, most: int) -> str:
    """The text in one line of at most ``most`` characters, with an ellipsis where some are left out."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"


def first_items(items: Sequence[str], most: int) -> str:
    """The first ``most`` items, and how many more there are."""
    return ", ".join(items[:most]) + (f", and {len(items) - most} more" if len(items) > most else "")


def as_sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


# --- tables -----------------------------------------------------------------------------------------


def checked_table(table: pd.DataFrame, required: Iterable[str], numeric: Iterable[str]) -> pd.DataFrame:
    """A copy that has every column that drawing reads: ``numeric`` ones as numbers, others as text.

    Of ``contender`` and ``series`` one stands in for the other. Raises ValueError where a required column is
    missing from a table that has rows, or a kind is unknown.
    """
    table = table.copy()
    for name, other in (("series", "contender"), ("contender", "series")):
        if other in table:
            table[name] = table[name].fillna(table[other]) if name in table else table[other]
    for name in (*required, "contender", "kind"):
        if name not in table and len(table):
            raise ValueError(f"table: no column {name!r} among {', '.join(map(str, table.columns))}")
    for name in numeric:
        table[name] = pd.to_numeric(table[name]) if name in table else np.nan
    for name in _TEXT_COLUMNS:
        table[name] = table[name].fillna("") if name in table else ""
    unknown = sorted(set(table["kind"]) - set(KINDS))
    if unknown:
        raise ValueError(f"kind: {unknown[0]!r} is none of {', '.join(KINDS)}")
    return table


def has_value(table: pd.DataFrame, column: str) -> "pd.Series[bool]":
    """Which rows have a positive finite number in a column; all others are gaps."""
    return np.isfinite(table[column].astype(float)) & (table[column] > 0)


def shape_axes(table: pd.DataFrame) -> list[str]:
    """The columns that are axes of the shape: those of whole numbers that no row's schema has."""
    others = table.drop(columns=[*COLUMNS, *_RESULT_COLUMNS], errors="ignore")
    numbers = others.select_dtypes("number").dropna(axis="columns", how="all")
    return [name for name in numbers if (numbers[name].dropna() % 1 == 0).all()]


def common_conditions(table: pd.DataFrame, varying: Iterable[str | None]) -> str:
    """What is the same for every row: direction, dtype, the axes of the shape that do not vary."""
    if table.empty:
        return ""
    fixed = [name for name in ("direction", "dtype", *shape_axes(table)) if name not in varying]
    values = {name: table[name].replace("", np.nan).dropna().unique() for name in fixed}
    return ", ".join(axis_value(name, found[0]) for name, found in values.items() if len(found) == 1)


# --- where numbers come from ------------------------------------------------------------------------


def origin(rows: pd.DataFrame, kind: str) -> str:
    """Where rows of one kind come from: the device, the date, the clock; the source of published ones."""

    def values(column: str) -> list[str]:
        return [str(value) for value in rows[column].unique() if value != ""]

    device, clocks, caches = " and ".join(values("device")), values("clock"), values("cache")
    if kind == PUBLISHED:
        source = f"published: {'; '.join(values('source')) or 'source unknown'}"
        return f"{source}, {device}" if device else source
    parts = [f"{kind} on {device}" if device else kind]
    if days := sorted(date[:10] for date in values("date")):
        parts.append(days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}")
    parts += [f"{clocks[0]} clock"] if len(clocks) == 1 else []
    parts += [f"{caches[0]} cache"] if len(caches) == 1 else []
    return ", ".join(parts)


def origins(table: pd.DataFrame) -> list[tuple[str, str]]:
    """Kind and origin for each device that measured and each source that published.

    Where several published, the text names whose points are whose.
    """
    found = []
    for kind in KINDS:
        rows = table[table["kind"] == kind]
        parts = [part for _, part in rows.groupby("source" if kind == PUBLISHED else "device", sort=False)]
        for part in parts:
            names = f" ({', '.join(part['series'].unique())})" * (kind == PUBLISHED and len(parts) > 1)
            found.append((kind, origin(part, kind) + names))
    return found


# --- gaps and noise ---------------------------------------------------------------------------------


def footnotes(rows: pd.DataFrame, reasons: "pd.Series[str]", x: str, panel_axes: Sequence[str]) -> list[str]:
    """A note for each reason that rows are marked for: which contenders, where on ``x``, in which panel.

    ``out of memory: labkit, eager at width 4096, 8192 (fp32); eager at width 2048 (bf16)``.
    """
    notes = []
    for reason, marked in rows.groupby(reasons, sort=False):
        places: dict[str, list[str]] = {}
        for (series, *values), part in marked.groupby(["series", *panel_axes], sort=False, dropna=False):
            sizes = ", ".join(format_size(size) for size in sorted(part[x].dropna().unique()))
            panel = ", ".join(axis_value(*each) for each in zip(panel_axes, values, strict=True))
            places.setdefault(f"at {x} {sizes}" + (f" ({panel})" if panel else ""), []).append(series)
        said = (f"{', '.join(series)} {place}" for place, series in places.items())
        notes.append(f"{shorten(str(reason), 90)}: {'; '.join(said)}")
    return notes


def notes_as_alt(title: str, notes: Sequence[str]) -> str:
    """Footnotes as a sentence of alt text, as "Missing: ..."; empty without notes."""
    return f" {title}: {'. '.join(notes)}." if notes else ""
