"""labkit.kernels.rms_norm: right for rows of any number and width, its sums, its plans, what is compiled."""

import itertools
import math

import cases
import operators as op
import pytest
import torch
from launches import ROOM
from operators import bf16, fp16, fp32, limits_of
from recurring import KERNELS, WIDTHS, OperatorTests, examine, launch, norms
from torch.nn import functional

import labkit
from labkit.kernels import rms_norm
from labkit.measure import correctness

RMS_NORM = cases.RMS_NORM


def asked(*several):
    return [(rms_norm, (4096, width), (width,), dtype) for dtype, width in several]


ASKED = dict(
    sm_80=asked((fp32, 512)),
    sm_90=asked((bf16, 512), (bf16, 1001), (bf16, 100), (bf16, 3), (fp32, 33)),
    sm_120=asked((bf16, 4096), (fp32, 3)),
)


class TestOperator(OperatorTests):
    tested, asked = (RMS_NORM,), ASKED
    shapes = ((3, 33), (1, 1), (2, 0, 5), (5, 64), (70, 100), (19,), (3, 600), (3, 1, 513), (1, 1, 8192))

    @op.INTERPRETED
    def test_one_warp_adds_up_by_shuffles_alone(self, large):
        lone = [v for v in large if v.title == "rms_norm_kernel" and v.launch.H == 512]
        assert lone
        for v in lone:
            assert v.code.num_warps == 1 and v.code.shuffles == {"bfly": 5 * v.launch.BM}, v
            assert not v.code.barriers and not v.code.shared_bytes, v

    @op.INTERPRETED
    def test_rows_are_loaded_in_128_bits_and_further_ones_run_ahead(self, large):
        """Copied into shared memory too. The backward has windows, so it is at any width."""
        for v in large:
            c, row_bytes = v.code, v.launch.H * v.dtype.itemsize if v.title != "column_sum_kernel" else 0
            if v.title == "rms_norm_kernel":
                wide = min(128, 8 * (row_bytes & -row_bytes))  # the largest power of two that divides a row
                assert max(c.loads) == wide and max(c.stores) in (wide, 128), (c, c.loads, c.stores)
            elif v.title == "rms_norm_grad_kernel" and v.launch.V * v.dtype.itemsize == 16:
                held = (v.launch.STAGES - 1) * 2 * v.launch.BM * v.launch.BH * v.dtype.itemsize
                assert held <= c.shared_bytes <= held + 8192, c
                assert set(c.async_copies) == {128} and 128 in c.stores, (c, c.async_copies, c.stores)


# --- right --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("eps", [0.5, 1e-3, 0.0])
def test_eps_is_added_to_the_mean_square(eps):
    """Without it rows that fill up a tile must not count: their mean square is zero."""
    with_eps = RMS_NORM._replace(
        call=lambda x, weight: rms_norm(x, weight, eps),
        reference=lambda x, weight: functional.rms_norm(x, weight.shape, weight, eps),
    )
    examine(with_eps, (3, 20), name="rms_norm")


@pytest.mark.parametrize("shape", [(3, 0), (0, 8193), (2, 3, 8193)], ids=str)
def test_rows_that_no_program_holds_are_pytorchs(shape):
    examine(RMS_NORM, shape, layouts=("contiguous", "transposed"))


MIXED = ((5, 64), (3, 33), (4, 535), (2, 0, 5))
"""Rows of whole 16 bytes, others, narrow and wide, and no rows."""


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
@pytest.mark.parametrize("shape", MIXED, ids=str)
def test_a_weight_in_float32_is_not_rounded_and_the_result_has_the_dtype_of_x(shape, dtype, autocast):
    """As of F.rms_norm, but that on a GPU's autocast PyTorch 2.12 and later cast all to float32."""
    x, weight = op.drawn(RMS_NORM, *shape)
    weight[2::4] = 1 + 2.0**-13  # rounded it would be 1
    x, upstream = x.to(dtype), torch.randn(shape, device=x.device).to(dtype)
    with torch.autocast(labkit.gpu.device(), dtype=bf16, enabled=autocast):
        made = op.gradients(rms_norm, [x, weight], upstream)
    assert [t.dtype for t in made] == [dtype, dtype, fp32]
    if not autocast:
        assert functional.rms_norm(x, weight.shape, weight, 1e-6).dtype is dtype
    y, dx, dweight = op.exact(RMS_NORM, [x, weight], upstream.double())
    op.all_close(made[:2], (y, dx), dtype)
    assert not y.numel() or correctness.relative_error(made[2], dweight) < 1e-6
    if y.numel() and dtype is fp16:
        op.assert_each_rounded_once(made[0], y)


def test_a_weight_in_half_beside_x_in_float32_is_for_autocast():
    x, weight = op.drawn(RMS_NORM)
    with pytest.raises(ValueError, match=r"^weight: has dtype .*should be torch\.float32 like the first"):
        rms_norm(x, weight.to(bf16))
    with torch.autocast(labkit.gpu.device(), dtype=bf16):
        y = rms_norm(x, weight.to(bf16))
    assert y.dtype is fp32 and torch.equal(y, rms_norm(x, weight.to(bf16).float()))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_weight_in_float32_compiles_into_one_graph_with_x_in_half():
    x, weight = op.drawn(RMS_NORM)
    x = x.to(bf16)
    made, want = (op.gradients(call, [x, weight]) for call in (op.compiled(rms_norm), rms_norm))
    assert op.equal(made, want) and made[2].dtype is fp32


@op.INTERPRETED
def test_a_weight_in_float32_beside_half_is_compiled_without_spills():
    def launched(width):
        op.launch_both_ways(rms_norm, op.meta(4096, width, dtype=bf16), op.meta(width))

    found = op.variants_of(KERNELS, {"sm_90": [(512,), (33,)]}, launched)
    assert {v.title for v in found} >= set(KERNELS[norms])
    op.assert_fits(found)


@pytest.mark.usefixtures("fresh_compiler")
def test_an_eps_first_met_inside_a_whole_graph():
    def layer(x, weight):
        return rms_norm(x, weight, 0.123) - rms_norm(x, weight, 0.25) + rms_norm(x, weight)

    op.assert_compiles(layer, op.drawn(RMS_NORM, 3, 20))


@pytest.mark.parametrize(("width", "dtype"), [(20, fp32), (535, bf16)])
def test_nan_stays_in_its_row(width, dtype):
    """Windows, as of rows of 535, reach into the rows beside."""
    x, weight = op.drawn(RMS_NORM, 24, width, dtype=dtype)
    upstream, others = torch.randn_like(x), [row for row in range(24) if row not in (1, 3, 7)]
    want = op.gradients(rms_norm, [x, weight], upstream)
    x[1, 3], x[3], upstream[7, 5] = math.nan, math.nan, math.inf
    y, dx, dweight = op.gradients(rms_norm, [x, weight], upstream)
    assert y[1].isnan().all() and dx[1].isnan().all() and dweight.isnan().all()
    assert op.equal([y[others], dx[others]], [want[0][others], want[1][others]])


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_the_weights_gradient_in_any_number_of_parts(monkeypatch, dtype, multiprocessors):
    op.pretend(monkeypatch, limits_of("sm_90", multiprocessors), norms)
    examine(RMS_NORM, (300, 20), dtypes=(dtype,))


def test_half_precision_is_rounded_once(monkeypatch):
    """Hundreds of rows by several programs; no sum in them and no part of a sum is rounded before the end."""
    op.pretend(monkeypatch, limits_of("sm_90", 1), norms)
    for width in (72, 9):
        tensors = op.drawn(RMS_NORM, 700, width, dtype=fp16)
        got = op.gradients(rms_norm, tensors)
        for one, want in zip(got, op.exact(RMS_NORM, tensors, 2 * got[0].double()), strict=True):
            op.assert_each_rounded_once(one, want)


def test_a_programs_part_of_the_weights_gradient_is_summed_in_float32():
    """Roundings of many parts would hide behind the last one."""
    x, weight = op.drawn(RMS_NORM, 99, 20, dtype=fp16)
    parts = torch.empty(1, 20, device=labkit.gpu.device())
    sizes = dict(H=20, V=8, BM=2, BH=32, STAGES=1, EARLY=False, num_warps=1)
    norms.rms_norm_grad_kernel[(1,)](x, x, weight, torch.empty_like(x), parts, 99, 1e-6, x.shape[1], **sizes)
    exact = x.double()
    want = (exact.square() * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).sum(0)
    assert correctness.relative_error(parts[0], want) < 1e-6


@pytest.mark.parametrize("parts", [1, 2, 511, 512, 513, 1100])
@pytest.mark.parametrize("width", [1, 8, 20])
def test_any_number_of_parts_is_added(parts, width):
    fences = correctness.GuardZones()
    given = fences.place(torch.randn(parts, width, device=labkit.gpu.device()), "contiguous")
    for dtype in (fp32, bf16):
        with fences:
            total = norms.sum_partials(given, torch.empty(width, dtype=dtype, device=labkit.gpu.device()))
        op.assert_close(total, given.double().sum(0), dtype)
    assert not fences.broken()


# --- every byte once ----------------------------------------------------------------------------------


@op.INTERPRETED
@pytest.mark.parametrize("shape", [(33, 20), (5, 100), (3, 600), (2, 3, 1), (400, 9)], ids=str)
def test_every_number_is_read_and_written_once(monkeypatch, shape):
    op.pretend(monkeypatch, limits_of("sm_90", 1), norms)
    tensors = op.drawn(RMS_NORM, *shape)
    N, H = tensors[0].numel(), shape[-1]
    (forward,), (back, total) = op.both_ways_of(rms_norm, tensors)
    assert op.moved(forward) == (N + forward.programs * H, N)
    weights = (
        H * norms.grad_plan(N // H, H, 4, limits_of("sm_90", 1))[1]["BM"]
    )  # one for each number of a tile
    read, written = op.moved(back)
    ends = 2 * N // H * 2 * (4 - math.gcd(H, 4))
    assert 2 * N <= read - back.programs * weights <= 2 * N + ends, "and vectors at the ends of rows whole"
    assert written == N + back.programs * H
    assert op.moved(total) == (back.programs * H, H)


# --- plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("multiprocessors", "target"), [(1, "sm_86"), (132, "sm_90")])
def test_programs_of_windows_keep_their_shifts_and_have_as_much_to_do(multiprocessors, target):
    for rows, width, itemsize in itertools.product((1, 33, 4096, 65537), (*WIDTHS, 535, 8191), (2, 4)):
        limits = limits_of(target, multiprocessors)
        programs, sizes = norms.grad_plan(rows, width, itemsize, limits)
        V, height, columns, warps = (sizes[name] for name in ("V", "BM", "BH", "num_warps"))
        assert V * itemsize in (4, 8, 16) or width == 1
        assert programs * height * width % V == 0, "shifts stay the same"
        assert columns <= 2 * width and columns >= max(row * width % V for row in range(V)) + width
        tiles, places = math.ceil(rows / height), multiprocessors * (norms.WARPS // warps)
        assert 1 <= programs <= max(places, V) and programs < tiles + V
        assert math.ceil(tiles / programs) <= math.ceil(tiles / max(1, places - V)), "nearly no more rounds"
        tile = 2 * norms.WARPS // warps * height * columns * itemsize
        room = ROOM[target] * 1024 - 4096
        assert sizes["STAGES"] >= 1 and (sizes["STAGES"] - 1) * tile <= room


def test_the_plan_asks_the_tensors_own_gpu(monkeypatch):
    made = op.recorded(monkeypatch, KERNELS)
    asked = op.pretend(monkeypatch, limits_of("sm_90", 10), norms)
    launch(rms_norm, (10**6, 512), (512,))
    assert set(asked) == {torch.device("meta")}
    assert [launch.grid for launch in made] == [(10**6,), (160,), (32, 1)]
