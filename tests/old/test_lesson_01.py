"""Lesson 1: its taught kernels and its execution. The finished layer is tried in kernels/test_affine.py."""

import pytest
import torch
from cases import vectors
from counting import calls_checked
from taught import INTERPRETED, assert_no_backward, counted, drawn, examine

from labkit.measure import correctness
from labkit.workloads.elementwise import AFFINE

pytestmark = pytest.mark.usefixtures("cache")
NAME = "old/01_launch_overhead"


def pairs(shape):
    return torch.randn(shape), torch.randn(shape)


TAUGHT = {"add": (torch.add, pairs), "affine": (AFFINE.reference, vectors)}


@pytest.mark.parametrize(
    ("name", "layouts"), [("add", ("contiguous", "transposed")), ("affine", ("contiguous",))]
)
def test_a_taught_kernel_is_right_beyond_one_block_and_without_rows_or_elements(lesson, name, layouts):
    shapes = ((4, 6), (1, 1), (3, 513), (1, 4097), (0, 8), (4, 0))
    examine(getattr(lesson, name), *TAUGHT[name], *shapes, layouts=layouts)


@INTERPRETED
@pytest.mark.parametrize(("name", "fetched"), [("add", 15), ("affine", 2 * 15)])
def test_a_taught_kernel_reads_x_once_and_nothing_beyond_the_end(lesson, name, fetched):
    (made,) = counted(getattr(lesson, name), *drawn(TAUGHT[name][1], 3, 5))
    assert (made.bytes_read, made.bytes_written) == (4 * (15 + fetched), 4 * 15)


@pytest.mark.parametrize("name", TAUGHT)
def test_a_taught_kernel_that_has_no_backward_says_so(lesson, name):
    assert_no_backward(name, getattr(lesson, name), drawn(TAUGHT[name][1], 3, 5))


# --- the lesson as a whole ----------------------------------------------------------------------------


def test_it_runs_to_its_end_in_silence_and_checks_its_kernel_on_the_whole_grid(checks_passed):
    assert checks_passed["add"] >= sum(map(calls_checked, correctness.SHAPES)) / 2
