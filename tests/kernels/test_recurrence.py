"""labkit.kernels.recurrence: sequences of any length and width, time in reverse, its plan, its code."""

import itertools
import math

import pytest
import recurring
import torch
from recurring import (
    GRU,
    LINEAR,
    WIDTHS,
    OperatorTests,
    bf16,
    drawn,
    examine,
    fp16,
    fp32,
    gradients,
    meta,
    steps,
)

from labkit import device

pytestmark = pytest.mark.usefixtures("cache")
every_case = pytest.mark.parametrize("case", [LINEAR, GRU], ids=repr)
X, STATE = torch.ones(2, 3, 4), torch.ones(2, 4)
WRONG = {
    "one sequence": (LINEAR, "a", "(any, any, any)", STATE, STATE),
    "four dimensions": (LINEAR, "a", "(any, any, any)", X[None], X[None]),
    "b of other steps": (LINEAR, "b", "(2, 3, 4)", X, X[:, :2]),
    "b to be spread": (LINEAR, "b", "(2, 3, 4)", X, X[:1]),
    "b in bf16": (LINEAR, "b", "torch.float32", X, X.bfloat16()),
    "b elsewhere": (LINEAR, "b", "cpu", X, X.to("meta")),
    "no b": (LINEAR, "b", "a tensor", X, None),
    "double precision": (LINEAR, "a", "float16 or bfloat16", X.double(), X.double()),
    "h0 with its step": (LINEAR, "h0", "(2, 4)", X, X, STATE[:, None]),
    "h0 in half": (LINEAR, "h0", "torch.float32", X, X, STATE.half()),
    "h0 elsewhere": (LINEAR, "h0", "cpu", X, X, STATE.to("meta")),
    "too long a sequence": (LINEAR, "a", "2**31", *[torch.empty(1, 2**16, 2**15, device="meta")] * 2),
    "steps ahead beyond 32 bits": (GRU, "z", "2**31", *[torch.empty(1, 2**31 - 8, 1, device="meta")] * 2),
    "z": (GRU, "z", "(any, any, any)", STATE, STATE),
    "candidate": (GRU, "candidate", "(2, 3, 4)", X, X[..., :3]),
    "h0 of another width": (GRU, "h0", "(2, 4)", X, X, torch.ones(2, 3)),
}
ASKED = {
    "sm_80": (GRU, fp32, 128, 4, False),
    "sm_86": (LINEAR, bf16, 512, 4, True),
    "sm_89": (GRU, bf16, 100, 4, True),
    "sm_90": (LINEAR, fp32, 512, 64, False),
    "sm_100": (GRU, bf16, 512, 64, False),
    "sm_120": (LINEAR, fp32, 100, 4, True),
}
"""The operator, dtype, features, steps (16 on their way take a second to compile), whether h0 is given."""


class TestOperators(OperatorTests):
    """Of any length, around the steps that are on their way, 16 forward and 8 backward; of any width."""

    kept, wrong = {LINEAR: (0, 2, -1), GRU: (0, 1, 2, -1)}, WRONG
    shapes = (
        *((1, time, 5) for time in (1, 2, 7, 8, 9, 15, 16, 17, 33)),
        *((1, 2, 1), (3, 2, 33), (2, 2, 32), (2, 1, 100), (2, 3, 0)),
    )
    spills = 384  # bytes: a few registers, once in as many steps as are on their way

    @staticmethod
    def launch(target):
        case, dtype, width, time, state = ASKED[target]
        x, h0 = meta(1024, time, width, dtype=dtype), meta(1024, width, dtype=dtype)
        recurring.both_ways(case.call, x, x, *[h0] * state)

    @recurring.INTERPRETED
    def test_no_lane_waits_for_another_and_steps_run_ahead_in_registers(self, variants):
        """U of them before the loop, and for each of U as many in it, beside the first state."""
        for v in variants:
            c, tensors = v.compiled, 2 if v.launch.title == "states_kernel" else 4 if v.launch.GRU else 3
            assert not c.shuffles and not c.barriers and not c.shared_bytes and not c.async_copies, c
            assert sum(c.loads.values()) == 2 * v.launch.U * tensors + (v.launch.h0 is not None), c

    @recurring.INTERPRETED
    def test_steps_are_loaded_in_64_or_128_bits(self, variants):
        """Two warps of eight bytes a lane for float32: measured, they are faster than one of sixteen."""
        for v in variants:
            if v.dtype is fp32 or v.launch.H >= 256:
                warps, bits = (2, 64) if v.dtype is fp32 else (1, 128)
                assert v.compiled.num_warps == warps and set(v.compiled.loads) == {bits}, v


@every_case
@pytest.mark.parametrize(("width", "dtype"), [(130, fp32), (256, fp32), (257, bf16), (512, bf16)], ids=str)
def test_several_programs_share_a_sequence(case, width, dtype):
    examine(case, (2, 2, width), dtypes=(dtype,))


@every_case
@pytest.mark.parametrize("time", [0, 1, 9])
def test_without_a_first_state_it_is_zero(case, time):
    examine(case.without_h0, (2, time, 5))


def in_reverse(case, dh, a, b, h0, h):
    """The gradients in float64, from the states as they were stored, and so rounded."""
    last = torch.cat([h0[:, None], h[:, :-1]], 1)
    gates = a if case is LINEAR else 1 - a
    g, carry = torch.zeros_like(dh), torch.zeros_like(h0)
    for t in reversed(range(dh.shape[1])):
        g[:, t] = dh[:, t] + carry
        carry = gates[:, t] * g[:, t]
    return (g * last, g, carry) if case is LINEAR else (g * (b - last), g * a, carry)


@every_case
def test_over_two_hundred_steps_half_precision_is_rounded_once(case):
    """A state or a carry in 16 bits is off by five times as much."""
    tensors = drawn(case, 2, 200, 9, dtype=fp16)
    h, *got = gradients(case.call, tensors)
    doubles = [t.double() for t in tensors]
    recurring.assert_rounded_once(h, case.reference(*doubles))
    for one, want in zip(got, in_reverse(case, 2 * h.double(), *doubles, h.double()), strict=True):
        recurring.assert_rounded_once(one, want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every_case
def test_nan_and_infinity_stay_in_their_sequence_and_feature(case):
    tensors, upstream = drawn(case, 3, 3, 6), torch.randn(3, 3, 6, device=device.name())
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


@recurring.INTERPRETED
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 33), (1, 17, 5), (3, 1, 130)], ids=str)
@every_case
def test_every_number_is_read_and_written_once(case, shape, state):
    (B, T, H), gru = shape, case is GRU
    N, S = B * T * H, state * B * H
    (forward,), (back,) = recurring.kernels_of(case.call, drawn(case if state else case.without_h0, *shape))
    assert recurring.moved(forward) == (2 * N + S, N)
    assert recurring.moved(back) == ((3 + gru) * N - B * H + S, 2 * N + S), "all of h but the last state"


def test_no_more_steps_are_on_their_way_than_there_are():
    sizes = itertools.product((1, 2, 3, 8, 9, 16, 17, 100), WIDTHS, (2, 4), (8, 16))
    for time, width, itemsize, most in sizes:
        (programs,), plan = steps.recurrence_plan(3, time, width, itemsize, most)
        lane = plan["BH"] * itemsize // (32 * plan["num_warps"])
        assert plan["H"] == width and programs == 3 * math.ceil(width / plan["BH"])
        assert plan["U"] == most if time > most // 2 else time <= plan["U"] < 2 * time
        assert lane in ((8,) if itemsize == 4 and width > 32 else (16,) if width > 128 else (4, 8, 16))
