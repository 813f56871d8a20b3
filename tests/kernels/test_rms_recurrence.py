"""labkit.kernels.rms_recurrence: a norm at every step, time in reverse, its plan, what is compiled."""

import itertools
import math

import pytest
import recurring
import torch
from launches import ROOM
from recurring import (
    RMS,
    WIDTHS,
    OperatorTests,
    bf16,
    drawn,
    examine,
    fp16,
    fp32,
    gpu,
    gradients,
    meta,
    normed,
)

from labkit import codegen, device
from labkit import recurrent_works as work
from labkit.kernels import rms_recurrence

pytestmark = pytest.mark.usefixtures("cache")
X, STATE, WEIGHT = torch.ones(2, 3, 4), torch.ones(2, 4), torch.ones(4)
WRONG = {
    "one sequence": (RMS, "a", "(any, any, any)", STATE, STATE, WEIGHT),
    "b to be spread": (RMS, "b", "(2, 3, 4)", X, X[:1], WEIGHT),
    "a weight too long": (RMS, "weight", "(4)", X, X, torch.ones(5)),
    "a weight for each sequence": (RMS, "weight", "(4)", X, X, STATE),
    "a weight in half": (RMS, "weight", "torch.float32", X, X, WEIGHT.half()),
    "a weight elsewhere": (RMS, "weight", "cpu", X, X, WEIGHT.to("meta")),
    "no weight": (RMS, "weight", "a tensor", X, X, None),
    "a flat h0": (RMS, "h0", "(2, 4)", X, X, WEIGHT, WEIGHT),
    "no features": (RMS, "weight", "1 to 4096", X[..., :0], X[..., :0], WEIGHT[:0]),
    "too many features": (RMS, "weight", "1 to 4096", *[torch.ones(1, 1, 4097)] * 2, torch.ones(4097)),
    "too long a sequence": (RMS, "a", "2**31", *[torch.empty(1, 2**20, 2**11, device="meta")] * 2, WEIGHT),
}


class TestOperator(OperatorTests):
    kept, wrong = {RMS: (0, 1, 2, 3, -1)}, WRONG
    shapes = (*((2, time, 5) for time in (1, 2, 5, 16, 33)), (1, 2, 1), (3, 2, 33), (2, 2, 32), (2, 1, 100))

    @staticmethod
    def launch(target):
        """512 features of many sequences, or the most of one."""
        dtype = fp32 if codegen.TARGETS.index(target) % 2 else bf16
        batch, width = (1024, 512) if target in ("sm_90", "sm_120") else (1, 4096)
        x, h0 = meta(batch, 64, width, dtype=dtype), meta(batch, width, dtype=dtype)
        recurring.both_ways(rms_recurrence, x, x, meta(width, dtype=dtype), h0)

    @recurring.INTERPRETED
    def test_steps_run_ahead_in_shared_memory_in_copies_of_128_bits(self, variants):
        for v in variants:
            if v.launch.title != "sum_kernel":
                c, tensors = v.compiled, 4 if "grad" in v.launch.title else 2
                held = (v.launch.STAGES - 1) * tensors * v.launch.BH * v.dtype.itemsize
                assert held <= c.shared_bytes <= held + 4096 and set(c.async_copies) == {128}, c
                assert set(c.loads) == {128} and max(c.stores) == 128, c

    @recurring.INTERPRETED
    def test_one_warp_adds_up_by_shuffles_alone(self, variants):
        """Five for each sum of a row, and nothing in shared memory where no step runs ahead."""
        lone = [v.launch for v in variants if v.launch.options.get("num_warps") == 1]
        requests = [
            codegen.request(one.kernel, one.arguments, target="sm_90", **one.options | dict(STAGES=1))
            for one in lone
        ]
        for one, c in zip(lone, codegen.compile_many(requests), strict=True):
            assert one.H == 512 and c.shuffles["bfly"] == 5 * (2 if "grad" in one.title else 1), c
            assert not c.barriers and not c.shared_bytes, c
        assert len(lone) == 4


# --- right --------------------------------------------------------------------------------------------


def test_wide_states_have_several_warps():
    examine(RMS, (1, 2, 513), dtypes=(fp32, bf16))


def test_the_widest_states_are_taken():
    tensors = drawn(RMS, 1, 1, 4096)
    recurring.assert_close(rms_recurrence(*tensors), RMS.reference(*(t.double() for t in tensors)))


@pytest.mark.parametrize("time", [0, 1, 9])
def test_without_a_first_state_it_is_zero(time):
    examine(RMS.without_h0, (2, time, 5))


@pytest.mark.parametrize("eps", [0.5, 1e-3])
def test_eps_is_added_to_the_mean_square(eps):
    with_eps = RMS._replace(
        call=lambda *given: rms_recurrence(*given, eps=eps),
        reference=lambda *given: work.rms_recurrence(*given, eps=eps),
    )
    examine(with_eps, (2, 3, 5), name="rms_recurrence", roundings=8)


@pytest.mark.usefixtures("fresh_compiler")
def test_an_eps_first_met_inside_a_whole_graph():
    def layer(*given):
        return rms_recurrence(*given, 0.123) - rms_recurrence(*given)

    recurring.assert_compiles(layer, drawn(RMS, 2, 3, 5))


def in_reverse(dh, a, b, weight, h0, h, eps=1e-6):
    """The gradients in float64, from the states as they were stored, and so rounded."""
    last = torch.cat([h0[:, None], h[:, :-1]], 1)
    u = a * last + b
    scale = (u.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit, g, du, carry = u * scale, torch.zeros_like(u), torch.zeros_like(u), torch.zeros_like(h0)
    for t in reversed(range(dh.shape[1])):
        g[:, t] = dh[:, t] + carry
        wg = weight * g[:, t]
        du[:, t] = scale[:, t] * (wg - unit[:, t] * (wg * unit[:, t]).mean(-1, keepdim=True))
        carry = a[:, t] * du[:, t]
    return du * last, du, (g * unit).sum((0, 1)), carry


def test_over_two_hundred_steps_half_precision_is_rounded_once():
    """A state, a carry or a part of the weight's gradient in 16 bits is off by several times as much."""
    tensors = drawn(RMS, 3, 200, 36, dtype=fp16)
    h, *got = gradients(rms_recurrence, tensors)
    doubles = [t.double() for t in tensors]
    recurring.assert_rounded_once(h, work.rms_recurrence(*doubles))
    for one, want in zip(got, in_reverse(2 * h.double(), *doubles, h.double()), strict=True):
        recurring.assert_rounded_once(one, want)


def test_nan_stays_in_its_sequence():
    tensors, upstream = drawn(RMS, 3, 3, 6), torch.randn(3, 3, 6, device=device.name())
    want = gradients(rms_recurrence, tensors, upstream)
    for which, at in ((0, (1, 1, 4)), (1, (1, 1, 4)), (3, (1, 4))):
        given = [t.clone() for t in tensors]
        given[which][at] = math.nan
        y, da, db, dweight, dh0 = gradients(rms_recurrence, given, upstream)
        assert which == 3 or torch.equal(y[1, 0], want[0][1, 0])
        assert y[1, 1:].isnan().all() and dweight.isnan().all()
        for got, other in zip((y, da, db, dh0), (want[n] for n in (0, 1, 2, 4)), strict=True):
            assert recurring.equal([got[0], got[2]], [other[0], other[2]])


@recurring.INTERPRETED
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 33), (1, 3, 5), (3, 1, 600)], ids=str)
def test_every_number_is_read_and_written_once(shape, state):
    B, T, H = shape
    N, S, case = B * T * H, state * B * H, RMS if state else RMS.without_h0
    (forward,), (back, total) = recurring.kernels_of(rms_recurrence, drawn(case, *shape))
    assert recurring.moved(forward) == (2 * N + B * H + S, N)
    assert recurring.moved(back) == (4 * N + S, 2 * N + B * H + S), "the weight, and h but its last state"
    assert recurring.moved(total) == (B * H, H)


# --- the plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_86", "sm_90"])
def test_as_many_steps_run_ahead_as_the_memory_needs_and_room_allows(target):
    needed, room = 100 * normed.FLIGHT, ROOM[target] * 1024 - 4096
    for batch, width, itemsize, tensors in itertools.product((1, 64, 1024, 8192), WIDTHS, (2, 4), (2, 4)):
        plan = normed.rms_recurrence_plan(batch, width, itemsize, tensors, gpu(target, 100))
        ahead, step, held = (
            plan["STAGES"],
            batch * tensors * width * itemsize,
            tensors * plan["BH"] * itemsize,
        )
        assert 2 <= ahead <= 24 and (ahead - 1) * held <= room
        assert ahead * step >= needed or ahead == 24 or ahead * held > room
        assert (ahead - 1) * step < needed or ahead <= 4
        assert width <= plan["BH"] <= 512 * plan["num_warps"] and (width > 512 or plan["num_warps"] == 1)


def test_the_plans_ask_the_tensors_own_gpu(monkeypatch):
    made, asked = recurring.recorded(monkeypatch), []
    monkeypatch.setattr(normed, "gpu_of", lambda where: asked.append(where) or gpu("sm_90", len(asked)))
    recurring.both_ways(rms_recurrence, meta(16, 9, 128), meta(16, 9, 128), meta(128))
    assert asked == [torch.device("meta")] * 2
    plans = [normed.rms_recurrence_plan(16, 128, 4, 2 * n, gpu("sm_90", n)) for n in (1, 2)]
    assert [launch.STAGES for launch in made[:2]] == [plan["STAGES"] for plan in plans]
