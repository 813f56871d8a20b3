"""Figures taken from tables of measurements."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from taped import recorded

from labkit import rows, tables
from labkit.measure.measured import Measured

GAP = {"median_us": None, "p20_us": None, "p80_us": None, "note": "out of memory"}
MIXED = "rows of recorded NVIDIA H200 and of"


def timed(ours, theirs, **columns):
    """Both contenders at widths 16, 32, 64, ...; a time of None is a gap."""
    found = []
    for name, times in (("labkit", ours), ("eager", theirs)):
        for n, us in enumerate(times):
            changes = columns if us else GAP | columns
            found.append(recorded(name, 16 * 2**n, us or 1.0, **changes))
    return rows.table(found)


def of(value):
    return Measured(pytest.approx(value), "recorded", "NVIDIA H200")


MEASURED = timed((10.0, 12.0, 14.0), (20.0, 48.0, None))


def test_one_figure_comes_with_its_origin_or_is_none():
    assert tables.at(MEASURED, "labkit", width=16) == of(10.0)
    assert tables.at(MEASURED, "labkit", "copy_us", width=32) == of(8.0)
    for name, where in (("labkit", {"width": 99}), ("nobody", {"width": 16}), ("labkit", {"depth": 3})):
        assert tables.at(MEASURED, name, **where) is None
    assert tables.at(MEASURED, "eager", width=64) is None, "a gap"
    with pytest.raises(ValueError, match=r"3 rows of labkit fit \{\}; name more columns"):
        tables.at(MEASURED, "labkit")
    assert tables.taken(3.5, MEASURED.iloc[0]) == of(3.5)
    assert tables.taken(7, SimpleNamespace(kind="live", device="L4")) == Measured(7, "live", "L4")
    assert tables.taken(7, SimpleNamespace(kind="live", device="")) is None, "counted, and not measured"


def test_a_quotient_needs_two_figures_of_one_origin_or_one_and_a_number():
    six, two = Measured(6.0, "live", "A"), Measured(2.0, "live", "A")
    assert tables.quotient(six, two) == Measured(3.0, "live", "A")
    for over, under in (
        (None, two),
        (six, None),
        (six, replace(two, kind="recorded")),
        (six, replace(two, device="B")),
    ):
        assert tables.quotient(over, under) is None
    assert tables.quotient(six, 3) == tables.quotient(12, six) == two
    with pytest.raises(ValueError, match="neither of them was measured"):
        tables.quotient(1.0, 2.0)
    assert tables.ratio(MEASURED, "labkit", "eager", width=32) == of(4.0)
    assert tables.ratio(MEASURED, "labkit", "eager", width=64) is None


def test_the_lowest_and_the_worst_are_of_all_cases_or_none():
    assert tables.lowest(MEASURED, "median_us", contender="labkit") == of(10.0)
    for name in ("eager", "nobody"):  # one has a gap
        assert tables.lowest(MEASURED, "median_us", contender=name) is None
    close = timed((10.0, 10.0), (9.9, 40.0))
    assert tables.worst(close, "labkit", "eager") == of(1.0), "a tie counts as one"
    assert tables.worst(close, "eager", "labkit") == of(4.0)
    assert tables.worst(close, "labkit", "nobody") is None
    assert tables.worst(timed((10.0, 10.0), (20.0,)), "labkit", "eager") is None, "it misses none"


def test_the_speedup_has_the_range_that_both_spreads_allow_and_grows_with_a_power_of_the_width():
    found = tables.speedup(MEASURED, "labkit", "eager")
    assert found["width"].tolist() == [16, 32] and found["speedup"].tolist() == pytest.approx([2.0, 4.0])
    assert found["low"].tolist() == pytest.approx([2.0 * 0.9 / 1.1, 4.0 * 0.9 / 1.1])
    assert found["high"].tolist() == pytest.approx([2.0 * 1.1 / 0.9, 4.0 * 1.1 / 0.9])
    assert set(found["series"]) == {"labkit over eager"} and set(found["kind"]) == {"recorded"}
    assert tables.speedup(MEASURED, "labkit", "eager", series="ours")["series"][0] == "ours"
    assert tables.growth(found) == of(1.0) and tables.growth(found[:1]) is None


def test_tables_to_read_keep_the_order_of_measurement():
    turned = MEASURED.iloc[[1, 4, 0, 3, 2, 5]]
    wide = tables.pivot(turned.replace({"median_us": {10.0: 10.23456}}), "median_us", "contender", "width")
    assert wide.columns.tolist() == [32, 16, 64] and wide.loc["labkit"].tolist() == [12.0, 10.23, 14.0]
    assert wide.loc["eager"].isna().tolist() == [False, False, True]
    found = tables.speedups(MEASURED, "labkit", "eager", "dtype", "width")
    assert found.loc["float32", [16, 32]].tolist() == [2.0, 4.0]
    assert 64 not in found or pd.isna(found.loc["float32", 64])


@pytest.mark.parametrize("change", [{"kind": "live"}, {"device": "NVIDIA L4"}])
def test_no_figure_mixes_kinds_or_devices(change):
    mixed = pd.concat([MEASURED, MEASURED.assign(**change).assign(width=128)], ignore_index=True)
    ratios = tables.speedup(MEASURED, "labkit", "eager")
    for refused in (
        lambda: tables.lowest(mixed, "copy_us"),
        lambda: tables.pivot(mixed, "median_us", "contender", "width"),
        lambda: tables.growth(pd.concat([ratios, ratios.assign(**change)])),
    ):
        with pytest.raises(ValueError, match=MIXED):
            refused()
    theirs = MEASURED[MEASURED["contender"] == "eager"].assign(**change)
    apart = pd.concat([MEASURED[MEASURED["contender"] == "labkit"], theirs])
    assert tables.speedup(apart, "labkit", "eager").empty
    assert tables.ratio(apart, "labkit", "eager", width=16) is None
    with pytest.raises(ValueError, match="2 rows of labkit fit"):
        tables.at(pd.concat([MEASURED, MEASURED.assign(**change)]), "labkit", width=16)


def test_no_ratio_mixes_clocks():
    events = rows.table([recorded(us=10.0), recorded("eager", us=20.0, clock="events")])
    assert tables.worst(events, "labkit", "eager") is None
    assert tables.speedup(events, "labkit", "eager").empty
    assert tables.ratio(events, "labkit", "eager", width=16) is None


def test_a_crossover_lies_where_the_curves_meet():
    meet = timed((64.0, 64.0, 64.0), (16.0, 32.0, 256.0))  # between 32 and 64, a third of the way
    assert tables.crossover(meet, "labkit", "eager", batch=2) == of(32 * 2 ** (1 / 3))
    assert tables.crossover(meet, "eager", "labkit") is None, "from there on the other is faster"
    assert tables.crossover(meet, "labkit", "eager", batch=3) is None
    assert tables.crossover(timed((64.0, 64.0), (16.0, 32.0)), "labkit", "eager") is None, "they never meet"
    twice = timed((64.0, 64.0, 64.0, 64.0), (16.0, 32.0, 256.0, 9.0))
    assert tables.crossover(twice, "labkit", "eager") is None, "they change places twice"
