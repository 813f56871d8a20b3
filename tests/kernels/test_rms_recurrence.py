"""labkit.kernels.rms_recurrence: a norm at every step, time in reverse, its plan, what is compiled."""

import itertools
import math

import cases
import operators as op
import pytest
import torch
from launches import ROOM
from operators import bf16, fp32, gradients, limits_of
from recurring import KERNELS, WIDTHS, OperatorTests, examine, launch, normed

import labkit
from labkit.kernels import rms_recurrence

RMS = cases.RMS


def asked(B, T, H, dtype):
    return (rms_recurrence, *[(B, T, H)] * 2, (H,), (B, H), dtype)


ASKED = {
    "sm_80": [asked(1024, 64, 512, bf16)],
    "sm_90": [asked(1024, 64, 512, fp32), asked(64, 4, 33, fp32)],
    "sm_120": [asked(1, 64, 4096, fp32)],
}
"""512 features of many sequences; rows that begin anywhere; the most of one where there is least memory."""


class TestOperator(OperatorTests):
    tested, asked, spills = (RMS,), ASKED, 8
    shapes = (
        *((2, time, 5) for time in (1, 2, 5, 16, 33)),
        *((1, 2, 1), (3, 2, 33), (2, 2, 32), (2, 1, 100), (1, 1, 4096), (19, 3, 3), (9, 2, 4)),
    )

    @op.INTERPRETED
    def test_steps_run_ahead_in_shared_memory_in_copies_of_128_bits(self, large):
        loops = [v for v in large if v.title.startswith("rms_recurrence") and v.launch.H % 16 == 0]
        assert any(v.code.num_warps == 1 for v in loops)
        for v in loops:
            c, tensors = v.code, 4 if "grad" in v.title else 2
            held = (v.launch.STAGES - 1) * tensors * v.launch.BH * v.dtype.itemsize
            assert held <= c.shared_bytes <= held + 4096 and set(c.async_copies) == {128}, c
            assert set(c.loads) == {128} and max(c.stores) == 128, c
            if c.num_warps == 1:  # which adds up by shuffles alone, five for each sum of a row
                assert c.shuffles["bfly"] == 5 * (2 if "grad" in v.title else 1), c


# --- right --------------------------------------------------------------------------------------------


def test_wide_states_have_several_warps():
    examine(RMS, (1, 2, 513), dtypes=(fp32, bf16))


@pytest.mark.parametrize("eps", [0.5, 1e-3])
def test_eps_is_added_to_the_mean_square(eps):
    with_eps = RMS._replace(
        call=lambda *given: rms_recurrence(*given, eps=eps),
        reference=lambda *given: cases.plain_rms_recurrence(*given, eps=eps),
    )
    examine(with_eps, (2, 3, 5), name="rms_recurrence", roundings=8)


@pytest.mark.usefixtures("fresh_compiler")
def test_an_eps_first_met_inside_a_whole_graph():
    def layer(*given):
        return rms_recurrence(*given, 0.123) - rms_recurrence(*given)

    op.assert_compiles(layer, op.drawn(RMS, 2, 3, 5))


def test_nan_stays_in_its_sequence():
    tensors, upstream = op.drawn(RMS, 3, 3, 6), torch.randn(3, 3, 6, device=labkit.gpu.device())
    want = gradients(rms_recurrence, tensors, upstream)
    for which, at in ((0, (1, 1, 4)), (1, (1, 1, 4)), (3, (1, 4))):
        given = [t.clone() for t in tensors]
        given[which][at] = math.nan
        y, da, db, dweight, dh0 = gradients(rms_recurrence, given, upstream)
        assert which == 3 or torch.equal(y[1, 0], want[0][1, 0])
        assert y[1, 1:].isnan().all() and dweight.isnan().all()
        for got, other in zip((y, da, db, dh0), (want[n] for n in (0, 1, 2, 4)), strict=True):
            assert op.equal([got[0], got[2]], [other[0], other[2]])


@op.INTERPRETED
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 33), (1, 3, 5), (3, 1, 600)], ids=str)
def test_every_number_is_read_and_written_once(shape, state):
    B, T, H = shape
    N, S, case = B * T * H, state * B * H, RMS if state else RMS.without_h0
    (forward,), (back, total) = op.both_ways_of(rms_recurrence, op.drawn(case, *shape))
    assert op.moved(forward) == (2 * N + B * H + S, N)
    assert op.moved(back) == (4 * N + S, 2 * N + B * H + S), "the weight, and h but its last state"
    assert op.moved(total) == (B * H, H)


# --- the plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_86", "sm_90"])
def test_as_many_steps_run_ahead_as_the_memory_needs_and_room_allows(target):
    needed, room = 100 * normed.BYTES_IN_FLIGHT, ROOM[target] * 1024 - 4096
    for batch, width, itemsize, tensors in itertools.product((1, 64, 1024, 8192), WIDTHS, (2, 4), (2, 4)):
        plan = normed.rms_recurrence_plan(batch, width, itemsize, tensors, limits_of(target, 100))
        ahead, step = plan["STAGES"], batch * tensors * width * itemsize
        held = tensors * plan["BH"] * itemsize
        assert 2 <= ahead <= 24 and (ahead - 1) * held <= room
        assert ahead * step >= needed or ahead == 24 or ahead * held > room
        assert (ahead - 1) * step < needed or ahead <= 4
        assert width <= plan["BH"] <= 512 * plan["num_warps"] and (width > 512 or plan["num_warps"] == 1)


def test_the_plans_ask_the_tensors_own_gpu(monkeypatch):
    made = op.recorded(monkeypatch, KERNELS)
    asked = op.pretend(monkeypatch, limits_of("sm_90", 3), normed)
    launch(rms_recurrence, (16, 9, 128), (16, 9, 128), (128,))
    assert asked == [torch.device("meta")] * 2
    plans = [normed.rms_recurrence_plan(16, 128, 4, tensors, limits_of("sm_90", 3)) for tensors in (2, 4)]
    assert [launch.STAGES for launch in made[:2]] == [plan["STAGES"] for plan in plans]
