"""Figures taken from tables of measurements."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from taped import recorded

from labkit import rows, tables
from labkit.claims import Measured


def table(*rows_, **columns):
    return rows.table([replace(row, **columns) for row in rows_])


MEASURED = table(
    recorded(width=16, us=10.0),
    recorded("eager", width=16, us=20.0),
    recorded(width=32, us=12.0),
    recorded("eager", width=32, us=48.0),
    recorded(width=64, us=14.0),
    recorded("eager", width=64, median_us=None, p20_us=None, p80_us=None, note="out of memory"),
)


def test_one_figure_comes_with_its_origin():
    assert tables.at(MEASURED, "labkit", width=16) == Measured(10.0, "recorded", "NVIDIA H200")
    assert tables.at(MEASURED, "labkit", "copy_us", width=32).value == 8.0


def test_a_figure_that_is_not_there_is_none():
    assert tables.at(MEASURED, "labkit", width=99) is None
    assert tables.at(MEASURED, "nobody", width=16) is None
    assert tables.at(MEASURED, "labkit", depth=3) is None
    assert tables.at(MEASURED, "eager", width=64) is None, "a gap"


def test_a_figure_must_be_one():
    with pytest.raises(ValueError, match=r"3 rows of labkit fit \{\}; name more columns"):
        tables.at(MEASURED, "labkit")
    both = pd.concat([MEASURED, MEASURED.assign(kind="live")])
    with pytest.raises(ValueError, match="2 rows of labkit fit"):
        tables.at(both, "labkit", width=16)


def test_a_ratio_says_how_many_times_faster():
    assert tables.ratio(MEASURED, "labkit", "eager", width=32) == Measured(4.0, "recorded", "NVIDIA H200")
    assert tables.ratio(MEASURED, "labkit", "eager", width=64) is None


def test_a_figure_read_off_a_row_or_a_profile_has_its_origin():
    row = MEASURED.iloc[0]
    assert tables.taken(3.5, row) == Measured(3.5, "recorded", "NVIDIA H200")
    seen = SimpleNamespace(kind="live", device="NVIDIA L4")
    assert tables.taken(7, seen) == Measured(7, "live", "NVIDIA L4")


def test_launches_that_were_counted_and_not_seen_are_no_measurement():
    assert tables.taken(7, SimpleNamespace(kind="live", device="")) is None


def test_a_quotient_needs_two_figures_of_one_origin():
    six, two = Measured(6.0, "live", "A"), Measured(2.0, "live", "A")
    assert tables.quotient(six, two) == Measured(3.0, "live", "A")
    assert tables.quotient(None, two) is None
    assert tables.quotient(six, None) is None
    assert tables.quotient(six, replace(two, kind="recorded")) is None
    assert tables.quotient(six, replace(two, device="B")) is None


def test_a_quotient_with_a_plain_number_keeps_the_origin():
    six = Measured(6.0, "live", "A")
    assert tables.quotient(six, 3) == Measured(2.0, "live", "A")
    assert tables.quotient(12, six) == Measured(2.0, "live", "A")
    with pytest.raises(ValueError, match="neither of them was measured"):
        tables.quotient(1.0, 2.0)


def test_the_lowest_is_of_all_rows_or_none():
    assert tables.lowest(MEASURED, "median_us", contender="labkit") == Measured(
        10.0, "recorded", "NVIDIA H200"
    )
    assert tables.lowest(MEASURED, "median_us", contender="eager") is None, "one is a gap"
    assert tables.lowest(MEASURED, "median_us", contender="nobody") is None


def test_the_worst_case_counts_ties_as_one():
    close = table(
        recorded(width=16, us=10.0),
        recorded("eager", width=16, us=9.9),
        recorded(width=32, us=10.0),
        recorded("eager", width=32, us=40.0),
    )
    assert tables.worst(close, "labkit", "eager") == Measured(1.0, "recorded", "NVIDIA H200")
    assert tables.worst(close, "eager", "labkit").value == 4.0
    assert tables.worst(close, "labkit", "nobody") is None


def test_the_speedup_has_the_range_that_both_spreads_allow():
    found = tables.speedup(MEASURED, "labkit", "eager")
    assert found["width"].tolist() == [16, 32]
    assert found["speedup"].tolist() == pytest.approx([2.0, 4.0])
    assert found["low"].tolist() == pytest.approx([2.0 * 0.9 / 1.1, 4.0 * 0.9 / 1.1])
    assert found["high"].tolist() == pytest.approx([2.0 * 1.1 / 0.9, 4.0 * 1.1 / 0.9])
    assert set(found["series"]) == {"labkit over eager"}
    assert set(found["kind"]) == {"recorded"}
    assert tables.speedup(MEASURED, "labkit", "eager", series="ours")["series"][0] == "ours"


def test_growth_is_the_power_of_the_width():
    found = tables.speedup(MEASURED, "labkit", "eager")
    assert tables.growth(found) == Measured(pytest.approx(1.0), "recorded", "NVIDIA H200")
    assert tables.growth(found[:1]) is None


def test_a_pivot_keeps_the_order_of_measurement():
    turned = MEASURED.iloc[[2, 3, 0, 1, 4, 5]]
    wide = tables.pivot(turned, "median_us", "contender", "width")
    assert wide.columns.tolist() == [32, 16, 64]
    assert wide.loc["labkit"].tolist() == [12.0, 10.0, 14.0]
    assert wide.loc["eager"].isna().tolist() == [False, False, True]
    assert (
        tables.pivot(MEASURED.assign(median_us=1.23456), "median_us", "contender", "width").iloc[0, 0] == 1.23
    )


def test_speedups_as_a_table_to_read():
    found = tables.speedups(MEASURED, "labkit", "eager", "dtype", "width")
    assert found.loc["float32", [16, 32]].tolist() == [2.0, 4.0]
    assert 64 not in found or pd.isna(found.loc["float32", 64])


@pytest.mark.parametrize("change", [{"kind": "live"}, {"device": "NVIDIA L4"}])
def test_no_figure_mixes_kinds_or_devices(change):
    mixed = pd.concat([MEASURED, MEASURED.assign(**change).assign(width=128)], ignore_index=True)
    with pytest.raises(ValueError, match="rows of recorded NVIDIA H200 and of"):
        tables.lowest(mixed, "copy_us")
    with pytest.raises(ValueError, match="rows of recorded NVIDIA H200 and of"):
        tables.pivot(mixed, "median_us", "contender", "width")
    ours = mixed[(mixed["contender"] == "labkit") & (mixed["width"] <= 64)]
    theirs = mixed[(mixed["contender"] == "eager") & (mixed["width"] > 64)].assign(width=[16, 32, 64])
    apart = pd.concat([ours, theirs])
    assert tables.speedup(apart, "labkit", "eager").empty
    assert tables.ratio(apart, "labkit", "eager", width=16) is None
    speedups = tables.speedup(MEASURED, "labkit", "eager")
    with pytest.raises(ValueError, match="rows of recorded NVIDIA H200 and of"):
        tables.growth(pd.concat([speedups, speedups.assign(**change)]))


def test_no_ratio_mixes_clocks_and_the_worst_case_misses_none():
    events = table(recorded(width=16, us=10.0), recorded("eager", width=16, us=20.0, clock="events"))
    assert tables.worst(events, "labkit", "eager") is None
    assert tables.speedup(events, "labkit", "eager").empty
    assert tables.ratio(events, "labkit", "eager", width=16) is None
    missing = table(
        recorded(width=16, us=10.0), recorded("eager", width=16, us=20.0), recorded(width=32, us=10.0)
    )
    assert tables.worst(missing, "labkit", "eager") is None


def test_a_crossover_lies_where_the_curves_meet():
    ours, theirs = (64.0, 64.0, 64.0), (16.0, 32.0, 256.0)  # they meet between 32 and 64, a third of the way
    rows_ = [
        recorded(name, width=width, us=us)
        for name, times in (("labkit", ours), ("eager", theirs))
        for width, us in zip((16, 32, 64), times, strict=True)
    ]
    found = tables.crossover(table(*rows_), "labkit", "eager", batch=2)
    assert found == Measured(pytest.approx(32 * 2 ** (1 / 3)), "recorded", "NVIDIA H200")
    assert tables.crossover(table(*rows_), "eager", "labkit") is None, "from there on the other is faster"
    assert tables.crossover(table(*rows_[:2], *rows_[3:5]), "labkit", "eager") is None, "they never meet"
    assert tables.crossover(table(*rows_), "labkit", "eager", batch=3) is None
    back = [
        replace(row, shape={"batch": 2, "width": 128}, median_us=us)
        for row, us in zip(rows_[2::3], (64, 9), strict=True)
    ]
    assert tables.crossover(table(*rows_, *back), "labkit", "eager") is None, "they change places twice"
