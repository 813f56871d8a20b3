"""What a sweep shows first, where its ticks stand, and how a profile joins kernels."""

import pytest

from labkit import work
from labkit.display import figures, numbers, style
from labkit.display.sweep import Sweep
from labkit.measure import session


def ticks(widths):
    """The x ticks of a curve at these widths that lie within the axis."""
    points = [(width, 1.0 + width, 1.0 + width, 1.0 + width) for width in widths]
    curve = figures.Curve("a", points, style.PALETTE[0], "live")
    panel = figures.Panel([curve], "width", "time", "lower", style.duration)
    axes = figures.curves("t", panel, []).figure.axes[0]
    low, high = axes.get_xlim()
    return sorted(tick for tick in axes.get_xticks() if low <= tick <= high)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([1, 2, 3, 4, 6, 8], [1, 2, 3, 4, 6, 8]),
        ([64, 256, 3072, 8192], [64, 256, 3072, 8192]),
        ([64, 7800, 8192], [64, 8192]),  # two numbers in one place cannot be read
    ],
)
def test_few_points_have_a_tick_each_unless_two_would_lie_upon_each_other(widths, expected):
    assert ticks(widths) == expected


def test_many_points_have_ticks_at_some_powers_of_two():
    assert set(ticks(range(100, 1100, 50))) == {128, 256, 512, 1024}


def test_the_axes_say_what_they_show():
    curve = figures.Curve("a", [(1.0, 2.0, 2.0, 2.0)], style.PALETTE[0], "live")
    (axes, *_) = figures.curves(
        "t", figures.Panel([curve], "width", "time", "lower", style.duration), []
    ).figure.axes
    assert axes.get_xlabel() == "width" and axes.get_ylabel() == "time\n(lower is better)"


def test_a_sweep_shows_the_first_value_that_it_was_given():
    how = {"batch": [8192, 512], "width": [64, 32, 128], "dtype": "float32"}
    points = session.points("t", {"a": lambda *_: None}, work.linear, how)
    swept = Sweep("t", points, session.Session(), None, None)
    assert swept.x == "width" and swept.usual()["batch"] == 8192
    assert [point.axes["width"] for point in swept.chosen(swept.usual())] == [32, 64, 128]


def test_kernels_of_one_name_are_a_line_with_their_number_and_time():
    lines = numbers.together([["gemm", 2.0], ["cat", 5.0], ["gemm", 3.0]])
    assert lines == [["5 µs", "2 × gemm"], ["5 µs", "cat"]]
