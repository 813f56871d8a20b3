"""Floors, and where each of them is the highest."""

import pytest

from labkit.measure import roofline
from labkit.measure.roofline import Roofs

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
