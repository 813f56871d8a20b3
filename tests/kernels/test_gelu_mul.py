"""gelu(x + bias) * other: right on every shape, the bytes it moves, what is compiled, its error."""

import importlib
import itertools
import math
import re

import cases
import operators as op
import pytest
import torch
from launches import POINTWISE
from operators import bf16, drawn, fp16, fp32
from torch.nn import functional

from labkit import gpu
from labkit.kernels import calls, common, gelu_mul
from labkit.measure import correctness

module = importlib.import_module("labkit.kernels.affine")  # the package's attribute is the function
KERNELS = {module: ("fold_kernel", "gelu_mul_grad_kernel", "column_sum_kernel")}
GELU_MUL = cases.GELU_MUL


def both(rows, width, dtype):
    op.launch_both_ways(
        gelu_mul, *(op.meta(*s, dtype=dtype) for s in ((rows, width), (width,), (rows, width)))
    )


# --- right --------------------------------------------------------------------------------------------


def test_every_shape_dtype_and_layout(monkeypatch):
    """By four programs, which have up to five tiles each, and by one, whose sum is the result."""
    op.pretend(monkeypatch, common.DeviceLimits(1, 0, True), module)
    monkeypatch.setattr(module, "TILES", 1)  # taller tiles, and so fewer programs
    op.examine(GELU_MUL, *correctness.SHAPES, layouts=correctness.LAYOUTS, roundings=2)


@pytest.mark.parametrize(("rows", "width"), [(5, 3), (70, 161), (9, 2049), (1, 4097)])
def test_folded_narrow_wide_and_odd_rows(rows, width):
    op.examine(GELU_MUL, (rows, width), dtypes=(fp32, bf16), roundings=2)


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_every_number_of_16_bits_is_within_the_stated_error(dtype):
    """Beside its rounding: 2**-12 z on a GPU, and float32's own error where kernels are interpreted."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    z = numbers[numbers.isfinite() & (numbers.abs() < 1e4)][:, None].to(gpu.device())
    y = gelu_mul(z, torch.zeros_like(z[0]), torch.ones_like(z)).double()
    want = functional.gelu(z.double(), approximate="tanh")
    tiny = torch.finfo(dtype).tiny * (1 if dtype is bf16 else torch.finfo(dtype).eps)  # flushed to zero
    rounded = (2 if dtype is bf16 and calls.INTERPRETED else 1) * torch.finfo(dtype).eps / 2
    off = 2.0**-12 if gpu.available() else 2.0**-22
    allowed = rounded * want.abs() + 1.01 * off * z.double().abs() + tiny
    assert ((y - want).abs() <= allowed).all(), ((y - want).abs() / allowed).max()


# --- bytes, and what is compiled ----------------------------------------------------------------------


@op.INTERPRETED
@pytest.mark.parametrize(("rows", "width"), [(7, 160), (7, 161), (1541, 3)])
def test_every_byte_is_moved_once(monkeypatch, rows, width):
    limits = common.DeviceLimits(0, 0, True)
    op.pretend(monkeypatch, limits, module)
    tensors, size = drawn(GELU_MUL, rows, width), rows * width
    (forward,), (back, *last) = op.both_ways_of(gelu_mul, tensors)
    height, wide, *_ = module.fold_rows(size, width, module.ROW_BYTES // 4, 4, width)
    tile = module.tile_rows(size, module.ROW_BYTES // 4, (4, 2, 1), limits)
    biases = max(1, math.ceil(height / tile)) * wide
    assert op.moved(forward) == (2 * size + biases, size)
    plan = module.sum_plan(size, width, 4, module.GELU_MUL_TILE, width, limits)
    assert op.moved(back) == (3 * size + plan.width, 2 * size + plan.partials * width)
    assert [op.moved(one) for one in last] == [(plan.partials * width, width)] * (plan.partials > 1)


@pytest.fixture(scope="module")
def variants(cache):
    """Of 9 rows of 161 eight are a whole folded row, a constant to Triton, and one is left."""
    asked = {
        "sm_80": [(100_001, 5, fp32), (100_001, 160, bf16)],
        "sm_90": [(100_001, 5, bf16), (100_001, 160, fp32), (9, 161, bf16)],
        "sm_120": [(100_001, 161, fp32)],
    }
    return op.variants_of(KERNELS, asked, both)


def test_every_kernel_fits_and_computes_in_float32(variants):
    names = {name for several in KERNELS.values() for name in several}
    assert {(v.title, v.target) for v in variants} == set(itertools.product(names, POINTWISE))
    op.assert_fits(variants)
    op.assert_float32(variants)
    for v in variants:
        if v.title == "gelu_mul_grad_kernel":
            assert v.code.shared_bytes <= 24 * 1024 + 64, "four programs in 99 KB"
            assert v.launch.VECTOR == 1 or v.code.async_copies.keys() == {128}, v
            if v.launch.VECTOR > 1:
                assert v.code.num_warps * 32 * 4 * v.code.registers <= 65536, "four programs' registers"


def test_16_bits_take_one_special_function_a_number_and_float32_two(variants):
    for v in variants:
        if v.title == "column_sum_kernel":
            continue
        tanh, exact = (len(re.findall(name, v.code.ptx)) for name in (r"tanh\.approx", r"rsqrt\.approx"))
        exp2 = len(re.findall(r"\bex2\.approx", v.code.ptx))
        if v.dtype is bf16:
            assert tanh and not exact and not exp2, v
        else:
            assert exact == exp2 > 0 and not tanh, v
