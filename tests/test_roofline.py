"""Floors, regimes, crossovers, slopes, and the sentence that states a finding."""

import math

import numpy as np
import pandas as pd
import pytest

from labkit import roofline
from labkit.machine import Roofs

# A megabyte and more in proportion to its size at 1 MB/us; small copies take 2 us.
ROOFS = Roofs(
    kind="live",
    device="Simulated",
    date="2026-01-02",
    copy=((1e3, 2.0), (2e6, 2.0), (2e9, 2000.0)),
    matmul={"float32": 1e12, "bfloat16": 8e12},
    node_us=1.5,
    host_us=4.0,
)


# Floors


def test_the_floor_is_the_largest_of_launch_memory_and_arithmetic():
    assert roofline.floor_us(ROOFS, min_bytes=0) == 1.5
    assert roofline.floor_us(ROOFS, min_bytes=2e9) == pytest.approx(2000.0)
    assert roofline.floor_us(ROOFS, min_bytes=0, flops=5e6) == pytest.approx(5.0)
    assert roofline.floor_us(ROOFS, min_bytes=2e9, flops=5e9) == pytest.approx(5000.0)
    assert roofline.floor_us(ROOFS, min_bytes=2e9, flops=5e8) == pytest.approx(2000.0)


def test_every_launch_counts():
    assert roofline.floor_us(ROOFS, min_bytes=4, launches=1) == 1.5
    assert roofline.floor_us(ROOFS, min_bytes=4, launches=3) == 4.5


def test_operations_are_done_at_the_rate_of_their_dtype():
    fp32, bf16 = (roofline.floor_us(ROOFS, min_bytes=0, flops=8e9, dtype=d) for d in ("float32", "bfloat16"))
    assert (fp32, bf16) == (pytest.approx(8000.0), pytest.approx(1000.0))
    with pytest.raises(KeyError):
        roofline.floor_us(ROOFS, min_bytes=0, flops=1, dtype="int4")


# Regimes


def test_regimes_say_where_which_floor_is_the_highest():
    floors = {"launch": lambda n: 10.0, "memory": lambda n: n, "arithmetic": lambda n: n * n / 100}
    xs = [1, 5, 9, 11, 50, 99, 101, 1000]
    spans = roofline.regimes(xs, floors)
    assert spans == [(1, 9, "launch"), (9, 99, "memory"), (99, 1000, "arithmetic")]


def test_one_regime_covers_everything():
    assert roofline.regimes([1, 2, 3], {"launch": lambda n: 1.0}) == [(1, 3, "launch")]
    assert roofline.regimes([], {"launch": lambda n: 1.0}) == []


# Crossovers


def test_a_crossover_is_interpolated_on_log_log_axes():
    xs = [10.0, 1000.0]
    assert roofline.crossovers(xs, [10.0, 1000.0], [100.0, 100.0]) == [pytest.approx(100.0)]


def test_power_laws_cross_where_algebra_says():
    xs = [2.0**k for k in range(4, 15)]
    linear, quadratic = [3 * x for x in xs], [x * x / 100 for x in xs]
    assert roofline.crossovers(xs, linear, quadratic) == [pytest.approx(300.0)]


def test_several_crossovers_ascend_whatever_the_order_of_the_points():
    xs, first, second = [1, 10, 100, 1000], [1.0, 4.0, 1.0, 4.0], [2.0, 2.0, 2.0, 2.0]
    found = roofline.crossovers(xs, first, second)
    assert len(found) == 3
    assert found == sorted(found)
    shuffled = [3, 0, 2, 1]
    again = roofline.crossovers(*([values[i] for i in shuffled] for values in (xs, first, second)))
    assert again == found


def test_a_meeting_at_measured_points_is_a_crossover_only_when_sides_change():
    xs = [1.0, 2.0, 4.0, 8.0]
    assert roofline.crossovers(xs, [1, 3, 9, 9], [2, 3, 4, 4]) == [pytest.approx(2.0)]
    assert roofline.crossovers(xs, [1, 3, 4, 9], [2, 3, 4, 4]) == [pytest.approx(math.sqrt(8))]
    assert roofline.crossovers(xs, [1, 3, 1, 1], [2, 3, 4, 4]) == []
    assert roofline.crossovers(xs, [1, 1, 1, 1], [1, 1, 1, 1]) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1, 2], [1, 2], [1]), "must have one length"),
        (([1, 2], [1, 0], [1, 2]), "must be positive"),
        (([1, 2], [1, 2], [1, math.nan]), "must be positive"),
    ],
)
def test_what_cannot_cross_is_a_value_error(columns, message):
    with pytest.raises(ValueError, match=message):
        roofline.crossovers(*columns)


def test_the_slope_is_the_exponent_of_a_power_law():
    xs = np.array([32, 64, 1024, 4096])
    assert roofline.slope(xs, 3 * xs**1.5) == pytest.approx(1.5)
    assert roofline.slope(xs, np.full(4, 7.0)) == pytest.approx(0.0, abs=1e-12)


# The finding


def table(times, over=None, spread=0.0, **columns):
    """Rows of "ours" with these times by width, and of "theirs" (1 us everywhere unless told)."""
    over = over or dict.fromkeys(times, 1.0)
    rows = [
        {
            "contender": name,
            "width": width,
            "median_us": us,
            "p20_us": None if us is None else us - spread / 2,
            "p80_us": None if us is None else us + spread / 2,
            "kind": "live",
            "device": "Simulated",
            "date": "2026",
        }
        | columns
        for name, series in (("ours", times), ("theirs", over))
        for width, us in series.items()
    ]
    return pd.DataFrame(rows)


def sentence(*arguments, **options):
    return roofline.finding(table(*arguments, **options), "ours", "theirs")


def test_faster_from_some_width_on():
    """On log-log axes 4, 1/4 crosses 1 in the middle."""
    assert (
        sentence({100: 4.0, 10000: 0.25})
        == "ours is faster than theirs from width 1000 on: 4x at width 10000."
    )


def test_faster_below_some_width():
    assert (
        sentence({100: 0.25, 10000: 4.0}) == "ours is faster than theirs below width 1000: 4x at width 100."
    )


def test_never_slower_and_never_faster():
    assert sentence({1: 0.5, 2: 0.04}) == "ours is never slower than theirs, and 25x at width 2."
    assert sentence({1: 2.0, 2: 3.0}) == "ours is never faster than theirs; it takes 3x as long at width 2."


def test_changing_places_more_than_once():
    found = sentence({1: 2.0, 100: 0.5, 10000: 2.0})
    assert found == "ours and theirs change places at width 10, 1000; ours is at best 2x at width 100."


def test_a_difference_inside_the_larger_spread_is_a_tie():
    assert sentence({1: 1.05, 2: 0.95}, spread=0.2) == "ours and theirs tie at every measured width."
    assert "tie" not in sentence({1: 1.05, 2: 0.95}, spread=0.01)


def test_a_tie_is_no_loss_and_no_win():
    assert sentence({1: 1.05, 2: 0.5}, spread=0.2) == "ours is never slower than theirs, and 2x at width 2."
    found = sentence({1: 0.95, 2: 2.0}, spread=0.2)
    assert found == "ours is never faster than theirs; it takes 2x as long at width 2."


def test_noise_around_a_tie_is_no_change_of_places():
    times = {1: 4.0, 10: 0.99, 100: 1.01, 1000: 0.99, 10000: 0.25}
    assert sentence(times, spread=0.1) == "ours is faster than theirs from width 100 on: 4x at width 10000."
    turned = {width: 1 / us for width, us in times.items()}
    assert sentence(turned, spread=0.1) == "ours is faster than theirs below width 100: 4x at width 1."


def test_a_tie_at_the_end_does_not_turn_the_finding_around():
    found = sentence({1: 4.0, 100: 0.25, 10000: 1.01}, spread=0.1)
    assert found == "ours is faster than theirs from width 10 on: 4x at width 100."


def test_equal_times_at_the_crossing():
    found = sentence({1: 2.0, 10: 1.0, 100: 0.5})
    assert found == "ours is faster than theirs from width 10 on: 2x at width 100."


def test_the_spread_of_either_contender_counts():
    both = table({1: 1.2, 2: 0.5})
    both.loc[(both.contender == "theirs") & (both.width == 1), ["p20_us", "p80_us"]] = (0.8, 1.2)
    assert roofline.finding(both, "ours", "theirs").startswith("ours is never slower")


def test_gaps_do_not_take_part():
    assert sentence({1: 0.5, 2: None}) == "ours is never slower than theirs, and 2x at width 1."
    assert sentence({1: None}) == "No width was measured for both ours and theirs."


def test_nothing_measured_is_said():
    nothing = "No width was measured for both ours and theirs."
    assert roofline.finding(table({1: 1.0}).iloc[:0], "ours", "theirs") == nothing
    assert sentence({1: 1.0}, over={2: 1.0}) == nothing


def test_another_axis():
    batches = table({8: 0.5}).rename(columns={"width": "batch"})
    assert roofline.finding(batches, "ours", "theirs", x="batch").endswith("2x at batch 8.")


# Pairs


def test_pairs_are_of_one_kind_and_one_device():
    here, there = table({1: 1.0}), table({1: 3.0}, device="Other")
    tape = table({1: 5.0}, kind="recorded")
    ours = pd.concat([here[here.contender == "ours"], there[there.contender == "ours"]])
    theirs = pd.concat([here[here.contender == "theirs"], tape[tape.contender == "theirs"]])
    both = roofline.paired(pd.concat([ours, theirs]), "ours", "theirs")
    assert both[["median_us_of", "median_us_over", "device", "kind"]].to_numpy().tolist() == [
        [1.0, 1.0, "Simulated", "live"]
    ]


def test_pairs_ascend():
    both = roofline.paired(table({4: 1.0, 1: 2.0, 2: 3.0}), "ours", "theirs")
    assert both["width"].tolist() == [1, 2, 4]
    assert both["median_us_of"].tolist() == [2.0, 3.0, 1.0]


def test_two_rows_for_one_width_are_a_value_error():
    twice = pd.concat([table({1: 1.0}), table({1: 2.0})])
    with pytest.raises(ValueError, match="several rows of ours for one width; select one dtype"):
        roofline.paired(twice, "ours", "theirs")
