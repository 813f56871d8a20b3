"""The stack of blocks, in one launch or several: right, its plan, its bytes, what the compiler makes."""

import re

import cases
import operators as op
import pytest
import torch
from launches import ROOM
from operators import bf16, fp16, fp32, gpu

from labkit.kernels import blocks, stack
from labkit.measure import correctness
from labkit.profiling import launch_counts
from labkit.workloads.stack import stack as reference

KERNELS = {stack: ("stack_kernel",)}


def inputs(rows, width, depth=3, dtype=fp32):
    return op.drawn(lambda shape: cases.blocks_of(shape, depth), rows, width, dtype=dtype)


def close(got, tensors, dtype):
    op.assert_close(got, reference(*(t.double() for t in tensors)), dtype)


# --- right --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 2, 99])
def test_it_is_right_in_every_dtype_and_layout(at_once):
    """h is rounded three times."""
    shapes = ((33, 64), (5, 20), (1, 1), (40, 96), (0, 8), (4, 0))
    case = cases.BLOCKS._replace(call=blocks(at_once))
    op.examine(case, *shapes, layouts=correctness.LAYOUTS, gradients=False, roundings=3)


@op.INTERPRETED
@pytest.mark.parametrize(("rows", "width"), [(16, 16), (5, 20), (33, 33)])
def test_every_row_is_read_and_written_once_and_none_beyond_the_last(rows, width):
    """A load without the mask of its rows gives the right result: no row is used for another."""
    (launch,) = op.kernels_of(blocks(99), *inputs(rows, width, depth=2))
    read = rows * width + -(-rows // 16) * 2 * width * (width + 2)
    assert op.moved(launch) == (read, rows * width)


def test_a_gradient_is_refused_in_a_sentence_and_not_dropped():
    for number, tensor in enumerate(tensors := inputs(4, 16)):
        given = [*tensors[:number], tensor.clone().requires_grad_(), *tensors[number + 1 :]]
        with pytest.raises(RuntimeError, match=r"^blocks has no backward"):
            blocks(99)(*given)
        with torch.no_grad():
            assert not blocks(99)(*given).requires_grad


def test_no_blocks_at_once_are_refused():
    with pytest.raises(ValueError, match=r"^at_once: is 0"):
        blocks(0)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_any_number_of_rows_a_program_is_right(monkeypatch, rows):
    monkeypatch.setattr(stack, "rows_for", lambda *_: rows)
    tensors = inputs(70, 32, dtype=bf16)
    close(blocks(99)(*tensors), tensors, bf16)


def test_products_and_means_are_those_of_float32():
    """Rounded once: a product or a sum of squares in 16 bits is further off than float16 rounds."""
    tensors = inputs(48, 256, depth=1, dtype=fp16)
    want = reference(*(t.double() for t in tensors))
    assert correctness.relative_error(blocks(1)(*tensors), want) < 2.6e-4


def test_no_blocks_are_a_copy():
    x, *weights = inputs(3, 8, depth=0)
    y = blocks(1)(x, *weights)
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()


@op.INTERPRETED
def test_one_launch_or_one_a_block_and_none_for_nothing():
    tensors = inputs(20, 16, depth=5)
    for at_once, launches in ((99, 1), (1, 5), (2, 3)):
        assert len(launch_counts.count(lambda n=at_once: blocks(n)(*tensors)).launches) == launches
    for nothing in (inputs(0, 16), inputs(4, 16, depth=0)):
        made = [launch.name for launch in launch_counts.count(lambda t=nothing: blocks(99)(*t)).launches]
        assert "stack_kernel" not in made, "a GPU refuses an empty grid"


def test_weights_of_2_to_the_31_elements_are_taken_in_parts(monkeypatch):
    launches = op.recorded(monkeypatch, KERNELS)
    depth = 2**17 + 3
    shapes = (5, 128), (depth, 128, 128), (depth, 128), (depth, 128)
    blocks(10**9)(*(op.meta(*shape) for shape in shapes))
    assert sum(made.last - made.first for made in launches) == depth
    assert all(made.weight.numel() < 2**31 for made in launches) and len(launches) == 2


@op.LARGE
@pytest.mark.parametrize(("rows", "width"), [(2**25 + 5, 64), (2**31 + 40, 1)])
def test_rows_beyond_2_to_the_31_elements(rows, width):
    _, *weights = inputs(1, width, depth=1, dtype=fp16)
    x = torch.empty(rows, width, dtype=fp16, device="cuda").normal_()
    y = blocks(1)(x, *weights)
    for part in (slice(0, 100), slice(rows - 100, None)):
        close(y[part], (x[part], *weights), fp16)


# --- plans, and what the compiler makes of them -------------------------------------------------------

FEW, MANY, FAR = 256, 10**5, 2**31 + 40
"""Rows for which a program takes the fewest and the most, and more than 32 bits count."""
WIDTHS = ((bf16, 64), (bf16, 100), (bf16, 128), (bf16, 256), (fp32, 64), (fp32, 128))
SIZES = {
    "sm_80": [(bf16, 64, FEW), (bf16, 256, MANY), (fp32, 128, MANY)],
    "sm_86": [(bf16, 100, MANY), (bf16, 128, MANY), (fp32, 128, MANY)],
    "sm_89": [(bf16, 128, MANY)],
    "sm_90": [
        *((*width, MANY) for width in WIDTHS),
        *((bf16, 64, 1), (bf16, 256, FEW), (fp32, 128, FEW), (bf16, 1, FAR)),
    ],
    "sm_100": [(bf16, 64, FEW), (bf16, 100, MANY), (bf16, 256, MANY), (fp32, 128, MANY)],
    "sm_120": [(bf16, 128, MANY), (fp32, 128, MANY)],
}
"""By target; all of them on the one that is measured, elsewhere the largest of each kind of tile."""


@pytest.mark.parametrize("target", ROOM)
def test_stages_fit_the_shared_memory_and_a_weight_that_does_not_is_refused(target):
    its = gpu(target)
    for width, itemsize in ((64, 2), (128, 2), (256, 2), (64, 4), (128, 4)):
        if width**2 * itemsize <= its.shared_bytes - 8192:
            kept = stack.stages_for(its, width, itemsize) - 1
            assert kept == 2 or 2 * width**2 * itemsize > its.shared_bytes - 8192
        else:
            with pytest.raises(ValueError, match=r"^weight: not one"):
                stack.stages_for(its, width, itemsize)


@pytest.fixture(scope="module")
def compiled(cache):
    """Compiled as they are launched; a kernel of the same tile once."""

    def launch(dtype, width, rows):
        x, *weights = (t.to("meta", dtype) for t in cases.blocks_of((1, width), depth=8))
        blocks(99)(x.expand(rows, -1), *weights)

    return op.variants_of(KERNELS, SIZES, launch)


@op.INTERPRETED
def test_it_compiles_for_every_target_fits_and_spills_nothing(compiled):
    assert {(v.target, v.case) for v in compiled} == {
        (target, one) for target in SIZES for one in SIZES[target]
    }
    op.assert_fits(compiled)
    for v in compiled:
        assert re.search(r"arith\.muli .*: i64", v.code.ttir), "elements beyond 2**31"
        assert bool(re.search(r"arith\.muli .*: i32", v.code.ttir)) == (v.launch.R != FAR), "rows beyond that"
        assert bool(v.code.matrix) == (v.dtype is bf16), "float32 is multiplied in full, without TF32"
    assert {v.launch.BM for v in compiled if v.target == "sm_90"} == {16, 32, 64}
