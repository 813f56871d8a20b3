"""A timeline of what ran: the host's launches in one lane, the device's kernels in another, gaps visible."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from labkit.measure.rows import RECORDED
from labkit.plots import formatting, style
from labkit.plots.formatting import format_duration
from labkit.plots.style import MUTED, PALETTE, SMALL, Picture

if TYPE_CHECKING:  # drawing needs no torch
    from labkit.profiling.profiles import Profile

_HOST, _OTHERS = "#5A5A5A", "#B0B0B0"
"""Colours of the host's events, and of kernels beyond the palette's eight."""
_CHARACTER_INCHES = 0.085
"""Width of a character of small text."""


def _lanes(profile: "Profile") -> tuple[pd.DataFrame, pd.DataFrame]:
    """The host's events and the device's kernels in order of time; overlapping ones have different rows.

    Columns name, start and end (in microseconds after the first event), row, and us, the length.
    """
    events: list[Any] = [*profile.host, *profile.kernels]
    first = min((event.start_us for event in events), default=0.0)

    def lane(listed: Iterable[Any]) -> pd.DataFrame:
        boxes, row_ends = [], [-math.inf]
        for event in sorted(listed, key=lambda event: (event.start_us, -event.duration_us)):
            start = event.start_us - first
            end = start + event.duration_us
            row = next((row for row, row_end in enumerate(row_ends) if start >= row_end), len(row_ends))
            row_ends[row : row + 1] = [end]
            boxes.append((event.name, start, end, row))
        frame = pd.DataFrame(boxes, columns=["name", "start", "end", "row"])
        return frame.assign(us=frame["end"] - frame["start"])

    return lane(profile.host), lane(profile.kernels)


@style.course_style()
def timeline(profile: "Profile", *, title: str) -> Picture:
    """Two lanes against time in microseconds, from the first event: host launches, device kernels.

    A box is as long as its event; overlapping events stand in rows. Kernels of one name have one colour, and
    the legend says how often each ran and how long; where a box has room its name stands in it. Boxes of a
    live profile have a solid edge, those of a recorded one are paler with a dashed edge.
    """
    host, device = _lanes(profile)
    whole = max([0.0, *host["end"], *device["end"]])
    ends, starts = device["end"].cummax()[:-1], device["start"][1:]
    gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]  # when none runs
    kernels, launches = _calls(device), [*_calls(host).values()]
    colours = dict(zip(kernels, (contender.colour for contender in PALETTE), strict=False))
    source, legend = "", []
    if whole:
        stamp = {"kind": profile.kind, "device": profile.device, "date": profile.date}
        source = formatting.origin(pd.DataFrame([stamp | {"clock": "", "cache": ""}]), profile.kind)
        entries = [(source, _HOST), (f"host: {formatting.first_items(launches, 3) or 'nothing'}", _HOST)]
        entries += [(kernels[name], colour) for name, colour in colours.items()]
        if more := len(kernels) - len(colours):
            entries.append((f"{more} more kernels", _OTHERS))
        legend = [Patch(label=label, **_box_style(colour, profile.kind)) for label, colour in entries]

    counts = [
        f"{len(events)} {noun}{'' if len(events) == 1 else 's'}"
        for noun, events in (("kernel", device), ("host event", host))
    ]
    busy = device["end"].max() - device["start"].min() - sum(b - a for a, b in gaps) if len(device) else 0.0
    share = f"{format_duration(busy) if busy else '0 µs'} ({100 * busy / (whole or 1.0):.0f}%)"
    summary = f"{', '.join(counts)} in {format_duration(whole)}; device busy {share}"

    n_rows = {lane: max([0, *events["row"]]) + 1 for lane, events in (("host", host), ("device", device))}
    height = n_rows["host"] + n_rows["device"] + 0.8
    figure = style.new_figure(title, 0.6 + 0.32 * height, subtitle=summary if whole else "", legend=legend)
    ax = figure.add_subplot()
    ax.set(xlim=(0.0, whole * 1.01 or 1.0), ylim=(height, -0.2), xlabel="time (µs)")  # the last edge shows
    ax.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    ax.grid(axis="y", visible=False)
    if not whole:
        ax.text(0.5, 0.5, formatting.NOTHING_MEASURED, transform=ax.transAxes, ha="center", color=MUTED)
    tops = {"host": 0.0, "device": n_rows["host"] + 0.8}
    for lane, events in (("host", host), ("device", device)):
        ax.axhspan(tops[lane], tops[lane] + n_rows[lane], color=style.SHADES[0], zorder=0)
        for name, a, b, row, us in events.itertuples(index=False):
            colour, y = _HOST if lane == "host" else colours.get(name, _OTHERS), tops[lane] + row + 0.5
            how = _box_style(colour, profile.kind) | {"gid": f"{lane} box"}
            ax.barh(y, us, left=a, height=0.8, zorder=3, **how)
            _write_where_it_fits(ax, name, a, b, y)
    for a, b in gaps:
        idle = f"{format_duration(b - a)} idle"
        _write_where_it_fits(ax, idle, a, b, tops["device"] + 0.5, style="italic")
    ax.set_yticks([tops[lane] + n_rows[lane] / 2 for lane in tops], list(tops), weight="bold", size="medium")
    ax.tick_params(axis="y", length=0)

    what = f"{title.rstrip('.')}. Timeline of host and device"
    if not whole:
        return Picture(figure, f"{what}: {formatting.NOTHING_MEASURED}.")
    totals = device["us"].groupby(device["name"], sort=False).sum()
    longest = totals.sort_values(ascending=False, kind="stable").map(format_duration)
    alt = [f"{what}: {summary}."]
    if len(longest):
        times = [f"{name} {time}" for name, time in longest.items()]
        alt.append(f"Kernels by time: {formatting.first_items(times, 4)}.")
    if gaps:
        alt.append(f"Longest gap between kernels {format_duration(max(b - a for a, b in gaps))}.")
    return Picture(figure, " ".join([*alt, formatting.as_sentence(source)]))


def _box_style(colour: str, kind: str) -> dict[str, Any]:
    """A box in a pale colour, so that a name in it is readable; paler, its edge dashed when recorded."""
    recorded = kind == RECORDED
    face = style.mix_with_white(colour, 0.18 if recorded else 0.45)
    return {"facecolor": face, "edgecolor": colour, "linewidth": 0.8, "linestyle": "--" if recorded else "-"}


def _calls(events: pd.DataFrame) -> dict[str, str]:
    """For each name, in order of time: how often it ran, and how long."""
    described = {}
    for name, calls in events.groupby("name", sort=False):
        total = format_duration(calls["us"].sum())
        times = f"{len(calls)} calls, {total} in all" if len(calls) > 1 else total
        described[str(name)] = f"{formatting.shorten(str(name), 60)}, {times}"
    return described


def _write_where_it_fits(ax: Axes, text: str, start: float, end: float, y: float, **font: Any) -> None:
    """Text in the middle of a stretch, if it has room for it."""
    left, right = ax.get_xlim()
    if (end - start) / (right - left) * (style.WIDTH - 1.0) > _CHARACTER_INCHES * (len(text) + 1):
        middle = (start + end) / 2
        ax.text(middle, y, text, size=SMALL, ha="center", va="center", zorder=5, gid="label", **font)
