"""Lesson 4: its two kernels, which are right on any size and read and write nothing beyond the end."""

import math

import pytest
import torch
from grouped import drawn, grouped, plain
from taught import INTERPRETED, assert_no_backward, bf16, counted

from labkit.kernels import grouped as family
from labkit.lessons import notebooks
from labkit.measure import correctness

pytestmark = pytest.mark.usefixtures("cache")
CALLS = {
    "groups first": lambda lesson: lesson.step(True),
    "rows first": lambda lesson: lesson.step(False),
    "two tiles": lambda lesson: lesson.stays(2),
    "all end together": lambda lesson: lesson.stays(),
}


@pytest.fixture(scope="module")
def lesson(cache):
    return notebooks.load("04_grouped_matmul")


@pytest.mark.parametrize("name", CALLS)
def test_each_is_right_on_any_size_and_refuses_gradients(lesson, name):
    call = CALLS[name](lesson)
    for groups, width in ((5, 20), (3, 16), (1, 1)):
        correctness.check(call, plain, grouped(groups, width), shapes=((70,), (64,), (200,)), gradients=False)
    assert_no_backward(r"\S+", call, drawn(grouped(2, 4), 3))


@INTERPRETED
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_read_or_written_beyond_the_end(lesson, name, monkeypatch):
    monkeypatch.setattr(lesson, "device_limits", lambda _: family.DeviceLimits(2, 0, True))
    x, weight, bias = drawn(grouped(3, 20), 330)
    (made,) = counted(CALLS[name](lesson), x, weight, bias)
    parts = {"two tiles": 3, "all end together": math.ceil(6 / family.balance_tiles(6, 3, 8, 2))}.get(name, 6)
    assert made.programs == 3 * parts and parts > 1
    assert made.bytes_read == 4 * (x.numel() + parts * (weight.numel() + bias.numel()))
    assert made.bytes_written == 4 * x.numel()


@pytest.mark.parametrize("across", [True, False])
def test_the_first_programs_share_rows_or_a_group(lesson, across):
    x, weight, bias = drawn(grouped(3, 20), 192)
    y = torch.full_like(x, math.nan)
    lesson.step_kernel[(3,)](x, weight, bias, y, 192, 3, ACROSS=across, D=20, BM=64, BD=32)
    written = y.isnan().logical_not()
    assert written[:64].all() if across else written[:, :20].all()
    assert written.sum() == 3 * 64 * 20


@INTERPRETED
@pytest.mark.usefixtures("overflow_is_an_error")
@pytest.mark.parametrize("kernel", ["step", "stay"])
def test_numbers_that_lie_more_than_32_bits_apart(lesson, kernel):
    """The rows of one group, of 2**20 side by side."""
    R, G, D = 130, 2**20, 16
    near, weight, bias = drawn(grouped(1, D), R, dtype=bf16)
    x, y = (torch.empty(R, G * D, dtype=bf16) for _ in "xy")  # 4 GB each, of which few pages are touched
    x[:, :D] = near
    weights = torch.empty(G, D, D, dtype=bf16), torch.empty(G, D, dtype=bf16)
    weights[0][0], weights[1][0] = weight[0], bias[0]
    if kernel == "step":
        lesson.step_kernel[(3,)](x, *weights, y, R, G, ACROSS=False, D=D, BM=64, BD=16)
    else:
        lesson.stay_kernel[(1,)](x, *weights, y, R, G, 3, D=D, BM=64, BD=16)
    want = plain(near.double(), weight.double(), bias.double())
    assert not correctness.diagnose(y[:, :D], want, correctness.TOLERANCE[bf16])
