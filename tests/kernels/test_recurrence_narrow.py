"""Narrow rows in labkit.kernels.recurrence: lanes with steps of their own."""

import itertools
import math

import cases
import operators as op
import pytest
import torch
from launches import ROOM
from operators import bf16, fp32, limits_of
from recurring import (
    assert_each_number_is_written_once,
    assert_nan_stays,
    assert_right_and_the_same,
    examine,
    launch,
    steps,
)

from labkit.kernels.recurrence_narrow import MOST_NUMBERS, narrow_plan
from labkit.measure import correctness

LINEAR, GRU = cases.LINEAR, cases.GRU
every_case = pytest.mark.parametrize("case", [LINEAR, GRU], ids=repr)
SHAPES = ((3, 290, 3), (2, 401, 7), (4, 700, 1), (3, 533, 2))
"""Of a GPU with one multiprocessor: sequences of two dtypes that begin and end within 16 bytes."""


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """A GPU with one multiprocessor, so that a few sequences are many; and a program always has one warp."""

    def plan(B, *shape):
        return narrow_plan(1000 * B, *shape)

    monkeypatch.setattr(steps, "device_limits", lambda *_: limits_of("sm_90", 1))
    monkeypatch.setattr(steps, "narrow_plan", plan)


def as_of_132_multiprocessors(monkeypatch, sequences):
    """A plan as for so many sequences on an H200, whose programs have several warps if they are few."""

    def plan(B, *shape):
        return narrow_plan(sequences, *shape[:3], 132, shape[-1])

    monkeypatch.setattr(steps, "narrow_plan", plan)


@every_case
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_any_shape_is_right(case, dtype):
    examine(case, *SHAPES, dtypes=(dtype,), roundings=2)  # a gradient reads states that were rounded


@op.INTERPRETED
@every_case
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_number_is_written_once(case, shape):
    assert_each_number_is_written_once(case, shape)


@every_case
def test_every_layout_and_dtype_is_right_with_and_without_a_first_state(case):
    shape = (2, 300, 6)
    examine(case, shape, layouts=correctness.LAYOUTS, dtypes=correctness.DTYPES, roundings=2)
    examine(case.without_h0, shape, dtypes=correctness.DTYPES, roundings=2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of products that overflow
@pytest.mark.parametrize("gate", [2.0, -2.0])
def test_growing_gates_are_walked(gate):
    """States and gradients stay 1, though products of gates overflow."""
    one = torch.ones(3, 450, 5, device=op.labkit.gpu.device())
    a, b, h0 = gate * one, (1 - gate) * one, one[:, 0].clone()
    dh = b.clone()
    dh[:, -1] = 1
    tensors = [t.requires_grad_() for t in (a, b, h0)]
    states = LINEAR.call(*tensors)
    states.backward(dh)
    for got in (states, a.grad, b.grad, h0.grad / gate):
        assert torch.equal(got, torch.ones_like(got))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_only_the_block_with_a_growing_gate_is_walked():
    some = op.drawn(LINEAR, 3, 450, 5, dtype=fp32)
    some[0][1, 100:300] *= 2 / some[0].abs().amax()  # of one sequence, in the middle; others are not walked
    tensors = [t.clone().requires_grad_() for t in some]
    exact = [t.double().detach().requires_grad_() for t in some]
    upstream = torch.randn_like(some[1])
    got, want = LINEAR.call(*tensors), LINEAR.reference(*exact)
    assert correctness.relative_error(got, want) < 1e-6
    got.backward(upstream)
    want.backward(upstream.double())
    for got, want in zip(tensors, exact, strict=True):
        assert correctness.relative_error(got.grad, want.grad) < 1e-5


@every_case
def test_nan_stays_in_its_sequence_and_feature(case):
    assert_nan_stays(case, (3, 401, 3), itertools.product((0, 200, 400), (0, 2)))


@op.GPU
@every_case
def test_it_is_the_same_from_run_to_run(case):
    assert_right_and_the_same(case, (700, 900, 5), bf16)


@every_case
@pytest.mark.parametrize("sequences, shapes", [(200, [(2, 1900, 3), (2, 1500, 7)]), (100, [(2, 2101, 6)])])
def test_programs_of_several_warps_are_right(case, sequences, shapes, monkeypatch):
    as_of_132_multiprocessors(monkeypatch, sequences)
    examine(case, *shapes, dtypes=(fp32, bf16), roundings=2)


# --- the plan -----------------------------------------------------------------------------------------


def test_lanes_have_whole_steps_and_whole_16_bytes_and_most_of_them_have_any():
    sizes = itertools.product((40, 100, 200, 300, 4000), (64, 300, 5000, 2**29), range(1, 40), (2, 4))
    found = 0
    for (B, T, H, itemsize), back in itertools.product(sizes, (False, True)):
        plan = narrow_plan(B, T, H, itemsize, 132, back)
        if plan is None:
            continue
        found += 1
        S, L, V, warps = (plan[name] for name in ("S", "L", "V", "num_warps"))
        assert V * itemsize == 16 and S * H % V == 0 and V <= S * H <= MOST_NUMBERS
        assert 32 * warps == L and (warps == 1 or H <= 8)
        assert T * H + 2 * L * S * H < 2**31, "a lane's next numbers have 32-bit offsets"
        assert math.ceil(T / (L * S)) * L * S * 0.6 <= T, "the last block has steps for most lanes"
    assert found > 100


def test_it_is_for_narrow_rows_unless_sequences_are_few():
    assert narrow_plan(1000, 3000, 3, 2, 132, False) and narrow_plan(1000, 3000, 10, 4, 132, True)
    assert narrow_plan(100, 9000, 3, 2, 132, True)["num_warps"] == 8
    assert narrow_plan(100, 2000, 3, 2, 132, True)["num_warps"] == 4, "eight would have nothing to do"
    assert not narrow_plan(40, 3000, 3, 2, 132, False), "few sequences, so few programs"
    assert not narrow_plan(1000, 3000, 13, 2, 132, False) and not narrow_plan(300, 3000, 10, 4, 132, False)
    assert not narrow_plan(1000, 64, 3, 2, 132, False), "too short"


# --- what is compiled ---------------------------------------------------------------------------------


@op.INTERPRETED
@pytest.mark.parametrize("sequences", [1000, 100], ids=str)
def test_it_compiles_and_fits_and_loads_and_stores_16_bytes(sequences, monkeypatch):
    """A warp a program, and of 100 sequences four and, backward, eight."""
    kernels = {steps: ("narrow_kernel", "narrow_grad_kernel")}
    few = sequences == 100
    sizes = {
        "sm_80": [(GRU, 10, 8000, 2, fp32)],
        "sm_90": [(LINEAR, 10, 8000, 6 if few else 3, bf16)],
        "sm_120": [(LINEAR, 10, 8000, 8 if few else 10, bf16)],
    }
    as_of_132_multiprocessors(monkeypatch, sequences)
    asked = {
        target: [(case.call, *[(B, T, H)] * 2, (B, H), dtype) for case, B, T, H, dtype in several]
        for target, several in sizes.items()
    }
    for v in op.variants_of(kernels, asked, lambda call, *of: launch(call, *of[:-1], dtype=of[-1])):
        assert v.code.num_warps == (1 if not few else 8 if "grad" in v.code.kernel else 4)
        assert few or v.code.spills <= 64, (
            v
        )  # with several warps some numbers spill, and did when it was raced
        assert v.code.shared_bytes < ROOM[v.target] * 1024, v
        assert v.code.widest_load == 128 and "st.global.v4" in v.code.ptx, v
