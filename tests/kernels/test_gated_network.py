"""labkit.kernels.gated_network: two recurrences in a loop, and the layers around it, in one kernel each."""

import itertools
import math
import re

import cases
import operators as op
import pytest
import torch
import triton
from launches import ROOM
from operators import bf16, drawn, exact, fp16, fp32, gradients, limits_of, meta
from packaging.version import Version
from torch.nn import functional

from labkit.kernels import gated_cell, gated_heads, gated_network, mlp_outputs
from labkit.kernels.common import DeviceLimits
from labkit.kernels.rms_recurrence import rms_recurrence_plan
from labkit.measure import correctness
from labkit.profiling import codegen, launch_counts
from labkit.workloads import network as work

CELL, HEADS, OUTPUTS = cases.CELL, cases.HEADS, cases.OUTPUTS
KERNELS = {gated_network: ("cell_kernel", "cell_grad_kernel", "gates_kernel", "outputs_kernel")}
LAYERS = {HEADS: "gates_kernel", OUTPUTS: "outputs_kernel"}
every_layer = pytest.mark.parametrize("case", LAYERS, ids=repr)
FAR = 2**31 + 40
"""More rows than 32 bits count."""


def examine(case, *sizes, **options):
    """Of the cell gradients, too, whose backward reads both states rounded at each step; a layer's one kernel
    has none, and rounds between products."""
    cell = case.name == "gated_cell"
    op.examine(case, *sizes, **dict(gradients=cell, roundings=8 if cell else 4) | options)


@pytest.mark.parametrize("case", [CELL, *LAYERS], ids=repr)
def test_every_layout_and_dtype_is_right(case):
    examine(case, layouts=correctness.LAYOUTS)


@pytest.mark.parametrize("case", [CELL, *LAYERS], ids=repr)
def test_nan_stays_in_its_row(case):
    tensors = drawn(case, dtype=bf16)
    want, at = case.call(*tensors), 1 if case is CELL else 5
    tensors[0][at, ..., 3] = math.nan
    got = case.call(*tensors)
    others = torch.arange(len(got), device=got.device) != at
    assert torch.equal(got[others], want[others]) and got[at].isnan().all()


# --- the cell -----------------------------------------------------------------------------------------


SHAPES = (
    *((2, time, 8) for time in (1, 2, 5, 33)),
    *((1, 2, 4), (3, 2, 36), (0, 3, 8), (2, 0, 8), (1, 2, 1028)),
)
CELLS = {1: [(2, 3, 5), (2, 3, 1)], 2: [(2, 3, 64)], 3: [(2, 3, 33)], 4: SHAPES, 5: [(2, 3, 5)]}
"""By the number of groups."""


@pytest.mark.parametrize("groups", CELLS)
def test_a_cell_of_any_shape_and_number_of_groups_is_right(groups):
    examine(cases.cell(groups), *CELLS[groups], dtypes=(fp32,) if groups == 4 else (fp32, bf16))
    examine(cases.cell(groups), CELLS[groups][0], gradients=False)  # without the other state


def test_float32_is_off_at_most_twice_as_far_as_eager():
    tensors = drawn(CELL, 4, 33, 100)
    found = gradients(CELL.call, tensors), gradients(CELL.reference, tensors), exact(CELL, tensors)
    for made, eager, want in zip(*found, strict=True):
        assert correctness.relative_error(made, want) <= 2 * correctness.relative_error(eager, want)


def in_reverse(dr, gates, gain, r, s, groups):
    """dgates and dgain in float64, from the states as they were stored, and so rounded."""
    logit, candidate = work.split_gates(gates, groups)
    z, none = logit.sigmoid(), torch.zeros_like(r[:, :1])
    last_r, last_s = (torch.cat([none, states[:, :-1]], 1) for states in (r, s))
    u = (1 - z) * last_r + last_s + z * (candidate - last_s)
    scale = (u.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    unit, g, du, ds = u * scale, torch.zeros_like(u), torch.zeros_like(u), torch.zeros_like(u)
    carry = later = torch.zeros_like(u[:, 0])  # of r_t and of s_t, from step t + 1
    for t in reversed(range(dr.shape[1])):
        g[:, t] = dr[:, t] + carry
        wg = gain * g[:, t]
        du[:, t] = scale[:, t] * (wg - unit[:, t] * (wg * unit[:, t]).mean(-1, keepdim=True))
        ds[:, t] = du[:, t] + later
        carry, later = (1 - z[:, t]) * du[:, t], (1 - z[:, t]) * ds[:, t]
    pair = z * (1 - z) * (ds * (candidate - last_s) - du * last_r), z * ds
    by_head = torch.stack([one.unflatten(-1, (groups, -1)) for one in pair], -2)
    return by_head.flatten(-3), (g * unit).sum((0, 1))


def test_over_two_hundred_steps_half_precision_is_rounded_once():
    """A state, a carry or a part of the gain's gradient in 16 bits is off by several times as much."""
    gates, gain = drawn(CELL, 3, 200, 36, dtype=fp16)
    doubles = gates.double(), gain.double()
    r, *got = gradients(CELL.call, (gates, gain))
    again, s = gated_network.gated_cell_forward(gates, gain, 4, True)
    logit, candidate = work.split_gates(doubles[0], 4)
    assert torch.equal(again, r)
    op.assert_each_rounded_once(r, work.cell(*doubles, 4))
    op.assert_each_rounded_once(s, work.min_gru(logit.sigmoid(), candidate))
    wants = in_reverse(2 * r.double(), *doubles, r.double(), s.double(), 4)
    for one, want in zip(got, wants, strict=True):
        op.assert_each_rounded_once(one, want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gates_that_are_shut_or_open():
    """Logits near to, and beyond, what a sigmoid can tell from 0 and 1."""
    gates, gain = drawn(CELL, 2, 5, 8)
    for logit in (-20.0, 20.0, -200.0, 200.0):
        gates.unflatten(-1, (4, 2, -1))[..., 0, :] = logit
        made = gradients(CELL.call, (gates, gain))
        assert all(t.isfinite().all() for t in made)
        if logit > -200:  # there float32 has a gate of 0
            op.all_close(made, exact(CELL, (gates, gain)))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_number_of_groups_first_met_inside_a_whole_graph():
    op.assert_compiles(
        lambda gates, gain: gated_cell(gates, gain, 10) - gated_cell(gates, gain, 5), drawn(CELL, 2, 3, 20)
    )


@op.GPU
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_two_thousand_steps_are_right(dtype):
    tensors = drawn(CELL, 16, 2048, 128, dtype=dtype)
    for got, want in zip(gradients(CELL.call, tensors), exact(CELL, tensors), strict=True):
        assert correctness.relative_error(got, want) < {fp32: 1e-5, bf16: 2e-2}[dtype]


@op.INTERPRETED
@pytest.mark.parametrize("shape", [(2, 5, 36), (1, 1, 8), (3, 2, 20)], ids=str)
def test_every_number_is_read_and_written_once(shape):
    (B, _, H), N, tensors = shape, math.prod(shape), drawn(CELL, *shape)
    (inference,) = op.kernels_of(CELL.call, *tensors)
    (training,), (back, total) = op.both_ways_of(CELL.call, tensors)
    assert op.moved(inference) == (2 * N + B * H, N), "s is made for training only"
    assert op.moved(training) == (2 * N + B * H, 2 * N)
    assert op.moved(back) == (5 * N - B * H, 2 * N + B * H), "all but the last of both states, and the gain"
    assert op.moved(total) == (B * H, H)
    for nothing in ((0, 3, 8), (2, 0, 8)):
        assert not any(op.both_ways_of(CELL.call, drawn(CELL, *nothing))), "a GPU refuses an empty grid"


# --- the layers around it -----------------------------------------------------------------------------

SIZES = {
    HEADS: ((1, 4, 8), (33, 1, 5), (5, 3, 16), (7, 2, 64), (0, 4, 8), (3, 8, 1)),
    OUTPUTS: (
        *((1, 32, 64, 32), (65, 20, 40, 3), (3, 128, 96, 17), (64, 1, 1, 1)),
        *((5, 8, 0, 4), (5, 0, 8, 4), (0, 8, 8, 8), (5, 8, 8, 0)),
    ),
}


@every_layer
def test_layers_of_any_rows_and_widths_are_right(case):
    examine(case, *SIZES[case], dtypes=(bf16, fp16))


def test_deep_sums_of_halves_are_those_of_float32():
    """With roundings only where a product begins; a sum in 16 bits is off by several times as much."""

    def rounded(value):
        return value.to(fp16).double()

    given = drawn(HEADS, 40, 1, 64, dtype=fp16)
    x, w_in, b_in, gain, *second = (t.double() for t in given)
    normed = functional.rms_norm(work.heads(x, w_in, b_in), gain.shape, gain, 1e-6)
    assert correctness.relative_error(gated_heads(*given), work.heads(rounded(normed), *second)) < 2.6e-4
    given = drawn(OUTPUTS, 40, 128, 4096, 96, dtype=fp16)
    states, w_gate_up, w_down, w_out, b_out = (t.double() for t in given)
    gate, up = (states @ weight.T for weight in w_gate_up)
    hidden = rounded(functional.gelu(gate, approximate="tanh") * up)
    want = functional.linear(rounded(states + hidden @ w_down.T), w_out, b_out)
    assert correctness.relative_error(mlp_outputs(*given), want) < 2.6e-4


@pytest.mark.parametrize("aligned", [True, False])
def test_outputs_with_and_without_descriptors_are_the_same(aligned, monkeypatch):
    tensors = drawn(OUTPUTS, 70, 64, 72, 24, dtype=bf16)
    want = mlp_outputs(*tensors)
    if aligned:
        its = gated_network.device_limits(tensors[0].device)
        lacks = DeviceLimits(its.multiprocessors, its.shared_bytes, has_tma=False)
        op.pretend(monkeypatch, lacks, gated_network)
    else:  # two bytes beside what a descriptor may begin at
        tensors = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t) for t in tensors]
        assert tensors[0].data_ptr() % 16 == 2
    assert correctness.relative_error(mlp_outputs(*tensors), want) < 1e-6


@op.INTERPRETED
@every_layer
def test_one_kernel_without_gradients_in_half_precision(case):
    def names(tensors):
        return [launch.name for launch in launch_counts.count(lambda: case.call(*tensors)).launches]

    tensors, kernel = drawn(case, dtype=bf16), LAYERS[case]
    assert names(tensors) == [kernel]
    assert kernel not in names(drawn(case))
    wide, many = {HEADS: ((3, 1, 65), (3, 16, 4)), OUTPUTS: ((3, 160, 16, 4), (3, 16, 16, 129))}[case]
    assert kernel not in names(drawn(case, *wide, dtype=bf16))
    assert kernel not in names(drawn(case, *many, dtype=bf16)), "tiles of heads are at least 16 wide"
    tensors[2].requires_grad_()
    assert kernel not in names(tensors)
    with torch.no_grad():
        assert names(tensors) == [kernel]


@op.INTERPRETED
def test_both_move_rows_once_and_weights_once_a_program(monkeypatch):
    op.pretend(monkeypatch, DeviceLimits(1, 0, True), gated_network)
    for case, sizes, programs in ((HEADS, (139, 4, 8), 4), (OUTPUTS, (139, 32, 64, 24), 3)):
        tensors = drawn(case, *sizes, dtype=bf16)
        (launch,) = launch_counts.count(lambda case=case, tensors=tensors: case.call(*tensors)).launches
        rows, *weights = (t.numel() for t in tensors)
        assert launch.programs == programs
        assert launch.bytes_read == 2 * (rows + programs * sum(weights))
        assert launch.bytes_written == 2 * 139 * (64 if case is HEADS else 24)


@op.LARGE
@every_layer
@pytest.mark.parametrize("rows", [2**31 - 1, FAR])
def test_more_rows_than_32_bits_count(case, rows):
    first, *rest = drawn(case, 1, *{HEADS: (1, 1), OUTPUTS: (1, 1, 1)}[case], dtype=fp16)
    first = torch.empty(rows, 1, dtype=fp16, device=first.device).normal_()
    got = case.call(first, *rest)
    for part in (slice(0, 100), slice(rows // 2, rows // 2 + 100), slice(rows - 100, None)):
        want = case.reference(first[part].double(), *(t.double() for t in rest))
        assert not correctness.diagnose(got[part], want, 4 * correctness.TOLERANCE[fp16])


@op.LARGE
def test_more_elements_than_32_bits_count():
    """Of the cell both ways: the first and the last sequence of many are as they are alone."""
    gates, gain = drawn(CELL, 1, 64, 128, dtype=bf16)
    many = gates.repeat(2**31 // gates.numel() + 3, 1, 1)
    r, dgates, _ = gradients(CELL.call, (many, gain))
    alone = gradients(CELL.call, (gates, gain))
    for got, want in zip((r, dgates), alone, strict=False):
        assert torch.equal(got[:1], want) and torch.equal(got[-1:], want)
    w = drawn(HEADS, 1, 4, 32, dtype=bf16)[1:]
    x = r.view(-1, 128)
    y = gated_heads(x, *w)
    assert y.numel() > 2**31 and torch.equal(y[-64:], gated_heads(x[-64:], *w))
    weights = drawn(OUTPUTS, 1, 128, 256, 128, dtype=bf16)[1:]
    x = many.view(-1, 128)
    y = mlp_outputs(x, *weights)
    assert y.numel() > 2**31 and torch.equal(y[-64:], mlp_outputs(x[-64:], *weights))


# --- plans, and what is compiled ----------------------------------------------------------------------


def launch_all(width, dtype, batch=1024):
    """The cell both ways, and the layers where they are one kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated_network, "sum_partials", lambda parts, gain: torch.empty_like(gain))
        gates, gain = meta(batch, 64, 2 * width, dtype=dtype), meta(width, dtype=dtype)
        op.launch_both_ways(lambda *given: gated_cell(*given, 4), gates, gain)
    if width <= 128 and dtype is not fp32:
        gated_heads(*(t.to("meta", dtype) for t in cases.heads_of((batch, 4, width // 4))))
        mlp_outputs(*(t.to("meta", dtype) for t in cases.mlp_of((batch, width, 2 * width, 32))))


def launch_far(width, dtype):
    """Layers of more rows than 32 bits count."""
    layers = (gated_heads, cases.heads_of((1, 1, width))), (mlp_outputs, cases.mlp_of((1, *[width] * 3)))
    for call, given in layers:
        first, *rest = (t.to("meta", dtype) for t in given)
        call(first.expand(FAR, width), *rest)


def test_plans_ask_the_tensors_own_gpu(monkeypatch):
    made = op.recorded(monkeypatch, KERNELS)
    asked = op.pretend(monkeypatch, limits_of("sm_90", 3), gated_network)
    launch_all(128, bf16)
    first, back, heads, outputs = made
    plans = [rms_recurrence_plan(1024, 128, 2, n, limits_of("sm_90", 3)) for n in (2, 5)]
    assert [one.STAGES for one in (first, back)] == [plan["STAGES"] for plan in plans]
    assert heads.grid == (12,) and outputs.TMA and (outputs.BI, outputs.num_warps) == (64, 4)
    assert asked == [torch.device("meta")] * 4


@pytest.fixture(scope="module")
def variants(cache):
    more = {"sm_90": [(32, bf16), (100, bf16), (128, fp32)], "sm_86": [(100, bf16), (4096, fp32)]}
    more |= {"sm_80": [(512, fp32)], "sm_120": [(512, fp32)]}
    asked = {target: [(128, bf16), *more.get(target, ())] for target in codegen.TARGETS}
    return op.variants_of(KERNELS, asked, launch_all)


TUNED = Version(triton.__version__) < Version("3.8")
"""The outputs' kernel is tuned for Hopper with Triton 3.6 and 3.7: on GPUs before it, which take its tiles
element by element, later compilers spill (on sm_80 and sm_86)."""


def allowed(v):
    """Bytes that may spill; None where nothing was tuned."""
    outputs = v.title == "outputs_kernel"
    if v.case[0] > 512 or (outputs and not TUNED and not limits_of(v.target).has_tma):
        return None
    return 64 if outputs and ROOM[v.target] < 128 else 0  # Triton 3.6 keeps a few registers too many there


@op.INTERPRETED
def test_every_kernel_compiles_for_every_target_and_fits(variants):
    seen = {(v.title, v.target) for v in variants}
    assert seen == set(itertools.product(KERNELS[gated_network], codegen.TARGETS))
    for v in variants:
        op.assert_fits([v], allowed(v))
    op.assert_far(variants, "gain", "bias", "w_in", "b_in", "w_gates", "b_gates")


@op.INTERPRETED
def test_heads_of_the_widest_groups_fit_every_target():
    """A program of groups of 65 features would take 104 KiB of shared memory, and spill half as many."""

    def launch(groups, width):
        gated_heads(*(t.to("meta", bf16) for t in cases.heads_of((999, groups, width))))

    op.assert_fits(op.variants_of(KERNELS, {"sm_86": [(2, 64)], "sm_120": [(1, 64)]}, launch), 1024)


@op.INTERPRETED
def test_one_warp_adds_up_a_step_by_shuffles_and_loads_heads_in_wide_pieces(variants):
    """A head's logits, and its candidates, stand side by side: four numbers a lane at least."""
    for v in variants:
        if v.case[0] == 128 and v.title.startswith("cell"):
            assert v.launch.num_warps == 1
            assert v.code.shuffles["bfly"] == (5 if v.title == "cell_kernel" else 10), v
            widest = 64 if v.case[1] is bf16 else 128
            assert max({**v.code.loads, **v.code.async_copies}) == widest, v


@op.INTERPRETED
def test_two_programs_of_the_outputs_fit_a_multiprocessor_of_an_h200(variants):
    (code,) = (v.code for v in variants if (v.title, v.target, v.case[0]) == ("outputs_kernel", "sm_90", 128))
    assert code.matrix.get("wgmma") and code.bulk_loads and op.registers_fit(2, code, "sm_90")


@op.INTERPRETED
def test_rows_beyond_32_bits_are_counted_in_64():
    """Where a row's number is made of a program's, and where it is compared with how many there are."""
    for v in op.variants_of(KERNELS, {"sm_90": [(8, bf16)]}, launch_far):
        assert v.launch.R == FAR and not v.launch.arguments.get("TMA", v.launch.options.get("TMA", False))
        narrow = re.findall(r"arith\.muli ([^:]*): i32", v.code.ttir)
        assert all("%INNER" in factors for factors in narrow), (v, narrow)
        assert re.search(r"arith\.cmpi slt, .*xi64", v.code.ttir), v
