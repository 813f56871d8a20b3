"""labkit.kernels.rms_norm: right for rows of any number and width, its sums, its plans, what is compiled."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import recurring
import torch
import triton.language as tl
from launches import ROOM
from recurring import RMS_NORM, WIDTHS, OperatorTests, bf16, drawn, examine, fp16, fp32, gpu, meta, norms
from torch.nn import functional
from triton.runtime import interpreter

from labkit import checks, device
from labkit.kernels import rms_norm

pytestmark = pytest.mark.usefixtures("cache")
X, WEIGHT = torch.ones(2, 3, 4), torch.ones(4)
WRONG = {
    "a scalar": (RMS_NORM, "x", "(..., any)", torch.tensor(1.0), WEIGHT),
    "no tensor": (RMS_NORM, "x", "a tensor", 1.0, WEIGHT),
    "a weight of two dimensions": (RMS_NORM, "weight", "(4)", X, torch.ones(2, 4)),
    "a weight of another length": (RMS_NORM, "weight", "(4)", X, torch.ones(5)),
    "no weight": (RMS_NORM, "weight", "a tensor", X, None),
    "no features": (RMS_NORM, "weight", "1 to 8192", torch.ones(3, 0), torch.ones(0)),
    "too many features": (RMS_NORM, "weight", "1 to 8192", torch.ones(1, 8193), torch.ones(8193)),
    "whole numbers": (RMS_NORM, "x", "float16 or bfloat16", X.int(), WEIGHT.int()),
    "double precision": (RMS_NORM, "x", "float16 or bfloat16", X.double(), WEIGHT.double()),
    "the weight in half": (RMS_NORM, "weight", "torch.float32", X, WEIGHT.half()),
    "the weight elsewhere": (RMS_NORM, "weight", "cpu", X, WEIGHT.to("meta")),
}


class TestOperator(OperatorTests):
    kept, wrong = {RMS_NORM: (0, 1)}, WRONG
    shapes = ((3, 33), (1, 1), (0, 8), (2, 0, 5), (5, 64), (70, 100), (19,), (3, 600), (3, 1, 513))

    @staticmethod
    def launch(target):
        asked = {"sm_86": [(bf16, 4096)], "sm_90": [(bf16, 512), (fp32, 100), (bf16, 100)]}
        for dtype, width in asked.get(target, [(fp32, 512)]):
            recurring.both_ways(rms_norm, meta(4096, width, dtype=dtype), meta(width, dtype=dtype))

    @recurring.INTERPRETED
    def test_one_warp_adds_up_by_shuffles_alone(self, variants):
        lone = [v for v in variants if v.launch.title == "rms_norm_kernel" and v.launch.H == 512]
        assert lone
        for v in lone:
            assert v.compiled.num_warps == 1 and v.compiled.shuffles == {"bfly": 5 * v.launch.BM}, v
            assert not v.compiled.barriers and not v.compiled.shared_bytes, v

    @recurring.INTERPRETED
    def test_rows_are_loaded_in_128_bits_and_further_ones_run_ahead(self, variants):
        """Copied into shared memory too. 100 features in bf16 begin at multiples of 8 bytes only."""
        for v in variants:
            if v.launch.title == "sum_kernel":
                continue
            c, wide = v.compiled, 64 if (v.launch.H, v.dtype) == (100, bf16) else 128
            assert max(c.stores) in (wide, 128) and set(c.loads) == {wide}, (c, c.loads, c.stores)
            if v.launch.title == "rms_norm_grad_kernel":
                held = (v.launch.STAGES - 1) * 2 * v.launch.BM * v.launch.BH * v.dtype.itemsize
                assert held <= c.shared_bytes <= held + 4096 and set(c.async_copies) == {wide}, c


# --- right --------------------------------------------------------------------------------------------


def test_the_widest_rows_are_taken():
    x, weight = drawn(RMS_NORM, 1, 1, 8192)
    recurring.assert_close(rms_norm(x, weight), RMS_NORM.reference(x.double(), weight.double()))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("eps", [0.5, 1e-3, 0.0])
def test_eps_is_added_to_the_mean_square(eps):
    """Without it rows that fill up a tile must not count: their mean square is zero."""
    with_eps = RMS_NORM._replace(
        call=lambda x, weight: rms_norm(x, weight, eps),
        reference=lambda x, weight: functional.rms_norm(x, weight.shape, weight, eps),
    )
    examine(with_eps, (3, 20), name="rms_norm")


@pytest.mark.usefixtures("fresh_compiler")
def test_an_eps_first_met_inside_a_whole_graph():
    def layer(x, weight):
        return rms_norm(x, weight, 0.123) - rms_norm(x, weight, 0.25) + rms_norm(x, weight)

    recurring.assert_compiles(layer, drawn(RMS_NORM, 3, 20))


def test_nan_stays_in_its_row():
    x, weight = drawn(RMS_NORM, 5, 20)
    upstream, others = torch.randn(5, 20, device=device.name()), [0, 1, 3, 4]
    want = recurring.gradients(rms_norm, [x, weight], upstream)
    x[2, 3] = math.nan
    y, dx, dweight = recurring.gradients(rms_norm, [x, weight], upstream)
    assert y[2].isnan().all() and dx[2].isnan().all() and dweight.isnan().all()
    assert recurring.equal([y[others], dx[others]], [want[0][others], want[1][others]])


@pytest.mark.parametrize("multiprocessors", [1, 2, 132])
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_the_weights_gradient_in_any_number_of_parts(monkeypatch, dtype, multiprocessors):
    recurring.pretend(monkeypatch, gpu("sm_90", multiprocessors))
    examine(RMS_NORM, (300, 20), dtypes=(dtype,))


def test_half_precision_is_rounded_once(monkeypatch):
    """Hundreds of rows by several programs; no sum in them and no part of a sum is rounded before the end."""
    recurring.pretend(monkeypatch, gpu("sm_90", 1))
    tensors = drawn(RMS_NORM, 700, 72, dtype=fp16)
    got = recurring.gradients(rms_norm, tensors)
    for one, want in zip(got, recurring.exact(RMS_NORM, tensors, 2 * got[0].double()), strict=True):
        recurring.assert_rounded_once(one, want)


def test_a_programs_part_of_the_weights_gradient_is_summed_in_float32():
    """Roundings of many parts would hide behind the last one."""
    (x, weight), parts = drawn(RMS_NORM, 99, 20, dtype=fp16), torch.empty(1, 20, device=device.name())
    sizes = dict(H=20, BM=2, BH=64, STAGES=1, num_warps=1)
    norms.rms_norm_grad_kernel[(1,)](x, x, weight, torch.empty_like(x), parts, 99, 1e-6, **sizes)
    exact = x.double()
    want = (exact.square() * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).sum(0)
    assert checks.relative_error(parts[0], want) < 1e-6


@pytest.mark.parametrize("parts", [1, 2, 511, 512, 513, 1100])
@pytest.mark.parametrize("width", [1, 8, 20])
def test_any_number_of_parts_is_added(parts, width):
    fences = checks.Fences()
    given = fences.place(torch.randn(parts, width, device=device.name()), "contiguous")
    for dtype in (fp32, bf16):
        with fences:
            total = norms.added(given, torch.empty(width, dtype=dtype, device=device.name()))
        recurring.assert_close(total, given.double().sum(0), dtype)
    assert not fences.broken()


# --- every byte once, and as many rows as 32 bits count -----------------------------------------------


@recurring.INTERPRETED
@pytest.mark.parametrize("shape", [(33, 20), (5, 100), (3, 600), (2, 3, 1)], ids=str)
def test_every_number_is_read_and_written_once(monkeypatch, shape):
    recurring.pretend(monkeypatch, gpu("sm_90", 1))
    tensors = drawn(RMS_NORM, *shape)
    N, H = tensors[0].numel(), shape[-1]
    (forward,), (back, total) = recurring.kernels_of(rms_norm, tensors)
    assert recurring.moved(forward) == (N + forward.programs * H, N)
    assert recurring.moved(back) == (2 * N + back.programs * H, N + back.programs * H)
    assert recurring.moved(total) == (back.programs * H, H)


@recurring.INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_as_many_rows_as_32_bits_just_count(monkeypatch):
    """The last tile of 2**31 - 3 rows of one number; nearly all of that memory is never touched."""
    M, rows, builder = 2**31 - 3, 32, interpreter.interpreter_builder
    last = np.array([M // rows], np.int32)
    monkeypatch.setattr(
        builder, "options", dataclasses.replace(builder.options, debug=True)
    )  # or no overflow
    monkeypatch.setattr(
        builder, "create_get_program_id", lambda axis: interpreter.TensorHandle(last, tl.int32)
    )
    x, dx = torch.empty(M, 1, dtype=bf16), torch.empty(M, 1, dtype=bf16)
    x[-rows:], dx[-rows:] = 2, math.nan
    weight, parts = torch.ones(1, dtype=bf16), torch.empty(M // rows + 1, 1)
    sizes = dict(H=1, BM=rows, BH=64, num_warps=1)
    norms.rms_norm_grad_kernel[(1,)](x, x, weight, dx, parts, M, 0.0, STAGES=1, **sizes)
    assert parts[-1] == 2 * (M % rows) and not dx[-1].isnan()
    norms.rms_norm_kernel[(1,)](x, weight, dx, M, 0.0, **sizes)
    assert dx[-1] == 1


# --- plans --------------------------------------------------------------------------------------------


def test_the_forwards_tile_has_two_kilobytes_or_a_lanes_share():
    for width, itemsize in itertools.product((*WIDTHS, 8192), (2, 4)):
        plan = norms.norm_plan(width, itemsize)
        height, columns = plan["BM"], plan["BH"]
        assert plan["H"] == width <= columns <= 512 * plan["num_warps"] and columns * itemsize >= 4 * 32
        assert height * width * itemsize >= 2048 or 2 * height * columns > 1024
        assert height == 1 or (height // 2 * width * itemsize < 2048 and height * columns <= 1024), "no more"


@pytest.mark.parametrize(("multiprocessors", "target"), [(1, "sm_86"), (132, "sm_90")])
def test_the_backwards_programs_are_few_and_have_as_much_to_do(multiprocessors, target):
    for rows, width, itemsize in itertools.product((1, 33, 4096, 65537), (*WIDTHS, 8192), (2, 4)):
        programs, sizes = norms.norm_grad_plan(rows, width, itemsize, gpu(target, multiprocessors))
        height, columns, warps, stages = (sizes[name] for name in ("BM", "BH", "num_warps", "STAGES"))
        tiles, places = math.ceil(rows / height), multiprocessors * max(1, 16 // (itemsize * warps))
        assert 1 <= programs <= min(tiles, places)
        assert math.ceil(tiles / programs) == math.ceil(tiles / places), "no more rounds than with all places"
        assert programs == 1 or math.ceil(tiles / (programs - 1)) > math.ceil(tiles / places), "and as few"
        tile, room = 2 * height * columns * itemsize, ROOM[target] * 1024 - 4096
        assert 2 <= stages <= 3 and (stages - 1) * tile <= room and (stages == 3 or stages * tile > room)


def test_the_plan_asks_the_tensors_own_gpu(monkeypatch):
    made, asked = recurring.recorded(monkeypatch), []
    monkeypatch.setattr(norms, "gpu_of", lambda where: asked.append(where) or gpu("sm_90", 10))
    recurring.both_ways(rms_norm, meta(10**6, 512), meta(512))
    assert asked == [torch.device("meta")]
    assert [launch.grid for launch in made] == [(10**6,), (20,), (64,)]
