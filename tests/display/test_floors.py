"""The floors of a work, and the thin lines that a sweep draws of them."""

import pytest

from labkit import work
from labkit.display.numbers import Roofs
from labkit.display.sweep import SPEEDUP, TIME, Sweep
from labkit.measure import session

ROOFS = Roofs(2.0, {"float32": 1000.0, "bfloat16": 1e6})


@pytest.mark.parametrize(
    ("made", "dtype", "direction", "us"),
    [
        (work.affine, "float32", "forward", 2 * 8 * 16 * 4 / 2),  # x in, y out
        (work.affine, "bfloat16", "backward", 3 * 8 * 16 * 2 / 2),  # x and dy in, dx out
        (work.linear, "bfloat16", "forward", (2 * 8 * 16 + 16 * 16) * 2 / 2),  # bytes decide
    ],
)
def test_a_floor_is_the_bytes_over_the_bandwidth_where_these_take_longer(made, dtype, direction, us):
    assert ROOFS.floor_us(made, {"batch": 8, "width": 16}, dtype, direction) == us


def test_a_floor_is_the_operations_over_their_rate_where_these_take_longer():
    rows, width = 4096, 4096
    slow = Roofs(1e9, {"float32": 1000.0})
    assert (
        slow.floor_us(work.linear, {"batch": rows, "width": width}, "float32") == 2 * rows * width**2 / 1000
    )


def test_a_sweep_draws_a_floor_for_each_work_and_of_speedups_their_ratio():
    works = {"a": work.linear, "b": work.affine, "c": work.affine}
    ways = {name: (lambda *_: None, of) for name, of in works.items()}
    points = session.points("t", ways, None, {"batch": 8, "width": [16, 32], "dtype": "float32"})
    swept = Sweep("t", points, session.Session(), None, ROOFS)
    floors = {
        n: [ROOFS.floor_us(w, p.axes, "float32") for p in points]
        for n, w in (("a", work.linear), ("b", work.affine))
    }
    drawn = swept._floors(swept.usual(), TIME)
    assert drawn == {f"floor of {n}": list(zip([16.0, 32.0], us, strict=True)) for n, us in floors.items()}
    ((name, ratio),) = swept._floors(swept.usual(), SPEEDUP).items()
    assert name == "ratio of the floors, b"
    assert [y for _, y in ratio] == [a / b for a, b in zip(floors["a"], floors["b"], strict=True)]
    assert Sweep("t", points, session.Session(), None, None)._floors(swept.usual(), TIME) == {}


def test_a_sweep_of_one_work_has_one_floor_and_the_lines_that_the_lesson_gives():
    ways = dict.fromkeys("ab", lambda *_: None)
    points = session.points("t", ways, work.affine, {"batch": 8, "width": [16, 32], "dtype": "float32"})
    swept = Sweep("t", points, session.Session(), None, ROOFS, {"twice": lambda width: 2 * width})
    assert swept._floors(swept.usual(), TIME) == {
        "the floor": [
            (w, ROOFS.floor_us(work.affine, {"batch": 8, "width": w}, "float32")) for w in (16, 32)
        ],
        "twice": [(16.0, 32.0), (32.0, 64.0)],
    }
    assert "twice" not in swept._floors(swept.usual(), SPEEDUP), "it is a time, and no ratio"
    alone = Sweep("t", points, session.Session(), None, None, {"twice": lambda width: 2 * width})
    assert alone._floors(alone.usual(), TIME) == {"twice": [(16.0, 32.0), (32.0, 64.0)]}
