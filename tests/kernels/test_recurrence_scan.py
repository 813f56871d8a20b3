"""The scan of labkit.kernels.recurrence: blocks, groups of them, growing gates, its plan, compiled code."""

import itertools
import math
import re

import cases
import operators as op
import pytest
import torch
from launches import ROOM
from operators import bf16, fp16, fp32, gradients, limits_of
from recurring import examine, launch, steps

from labkit.kernels import linear_recurrence, recurrence_scan
from labkit.kernels.recurrence import scan_pays
from labkit.measure import correctness

LINEAR, GRU = cases.LINEAR, cases.GRU
every_case = pytest.mark.parametrize("case", [LINEAR, GRU], ids=repr)
WAYS = "look back", "a chain each"
both_ways = pytest.mark.parametrize("scanned", WAYS, indirect=True)
each_with_a_case = pytest.mark.parametrize(
    ("scanned", "case"), [*zip(WAYS, (LINEAR, GRU), strict=True)], ids=repr, indirect=["scanned"]
)
"""Where `test_any_shape_is_right` has told that both operators are right both ways."""


@pytest.fixture(autouse=True)
def scanned(monkeypatch, request):
    """Every call is a scan, of small tiles: so a short sequence has blocks and groups.

    With many multiprocessors blocks look back; with one a program goes through a whole chain.
    """
    few = getattr(request, "param", None) == "a chain each"
    limits = limits_of("sm_90", 1 if few else 132)
    monkeypatch.setattr(steps, "device_limits", lambda *_: limits)
    monkeypatch.setattr(steps, "scan_pays", lambda *_: True)
    monkeypatch.setattr(steps, "TILE", 32)
    steps.scan_plan.cache_clear()
    yield
    steps.scan_plan.cache_clear()


@both_ways
@every_case
@pytest.mark.parametrize("shape", [(2, 70, 8), (1, 70, 5), (3, 40, 1), (9, 7, 2), (1, 1, 1)], ids=str)
def test_any_shape_is_right(case, shape):
    examine(case, shape)


@each_with_a_case
def test_every_layout_and_dtype_is_right_with_and_without_a_first_state(case):
    examine(case, (2, 20, 6), layouts=correctness.LAYOUTS, dtypes=correctness.DTYPES)
    examine(case.without_h0, (2, 20, 6))


@every_case
def test_a_state_in_half_precision_is_rounded_once(case):
    """Of four blocks, which are one group."""
    tensors = op.drawn(case, 2, 200, 8, dtype=fp16)
    op.assert_each_rounded_once(case.call(*tensors), case.reference(*(t.double() for t in tensors)))


def test_growing_gates_are_right_where_their_products_overflow(monkeypatch):
    """States that stay at 1, exactly; that grow from next to nothing; that are zero until late."""
    T, tile = (65536, 512) if op.labkit.gpu.available() else (512, 64)  # blocks of 1024 steps, and of 128
    monkeypatch.setattr(steps, "TILE", tile)
    device = op.labkit.gpu.device()
    two, less, one = (torch.full((1, T, 4), x, device=device) for x in (2.0, -1.0, 1.0))
    assert torch.equal(linear_recurrence(two, less, one[:, 0]), one)
    late = torch.zeros_like(one)
    late[:, -5] = 1
    assert linear_recurrence(3 * one, late)[0, -6:, 0].tolist() == [0, 1, 3, 9, 27, 81]
    got = linear_recurrence(1.2 * one[:, :512], 0 * one[:, :512], 1e-30 * one[:, 0])
    assert got[0, -1, 0].item() == pytest.approx(1e-30 * float(torch.tensor(1.2)) ** 512, rel=1e-3)


@both_ways
@pytest.mark.parametrize("far", [3e38, math.inf])
def test_states_are_finite_where_those_of_a_loop_are(far):
    """A sum of the inputs is infinite, where the first state is so large that the states are not."""
    a, b = torch.ones(1, 300, 4), torch.zeros(1, 300, 4)
    b[:, 10:12], b[:, 150:152] = -2e38, 1.75e38
    a[:, 290:] = 0.5
    a, b = a.to(op.labkit.gpu.device()), b.to(op.labkit.gpu.device())
    h0 = torch.full_like(a[:, 0], far)
    want, h = [], h0
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        want.append(h)
    want, got = torch.stack(want, 1), linear_recurrence(a, b, h0)
    assert torch.equal(got.isfinite(), want.isfinite()) and want[0, -1].isfinite().all() == (far < math.inf)
    op.assert_close(got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0).double())


@pytest.mark.parametrize("combine", [recurrence_scan.two_blocks, recurrence_scan.two_runs])
def test_neighbours_may_be_combined_in_any_order(combine):
    """As a GPU does; interpreted, a scan combines them from the first to the last."""
    one, two, three = torch.randn(3, 2 if combine is recurrence_scan.two_blocks else 4, dtype=torch.float64)
    from_left, from_right = (
        combine.fn(*combine.fn(*one, *two), *three),
        combine.fn(*one, *combine.fn(*two, *three)),
    )
    torch.testing.assert_close(from_left, from_right)


@each_with_a_case
def test_some_blocks_are_walked_and_others_not(monkeypatch, case):
    """Gates above 1 here and there, in the first block and in the last, with gradients."""
    monkeypatch.setattr(steps, "GROUP_WORDS", 16)  # two of the four blocks are a group
    a, b, h0 = op.drawn(case, 2, 200, 8)
    for at in (0, 40, 41, 97, 149):
        a[:, at, 1::2] = -0.5 if case is GRU else 1.5
    got = gradients(case.call, (a, b, h0))
    for one, want in zip(got, op.exact(case, (a, b, h0), 2 * got[0].double()), strict=True):
        assert correctness.relative_error(one, want) < 1e-6


@every_case
def test_a_feature_is_written_by_one_program_alone(monkeypatch, case):
    """The second program of a row loads 24 features of the first too; here it alone walks its blocks."""
    monkeypatch.setattr(steps, "TILE", 512)
    a, b, h0 = op.drawn(case, 1, 300, 40)
    want = gradients(case.call, (a, b, h0))
    a[:, 40, 39] = -0.5 if case is GRU else 1.5
    got = gradients(case.call, (a, b, h0))
    assert op.equal([t[..., :32] for t in got], [t[..., :32] for t in want])
    assert not torch.equal(got[0][:, 40:, 39], want[0][:, 40:, 39])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every_case
def test_nan_and_infinity_stay_in_their_sequence_and_feature(case):
    a, b, h0 = op.drawn(case, 2, 90, 6)
    want = case.call(a, b, h0)
    for which, value in itertools.product((0, 1), (math.nan, math.inf)):
        given = [a.clone(), b.clone(), h0]
        given[which][0, 33, 2] = value
        got = case.call(*given)
        assert not got[0, 33:, 2].isfinite().any()
        got[0, 33:, 2] = want[0, 33:, 2]
        torch.testing.assert_close(got, want)


@op.GPU
@every_case
def test_a_graph_resets_what_blocks_wait_for(case):
    got, want = op.captured(case.call, op.drawn(case, 1, 5000, 33))
    assert op.equal(got, want)


@op.GPU
@every_case
@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_it_is_the_same_from_run_to_run_whoever_is_first(monkeypatch, case, dtype):
    """In bfloat16 the lanes of two warps have the word that both wait for."""
    monkeypatch.setattr(steps, "TILE", 512)  # rows of 128 bytes are wider than the small tiles
    tensors = op.drawn(case, 3, 20000, 70, dtype=dtype)
    first = gradients(case.call, tensors)
    for _ in range(20):
        assert op.equal(gradients(case.call, tensors), first)


# --- the plan -----------------------------------------------------------------------------------------


def test_programs_cover_all_steps_features_and_sequences(monkeypatch):
    monkeypatch.setattr(steps, "TILE", 512)
    sizes = itertools.product((1, 3, 64, 4096), (1, 5, 200, 16384, 2**20), (1, 3, 5, 33, 128, 512), (2, 4))
    for (B, T, H, itemsize), back in itertools.product(sizes, (False, True)):
        plan = steps.scan_plan(B, T, H, itemsize, limits_of("sm_90"), back, False)
        programs, blocks, sizes = plan
        R, L, S, BH, W = (sizes[name] for name in ("R", "L", "S", "BH", "W"))
        assert R * L * BH in (256, 512) and blocks * L * S >= T > (blocks - 1) * L * S
        assert programs == math.ceil(B / R) * math.ceil(H / BH) * (blocks if W else 1)
        assert (R == 1 or blocks == 1) and W * BH <= 2048 and (W == 0 or blocks > 1)


def test_a_scan_is_for_few_or_narrow_sequences_of_many_steps_and_for_rows_that_are_not_aligned():
    pays, gpu = scan_pays, limits_of("sm_90")
    assert (
        pays(8, 4096, 512, 4, 32, gpu) and pays(1, 65536, 128, 2, 32, gpu) and pays(4096, 1000, 3, 4, 32, gpu)
    )
    assert pays(1024, 64, 511, 4, 32, gpu) and pays(1024, 64, 511, 2, 32, gpu)
    assert not pays(1024, 64, 512, 4, 32, gpu) and not pays(64, 2048, 512, 4, 32, gpu)
    assert not pays(1024, 64, 510, 2, 32, gpu) and not pays(8, 40, 512, 4, 32, gpu)


# --- what is compiled ---------------------------------------------------------------------------------


def forward(call, *shapes, dtype):
    call(*(op.meta(*shape, dtype=dtype) for shape in shapes))


@op.INTERPRETED
def test_it_compiles_and_fits(monkeypatch):
    monkeypatch.setattr(steps, "TILE", 512)
    kernels = {steps: ("scan_kernel", "scan_grad_kernel")}
    asked = {
        "sm_80": [(launch, GRU.call, (8, 2**17, 1), fp32)],
        "sm_90": [
            (forward, LINEAR.call, (2, 16384, 512), fp32),
            (launch, GRU.call, (53, 4545, 496), bf16),  # a program for each chain: nobody waits
        ],
        "sm_120": [(forward, LINEAR.call, (1, 2**17, 16), bf16)],  # a batch of 1 is a constant
    }

    def launched(how, call, shape, dtype):
        how(call, shape, shape, shape[::2], dtype=dtype)

    for v in op.variants_of(kernels, asked, launched):
        assert v.code.spills <= 64 and v.code.shared_bytes <= 16 * 1024 < ROOM[v.target] * 1024, v
        waits = re.findall(r"tt\.load .*isVolatile = true\} : tensor<(\d+)x!tt\.ptr", v.code.ttgir)
        assert len(waits) >= 4 * (v.launch.W > 0) and v.code.num_warps == 4, "what is waited for is read anew"
        assert all(int(n) >= 128 for n in waits), f"{v}: lanes that wait for the same may leave one by one"
        if v.launch.H > 1:
            widest = 128 if v.dtype is fp32 else 64 if v.launch.W else 32
            assert v.code.widest_load == widest, v
