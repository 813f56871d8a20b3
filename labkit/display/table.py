"""A table of measurements that answers questions and shows itself as its figure; races."""

import html
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

from labkit.display import figures, style
from labkit.display.figures import Bar
from labkit.display.style import Picture, show
from labkit.measure import session
from labkit.measure.session import Session, Ways
from labkit.measure.tape import FIELDS, Row
from labkit.work import Work

POWER = "slowed down by power limit"
"""The noise of a row that a GPU measured at its power limit. A large GPU that multiplies is there most of the
time, in a network as in a race: it is noted in the row, and not said beneath a figure."""


# ---- a number that knows where it is from ------------------------------------------------------------------


def _arithmetic(
    operation: Callable[[float, float], float],
) -> Callable[["Measured", "Measured | float"], "Measured"]:
    """A method that applies an operation to a figure and another one, or a plain number."""

    def method(self: "Measured", other: "Measured | float") -> "Measured":
        if not isinstance(other, Measured):
            return replace(self, value=operation(self.value, other))
        if (self.kind, self.device) != (other.kind, other.device):
            return MISSING
        return replace(self, value=operation(self.value, other.value))

    return method


@dataclass(frozen=True, order=True)
class Measured:
    """A figure and where it comes from: measured now (live), or read from a tape.

    It adds, subtracts, multiplies and divides with plain numbers, and with figures of the same origin. With
    one of another device or kind the result is `MISSING`, as no figure may mix them.
    """

    value: float
    kind: Literal["live", "recorded"]
    device: str
    """Empty for a figure that nobody measured."""

    __add__ = __radd__ = _arithmetic(operator.add)
    __mul__ = __rmul__ = _arithmetic(operator.mul)
    __sub__ = _arithmetic(operator.sub)
    __rsub__ = _arithmetic(lambda value, other: other - value)
    __truediv__ = _arithmetic(operator.truediv)
    __rtruediv__ = _arithmetic(lambda value, other: other / value)

    def __getitem__(self, name: str) -> "Measured":
        """Of a table that nobody measured every entry is missing, too."""
        if self.device:
            raise TypeError("a figure is no table")
        return self

    def __float__(self) -> float:
        """The number; nan where nobody measured it."""
        return float(self.value)

    def __format__(self, spec: str) -> str:
        """The number as ``f"{time:.1f}"`` writes it; nan where nobody measured it."""
        return format(self.value, spec) if spec else str(self)


MISSING = Measured(math.nan, "live", "")
"""A figure that nobody measured; what is computed from it is missing, too."""


# ---- a table -----------------------------------------------------------------------------------------------


class Table:
    """Rows of one race or sweep.

    A question names what tells rows apart: ``table.time("x*w + b", clock="host", width=160)``. Its answer is
    a number in microseconds, or a ratio, that knows where it was measured (`Measured`); it is missing where
    nothing was measured. ValueError where several rows fit. The solution answers for "your kernel" where that
    has not been measured.
    """

    def __init__(self, title: str, rows: Sequence[Row], live: bool, known: Session) -> None:
        self.title, self.rows, self.live, self._session = title, list(rows), live, known

    @property
    def axes(self) -> list[str]:
        """The names of the sizes."""
        return list(dict.fromkeys(axis for row in self.rows for axis in row.axes))

    def time(self, way: str, **where: Any) -> Measured:
        """The median time of a way, in microseconds a call."""
        row = self._row(way, where)
        return MISSING if row is None or row.median_us is None else self._number(row.median_us, row)

    def speedup(self, of: str, over: str, **where: Any) -> Measured:
        """How many times as fast as ``over`` is ``of``."""
        return self.time(over, **where) / self.time(of, **where)

    def share(self, way: str, **where: Any) -> Measured:
        """The time of a copy of the same bytes over that of a way: 1 is as fast as copying."""
        row = self._row(way, where)
        if row is None or not row.median_us or not row.copy_us:
            return MISSING
        return self._number(row.copy_us / row.median_us, row)

    def _number(self, value: float, row: Row) -> Measured:
        return Measured(value, "live" if self.live else "recorded", row.device)

    def _row(self, way: str, where: Mapping[str, Any]) -> Row | None:
        found = [
            row
            for row in self.rows
            if row.way == way and all(_of(row, name) == v for name, v in where.items())
        ]
        if not found and way == "your kernel":
            return self._row("the solution", where)
        if len(found) > 1:
            raise ValueError(
                f"{self.title}: {len(found)} rows of {way!r} fit {dict(where)}; name more of their columns"
            )
        return found[0] if found else None

    # ---- how it shows itself -------------------------------------------------------------------------------

    def picture(self) -> Picture:
        """Bars: those of the ways at one point under a heading that says what is special to it."""
        varying = [name for name in (*self.axes, *FIELDS) if len({_of(row, name) for row in self.rows}) > 1]
        groups: dict[str, list[Bar]] = {}
        for row in self.rows:
            heading = ", ".join(in_words(name, _of(row, name)) for name in varying)
            look = style.style_of(row.way, self._session.styles)
            bar = Bar(row.way, row.median_us, look, self.live, row.p20_us, row.p80_us, row.copy_us, row.note)
            groups.setdefault(heading, []).append(bar)
        return figures.bars(self.title, groups, origin(self.rows, self.live))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        if not self.rows:
            nothing = f"{self.title}: nothing was measured here, and nothing is recorded."
            return {"text/plain": nothing, "text/html": f"<p><em>{html.escape(nothing)}</em></p>"}
        picture = self.picture()
        page = picture._repr_html_() + numbers_html(self.rows)
        return {"text/plain": picture.alt, "text/html": page}


def _of(row: Row, name: str) -> Any:
    """A row's field, or its size along an axis."""
    return getattr(row, name) if name in FIELDS else row.axes.get(name)


def short(device: str) -> str:
    """A device without its memory: ``NVIDIA H100``."""
    return re.sub(r" \d+GB.*$", "", device)


def in_words(name: str, value: Any) -> str:
    """``width 160``, ``host clock``, ``bfloat16``."""
    return {
        "clock": f"{value} clock",
        "cache": f"{value} cache",
        "dtype": str(value),
        "direction": str(value),
    }.get(name, f"{name} {value}")


def origin(rows: Sequence[Row], live: bool) -> list[str]:
    """Where rows are from, as lines beneath a title: device, date, versions, and what is the same for all."""
    timed = [row for row in rows if row.device]
    if not timed:
        return ["no times"]
    first = timed[0]
    days = sorted({row.date[:10] for row in timed})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    versions = f"torch {first.torch.partition('+')[0]}, triton {first.triton}"
    where = f"{'Live' if live else 'Recorded'} on an {short(first.device)}, {when} ({versions})"
    same = [(name, {_of(row, name) for row in timed}) for name in (*first.axes, *FIELDS)]
    usual: list[set[Any]] = [{""}, {"forward"}]  # a forward pass is what one expects
    how = ", ".join(
        in_words(name, *values) for name, values in same if len(values) == 1 and values not in usual
    )
    found = [f"{where}; {how}." if how else f"{where}."]
    for noise in dict.fromkeys(row.noise for row in timed if row.noise not in ("", POWER)):
        varying = [name for name in first.axes if len({row.axes.get(name) for row in timed}) > 1]
        sizes = {
            ", ".join(in_words(name, _of(row, name)) for name in varying)
            for row in timed
            if row.noise == noise
        }
        found.append(f"Noisy ({noise}): {'; '.join(sorted(filter(None, sizes))) or 'all'}.")
    return found


def numbers_html(rows: Iterable[Row]) -> str:
    """The rows' times as a table that a click, or Enter on the focused line, unfolds."""
    lines = [
        (row.way, *(in_words(name, _of(row, name)) for name in (*row.axes, *FIELDS)), _spread(row))
        for row in rows
    ]
    table = plain_table([], lines)
    return f'<details><summary style="cursor:pointer">The numbers</summary>{table}</details>'


def _spread(row: Row) -> str:
    if row.median_us is None:
        return row.note
    spread = f"{row.p20_us:,.2f} to {row.p80_us:,.2f}" if row.p20_us is not None else ""
    return f"{row.median_us:,.2f} µs ({spread})" + (f"; {row.note}" if row.note else "")


def plain_table(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """An HTML table, its texts to the left, nothing in them markup."""

    def cells(tag: str, values: Sequence[Any]) -> str:
        look = "text-align:left; padding-right:1.5em"
        return "".join(f'<{tag} style="{look}">{html.escape(str(value))}</{tag}>' for value in values)

    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if heads else ""
    body = "".join(f"<tr>{cells('td', line)}</tr>" for line in lines)
    return f"<table>{head}<tbody>{body}</tbody></table>"


def show_table(title: str, heads: Sequence[str], lines: Sequence[Sequence[Any]], *where: str) -> None:
    """Show a small table below a title, and below it lines that say where its numbers are from."""
    said = "\n".join(where)
    page = f"<p><strong>{html.escape(title)}</strong></p>" if title else ""
    page += plain_table(heads, lines)
    page += f"<p><small>{html.escape(said)}</small></p>" if said else ""
    if heads:
        text = pd.DataFrame(lines, columns=heads).to_string(index=False)
    else:
        text = "\n".join("  ".join(line) for line in lines)
    show(page, "\n".join(filter(None, [title, text, said])))


# ---- the face ----------------------------------------------------------------------------------------------


def race(title: str, ways: Ways, work: Work | None = None, **how: Any) -> Table:
    """Time ways to do the same at a few sizes, in interleaved runs, and show bars.

    Args:
        title: the figure's, and the name of its rows on a tape.
        ways: functions by name; one that does another work is written ``(function, work)``.
        work: what they compute (``lab.work.affine``): it makes the inputs, and says what is right.
        how: sizes (``batch=256, width=[160, 1024]``), and ``dtype`` ("float32"), ``direction`` ("forward",
            "backward"), ``clock`` ("graph", "host", "events"), ``cache`` ("cold", "warm"); each a value or a
            list of them.

    On a GPU every way is first compared with float64. Elsewhere the recorded times are shown.
    """
    known = session.current()
    rows = [row for point in session.points(title, ways, work, how) for row in known.measure(point)]
    return Table(title, rows, known.live, known)
