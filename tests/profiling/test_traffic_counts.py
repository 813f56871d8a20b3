"""Counting in place of timing: launches and bytes of contenders at sizes that an interpreter can do."""

import math
from dataclasses import replace

import pytest
import torch
from simulated import DOUBLING

from labkit.measure.contender import Contender
from labkit.profiling import traffic_counts


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("labkit.gpu.available", lambda: False)
    monkeypatch.setattr("labkit.gpu.device", lambda: "cpu")


def counted(call, shape=None, dtype="float32", direction="forward", work=DOUBLING, **options):
    contender = Contender("it", call, work, **options)
    return traffic_counts.counted_row(
        contender, shape or {"batch": 2, "width": 16}, "width", dtype, direction
    )


DIRECTIONS = ("forward", "backward", "forward_backward")


def twice(x):
    return x * 2


def test_a_row_says_what_was_counted_and_of_what():
    row = counted(twice)
    nbytes = 2 * 16 * 4
    assert row["contender"] == "it" and row["dtype"] == "float32" and row["direction"] == "forward"
    assert (row["batch"], row["width"], row["kind"], row["note"]) == (2, 16, "live", "")
    assert (row["launches"], row["moved"], row["min_bytes"]) == (1, 2 * nbytes, 2 * nbytes)
    assert row["traffic"] == 1.0
    assert not {"median_us", "clock", "date"} & set(row), "nothing is timed"
    again = counted(lambda x: (x * 1) * 2, dtype="bfloat16")
    assert (again["launches"], again["traffic"]) == (2, 2.0), "an intermediate goes out and comes back"
    assert again["moved"] == row["moved"], "twice as often, in half precision"


@pytest.mark.parametrize(
    ("shape", "axis", "small"),
    [
        ({"batch": 32768, "width": 4096}, "width", {"batch": 64, "width": 4096}),
        ({"batch": 8, "width": 4096}, "width", {"batch": 8, "width": 4096}),
        ({"batch": 1024, "time": 64, "width": 512}, "width", {"batch": 16, "time": 4, "width": 512}),
        ({"batch": 1024, "time": 64, "width": 512}, "time", {"batch": 16, "time": 64, "width": 16}),
        ({"batch": 99, "groups": 3, "width": 512}, "width", {"batch": 64, "groups": 3, "width": 512}),
    ],
)
def test_the_other_axes_are_small_and_the_swept_one_is_itself(shape, axis, small):
    assert traffic_counts.counted_shape(shape, axis) == small


@pytest.mark.parametrize(
    ("call", "shape", "options", "note"),
    [
        (twice, {"batch": 64, "width": 1024}, {}, ""),
        (twice, {"batch": 64, "width": 1025}, {}, "too large for the interpreter"),
        (lambda x: 1 // 0, None, {}, "ZeroDivisionError: integer "),
        (lambda x: pytest.fail("called"), None, {"compiled": True}, "on a GPU"),  # it would fuse
    ],
)
def test_what_takes_too_long_fails_or_is_compiled_is_a_gap(call, shape, options, note):
    row = counted(call, shape, **options)
    assert math.isnan(row["traffic"]) == bool(note) and note in row["note"]


@pytest.mark.parametrize(("direction", "launches"), [*zip(DIRECTIONS, (1, 2, 3), strict=True)])
def test_each_direction_counts_its_own_launches_with_inputs_of_the_dtype(direction, launches):
    seen = []

    def call(x, w):
        seen.append((x.dtype, x.requires_grad, w.requires_grad, torch.is_grad_enabled()))
        return x * w

    square = replace(DOUBLING, inputs=lambda s: (torch.randn(2, 3), torch.randn(2, 3)))
    row = counted(call, {"width": 3, "batch": 2}, "float16", direction, square)
    assert set(seen) == {(torch.float16, *[direction != "forward"] * 3)}
    assert (row["launches"], row["note"]) == (launches, "")
