"""Bias, RMSNorm and GELU in one pass: right both ways, in float32, its plan, what the compiler makes."""

import importlib
import re

import cases
import operators as op
import pytest
import torch
from launches import ROOM
from operators import bf16, drawn, fp16, fp32

from labkit.kernels import norm_gelu
from labkit.kernels.common import Gpu
from labkit.measure import correctness

module = importlib.import_module("labkit.kernels.norm_gelu")  # the package's attribute is the function
KERNELS = {module: ("norm_gelu_kernel", "norm_gelu_grad_kernel", "sum_kernel")}
NORM_GELU = cases.NORM_GELU

FAR = 2**31 + 40
"""More rows than 32 bits count."""


# --- right --------------------------------------------------------------------------------------------


def test_it_and_its_gradients_are_right_in_every_dtype_and_layout():
    shapes = ((33, 64), (2, 3, 20), (1, 7), (1, 1), (19,), (0, 8), (4, 0), (70, 256))
    op.examine(NORM_GELU, *shapes, layouts=correctness.LAYOUTS)


@pytest.mark.parametrize(
    ("rows", "width", "places"), [(300, 1000, 1), (300, 1000, 132), (300, 24, 4), (7, 40, 132)]
)
def test_sums_over_however_many_programs_and_rows_are_those_of_float32(monkeypatch, rows, width, places):
    """Rounded once: a sum, or a part of one, in 16 bits is further off than float16 rounds."""
    op.pretend(monkeypatch, Gpu(places, 0, True), module)
    tensors = drawn(NORM_GELU, rows, width, dtype=fp16)
    upstream = 2 * NORM_GELU.reference(*tensors)
    wants = op.exact(NORM_GELU, tensors, upstream.double())
    for got, want in zip(op.gradients(norm_gelu, tensors, upstream), wants, strict=True):
        assert correctness.relative_error(got, want) < 2.6e-4


@op.LARGE
def test_rows_beyond_2_to_the_31_elements():
    width = 64
    z = torch.empty(2**31 // width + 5, width, dtype=fp16, device="cuda").normal_()
    _, *vectors = drawn(NORM_GELU, 1, width, dtype=fp16)
    upstream = torch.zeros_like(z)
    upstream[-9:] = 1
    y, dz, *_ = op.gradients(norm_gelu, (z, *vectors), upstream)
    wants = op.exact(NORM_GELU, (z[-9:], *vectors), upstream[-9:].double())
    op.all_close((y[-9:], dz[-9:]), wants[:2], fp16)
    assert not dz[:-9].any()


# --- plan, and what the compiler makes of it ----------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(cache):
    """What a forward and a backward launch, compiled for every target."""
    asked = [(256, 256, bf16), (1, 100, fp32), (FAR, 1, bf16)]

    def launch(rows, width, dtype):
        op.launch_both_ways(
            norm_gelu, *(op.meta(*s, dtype=dtype) for s in ((rows, width), (width,), (width,)))
        )

    return op.variants_of(KERNELS, dict.fromkeys(ROOM, asked), launch)


@op.INTERPRETED
def test_every_kernel_compiles_for_every_target_without_a_spill(compiled):
    assert {(v.title, v.target) for v in compiled} == {(name, t) for name in KERNELS[module] for t in ROOM}
    op.assert_fits(compiled)
    for v in compiled:
        if v.title == "sum_kernel":
            assert v.launch.parts.dtype is fp32
        else:
            assert re.search(r"arith\.muli .*: (tensor<\w+x)?i64", v.code.ttir), "elements beyond 2**31"
            assert bool(re.search(r"arith\.cmpi slt, .*xi64", v.code.ttir)) == (v.launch.R == FAR), "rows"
        if v.launch.W == 256:  # the sum over a program's rows takes 4 columns a thread
            assert v.code.widest_load >= 64, v
