"""Which pass of a point is kept when it was measured several times."""

import pytest

from labkit.measure import session
from labkit.measure.tape import Row


def rows(*times):
    """A pass: a row for each way."""
    return [
        Row("title", f"way {number}", {"width": 8}, "float32", "forward", "host", "warm", median_us=time)
        for number, time in enumerate(times)
    ]


@pytest.mark.parametrize(
    ("passes", "kept"),
    [
        ([rows(20.0, 30.0), rows(18.0, 25.0), rows(29.0, 40.0)], 1),
        (
            [rows(10.0, 2000.0), rows(20.0, 1900.0)],
            0,
        ),  # a factor counts the same for each way
        ([rows(1.0, None), rows(20.0, 30.0)], 1),  # a pass in which a way failed is no fast one
        ([rows(None, None), rows(None, None)], 0),
    ],
)
def test_the_fastest_pass_is_kept_whole(passes, kept):
    assert session.fastest(passes) is passes[kept]
