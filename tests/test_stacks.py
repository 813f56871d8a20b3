"""Stacked bars begin at zero and lie end to end; the measured total stands where it was measured."""

from itertools import pairwise
from math import inf, nan
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
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
    shown = drawn()
    for ends, row, values in zip(totals(shown), bars(shown), STEPS.values(), strict=True):
        assert ends[:, 0] == pytest.approx(values[3])
        assert ends[:, 1].min() < row[0].get_y()
        assert ends[:, 1].max() > row[0].get_y() + row[0].get_height()
    assert {"189 µs", "55 µs"} <= set(texts(shown))


def test_rows_stand_in_the_tables_order() -> None:
    shown = drawn()
    labels = boxes(shown, "label")
    assert len(labels) == 2 and labels[0].y0 > labels[1].y1
    for steps in (STEPS, dict(reversed(STEPS.items()))):
        written = [text for text in texts(drawn(steps)) if text in steps]
        assert written == list(steps)


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


@pytest.mark.parametrize("total", [189.0, 1999.0, 17.6, 640.0, 1755.0])
def test_numbers_of_the_axis_do_not_leave_the_figure(total: float) -> None:
    shown = drawn({"eager": (1.0, 1.0, 1.0, total)})
    FigureCanvasAgg(shown.figure).draw()
    (ax,) = shown.figure.axes
    found = [tick.label1.get_window_extent() for tick in ax.xaxis.get_major_ticks()]
    assert len(found) >= 3
    assert_apart(found, shown)


def test_every_part_has_a_colour_of_its_own_and_a_line_in_the_key() -> None:
    shown = drawn()
    assert {f"{part}: {meaning}" for part, meaning in PARTS.items()} <= set(texts(shown))
    assert any(text.startswith("wall: ") for text in texts(shown)), "and the total"
    rows = [[drawing.to_hex(bar.get_facecolor()) for bar in row] for row in bars(shown)]
    assert rows[0] == rows[1] == [hue.lower() for hue in stacks.HUES[:3]]
    samples = [p for p in shown.figure.findobj(Rectangle) if p.get_gid() is None and p.get_height() < 0.1]
    assert {drawing.to_hex(p.get_facecolor()) for p in samples} >= set(rows[0])


def test_colours_are_of_the_palette_and_neighbours_differ_in_lightness() -> None:
    """Who sees no colours at all tells a part from the next one."""
    assert len(set(stacks.HUES)) == len(stacks.HUES)
    assert set(stacks.HUES) <= {hue for hue, _ in drawing.SLOTS[1:]}, "the first is our own contender's"
    assert all(drawing.contrast(a, b) > 2 for a, b in pairwise(stacks.HUES))


def test_as_many_parts_as_there_are_colours() -> None:
    parts = {f"part {i}": "some of it" for i in range(len(stacks.HUES) + 1)}
    many = table().assign(**dict.fromkeys(parts, 1.0))
    with pytest.raises(ValueError, match="parts: there are 7; 1 to 6"):
        figures.stacks(many, parts, total="wall", title="t")
    parts.popitem()
    (first, _) = bars(figures.stacks(many, parts, total="wall", title="t"))
    assert len({bar.get_facecolor() for bar in first}) == len(first) == len(stacks.HUES)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("live", "live on NVIDIA H200, 2026-11-20"),
        ("recorded", "recorded on NVIDIA H200, 2026-11-20"),
        ("published", "published: a paper, NVIDIA H200"),
    ],
)
def test_it_says_where_its_values_come_from(kind: str, words: str) -> None:
    shown = figures.stacks(table(kind=kind, source="a paper"), PARTS, total="wall", title="t")
    assert words in texts(shown), "and no clock, which measured the total only"
    assert shown.alt.endswith(f"{words[0].upper()}{words[1:]}.")


def test_kinds_look_different() -> None:
    looks = {}
    for kind in ("live", "recorded", "published"):
        (row, _) = bars(figures.stacks(table(kind=kind), PARTS, total="wall", title="t"))
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
    assert "launches 0 = 2.5 ms, wall 3 ms" in drawn({"a": (500.0, 2000.0, 0.0, 3000.0)}).alt


def test_title_note_and_another_total() -> None:
    shown = figures.stacks(
        table().assign(alone=[80.0, 50.0]), PARTS, total="alone", title="A title", note="A note."
    )
    assert {"A title", "A note.", "80 µs", "50 µs"} <= set(texts(shown))
    assert "189 µs" not in texts(shown)
    assert [ends[0, 0] for ends in totals(shown)] == [80, 50]


def test_columns_that_are_no_parts_are_not_drawn() -> None:
    two = {part: PARTS[part] for part in ("work", "waiting")}
    shown = figures.stacks(table(), two, total="wall", title="t")
    assert [names(row) for row in bars(shown)] == [list(two)] * 2
    assert "launches" not in shown.alt and not any("launches" in text for text in texts(shown))


def test_one_row() -> None:
    shown = drawn({"eager": STEPS["eager"]})
    assert [names(row) for row in bars(shown)] == [list(PARTS)]
    assert len(totals(shown)) == 1


def test_a_part_that_is_zero_everywhere_has_no_bar_but_its_key() -> None:
    shown = drawn({"a": (20.0, 0.0, 10.0, 30.0), "b": (10.0, 0.0, 5.0, 16.0)})
    assert [names(row) for row in bars(shown)] == [["work", "launches"]] * 2
    assert [row[1].get_x() for row in bars(shown)] == [20, 10]
    assert "waiting: the rest" in texts(shown)


@pytest.mark.filterwarnings("error")
def test_nothing_but_zeros_can_be_drawn() -> None:
    shown = drawn({"a": (0.0, 0.0, 0.0, 0.0)})
    assert not bars(shown) and "0" in texts(shown)
    assert totals(shown)[0][:, 0] == pytest.approx(0)


@pytest.mark.parametrize(
    "values",
    [(0.01, 1000.0, 5.0), (1000.0, 0.01, 900.0), (900.0, 1000.0, 0.01)],
    ids=["first", "middle", "last"],
)
def test_a_tiny_part_beside_large_ones_is_seen(values: tuple[float, ...]) -> None:
    """As a line in its colour, at least: edges of its neighbours do not cover it."""
    shown = drawn({"a": (*values, 2500.0)})
    canvas = FigureCanvasAgg(shown.figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].astype(int)
    ((*row,),) = bars(shown)
    tiny = min(row, key=lambda bar: bar.get_width())
    box, wanted = tiny.get_window_extent(), np.multiply(drawing.to_rgb(tiny.get_facecolor()), 255)
    inside = slice(pixels.shape[0] - int(box.y1) + 3, pixels.shape[0] - int(box.y0) - 3)
    strip = pixels[inside, round(box.x0) - 4 : round(box.x1) + 4]
    nearest = np.abs(strip - wanted).sum(-1).min(1)
    assert (nearest < 60).all(), "in every line of pixels one of about its colour"


@pytest.mark.parametrize("column", [*PARTS, "wall"])
@pytest.mark.parametrize(("value", "said"), [(-1.0, "-1"), (nan, "nan"), (inf, "inf")])
def test_what_has_no_length_is_refused(column: str, value: float, said: str) -> None:
    wrong = table()
    wrong.loc[1, column] = value
    with pytest.raises(ValueError, match=f"a value of '{column}' is {said}; it has to be zero or more"):
        figures.stacks(wrong, PARTS, total="wall", title="t")


def test_numbers_may_come_as_objects_and_a_gap_among_them_is_refused() -> None:
    """As a table of rows with gaps has them."""
    objects = table().astype(dict.fromkeys(PARTS, object))
    assert figures.stacks(objects, PARTS, total="wall", title="The ledger").alt == drawn().alt
    objects.loc[0, "work"] = None
    with pytest.raises(ValueError, match="a value of 'work' is nan"):
        figures.stacks(objects, PARTS, total="wall", title="t")


def test_without_rows_or_parts_there_is_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="table: has no rows"):
        figures.stacks(table().iloc[:0], PARTS, total="wall", title="t")
    with pytest.raises(ValueError, match="parts: there are 0"):
        figures.stacks(table(), {}, total="wall", title="t")


@pytest.mark.parametrize("column", ["work", "wall", "contender", "kind"])
def test_a_column_that_is_missing_is_named(column: str) -> None:
    with pytest.raises(ValueError, match=f"no column '{column}'"):
        figures.stacks(table().drop(columns=column), PARTS, total="wall", title="t")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"device": "NVIDIA L4"}, "rows live on NVIDIA H200, 2026-11-20 and live on NVIDIA L4"),
        ({"kind": "recorded"}, "rows live on NVIDIA H200, 2026-11-20 and recorded on NVIDIA H200"),
        ({"kind": "guessed"}, "kind: 'guessed' is none of live, recorded, published"),
    ],
)
def test_rows_of_two_devices_or_kinds_are_refused(other: dict[str, str], message: str) -> None:
    both = pd.concat([table(), table({"labkit": STEPS["fused"]}, **other)])
    with pytest.raises(ValueError, match=message):
        figures.stacks(both, PARTS, total="wall", title="t")


def test_the_table_stays_as_it_was() -> None:
    given = table()
    before = given.copy()
    figures.stacks(given, PARTS, total="wall", title="t")
    pd.testing.assert_frame_equal(given, before)
