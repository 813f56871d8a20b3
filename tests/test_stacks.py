"""Stacked bars begin at zero and lie end to end; the measured total stands where it was measured."""

from itertools import pairwise
from math import inf, nan
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox
from test_figures import assert_apart, boxes, texts

from labkit import drawing, figures, stacks

PARTS = {"work": "what has to be done", "waiting": "the rest", "launches": "what the host adds"}
STEPS = {"eager": (20.0, 60.0, 100.0, 189.0), "fused": (20.0, 30.0, 10.0, 55.0)}
"""Parts, and the total as measured: above the sum of the first, below that of the second."""
ORIGIN = {
    "kind": "live",
    "device": "NVIDIA H200",
    "date": "2026-11-20T12:00:00",
    "clock": "host",
    "cache": "warm",
}
LONG = "a contender whose name goes on for more than two lines, and even then is not at its end"


def table(steps: dict[str, tuple[float, ...]] = STEPS, **changes: Any) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"contender": name, **dict(zip([*PARTS, "wall"], values, strict=True)), **ORIGIN, **changes}
            for name, values in steps.items()
        ]
    )


def drawn(steps: dict[str, tuple[float, ...]] = STEPS, **changes: Any) -> figures.Shown:
    return figures.stacks(table(steps), PARTS, **{"total": "wall", "title": "The ledger", **changes})


def bars(shown: figures.Shown) -> list[list[Rectangle]]:
    """The bars of each row, from left to right; rows without a bar are left out."""
    found = [p for p in shown.figure.findobj(Rectangle) if str(p.get_gid()).endswith(" bar")]
    heights = sorted({bar.get_y() for bar in found}, reverse=True)
    return [sorted((b for b in found if b.get_y() == y), key=lambda b: b.get_x()) for y in heights]


def names(row: list[Rectangle]) -> list[str]:
    return [str(bar.get_gid()).removesuffix(" bar") for bar in row]


def totals(shown: figures.Shown) -> list[np.ndarray]:
    """The lines of the totals, (2, 2) each, from top to bottom."""
    lines = [c for c in shown.figure.findobj(LineCollection) if c.get_gid() == "total"]
    return sorted((line.get_segments()[0] for line in lines), key=lambda ends: -ends[0, 1])


def extents(shown: figures.Shown) -> list[Bbox]:
    """All bars and total lines as drawn, in pixels."""
    (ax,) = shown.figure.axes
    found = [bar.get_window_extent() for row in bars(shown) for bar in row]
    return found + [Bbox(ax.transData.transform(ends)) for ends in totals(shown)]


def test_bars_begin_at_zero_and_lie_end_to_end() -> None:
    rows = bars(drawn())
    assert [names(row) for row in rows] == [list(PARTS)] * 2
    for row, values in zip(rows, STEPS.values(), strict=True):
        assert row[0].get_x() == 0
        assert [bar.get_width() for bar in row] == pytest.approx(values[:3])
        for bar, following in pairwise(row):
            assert following.get_x() == pytest.approx(bar.get_x() + bar.get_width())


def test_the_total_stands_where_it_was_measured_and_crosses_its_bar() -> None:
    shown = drawn(note="A note.")
    for ends, row, values in zip(totals(shown), bars(shown), STEPS.values(), strict=True):
        assert ends[:, 0] == pytest.approx(values[3])
        assert ends[:, 1].min() < row[0].get_y()
        assert ends[:, 1].max() > row[0].get_y() + row[0].get_height()
    assert {"189 µs", "55 µs", "The ledger", "A note."} <= set(texts(shown))
    written = [text for text in texts(drawn(dict(reversed(STEPS.items())))) if text in STEPS]
    assert written == list(STEPS)[::-1], "rows stand in the table's order"


@pytest.mark.parametrize(
    "steps",
    [
        STEPS,
        {LONG: STEPS["eager"], "x" * 90: STEPS["fused"], LONG + "!": (1.0, 1.0, 1.0, 3.0), "short": (1,) * 4},
        {"far above": (1.0, 1.0, 1.0, 1e6), "next": (1.0, 1.0, 1.0, 3.0)},
        {"far below": (1e6, 1.0, 1.0, 1.0), "next": (1.0, 1.0, 1.0, 3.0)},
        {"at the sum": (1.0, 2.0, 3.0, 6.0)},
        {"long number": (1.0, 2.0, 3.0, 1234567.0), "none": (0.0, 0.0, 0.0, 0.0)},
        {f"contender {i}": (10.0, 0.0, i, 12.0 * i) for i in range(14)},
    ],
    ids=["two", "long names", "far above", "far below", "equal", "long number", "many"],
)
def test_names_totals_and_bars_do_not_overlap(steps: dict[str, tuple[float, ...]]) -> None:
    shown = drawn(steps)
    labels, values = boxes(shown, "label"), boxes(shown, "value")
    assert len(labels) == len(values) == len(totals(shown)) == len(steps)
    assert_apart([*labels, *values], shown)
    for text in [*labels, *values]:
        for bar in extents(shown):
            assert not (text.y0 < bar.y1 and bar.y0 < text.y1 and text.x0 < bar.x1 and bar.x0 < text.x1)
    (ax,) = shown.figure.axes
    assert all(ax.bbox.y0 <= box.y0 and box.y1 <= ax.bbox.y1 for box in extents(shown) + labels)
    assert all(box.x1 <= ax.bbox.x1 for box in extents(shown) + values)
    assert all(box.x1 <= ax.bbox.x0 for box in labels)


def test_zeros_have_no_bar_but_a_key_and_columns_that_are_no_parts_are_not_drawn() -> None:
    shown = drawn({"a": (20.0, 0.0, 10.0, 30.0), "b": (10.0, 0.0, 5.0, 16.0)})
    assert [names(row) for row in bars(shown)] == [["work", "launches"]] * 2
    assert [row[1].get_x() for row in bars(shown)] == [20, 10]
    assert "waiting: the rest" in texts(shown)
    nothing = drawn({"a": (0.0, 0.0, 0.0, 0.0)})
    assert not bars(nothing) and totals(nothing)[0][:, 0] == pytest.approx(0)
    two = {part: PARTS[part] for part in ("work", "waiting")}
    shown = figures.stacks(table(), two, total="launches", title="t")
    assert [names(row) for row in bars(shown)] == [list(two)] * 2
    assert [ends[0, 0] for ends in totals(shown)] == [100, 10]


def test_every_part_has_a_colour_of_its_own_and_a_line_in_the_key() -> None:
    shown = drawn()
    assert {f"{part}: {meaning}" for part, meaning in PARTS.items()} <= set(texts(shown))
    assert any(text.startswith("wall: ") for text in texts(shown)), "and the total"
    rows = [[drawing.to_hex(bar.get_facecolor()) for bar in row] for row in bars(shown)]
    assert rows[0] == rows[1] == [hue.lower() for hue in stacks.HUES[:3]]
    samples = [p for p in shown.figure.findobj(Rectangle) if p.get_gid() is None and p.get_height() < 0.1]
    assert {drawing.to_hex(p.get_facecolor()) for p in samples} >= set(rows[0])


def test_it_says_where_its_values_come_from_and_kinds_look_different() -> None:
    looks = {}
    for kind in ("live", "recorded", "published"):
        shown = figures.stacks(table(kind=kind, source="a paper"), PARTS, total="wall", title="t")
        rest = ": a paper, NVIDIA H200" if kind == "published" else " on NVIDIA H200, 2026-11-20"
        assert kind + rest in texts(shown), "and no clock, which measured the total only"
        assert shown.alt.endswith(f"{kind.capitalize()}{rest}.")
        (row, _) = bars(shown)
        looks[kind] = {(bar.get_facecolor(), str(bar.get_linestyle())) for bar in row}
    assert {style for _, style in looks["live"]} == {"-"}
    assert all(style != "-" for kind in ("recorded", "published") for _, style in looks[kind])
    assert looks["live"].isdisjoint(looks["recorded"]) and looks["recorded"].isdisjoint(looks["published"])


def test_the_alt_text_tells_every_row() -> None:
    assert drawn().alt == (
        "The ledger. Stacked bars, from top to bottom: "
        "eager: work 20 µs + waiting 60 µs + launches 100 µs = 180 µs, wall 189 µs; "
        "fused: work 20 µs + waiting 30 µs + launches 10 µs = 60 µs, wall 55 µs. "
        "Live on NVIDIA H200, 2026-11-20."
    )
    assert drawn(alt="my words").alt == "my words"


def test_what_cannot_be_drawn_is_refused_and_a_table_stays_as_it_was() -> None:
    many = {f"part {i}": "some of it" for i in range(len(stacks.HUES) + 1)}
    both = [pd.concat([table(), table(**other)]) for other in ({"device": "NVIDIA L4"}, {"kind": "recorded"})]
    wrong: list[tuple[Any, Any, str]] = [
        (table().iloc[:0], PARTS, "table: has no rows"),
        (table(), {}, "parts: there are 0"),
        (table().assign(**dict.fromkeys(many, 1.0)), many, "parts: there are 7; 1 to 6"),
        (table(kind="guessed"), PARTS, "kind: 'guessed' is none of"),
        *((each, PARTS, "rows live on NVIDIA H200, 2026-11-20 and ") for each in both),
        *(
            (table().drop(columns=name), PARTS, f"no column '{name}'")
            for name in ("work", "wall", "contender")
        ),
    ]
    for column in (*PARTS, "wall"):
        for value in (-1.0, nan, inf, None):
            spoilt = table().astype({column: object})
            spoilt.loc[1, column] = value
            wrong.append((spoilt, PARTS, f"a value of '{column}' is .*; it has to be zero or more"))
    for given, parts, words in wrong:
        before = given.copy()
        with pytest.raises(ValueError, match=words):
            figures.stacks(given, parts, total="wall", title="t")
        pd.testing.assert_frame_equal(given, before)
