"""labkit.kernels.recurrence: sequences of any length and width, time in reverse, its plan, its code."""

import itertools
import math

import cases
import operators as op
import pytest
import torch
from operators import bf16, fp16, fp32, gradients
from recurring import (
    WIDTHS,
    OperatorTests,
    assert_each_number_is_written_once,
    assert_nan_stays,
    examine,
    in_reverse,
    steps,
)

from labkit import gpu
from labkit.kernels import linear_recurrence

LINEAR, GRU, RMS = cases.LINEAR, cases.GRU, cases.RMS
every_case = pytest.mark.parametrize("case", [LINEAR, GRU], ids=repr)
every_loop = pytest.mark.parametrize("case", [LINEAR, GRU, RMS], ids=repr)


def of(case, dtype, width, time, *h0):
    """16 steps on their way take a second to compile."""
    return [(case.call, *[(1024, time, width)] * 2, *[(1024, width)] * len(h0), dtype)]


ASKED = {
    "sm_80": of(GRU, bf16, 512, 4, "h0"),
    "sm_90": of(LINEAR, fp32, 512, 64),
    "sm_120": of(LINEAR, bf16, 100, 4, "h0"),
}


class TestOperators(OperatorTests):
    """Of any length, around the steps that are on their way, 16 forward and 8 backward; of any width."""

    tested, asked = (LINEAR, GRU), ASKED
    shapes = (
        *((1, time, 5) for time in (1, 2, 7, 8, 9, 15, 16, 17, 33)),
        *((1, 2, 1), (3, 2, 33), (2, 2, 32), (2, 1, 100), (2, 3, 0)),
    )
    spills = 384  # bytes: a few registers, once in as many steps as are on their way

    @op.INTERPRETED
    def test_no_lane_waits_for_another_and_steps_run_ahead_in_registers(self, large):
        """U of them before the loop, and for each of U as many in it, beside the first state.

        Two warps of eight bytes a lane for float32: measured, they are faster than one of sixteen.
        """
        for v in large:
            c, tensors = v.code, 2 if v.title == "states_kernel" else 4 if v.launch.GRU else 3
            assert not c.shuffles and not c.barriers and not c.shared_bytes and not c.async_copies, c
            assert sum(c.loads.values()) == 2 * v.launch.U * tensors + (v.launch.h0 is not None), c
            if v.dtype is fp32 or v.launch.H >= 256:
                warps, bits = (2, 64) if v.dtype is fp32 else (1, 128)
                assert c.num_warps == warps and set(c.loads) == {bits}, v


@every_case
@pytest.mark.parametrize(("width", "dtype"), [(130, fp32), (256, fp32), (257, bf16), (512, bf16)], ids=str)
def test_several_programs_share_a_sequence(case, width, dtype):
    examine(case, (2, 2, width), dtypes=(dtype,))


@every_loop
@pytest.mark.parametrize("time", [0, 1, 9])
def test_without_a_first_state_it_is_zero(case, time):
    examine(case.without_h0, (2, time, 5))


@every_loop
def test_over_two_hundred_steps_half_precision_is_rounded_once(case):
    """A state, a carry or a part of the weight's gradient in 16 bits is off by several times as much."""
    tensors = op.drawn(case, 2, 200, 36, dtype=fp16)
    h, *got = gradients(case.call, tensors)
    doubles = [t.double() for t in tensors]
    op.assert_each_rounded_once(h, case.reference(*doubles))
    for one, want in zip(got, in_reverse(case, 2 * h.double(), doubles, h.double()), strict=True):
        op.assert_each_rounded_once(one, want)


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_gates_near_one_are_not_rounded_by_autocast(dtype):
    """0.9995 is 1 in bfloat16, and 0.99951 in float16: after 4096 steps of adding 1 the state would be 4096,
    or 1769, where it is 2000 (1 - 0.9995**4096) = 1742."""
    gate = torch.full((1, 4096, 1), 0.9995, device=gpu.device())
    with torch.autocast(gpu.device(), dtype=dtype):
        h = linear_recurrence(gate, torch.ones_like(gate))
    assert h.dtype is fp32
    assert h[0, -1, 0].item() == pytest.approx(2000 * (1 - 0.9995**4096), rel=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every_case
def test_nan_and_infinity_stay_in_their_sequence_and_feature(case):
    tensors, upstream = op.drawn(case, 3, 3, 6), torch.randn(3, 3, 6, device=gpu.device())
    want = gradients(case.call, tensors, upstream)
    for which, at in enumerate(((1,), (1,), ())):
        given = [t.clone() for t in tensors]
        given[which][(0, *at, 2)], given[which][(1, *at, 4)] = math.inf, math.nan
        got = gradients(case.call, given, upstream)
        assert not got[0][0, sum(at) :, 2].isfinite().any() and got[0][1, sum(at) :, 4].isnan().all()
        if at:
            assert torch.equal(got[0][:, 0], want[0][:, 0]), "what was before"
        for one, other in zip(got, want, strict=True):
            for row, feature in ((0, 2), (1, 4)):
                one[row, ..., feature] = other[row, ..., feature]
            assert torch.equal(one, other)


@op.INTERPRETED
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 33), (1, 17, 5), (3, 1, 130)], ids=str)
@every_case
def test_every_number_is_read_and_written_once(case, shape, state):
    (B, T, H), gru, case = shape, case is GRU, case if state else case.without_h0
    N, S = B * T * H, state * B * H
    (forward,), (back,) = op.both_ways_of(case.call, op.drawn(case, *shape))
    assert op.moved(forward) == (2 * N + S, N)
    assert op.moved(back) == ((3 + gru) * N - B * H + S, 2 * N + S), "all of h but the last state"


def test_no_more_steps_are_on_their_way_than_there_are():
    sizes = itertools.product((1, 2, 3, 8, 9, 16, 17, 100), WIDTHS, (2, 4), (8, 16))
    for time, width, itemsize, most in sizes:
        (programs,), plan = steps.recurrence_plan(3, time, width, itemsize, most)
        lane = plan["BH"] * itemsize // (32 * plan["num_warps"])
        assert plan["H"] == width and programs == 3 * math.ceil(width / plan["BH"])
        assert plan["U"] == most if time > most // 2 else time <= plan["U"] < 2 * time
        assert lane == min(8 if itemsize == 4 or width % 8 else 16, plan["BH"] * itemsize // 32)
        if time <= 2 and width == 4096:
            assert plan["BH"] * itemsize == (1024 if time == 1 else 512), "bytes enough on their way"


@op.INTERPRETED
@every_case
@pytest.mark.parametrize("shape", [(2, 5, 20), (2, 18, 33)])
def test_a_sequence_and_a_feature_touch_no_other_and_each_number_is_written_once(case, shape):
    assert_each_number_is_written_once(case, shape)
    assert_nan_stays(case, shape, [(0, 0), (shape[1] - 1, shape[2] - 1)])
