"""Bars of a race: what can be compared by eye is on one scale, and no bar is a sliver."""

import pytest

from labkit.display import figures, style
from labkit.display.figures import Bar


def drawn(short: float, long: float) -> tuple[list[float], str]:
    """How long the bars of two groups are in the figure, and its axis's name."""
    look = style.PALETTE[0]
    groups = {
        "width 8": [Bar("a", short, look, True), Bar("b", 2 * short, look, True, floor=short / 2)],
        "width 64": [Bar("a", long, look, True), Bar("b", 2 * long, look, True)],
    }
    (axes,) = figures.bars("A race", groups, ["Live."]).figure.axes
    return [patch.get_width() for patch in axes.patches], axes.get_xlabel()


def test_groups_of_like_times_share_a_scale():
    bars, axis = drawn(10, 30)
    assert bars == [10, 20, 30, 60] and "scale" not in axis


def test_groups_far_apart_have_a_scale_each_and_the_axis_says_so():
    bars, axis = drawn(10, 1000)
    assert bars == pytest.approx([1000, 2000, 1000, 2000]) and "each group on a scale of its own" in axis
