"""RMSNorm and GELU in one pass, and stacks of blocks in one launch: right, plans, bytes, what is compiled."""

import importlib
import re

import cases
import operators as op
import pytest
import torch
from launches import ROOM
from operators import bf16, drawn, fp16, fp32, limits_of

from benchmarks.workloads.stack import stack as reference
from labkit.kernels import fused_mlp, mlp, norm_gelu
from labkit.kernels.common import DeviceLimits
from labkit.measure import correctness, launch_counts

norms = importlib.import_module("labkit.kernels.rms_norm")  # the package's attribute is the function
affine = importlib.import_module("labkit.kernels.affine")
NORM_KERNELS = {norms: ("norm_gelu_kernel", "norm_gelu_grad_kernel"), affine: ("column_sum_kernel",)}
MLP_KERNELS = {mlp: ("fused_mlp_kernel",)}
NORM_GELU = cases.NORM_GELU

FAR = 2**31 + 40
"""More rows than 32 bits count."""


# --- norm_gelu: right ---------------------------------------------------------------------------------


def test_norm_gelu_and_its_gradients_are_right_in_every_dtype_and_layout():
    shapes = ((33, 64), (2, 3, 20), (1, 7), (1, 1), (19,), (0, 8), (4, 0), (70, 256))
    op.examine(NORM_GELU, *shapes, layouts=correctness.LAYOUTS)


@pytest.mark.parametrize(
    ("rows", "width", "places"), [(300, 1000, 1), (300, 1000, 132), (300, 24, 4), (7, 40, 132)]
)
def test_sums_over_however_many_programs_and_rows_are_those_of_float32(monkeypatch, rows, width, places):
    """Rounded once: a sum, or a part of one, in 16 bits is further off than float16 rounds."""
    op.pretend(monkeypatch, DeviceLimits(places, 0, True), norms)
    tensors = drawn(NORM_GELU, rows, width, dtype=fp16)
    upstream = 2 * NORM_GELU.reference(*tensors)
    wants = op.exact(NORM_GELU, tensors, upstream.double())
    for got, want in zip(op.gradients(norm_gelu, tensors, upstream), wants, strict=True):
        assert correctness.relative_error(got, want) < 2.6e-4


@op.LARGE
def test_norm_gelu_of_rows_beyond_2_to_the_31_elements():
    width = 64
    z = torch.empty(2**31 // width + 5, width, dtype=fp16, device="cuda").normal_()
    _, *vectors = drawn(NORM_GELU, 1, width, dtype=fp16)
    upstream = torch.zeros_like(z)
    upstream[-9:] = 1
    y, dz, *_ = op.gradients(norm_gelu, (z, *vectors), upstream)
    wants = op.exact(NORM_GELU, (z[-9:], *vectors), upstream[-9:].double())
    op.all_close((y[-9:], dz[-9:]), wants[:2], fp16)
    assert not dz[:-9].any()


# --- norm_gelu: plan, and what the compiler makes of it -----------------------------------------------


def launch_norm(rows, width, dtype):
    op.launch_both_ways(norm_gelu, *(op.meta(*s, dtype=dtype) for s in ((rows, width), (width,), (width,))))


@pytest.fixture(scope="module")
def norms_compiled(cache):
    """What a forward and a backward launch, compiled for every target."""
    shapes = [(256, 256, bf16), (1, 100, fp32), (FAR, 1, bf16)]
    asked = {target: [shapes[n % 3]] for n, target in enumerate(ROOM)}
    return op.variants_of(NORM_KERNELS, asked, launch_norm)


@op.INTERPRETED
def test_norm_gelu_compiles_for_every_target_without_a_spill(norms_compiled):
    assert {(v.title, v.target) for v in norms_compiled} == {
        (name, t) for names in NORM_KERNELS.values() for name in names for t in ROOM
    }
    op.assert_fits(norms_compiled)
    for v in norms_compiled:
        if v.title == "column_sum_kernel":
            assert v.launch.sums.dtype is fp32
        else:
            assert re.search(r"arith\.muli .*: (tensor<\w+x)?i64", v.code.ttir), "elements beyond 2**31"
            assert bool(re.search(r"arith\.cmpi slt, .*xi64", v.code.ttir)) == (v.launch.R == FAR), "rows"
        if 256 in v.case:  # the sum over a program's rows takes 4 columns a thread
            assert v.code.widest_load >= 64, v


@op.INTERPRETED
def test_norm_gelu_of_wide_rows_fits_every_targets_shared_memory_and_compiles_in_seconds(cache):
    """Rows on their way take shared memory; with four warps for any width registers spill by the kilobyte."""
    asked = {"sm_86": [(9, 8192, fp32), (9, 16384, bf16)], "sm_90": [(9, 16384, bf16)]}
    for v in op.variants_of(NORM_KERNELS, asked, launch_norm):
        op.assert_fits([v], 1024)


def inputs(rows, width, depth=3, dtype=fp32):
    return op.drawn(lambda shape: cases.blocks_of(shape, depth), rows, width, dtype=dtype)


def close(got, tensors, dtype):
    op.assert_close(got, reference(*(t.double() for t in tensors)), dtype)


# --- fused_mlp: right ---------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks_per_launch", [1, 2, 99])
def test_fused_mlp_is_right_in_every_dtype_and_layout(blocks_per_launch):
    """h is rounded three times."""
    shapes = ((33, 64), (5, 20), (1, 1), (40, 96), (0, 8), (4, 0))
    case = cases.BLOCKS._replace(call=fused_mlp(blocks_per_launch))
    op.examine(case, *shapes, layouts=correctness.LAYOUTS, gradients=False, roundings=3)


@op.INTERPRETED
@pytest.mark.parametrize(("rows", "width"), [(16, 16), (5, 20), (33, 33)])
def test_every_row_is_read_and_written_once_and_none_beyond_the_last(rows, width):
    """A load without the mask of its rows gives the right result: no row is used for another."""
    (launch,) = op.kernels_of(fused_mlp(99), *inputs(rows, width, depth=2))
    read = rows * width + -(-rows // 16) * 2 * width * (width + 2)
    assert op.moved(launch) == (read, rows * width)


def test_a_gradient_is_refused_in_a_sentence_and_not_dropped():
    for number, tensor in enumerate(tensors := inputs(4, 16)):
        given = [*tensors[:number], tensor.clone().requires_grad_(), *tensors[number + 1 :]]
        with pytest.raises(RuntimeError, match=r"^fused_mlp has no backward"):
            fused_mlp(99)(*given)
        with torch.no_grad():
            assert not fused_mlp(99)(*given).requires_grad


def test_no_blocks_at_once_are_refused():
    with pytest.raises(ValueError, match=r"^blocks_per_launch: is 0"):
        fused_mlp(0)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_any_number_of_rows_a_program_is_right(monkeypatch, rows):
    monkeypatch.setattr(mlp, "rows_per_program", lambda *_: rows)
    tensors = inputs(70, 32, dtype=bf16)
    close(fused_mlp(99)(*tensors), tensors, bf16)


def test_products_and_means_are_those_of_float32():
    """Rounded once: a product or a sum of squares in 16 bits is further off than float16 rounds."""
    tensors = inputs(48, 256, depth=1, dtype=fp16)
    want = reference(*(t.double() for t in tensors))
    assert correctness.relative_error(fused_mlp(1)(*tensors), want) < 2.6e-4


def test_no_blocks_are_a_copy():
    x, *weights = inputs(3, 8, depth=0)
    y = fused_mlp(1)(x, *weights)
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()


@op.INTERPRETED
def test_one_launch_or_one_a_block_and_none_for_nothing():
    tensors = inputs(20, 16, depth=5)
    for blocks_per_launch, launches in ((99, 1), (1, 5), (2, 3)):
        assert (
            len(launch_counts.count(lambda n=blocks_per_launch: fused_mlp(n)(*tensors)).launches) == launches
        )
    for nothing in (inputs(0, 16), inputs(4, 16, depth=0)):
        made = [launch.name for launch in launch_counts.count(lambda t=nothing: fused_mlp(99)(*t)).launches]
        assert "fused_mlp_kernel" not in made, "a GPU refuses an empty grid"


def test_weights_of_2_to_the_31_elements_are_taken_in_parts(monkeypatch):
    launches = op.recorded(monkeypatch, MLP_KERNELS)
    depth = 2**17 + 3
    shapes = (5, 128), (depth, 128, 128), (depth, 128), (depth, 128)
    fused_mlp(10**9)(*(op.meta(*shape) for shape in shapes))
    assert sum(made.last - made.first for made in launches) == depth
    assert all(made.weight.numel() < 2**31 for made in launches) and len(launches) == 2


@op.LARGE
@pytest.mark.parametrize(("rows", "width"), [(2**25 + 5, 64), (2**31 + 40, 1)])
def test_rows_beyond_2_to_the_31_elements(rows, width):
    _, *weights = inputs(1, width, depth=1, dtype=fp16)
    x = torch.empty(rows, width, dtype=fp16, device="cuda").normal_()
    y = fused_mlp(1)(x, *weights)
    for part in (slice(0, 100), slice(rows - 100, None)):
        close(y[part], (x[part], *weights), fp16)


# --- fused_mlp: plans, and what the compiler makes of them --------------------------------------------

FEW, MANY = 256, 10**5
"""Rows for which a program takes the fewest and the most."""
WIDTHS = ((bf16, 64), (bf16, 100), (bf16, 128), (bf16, 256), (fp32, 64), (fp32, 128))
SIZES = {
    "sm_80": [(bf16, 64, FEW), (bf16, 256, MANY), (fp32, 128, MANY)],
    "sm_86": [(bf16, 100, MANY)],
    "sm_89": [(bf16, 128, MANY)],
    "sm_90": [
        *((*width, MANY) for width in WIDTHS),
        *((bf16, 64, 1), (bf16, 256, FEW), (fp32, 128, FEW), (bf16, 1, FAR)),
    ],
    "sm_100": [(bf16, 64, FEW), (bf16, 256, MANY)],
    "sm_120": [(bf16, 128, MANY), (fp32, 128, MANY)],
}
"""By target; all of them on the one that is measured, elsewhere the largest of each kind of tile."""


@pytest.mark.parametrize("target", ROOM)
def test_stages_fit_the_shared_memory_and_a_weight_that_does_not_is_refused(target):
    its = limits_of(target)
    for width, itemsize in ((64, 2), (128, 2), (256, 2), (64, 4), (128, 4)):
        if width**2 * itemsize <= its.shared_bytes - 8192:
            kept = mlp.weight_stages(its, width, itemsize) - 1
            assert kept == 2 or 2 * width**2 * itemsize > its.shared_bytes - 8192
        else:
            with pytest.raises(ValueError, match=r"^weight: that of one block does not fit"):
                mlp.weight_stages(its, width, itemsize)


@pytest.fixture(scope="module")
def compiled(cache):
    """Compiled as they are launched; a kernel of the same tile once."""

    def launch(dtype, width, rows):
        x, *weights = (t.to("meta", dtype) for t in cases.blocks_of((1, width), depth=8))
        fused_mlp(99)(x.expand(rows, -1), *weights)

    return op.variants_of(MLP_KERNELS, SIZES, launch)


@op.INTERPRETED
def test_fused_mlp_compiles_for_every_target_fits_and_spills_nothing(compiled):
    assert {(v.target, v.case) for v in compiled} == {
        (target, one) for target in SIZES for one in SIZES[target]
    }
    op.assert_fits(compiled)
    for v in compiled:
        assert re.search(r"arith\.muli .*: i64", v.code.ttir), "elements beyond 2**31"
        assert bool(re.search(r"arith\.muli .*: i32", v.code.ttir)) == (v.launch.R != FAR), "rows beyond that"
        assert bool(v.code.matrix) == (v.dtype is bf16), "float32 is multiplied in full, without TF32"
    assert {v.launch.BM for v in compiled if v.target == "sm_90"} == {16, 32, 64}
