"""The windows of labkit.kernels.recurrence: rows that begin anywhere, their plan, compiled code."""

import itertools
import math

import cases
import operators as op
import pytest
from launches import ROOM
from operators import bf16, fp32, gradients, limits_of
from recurring import (
    assert_each_number_is_written_once,
    assert_nan_stays,
    assert_right_and_the_same,
    examine,
    launch,
    steps,
)

from labkit.kernels.recurrence_windows import window_plan
from labkit.measure import correctness

LINEAR, GRU = cases.LINEAR, cases.GRU
every_case = pytest.mark.parametrize("case", [LINEAR, GRU], ids=repr)
SHAPES = ((3, 33, 70), (5, 16, 37), (2, 50, 131), (9, 17, 131), (4, 40, 250), (3, 65, 61), (2, 64, 130))
"""Of a GPU with one multiprocessor they have windows, of 8, 16 and 32 steps, narrow and wide."""


@pytest.fixture(autouse=True)
def windows(monkeypatch):
    """A GPU with one multiprocessor, so that a few sequences are many programs."""
    monkeypatch.setattr(steps, "device_limits", lambda *_: limits_of("sm_90", 1))


@every_case
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_any_shape_is_right(case, dtype):
    examine(case, *SHAPES, dtypes=(dtype,), roundings=2)  # a gradient reads states that were rounded


@op.INTERPRETED
@every_case
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_number_is_written_once(case, shape):
    assert_each_number_is_written_once(case, shape)


@op.INTERPRETED
def test_the_loop_has_the_same_gradients(monkeypatch):
    """Bit by bit; a GPU's compiler may fuse one's products and sums, and not the other's."""
    for case, dtype in itertools.product((LINEAR, GRU), (fp32, bf16)):
        tensors = op.drawn(case, 3, 37, 131, dtype=dtype)
        got = gradients(case.call, tensors)
        with monkeypatch.context() as patch:
            patch.setattr(steps, "window_plan", lambda *_: None)
            patch.setattr(steps, "scan_pays", lambda *_: False)
            want = gradients(case.call, tensors)
        assert op.equal(got, want)


@every_case
def test_every_layout_and_dtype_is_right_with_and_without_a_first_state(case):
    examine(case, (3, 20, 131), layouts=correctness.LAYOUTS, dtypes=correctness.DTYPES, roundings=2)
    examine(case.without_h0, (3, 20, 131), dtypes=correctness.DTYPES, roundings=2)


def test_the_shapes_have_all_windows_there_are():
    ways = itertools.product(SHAPES, (2, 4), (False, True))
    plans = [window_plan(*shape, itemsize, 1, back) for shape, itemsize, back in ways]
    found = {(plan["S"], plan["BH"] * 16 // plan["V"]) for plan in plans if plan}
    assert found >= {(8, 512), (8, 256), (16, 256), (32, 256)}, found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every_case
def test_nan_stays_in_its_sequence_and_feature(case):
    """Also at the ends of rows, and where two programs load the same 16 bytes."""
    assert_nan_stays(case, (3, 40, 131), [(20, n) for n in (0, 64, 65, 66, 130)])


@op.GPU
@every_case
def test_it_is_the_same_from_run_to_run(case):
    assert_right_and_the_same(case, (700, 300, 301), bf16)


# --- the plan -----------------------------------------------------------------------------------------


def test_every_feature_is_of_one_program_and_its_window_has_it():
    sizes = itertools.product((1, 64, 4096), (1, 16, 200), (*range(20, 300), 2551), (2, 4))
    for (B, T, H, itemsize), back in itertools.product(sizes, (False, True)):
        plan = window_plan(B, T, H, itemsize, 132, back)
        if plan is None:
            continue
        S, BH, USE, V, warps = (plan[name] for name in ("S", "BH", "USE", "V", "num_warps"))
        assert V * itemsize == 16 and S % V == 0 and S in (8, 16, 32)
        assert USE + V - 1 <= BH, "a window begins up to V - 1 numbers before its first feature"
        assert (math.ceil(H / USE) - 1) * USE < H, "no program has no feature"
        last = (math.ceil(H / USE) - 1) * USE  # the last program's first feature
        assert last + USE + 2 * V - 2 <= 2 * H, "a window of step T - 2 ends within step T - 1"
        assert warps > 1, "of one warp a gather is a shuffle for each number and each of its places"
        assert 32 * warps <= BH, "each lane has a feature, or two lanes have the same"


def test_windows_are_for_many_rows_that_begin_anywhere():
    plan = window_plan
    assert plan(1024, 64, 511, 4, 132, False) and plan(1024, 64, 510, 2, 132, True)
    assert not plan(1024, 64, 512, 4, 132, False) and not plan(1024, 64, 504, 2, 132, True)
    assert not plan(1024, 15, 511, 4, 132, False) and not plan(2, 640, 511, 2, 132, True)
    assert not plan(4096, 64, 3, 2, 132, False)


# --- what is compiled ---------------------------------------------------------------------------------


@op.INTERPRETED
def test_it_compiles_and_fits_and_rows_come_straight_from_the_gather():
    kernels = {steps: ("window_kernel", "window_grad_kernel")}
    sizes = {
        "sm_80": [(GRU, 1024, 131, fp32)],
        "sm_90": [(LINEAR, 264, 131, bf16), (LINEAR, 600, 102, bf16), (LINEAR, 900, 1001, bf16)],
        "sm_120": [(GRU, 900, 2551, bf16)],
    }
    asked = {
        target: [(case.call, *[(B, 40, H)] * 2, (B, H), dtype) for case, B, H, dtype in several]
        for target, several in sizes.items()
    }
    for v in op.variants_of(kernels, asked, lambda call, *of: launch(call, *of[:-1], dtype=of[-1])):
        spills = 384 if v.launch.GRU else 64  # a minimal GRU's backward has a fourth window in registers
        assert v.code.spills <= spills and v.code.shared_bytes < ROOM[v.target] * 1024, v
        assert v.code.widest_load == 128, "a window is loaded 16 bytes at a time"
        tensors = 2 if v.title == "window_kernel" else 3 + v.launch.GRU
        assert v.code.ttgir.count("= tt.gather") == tensors, v
        assert v.code.barriers["bar.sync"] <= 3 * tensors, f"{v}: a row goes through shared memory once more"
