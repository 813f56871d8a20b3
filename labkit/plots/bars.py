"""Horizontal bars: values side by side, and totals made of parts."""

from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from labkit.measure.rows import LIVE
from labkit.plots import formatting, style
from labkit.plots.formatting import RING_SIGN, TIMES_SIGN, format_duration
from labkit.plots.style import INK, MUTED, Picture, bar_style

_ROW, _BAR = 0.31, 0.66
"""Height of a row in inches, and of its bar in rows."""
_DECADE = 10.0
"""Values that span more stand on a logarithmic axis."""
_TICK: dict[str, Any] = {"color": INK, "linestyle": "none", "marker": "|", "markeredgewidth": 1.8}


@style.course_style()
def bars(
    table: pd.DataFrame,
    *,
    title: str,
    group: str | None = None,
    floor: Mapping[str, str] | None = None,
    linear: bool = False,
) -> Picture:
    """A bar of ``median_us`` for each row, in the table's order, with whiskers from p20 to p80.

    Bars start at zero. Where values span more than a decade the axis is logarithmic and says so, and markers
    at the end of a thin line take the place of bars; ``linear`` forbids it, where differences count.
    ``group`` is a column that puts the bars under headings. ``floor`` names references: columns, as
    ``"copy_us"``, that are a tick across each bar. Live bars are full, recorded ones pale with a dashed edge,
    published ones hollow with a dotted edge. Behind a value that something disturbed (column ``noise``)
    stands a ring, and a footnote says what. Raises ValueError for a column that the table lacks.
    """
    ticks = floor or {}
    numbers, whiskers = ["median_us", *ticks.values()], ["p20_us", "p80_us"]
    required = [*numbers, *([group] if group else [])]
    table = formatting.checked_table(table, required, [*numbers, *whiskers]).reset_index(drop=True)
    several_kinds = table["kind"].nunique() > 1
    kinds = [f" ({kind})" if several_kinds and kind != LIVE else "" for kind in table["kind"]]
    table["name"] = table["contender"] + kinds
    values = zip(table["median_us"], table["note"].replace("", "no value"), strict=True)
    table["written"] = [format_duration(x) if x > 0 else f"none ({reason})" for x, reason in values]
    table["heading"] = ""
    if group and len(table):
        table["heading"] = [formatting.axis_value(group, each) for each in table[group]]
    full_names = table["name"] + [f" ({heading})" if heading else "" for heading in table["heading"]]
    noise_notes = _noise_notes(full_names, table["noise"])
    known = table.loc[formatting.has_value(table, "median_us"), "median_us"]
    is_log = not linear and bool(known.max() > _DECADE * known.min())
    table["end"] = table[[*numbers, *whiskers]].max(axis=1)

    conditions, sources = formatting.common_conditions(table, (group, "contender")), formatting.origins(table)
    n_rows = max(len(table) + (table["heading"].nunique() if group else 0), 2)
    legend: list[Artist] = [Patch(label=source, **bar_style(MUTED, kind)) for kind, source in sources]
    legend += [Line2D([], [], label=name, **_TICK, markersize=11) for name in ticks]
    words: dict[str, Any] = dict(subtitle=conditions, footnotes=_ringed(noise_notes), legend=legend)
    figure = style.new_figure(title, 0.6 + n_rows * _ROW, **words)
    better = "lower is better" + ", logarithmic axis" * is_log
    ax = figure.add_subplot()
    ax.set(xlabel=f"time per call ({better})", ylim=(n_rows - 0.5, -0.5))
    _set_value_axis(ax, table[[*numbers, "end"]].to_numpy().ravel(), is_log)
    if table.empty:
        ax.text(0.5, 0.5, formatting.NOTHING_MEASURED, transform=ax.transAxes, ha="center", color=MUTED)
    styles, y, names = style.contender_styles(table["contender"]), 0, []
    left, _ = ax.get_xlim()
    for heading, part in table.groupby("heading", sort=False):
        if heading:
            ax.text(0.01, y, heading, transform=ax.get_yaxis_transform(), weight="bold", va="center")
            y += 1
        for _, row in part.iterrows():
            contender, x = styles[row["contender"]], row["median_us"]
            weight = "bold" if contender.emphasised else "normal"
            names.append((y, formatting.shorten(row["name"], 36), weight))
            if not x > 0:
                reason = formatting.shorten(f"{TIMES_SIGN} {row['note'] or 'no value'}", 58)
                _write_beside(ax, left, y, reason, color=MUTED, gid="gap")
            elif is_log:
                how = contender.curve(row["kind"]) | {"markersize": 9.5, "gid": f"{row['kind']} bar"}
                ax.plot([left, x], [y, y], markevery=[1], **how)
            else:
                how = bar_style(contender.colour, row["kind"]) | {"gid": f"{row['kind']} bar"}
                ax.barh(y, x, height=_BAR, zorder=3, **how)
            if x > 0:
                ax.plot(row[whiskers], [y] * len(whiskers), color=INK, linewidth=1.3, marker="|", zorder=7)
                floors = row[[*ticks.values()]]
                ax.plot(floors, [y] * len(ticks), **_TICK, markersize=19, zorder=8)
                _write_value(ax, row["end"], y, row["written"], row["noise"], weight)
            y += 1
    _set_row_names(ax, names)

    drawn = f"{title.rstrip('.')}. Bars of time per call{', on a logarithmic axis' if is_log else ''}"
    alt = [f"{drawn}: {formatting.NOTHING_MEASURED}."]
    if len(table):
        alt = [f"{', '.join(filter(None, [drawn, conditions]))}."]
    for heading, part in table.groupby("heading", sort=False):
        bars_in_words = formatting.first_items([*(part["name"] + " " + part["written"])], 10)
        alt.append(f"{heading}: {bars_in_words}." if heading else f"{bars_in_words}.")
    alt += [formatting.as_sentence(source) for _, source in sources]
    return Picture(figure, " ".join(alt) + formatting.notes_as_alt("Disturbed", noise_notes))


# --- what all bars share ----------------------------------------------------------------------------


def _set_value_axis(ax: Axes, values: Iterable[float], is_log: bool = False) -> None:
    """A value axis from zero, or a logarithmic one, with room for a value behind the longest bar."""
    known = [float(v) for v in values if v > 0]
    if is_log:
        low, reach = min(known), max(known) / min(known)
        ax.set(xscale="log", xlim=(low / reach**0.08, low * reach**1.18))
        ax.xaxis.set_major_locator(LogLocator(10, (1, 2, 5) if reach < 100 else (1,)))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.set_xlim(0, 1.16 * max(known, default=0.0) or 1.0)
        ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_duration(x) if x else "0"))
    ax.grid(axis="y", visible=False)


def _set_row_names(ax: Axes, names: Sequence[tuple[float, str, str]]) -> None:
    """Names left of the axis: tuples of y, text and font weight."""
    ax.set_yticks([y for y, *_ in names], [name for _, name, _ in names], size="medium")
    ax.tick_params(axis="y", length=0)
    for tick, (_, _, weight) in zip(ax.get_yticklabels(), names, strict=True):
        tick.set(weight=weight, linespacing=1.1, gid="label")


def _write_value(ax: Axes, x: float, y: float, text: str, noise: str, weight: str = "bold") -> None:
    """A bar's value at its end, with a ring where something disturbed it."""
    _write_beside(ax, x, y, f"{text} {RING_SIGN}" if noise else text, weight=weight, gid="value")


def _noise_notes(names: "pd.Series[str]", noise: "pd.Series[str]") -> list[str]:
    """A note for each thing that disturbed bars, with their names."""
    disturbed = names[noise != ""].groupby(noise, sort=False)
    return [f"{each}: {formatting.first_items(list(which), 6)}" for each, which in disturbed]


def _ringed(notes: Sequence[str]) -> list[str]:
    return [f"{RING_SIGN} {note}" for note in notes]


def _write_beside(ax: Axes, x: float, y: float, text: str, **how: Any) -> None:
    """Text right of a place, on white that hides the grid and the lines behind it."""
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    ax.annotate(text, (x, y), (9, 0), textcoords="offset points", va="center", bbox=white, zorder=6, **how)


# --- stacked bars -----------------------------------------------------------------------------------

_PART_COLOURS = ("#5A5A5A", "#CC8000", "#0048DC", "#1AA57D", "#5C0088", "#4D90FF")
"""Of the first part, the second and so on: neighbours are far apart in lightness."""


@style.course_style()
def stacked(table: pd.DataFrame, parts: Mapping[str, str], *, total: str, title: str) -> Picture:
    """A bar for each row of ``table``, made of its columns ``parts``, from left to right; in microseconds.

    ``parts`` says what each column means, for the legend; there are at most six. A line across the bar marks
    the column ``total``, which was measured by itself and is printed at the bar's end. Rows have a contender,
    and say where they come from (kind, device, date); those of one figure are of one device and kind. Clock
    and cache are left out: a part need not come from the clock that measured the total. Live bars are full,
    recorded ones pale with a dashed edge. Behind a total that something disturbed (column ``noise``) stands a
    ring, and a footnote says what.

    Raises ValueError for a table without rows, or with rows of two devices or kinds; for a column that is
    missing; and for a part or total that is negative or no finite number.
    """
    if len(parts) > len(_PART_COLOURS):
        raise ValueError(f"parts: there are {len(parts)}; at most {len(_PART_COLOURS)} can be told apart")
    numbers = [*parts, total]
    table = formatting.checked_table(table.assign(clock="", cache=""), numbers, numbers)
    sources = formatting.origins(table)
    if len(sources) != 1:
        raise ValueError(f"table: its rows have to be of one device and kind, and are of {len(sources)}")
    if not (np.isfinite(table[numbers]) & (table[numbers] >= 0)).all(axis=None):
        raise ValueError(f"table: each of {', '.join(numbers)} has to be zero or more in every row")
    kind, source = sources[0]
    colours = dict(zip(parts, _PART_COLOURS, strict=False))
    total_label = f"{total}: the total as measured by itself; its value is printed"
    legend = [
        *(Patch(label=f"{part}: {parts[part]}", **bar_style(hue, kind)) for part, hue in colours.items()),
        Line2D([], [], label=total_label, **_TICK, markersize=11),
    ]
    noise_notes = _noise_notes(table["contender"], table["noise"])
    words: dict[str, Any] = dict(subtitle=source, footnotes=_ringed(noise_notes), legend=legend)
    figure = style.new_figure(title, 0.6 + 1.1 * _ROW * len(table), **words)
    ax = figure.add_subplot()
    ax.set(xlabel="time (lower is better)", ylim=(len(table) - 0.5, -0.5))
    _set_value_axis(ax, [*table[list(parts)].sum(axis=1), *table[total]])

    def written(us: float) -> str:
        return format_duration(us) if us else "0"

    described = []
    for y, (_, row) in enumerate(table.iterrows()):
        x = 0.0
        for part, colour in colours.items():
            how = {**bar_style(colour, kind), "linewidth": 0.6, "gid": f"{part} bar"}
            ax.barh(y, row[part], left=x, height=_BAR, zorder=3, **how)
            x += row[part]
        ax.plot([row[total]], [y], **_TICK, markersize=19, zorder=5)
        _write_value(ax, max(x, row[total]), y, written(row[total]), row["noise"])
        summands = " + ".join(f"{part} {written(row[part])}" for part in parts)
        described.append(f"{row['contender']}: {summands} = {written(x)}, {total} {written(row[total])}")
    _set_row_names(ax, [(y, fill(str(name), 32), "normal") for y, name in enumerate(table["contender"])])
    drawn = f"{title.rstrip('.')}. Stacked bars, from top to bottom"
    alt = f"{drawn}: {'; '.join(described)}. {formatting.as_sentence(source)}"
    return Picture(figure, alt + formatting.notes_as_alt("Disturbed", noise_notes))
