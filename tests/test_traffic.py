"""Counting in place of timing: launches and bytes of contenders at sizes that an interpreter can do."""

import math
from dataclasses import replace

import pytest
import torch
from simulated import DOUBLING

from labkit import device, traffic
from labkit.sweeps import Contender, Work


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    monkeypatch.setattr(device, "name", lambda: "cpu")


def counted(call, shape=None, dtype="float32", direction="forward", work=DOUBLING, **options):
    contender = Contender("it", call, work, **options)
    return traffic.row(contender, shape or {"batch": 2, "width": 16}, "width", dtype, direction)


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


def test_an_intermediate_that_goes_out_and_comes_back_doubles_the_traffic():
    row = counted(lambda x: (x * 1) * 2)
    assert (row["launches"], row["traffic"]) == (2, 2.0)


def test_half_precision_moves_half_the_bytes():
    assert counted(twice, dtype="bfloat16")["moved"] == counted(twice)["moved"] / 2


def test_the_other_axes_are_small_and_the_swept_one_is_itself():
    assert traffic.counted_shape({"batch": 32768, "width": 4096}, "width") == {"batch": 64, "width": 4096}
    assert traffic.counted_shape({"batch": 8, "width": 4096}, "width") == {"batch": 8, "width": 4096}
    assert counted(twice, {"batch": 32768, "width": 16})["batch"] == traffic.ROWS


@pytest.mark.parametrize(("width", "large"), [(1024, False), (1025, True)])
def test_what_takes_too_long_is_a_gap(width, large):
    row = counted(twice, {"batch": 64, "width": width})
    assert math.isnan(row["traffic"]) == large
    assert row["note"] == ("too large for the interpreter" if large else "")


def test_what_fails_is_a_gap_with_its_reason():
    def call(x):
        raise ValueError("width: too odd")

    row = counted(call)
    assert row["note"] == "ValueError: width: too odd" and math.isnan(row["traffic"])
    assert "moved" not in row


def test_what_torch_compile_would_fuse_is_not_counted_as_if_it_did_not():
    def call(x):
        pytest.fail("called")

    row = counted(call, compiled=True)
    assert math.isnan(row["traffic"]) and "on a GPU" in row["note"]


def test_backward_alone_and_with_its_forward():
    square = replace(DOUBLING, min_bytes=lambda s, size, _: s["batch"] * s["width"] * size)
    passes = {
        direction: counted(lambda x: x * x.detach(), direction=direction, work=square)["launches"]
        for direction in ("forward", "backward", "forward_backward")
    }
    assert passes == {"forward": 1, "backward": 1, "forward_backward": 2}


def test_forward_is_counted_without_autograd():
    seen = []
    counted(lambda x: seen.append(torch.is_grad_enabled()) or x * 2)
    counted(lambda x: seen.append(torch.is_grad_enabled()) or x * 2, direction="backward")
    assert seen == [False, True]


def test_inputs_are_cast_and_gradients_reach_all_of_them():
    work = Work(
        inputs=lambda s: (torch.randn(2, 3), torch.randn(3)),
        reference=None,
        min_bytes=lambda s, size, _: size,
        flops=lambda s, _: 1,
    )
    seen = []

    def call(x, w):
        seen.append((x.dtype, w.dtype, x.requires_grad, w.requires_grad))
        return x * w

    row = counted(call, {"width": 3}, "float16", "forward_backward", work)
    assert seen == [(torch.float16, torch.float16, True, True)] and row["note"] == ""


def test_a_recurrence_is_counted_over_few_steps():
    shape = {"batch": 1024, "time": 64, "width": 512}
    assert traffic.counted_shape(shape, "width") == {"batch": 16, "time": 4, "width": 512}
    assert traffic.counted_shape(shape, "time") == {"batch": 16, "time": 64, "width": 16}
    assert traffic.counted_shape({"batch": 1024, "groups": 3, "width": 512}, "width")["batch"] == 64
