"""The results of a sweep: times and ratios with their origin, and what is missing stays missing."""

import math
from types import SimpleNamespace

import pandas as pd
import pytest
from taped import recorded

from labkit.measure import rows
from labkit.measure.results import MISSING, Measured, Results, measured, number
from labkit.widgets import claim


def row(contender, width, median_us, **other):
    usual = {"direction": "forward", "dtype": "float32", "clock": "graph", "cache": "cold", "kind": "live"}
    spread = {"p20_us": median_us, "p80_us": median_us, "noise": "", "date": "2026-11-24"}
    shape = {"shape": {"width": width}, "width": width}
    what = {"contender": contender, "median_us": median_us, "device": "gpu"}
    return what | usual | spread | shape | other


@pytest.fixture
def results():
    return Results([row(name, n, us * n) for n in (4, 8, 16) for name, us in (("slow", 4.0), ("fast", 1.0))])


def test_a_time_and_a_speedup_know_their_origin(results):
    assert results.time("slow", width=8) == Measured(32.0, "live", "gpu")
    assert results.speedup("fast", "slow", width=8) == Measured(4.0, "live", "gpu")
    assert isinstance(results[results.width > 4], Results), "what pandas selects answers, too"


def test_what_nobody_measured_is_missing_and_so_is_what_is_computed_from_it(results):
    no_such = results.speedup("fast", "third", width=4)
    for nothing in (results.time("third"), no_such):
        assert nothing == MISSING or math.isnan(nothing.value)
        assert number(nothing) is None and number(2 / (1 + nothing) * 3) is None
    assert claim("It takes {value} us.", Results().time("fast"), lambda us: us > 0).status == "needs a GPU"


def test_several_fitting_rows_are_an_error_that_names_them(results):
    with pytest.raises(ValueError, match="3 rows of fast"):
        results.time("fast")


def test_figures_of_one_origin_compute_and_those_of_two_do_not_mix():
    here, there = Measured(6.0, "live", "gpu"), Measured(2.0, "recorded", "gpu")
    assert (here - here / 2) * 2 == here and 12 / here == Measured(2.0, "live", "gpu")
    assert f"{here:.1f} {MISSING:.0f}" == "6.0 nan" and round(float(here)) == 6
    assert number(here / there) is None and number(here + there) is None


# Figures of a recorded table


GAP = {"median_us": None, "p20_us": None, "p80_us": None, "note": "out of memory"}


def timed(ours, theirs, **columns):
    """Both contenders at widths 16, 32, 64, ...; a time of None is a gap."""
    found = []
    for name, times in (("labkit", ours), ("eager", theirs)):
        for n, us in enumerate(times):
            changes = columns if us else GAP | columns
            found.append(recorded(name, 16 * 2**n, us or 1.0, **changes))
    return rows.as_results(found)


def of(value):
    return Measured(pytest.approx(value), "recorded", "NVIDIA H200")


MEASURED = timed((10.0, 12.0, 14.0), (20.0, 48.0, None))


def test_one_figure_comes_with_its_origin_or_is_none():
    assert MEASURED.time("labkit", width=16) == of(10.0)
    for name, where in (("labkit", {"width": 99}), ("nobody", {"width": 16}), ("labkit", {"depth": 3})):
        assert number(MEASURED.time(name, **where)) is None
    assert number(MEASURED.time("eager", width=64)) is None, "a gap"
    with pytest.raises(ValueError, match=r"3 rows of labkit fit \{\}; name more columns"):
        MEASURED.time("labkit")
    assert measured(3.5, MEASURED.iloc[0]) == of(3.5)
    assert measured(7, SimpleNamespace(kind="live", device="L4")) == Measured(7, "live", "L4")
    assert number(measured(7, SimpleNamespace(kind="live", device=""))) is None, "counted, and not measured"


def test_a_speedup_needs_two_times():
    assert MEASURED.speedup("labkit", "eager", width=32) == of(4.0)
    assert number(MEASURED.speedup("labkit", "eager", width=64)) is None


def test_the_speedup_has_the_range_that_both_spreads_allow():
    found = MEASURED.speedups("labkit", "eager")
    assert found["width"].tolist() == [16, 32] and found["speedup"].tolist() == pytest.approx([2.0, 4.0])
    assert found["low"].tolist() == pytest.approx([2.0 * 0.9 / 1.1, 4.0 * 0.9 / 1.1])
    assert found["high"].tolist() == pytest.approx([2.0 * 1.1 / 0.9, 4.0 * 1.1 / 0.9])
    assert set(found["series"]) == {"labkit over eager"} and set(found["kind"]) == {"recorded"}
    assert MEASURED.speedups("labkit", "eager", series="ours")["series"][0] == "ours"


@pytest.mark.parametrize("change", [{"kind": "live"}, {"device": "NVIDIA L4"}])
def test_no_figure_mixes_kinds_or_devices(change):
    theirs = MEASURED[MEASURED["contender"] == "eager"].assign(**change)
    apart = pd.concat([MEASURED[MEASURED["contender"] == "labkit"], theirs])
    assert apart.speedups("labkit", "eager").empty
    assert number(apart.speedup("labkit", "eager", width=16)) is None
    with pytest.raises(ValueError, match="2 rows of labkit fit"):
        pd.concat([MEASURED, MEASURED.assign(**change)]).time("labkit", width=16)


def test_no_ratio_mixes_clocks():
    events = rows.as_results([recorded(us=10.0), recorded("eager", us=20.0, clock="events")])
    assert events.speedups("labkit", "eager").empty
    assert number(events.speedup("labkit", "eager", width=16)) is None


# The finding


def table(times, over=None, spread=0.0, **columns):
    """Rows of "ours" with these times by width, and of "theirs" (1 us everywhere unless told)."""
    over = over or dict.fromkeys(times, 1.0)
    origin = {"kind": "live", "device": "Simulated", "date": "2026", **columns}
    rows = [
        (name, width, us, us and us - spread / 2, us and us + spread / 2)
        for name, series in (("ours", times), ("theirs", over))
        for width, us in series.items()
    ]
    columns = ["contender", "width", "median_us", "p20_us", "p80_us"]
    return Results([dict(zip(columns, each, strict=True)) | origin for each in rows])


NOTHING = "No width was measured for both ours and theirs."


@pytest.mark.parametrize(
    ("times", "spread", "sentence"),
    [
        ({100: 4.0, 10000: 0.25}, 0, "ours is faster than theirs from width 10000 on: 4x at width 10000."),
        ({100: 0.25, 10000: 4.0}, 0, "ours is faster than theirs below width 10000: 4x at width 100."),
        ({1: 0.5, 2: 0.04}, 0, "ours is never slower than theirs, and 25x at width 2."),
        ({1: 2.0, 2: 3.0}, 0, "ours is never faster than theirs; it takes 3x as long at width 2."),
        (
            {1: 2.0, 100: 0.5, 10000: 2.0}, 0,
            "ours and theirs change places at width 100, 10000; ours is at best 2x at width 100.",
        ),
        # a difference inside the larger spread is a tie, which is no loss, no win and no change of places
        ({1: 1.05, 2: 0.95}, 0.2, "ours and theirs tie at every measured width."),
        ({1: 1.05, 2: 0.5}, 0.2, "ours is never slower than theirs, and 2x at width 2."),
        ({1: 0.95, 2: 2.0}, 0.2, "ours is never faster than theirs; it takes 2x as long at width 2."),
        (
            {1: 4.0, 10: 0.99, 100: 1.01, 1000: 0.99, 10000: 0.25}, 0.1,
            "ours is faster than theirs from width 10000 on: 4x at width 10000.",
        ),
        (
            {1: 0.25, 10: 1 / 0.99, 100: 1 / 1.01, 1000: 1 / 0.99, 10000: 4.0}, 0.1,
            "ours is faster than theirs below width 10000: 4x at width 1.",
        ),
        (
            {1: 4.0, 100: 0.25, 10000: 1.01}, 0.1,
            "ours is faster than theirs from width 100 on: 4x at width 100.",
        ),
        ({1: 2.0, 10: 1.0, 100: 0.5}, 0, "ours is faster than theirs from width 100 on: 2x at width 100."),
        ({1: 0.5, 2: None}, 0, "ours is never slower than theirs, and 2x at width 1."),
        ({1: None}, 0, NOTHING),
        ({}, 0, NOTHING),
    ],
)  # fmt: skip
def test_a_finding_is_a_sentence(times, spread, sentence):
    measured = table(times or {1: 1.0}, spread=spread)
    measured = measured if times else measured.iloc[:0]
    assert measured.describe_speedup("ours", "theirs") == sentence
    turned = measured.rename(columns={"width": "batch"})
    assert turned.describe_speedup("ours", "theirs", x="batch") == sentence.replace("width", "batch")


def test_the_spread_of_either_contender_counts():
    both = table({1: 1.2, 2: 0.5})
    both.loc[(both.contender == "theirs") & (both.width == 1), ["p20_us", "p80_us"]] = (0.8, 1.2)
    assert both.describe_speedup("ours", "theirs").startswith("ours is never slower")


def test_pairs_ascend_and_are_of_one_kind_device_and_dtype():
    both = table({4: 1.0, 1: 2.0, 2: 3.0}).paired("ours", "theirs")
    assert both[["width", "median_us_of"]].to_numpy().tolist() == [[1, 2.0], [2, 3.0], [4, 1.0]]
    here, there = table({1: 1.0}), table({1: 3.0}, device="Other")
    tape = table({1: 5.0}, kind="recorded")
    mixed = pd.concat([here, there[there.contender == "ours"], tape[tape.contender == "theirs"]])
    found = mixed.paired("ours", "theirs")
    assert found[["median_us_of", "median_us_over", "device", "kind"]].to_numpy().tolist() == [
        [1.0, 1.0, "Simulated", "live"]
    ]
    with pytest.raises(ValueError, match="several rows of ours for one width; select one dtype"):
        pd.concat([here, table({1: 2.0})]).paired("ours", "theirs")
