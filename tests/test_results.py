"""The results of a sweep: times and ratios with their origin, and what is missing stays missing."""

import math

import pandas as pd
import pytest

from labkit.measure.measured import MISSING, Measured, number
from labkit.results import Results
from labkit.widgets import claim


def row(contender, width, median_us, **other):
    usual = {"direction": "forward", "dtype": "float32", "clock": "graph", "cache": "cold", "kind": "live"}
    spread = {"p20_us": median_us, "p80_us": median_us, "copy_us": 2.0, "noise": "", "date": "2026-11-24"}
    shape = {"shape": {"width": width}, "width": width}
    return {
        "contender": contender,
        "median_us": median_us,
        "device": "gpu",
        **usual,
        **spread,
        **shape,
        **other,
    }


@pytest.fixture
def results():
    return Results([row(name, n, us * n) for n in (4, 8, 16) for name, us in (("slow", 4.0), ("fast", 1.0))])


def test_a_time_a_speedup_and_a_share_of_a_copy_know_their_origin(results):
    assert results.time("slow", width=8) == Measured(32.0, "live", "gpu")
    assert results.speedup("fast", "slow", width=8) == Measured(4.0, "live", "gpu")
    assert results.share("fast", width=4) == Measured(0.5, "live", "gpu")
    assert isinstance(results[results.width > 4], Results), "what pandas selects answers, too"


def test_a_speedup_that_stays_the_same_grows_with_the_power_zero(results):
    assert results.growth("fast", "slow").value == pytest.approx(0.0, abs=1e-9)
    assert list(results.speedups("fast", "slow").speedup) == [4.0, 4.0, 4.0]


def test_what_nobody_measured_is_missing_and_so_is_what_is_computed_from_it(results):
    no_such = results.speedup("fast", "third", width=4)
    for nothing in (results.time("third"), no_such, Results().crossover("a", "b")):
        assert nothing == MISSING or math.isnan(nothing.value)
        assert number(nothing) is None and number(2 / (1 + nothing) * 3) is None
    assert claim("It takes {value} us.", Results().time("fast"), lambda us: us > 0).status == "needs a GPU"


def test_several_fitting_rows_are_an_error_that_names_them(results):
    with pytest.raises(ValueError, match="3 rows of fast"):
        results.time("fast")


def test_figures_of_one_origin_compute_and_those_of_two_do_not_mix():
    here, there = Measured(6.0, "live", "gpu"), Measured(2.0, "recorded", "gpu")
    assert (here - here / 2) * 2 == here and 12 / here == Measured(2.0, "live", "gpu")
    assert number(here / there) is None and number(here + there) is None


def test_a_crossover_lies_between_the_sizes_where_the_faster_one_changes():
    table = Results([row("flat", n, 8.0) for n in (4, 16)] + [row("steep", n, float(n)) for n in (4, 16)])
    assert table.crossover("flat", "steep").value == pytest.approx(8.0)
    assert pd.isna(table.crossover("steep", "flat").value)
