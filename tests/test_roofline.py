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


@pytest.mark.parametrize(
    ("asked", "us"),
    [
        ({"min_bytes": 0}, 1.5),
        ({"min_bytes": 4, "launches": 3}, 4.5),
        ({"min_bytes": 2e9}, 2000.0),
        ({"min_bytes": 0, "flops": 5e6}, 5.0),
        ({"min_bytes": 2e9, "flops": 5e9}, 5000.0),
        ({"min_bytes": 2e9, "flops": 5e8}, 2000.0),
        ({"min_bytes": 0, "flops": 8e9, "dtype": "bfloat16"}, 1000.0),
    ],
    ids=str,
)
def test_the_floor_is_the_largest_of_launches_memory_and_arithmetic(asked, us):
    assert roofline.floor_us(ROOFS, **asked) == pytest.approx(us)
    with pytest.raises(KeyError):
        roofline.floor_us(ROOFS, min_bytes=0, flops=1, dtype="int4")


# Regimes


def test_regimes_say_where_which_floor_is_the_highest():
    floors = {"launch": lambda n: 10.0, "memory": lambda n: n, "arithmetic": lambda n: n * n / 100}
    spans = roofline.regimes([1, 5, 9, 11, 50, 99, 101, 1000], floors)
    assert spans == [(1, 9, "launch"), (9, 99, "memory"), (99, 1000, "arithmetic")]
    assert roofline.regimes([1, 2, 3], {"launch": lambda n: 1.0}) == [(1, 3, "launch")]
    assert roofline.regimes([], {"launch": lambda n: 1.0}) == []


# Crossovers


@pytest.mark.parametrize(
    ("xs", "first", "second", "where"),
    [
        ([10, 1000], [10, 1000], [100, 100], [100]),
        ([16, 1024], [3 * 16, 3 * 1024], [16**2 / 100, 1024**2 / 100], [300]),
        ([1, 10, 100, 1000], [1, 4, 1, 4], [2, 2, 2, 2], [10**0.5, 10**1.5, 10**2.5]),
        ([1000, 1, 100, 10], [4, 1, 1, 4], [2, 2, 2, 2], [10**0.5, 10**1.5, 10**2.5]),
        ([1, 2, 4, 8], [1, 3, 9, 9], [2, 3, 4, 4], [2]),
        ([1, 2, 4, 8], [1, 3, 4, 9], [2, 3, 4, 4], [8**0.5]),
        ([1, 2, 4, 8], [1, 3, 1, 1], [2, 3, 4, 4], []),  # they meet, and neither changes sides
        ([1, 2, 4, 8], [1, 1, 1, 1], [1, 1, 1, 1], []),
    ],
)
def test_crossovers_are_interpolated_on_log_log_axes(xs, first, second, where):
    assert roofline.crossovers(xs, first, second) == pytest.approx(where)


@pytest.mark.parametrize("columns", [([1, 2], [1, 2], [1]), ([1, 2], [1, 0], [1, 2]), ([1], [1], [math.nan])])
def test_what_cannot_cross_is_a_value_error(columns):
    with pytest.raises(ValueError, match="must"):
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


NOTHING = "No width was measured for both ours and theirs."


@pytest.mark.parametrize(
    ("times", "spread", "sentence"),
    [
        ({100: 4.0, 10000: 0.25}, 0, "ours is faster than theirs from width 1000 on: 4x at width 10000."),
        ({100: 0.25, 10000: 4.0}, 0, "ours is faster than theirs below width 1000: 4x at width 100."),
        ({1: 0.5, 2: 0.04}, 0, "ours is never slower than theirs, and 25x at width 2."),
        ({1: 2.0, 2: 3.0}, 0, "ours is never faster than theirs; it takes 3x as long at width 2."),
        (
            {1: 2.0, 100: 0.5, 10000: 2.0}, 0,
            "ours and theirs change places at width 10, 1000; ours is at best 2x at width 100.",
        ),
        # a difference inside the larger spread is a tie, which is no loss, no win and no change of places
        ({1: 1.05, 2: 0.95}, 0.2, "ours and theirs tie at every measured width."),
        ({1: 1.05, 2: 0.5}, 0.2, "ours is never slower than theirs, and 2x at width 2."),
        ({1: 0.95, 2: 2.0}, 0.2, "ours is never faster than theirs; it takes 2x as long at width 2."),
        (
            {1: 4.0, 10: 0.99, 100: 1.01, 1000: 0.99, 10000: 0.25}, 0.1,
            "ours is faster than theirs from width 100 on: 4x at width 10000.",
        ),
        (
            {1: 0.25, 10: 1 / 0.99, 100: 1 / 1.01, 1000: 1 / 0.99, 10000: 4.0}, 0.1,
            "ours is faster than theirs below width 100: 4x at width 1.",
        ),
        (
            {1: 4.0, 100: 0.25, 10000: 1.01}, 0.1,
            "ours is faster than theirs from width 10 on: 4x at width 100.",
        ),
        ({1: 2.0, 10: 1.0, 100: 0.5}, 0, "ours is faster than theirs from width 10 on: 2x at width 100."),
        ({1: 0.5, 2: None}, 0, "ours is never slower than theirs, and 2x at width 1."),
        ({1: None}, 0, NOTHING),
        ({}, 0, NOTHING),
    ],
)  # fmt: skip
def test_a_finding_is_a_sentence(times, spread, sentence):
    measured = table(times or {1: 1.0}, spread=spread)
    measured = measured if times else measured.iloc[:0]
    assert roofline.finding(measured, "ours", "theirs") == sentence
    turned = measured.rename(columns={"width": "batch"})
    assert roofline.finding(turned, "ours", "theirs", x="batch") == sentence.replace("width", "batch")


def test_the_spread_of_either_contender_counts():
    both = table({1: 1.2, 2: 0.5})
    both.loc[(both.contender == "theirs") & (both.width == 1), ["p20_us", "p80_us"]] = (0.8, 1.2)
    assert roofline.finding(both, "ours", "theirs").startswith("ours is never slower")


def test_pairs_ascend_and_are_of_one_kind_device_and_dtype():
    both = roofline.paired(table({4: 1.0, 1: 2.0, 2: 3.0}), "ours", "theirs")
    assert both[["width", "median_us_of"]].to_numpy().tolist() == [[1, 2.0], [2, 3.0], [4, 1.0]]
    here, there = table({1: 1.0}), table({1: 3.0}, device="Other")
    tape = table({1: 5.0}, kind="recorded")
    mixed = pd.concat([here, there[there.contender == "ours"], tape[tape.contender == "theirs"]])
    found = roofline.paired(mixed, "ours", "theirs")
    assert found[["median_us_of", "median_us_over", "device", "kind"]].to_numpy().tolist() == [
        [1.0, 1.0, "Simulated", "live"]
    ]
    with pytest.raises(ValueError, match="several rows of ours for one width; select one dtype"):
        roofline.paired(pd.concat([here, table({1: 2.0})]), "ours", "theirs")
