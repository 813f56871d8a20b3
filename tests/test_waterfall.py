"""A waterfall adds up, says in words and signs what its colours say, and where its values come from."""

from collections.abc import Sequence
from math import inf, nan
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle
from test_figures import assert_apart, boxes, row, texts

from labkit import drawing, figures, rows
from labkit.claims import Measured
from labkit.profiles import Profile

LIVE = Profile(device="NVIDIA H200", date="2026-11-20T12:00:00")
STEPS = [("eager", 189.0), ("GELU kernel: gone", -21.0), ("product: gone", -24.0), ("epilogue", 4.1)]


def drawn(steps: Sequence[tuple[str, float]] = STEPS, **changes: Any) -> figures.Shown:
    return figures.waterfall(steps, **{"end": "ours", "title": "Gate and up", "origin": LIVE, **changes})


def bars(shown: figures.Shown) -> list[Rectangle]:
    found = [p for p in shown.figure.findobj(Rectangle) if str(p.get_gid()).endswith(" bar")]
    return sorted(found, key=lambda bar: -bar.get_y())


def spans(shown: figures.Shown) -> list[tuple[float, float]]:
    return [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars(shown)]


def test_bars_hang_from_running_total_to_running_total() -> None:
    shown = drawn()
    wanted = [(0, 189), (168, 189), (144, 168), (144, 148.1), (0, 148.1)]
    assert [end for span in spans(shown) for end in span] == pytest.approx(
        [x for pair in wanted for x in pair]
    )
    assert [bar.get_gid() for bar in bars(shown)] == [
        "total bar",
        "saving bar",
        "saving bar",
        "cost bar",
        "total bar",
    ]
    tops = [bar.get_y() for bar in bars(shown)]
    assert tops == sorted(tops, reverse=True)


def test_connectors_join_each_bar_to_the_next_at_the_running_total() -> None:
    shown = drawn()
    lines = [c for c in shown.figure.findobj(LineCollection) if c.get_gid() == "connector"]
    ends = [line.get_segments()[0] for line in lines]
    assert [x for x, _ in (end[0] for end in ends)] == pytest.approx([189, 168, 144, 148.1])
    for end, above, below in zip(ends, bars(shown), bars(shown)[1:], strict=False):
        assert end[:, 1].max() == pytest.approx(above.get_y())
        assert end[:, 1].min() == pytest.approx(below.get_y() + below.get_height())


def test_savings_costs_and_totals_differ_in_colour_and_in_sign() -> None:
    shown = drawn()
    assert {"189 µs", "\N{MINUS SIGN}21 µs", "+4.1 µs", "148 µs", "total", "+ added"} <= set(texts(shown))
    assert "\N{MINUS SIGN} saved" in texts(shown)
    hues = {str(bar.get_gid()): drawing.to_hex(bar.get_facecolor()) for bar in bars(shown)}
    assert len(set(hues.values())) == 3
    assert {hue.upper() for hue in hues.values()} <= {hue for hue, _ in drawing.SLOTS}
    assert drawing.SLOTS[0][0].lower() not in hues.values(), "the colour of our own contender"


def test_without_a_cost_none_is_explained() -> None:
    assert "+ added" not in texts(drawn(STEPS[:3]))


def test_one_total_alone_is_the_end_too() -> None:
    assert spans(drawn(STEPS[:1])) == [(0, 189), (0, 189)]


def test_labels_and_values_do_not_overlap_however_long_they_are() -> None:
    steps = [
        (f"{name}, with a name that goes on for more than two lines of its own", us) for name, us in STEPS
    ]
    for shown in (drawn(steps), drawn(steps * 1 + [("a step", 100.0)] * 9), drawn([("x" * 90, 1.0)])):
        labels, values = boxes(shown, "label"), boxes(shown, "value")
        assert len(labels) == len(values) == len(bars(shown))
        assert_apart([*labels, *values], shown)
    (ax,) = shown.figure.axes
    assert all(box.x1 <= ax.bbox.x0 for box in labels)


@pytest.mark.parametrize("first", [1789.0, 1796.0, 189.0])
def test_numbers_of_the_axis_do_not_leave_the_figure(first: float) -> None:
    shown = drawn([("eager", first), ("a", -5.0)])
    FigureCanvasAgg(shown.figure).draw()
    (ax,) = shown.figure.axes
    assert_apart([tick.label1.get_window_extent() for tick in ax.xaxis.get_major_ticks()], shown)


def test_the_alt_text_tells_the_sequence() -> None:
    assert drawn().alt == (
        "Gate and up. A waterfall, from top to bottom: eager 189 µs; then GELU kernel: gone saves 21 µs, "
        "which makes 168 µs; then product: gone saves 24 µs, which makes 144 µs; then epilogue adds 4.1 µs, "
        "which makes 148 µs; then ours 148 µs. Live on NVIDIA H200, 2026-11-20."
    )
    assert drawn(alt="my words").alt == "my words"


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (
            Profile(kind="recorded", device="NVIDIA L4", date="2026-01-02"),
            "recorded on NVIDIA L4, 2026-01-02",
        ),
        (row("labkit", 128, 1.0), "live on NVIDIA H200, 2026-11-20, graph clock, cold cache"),
        (
            rows.table([row("labkit", 128, 1.0)]).iloc[0],
            "live on NVIDIA H200, 2026-11-20, graph clock, cold cache",
        ),
        (Measured(1.0, "live", "NVIDIA H200"), "live on NVIDIA H200"),
    ],
)
def test_it_says_where_its_values_come_from(origin: Any, words: str) -> None:
    shown = drawn(origin=origin)
    assert words in texts(shown)
    assert words[1:] in shown.alt


def test_recorded_bars_look_recorded() -> None:
    recorded = Profile(kind="recorded", device="NVIDIA H200", date="2026-11-20")
    live, taped = bars(drawn()), bars(drawn(origin=recorded))
    assert {bar.get_linestyle() for bar in live} == {"-"}
    assert all(bar.get_linestyle() != "-" for bar in taped)
    assert all(a.get_facecolor() != b.get_facecolor() for a, b in zip(live, taped, strict=True))


def test_other_units() -> None:
    assert {"5 launches", "\N{MINUS SIGN}1 launches"} <= set(
        texts(drawn([("eager", 5), ("GELU", -1)], unit="launches"))
    )


def test_a_step_that_changes_nothing_has_no_sign() -> None:
    assert "0 µs" in texts(drawn([("eager", 5.0), ("renamed", 0.0)]))


def test_rounding_is_no_negative_total_and_all_may_be_saved() -> None:
    assert spans(drawn([("all", 0.3), ("a", -0.1), ("b", -0.2)]))[-1] == (0, 0)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "steps: there are none"),
        ([("eager", -1.0)], "after 'eager' the total is -1, below zero"),
        ([("eager", 5.0), ("a", -6.0), ("b", 3.0)], "after 'a' the total is -1"),
        ([("eager", nan)], "the value of 'eager' is nan"),
        ([("eager", 5.0), ("a", inf)], "the value of 'a' is inf"),
    ],
)
def test_what_does_not_add_up_is_refused(steps: list[tuple[str, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drawn(steps)
