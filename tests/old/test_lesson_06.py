"""Lesson 6: its taught kernels, solved, and its execution. The finished norm is tried in tests/kernels."""

import math

import pytest
import torch
from cases import rows_of
from counting import calls_checked
from taught import (
    INTERPRETED,
    assert_no_backward,
    bf16,
    counted,
    drawn,
    examine,
    fp32,
)

from labkit import gpu
from labkit.measure import correctness
from labkit.workloads.recurrent import rms_norm

pytestmark = pytest.mark.usefixtures("cache")
NAME = "old/06_row_reductions"
SHAPES = ((33, 64), (2, 5, 20), (1, 3), (1, 1), (0, 8), (3, 600))
KERNELS = ("lane_norm_kernel", "row_sum_kernel", "row_norm_kernel", "backward_kernel", "softmax_kernel")


@pytest.mark.parametrize("warps", [1, 4])
def test_the_norm_of_a_row_is_right(lesson, warps):
    def norm(x, weight):
        return lesson.row_norm(x.contiguous(), weight.contiguous(), warps)

    examine(norm, rms_norm, rows_of, *SHAPES, dtypes=correctness.DTYPES)


def test_a_row_for_each_lane_is_right_in_both_layouts(lesson):
    examine(lesson.lane_norm, rms_norm, rows_of, (70, 20), (3, 25, 4), (1, 1), (0, 8), dtypes=(fp32, bf16))
    x, weight = drawn(rows_of, 70, 20)
    y = lesson.lane_norm(x.T.contiguous(), weight, by_column=True)
    assert torch.equal(y.T, lesson.lane_norm(x, weight)), "it is one kernel"


@pytest.mark.parametrize("programs", [1, 3, 2048])
def test_both_gradients_are_right_for_a_correlated_upstream_gradient(lesson, programs):
    """The layer's gradients, its upstream gradient being twice its output."""

    def layer(x, weight):
        return lesson.RowNorm.apply(x, weight, (lesson.row_norm, lesson.rms_norm_backward), programs)

    # a row of one number has a gradient of zero, nearly: nothing to compare with
    examine(layer, rms_norm, rows_of, (33, 64), (2, 5, 20), (1, 3), (3, 513), (0, 8), gradients=True)


def test_more_programs_change_no_more_than_the_order_of_the_sum(lesson):
    (x, weight), dy = drawn(rows_of, 37, 20), torch.randn(37, 20, device=gpu.device())
    want = lesson.rms_norm_backward(dy, x, weight, 2**31)
    got = lesson.rms_norm_backward(dy, x, weight, 5)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


def test_sums_and_softmax_of_rows_are_right(lesson):
    for shape in ((1, 1), (5, 33), (3, 600)):
        x = torch.randn(shape, device=gpu.device())
        torch.testing.assert_close(lesson.row_sums(x), x.sum(1), rtol=1e-5, atol=1e-5)

    def wild(shape):
        return (100 * torch.randn(shape),)

    shapes = (2, 3, 5), (1, 1), (2, 1024), (2, 1025), (0, 8)
    examine(lesson.softmax, lambda x: x.softmax(-1), wild, *shapes, dtypes=(fp32, bf16))


def test_a_softmax_whose_first_block_is_masked_away_is_finite(lesson):
    x = torch.full((2, 1500), -math.inf, device=gpu.device())
    x[:, 1200:] = torch.randn(2, 300)
    torch.testing.assert_close(lesson.softmax(x), x.softmax(1), rtol=1e-5, atol=1e-7)


def test_what_has_no_derivative_refuses_to_be_differentiated(lesson):
    for name in ("row_norm", "lane_norm"):
        assert_no_backward(name, getattr(lesson, name), drawn(rows_of, 3, 20))
    for name in ("row_sums", "softmax"):
        assert_no_backward(name, getattr(lesson, name), drawn(rows_of, 3, 20)[:1])


@INTERPRETED
def test_every_number_is_read_and_written_once_and_by_a_lane_read_twice(lesson):
    x, weight = drawn(rows_of, 33, 20)
    size = 4 * x.numel()
    (row,) = counted(lesson.row_norm, x, weight)
    assert (row.bytes_read, row.bytes_written) == (2 * size, size), "the weight for each row"
    (lane,) = counted(lesson.lane_norm, x, weight)
    assert (lane.bytes_read, lane.bytes_written) == (2 * size + 4 * 20, size)
    dy = torch.randn_like(x)
    for programs in (4, 33):
        back, *_ = counted(lambda *t, n=programs: lesson.rms_norm_backward(*t, n), dy, x, weight)
        parts = 4 * programs * 20
        assert (back.bytes_read, back.bytes_written) == (2 * size + parts, size + parts)


# --- the lesson as a whole ----------------------------------------------------------------------------


def test_it_runs_to_its_end_in_silence_and_checks_the_softmax(checks_passed):
    assert checks_passed.keys() == {"softmax"}
    assert checks_passed["softmax"] >= sum(calls_checked(shape) for shape in ((3, 5), (1, 1), (2, 1500)))
