"""A waterfall adds up, says in words and signs what its colours say, and where its values come from."""

from math import inf, nan

import pytest
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle
from test_figures import assert_apart, boxes, rendered, row, texts

from labkit import drawing, figures, rows
from labkit.claims import Measured
from labkit.profiles import Profile

LIVE = Profile(device="NVIDIA H200", date="2026-11-20T12:00:00")
STEPS = [("eager", 189.0), ("GELU kernel: gone", -21.0), ("product: gone", -24.0), ("epilogue", 4.1)]
MINUS = "\N{MINUS SIGN}"


def drawn(steps=STEPS, **changes):
    return figures.waterfall(steps, **{"end": "ours", "title": "Gate and up", "origin": LIVE, **changes})


def bars(shown):
    found = [p for p in shown.figure.findobj(Rectangle) if str(p.get_gid()).endswith(" bar")]
    return sorted(found, key=lambda bar: -bar.get_y())


def spans(shown):
    return [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars(shown)]


def test_bars_hang_from_running_total_to_running_total_and_are_joined_there():
    shown = drawn()
    wanted = [(0, 189), (168, 189), (144, 168), (144, 148.1), (0, 148.1)]
    assert sum(spans(shown), ()) == pytest.approx(sum(wanted, ()))
    kinds = [bar.get_gid().split()[0] for bar in bars(shown)]
    assert kinds == ["total", "saving", "saving", "cost", "total"]
    joins = [c.get_segments()[0] for c in shown.figure.findobj(LineCollection) if c.get_gid() == "connector"]
    assert [join[0][0] for join in joins] == pytest.approx([189, 168, 144, 148.1])
    for join, above, below in zip(joins, bars(shown), bars(shown)[1:], strict=False):
        assert join[:, 1].max() == pytest.approx(above.get_y())
        assert join[:, 1].min() == pytest.approx(below.get_y() + below.get_height())
    assert spans(drawn(STEPS[:1])) == [(0, 189), (0, 189)], "one total alone is the end too"
    assert spans(drawn([("all", 0.3), ("a", -0.1), ("b", -0.2)]))[-1] == (0, 0), (
        "rounding is no negative total"
    )


def test_savings_costs_and_totals_differ_in_colour_and_in_sign():
    shown = drawn()
    said = {"189 µs", f"{MINUS}21 µs", "+4.1 µs", "148 µs", "total", "+ added", f"{MINUS} saved"}
    assert said <= set(texts(shown)) and "+ added" not in texts(drawn(STEPS[:3]))
    hues = {drawing.to_hex(bar.get_facecolor()).upper() for bar in bars(shown)}
    assert len(hues) == 3 and hues <= {hue for hue, _ in drawing.SLOTS[1:]}, "the first is our contender's"
    launches = drawn([("eager", 5), ("GELU", -1), ("renamed", 0)], unit="launches")
    assert {"5 launches", f"{MINUS}1 launches", "0 launches"} <= set(texts(launches))


def test_labels_and_values_do_not_overlap_however_long_they_are():
    long = [
        (f"{name}, with a name that goes on for more than two lines of its own", us) for name, us in STEPS
    ]
    for steps in (
        long,
        [*long, *[("a step", 100.0)] * 9],
        [("x" * 90, 1.0)],
        [("eager", 1796.0), ("a", -5.0)],
    ):
        shown = drawn(steps)
        labels, values = boxes(shown, "label"), boxes(shown, "value")
        assert len(labels) == len(values) == len(bars(shown))
        assert_apart([*labels, *values], shown)
        (ax,), renderer = shown.figure.axes, rendered(shown)
        assert all(box.x1 <= ax.bbox.x0 for box in labels)
        assert_apart([tick.label1.get_window_extent(renderer) for tick in ax.xaxis.get_major_ticks()], shown)


def test_the_alt_text_tells_the_sequence():
    assert drawn().alt == (
        "Gate and up. A waterfall, from top to bottom: eager 189 µs; then GELU kernel: gone saves 21 µs, "
        "which makes 168 µs; then product: gone saves 24 µs, which makes 144 µs; then epilogue adds 4.1 µs, "
        "which makes 148 µs; then ours 148 µs. Live on NVIDIA H200, 2026-11-20."
    )
    assert drawn(alt="my words").alt == "my words"


def test_it_says_where_its_values_come_from_and_looks_it():
    by_graph = "live on NVIDIA H200, 2026-11-20, graph clock, cold cache"
    recorded = Profile(kind="recorded", device="NVIDIA L4", date="2026-01-02")
    one = row("labkit", 128, 1.0)
    for origin, words in (
        (recorded, "recorded on NVIDIA L4, 2026-01-02"),
        *((each, by_graph) for each in (one, rows.table([one]).iloc[0])),
        (Measured(1.0, "live", "NVIDIA H200"), "live on NVIDIA H200"),
    ):
        shown = drawn(origin=origin)
        assert words in texts(shown) and words[1:] in shown.alt
    live, taped = bars(drawn()), bars(drawn(origin=recorded))
    assert {bar.get_linestyle() for bar in live} == {"-"}
    assert all(bar.get_linestyle() != "-" for bar in taped)
    assert all(a.get_facecolor() != b.get_facecolor() for a, b in zip(live, taped, strict=True))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "steps: there are none"),
        ([("eager", -1.0)], "after 'eager' the total is -1, below zero"),
        ([("eager", 5.0), ("a", -6.0), ("b", 3.0)], "after 'a' the total is -1"),
        *(([("eager", value)], f"the value of 'eager' is {value}") for value in (nan, inf)),
    ],
)
def test_what_does_not_add_up_is_refused(steps, message):
    with pytest.raises(ValueError, match=message):
        drawn(steps)
