"""The finished affine layer: right on every shape, its plan, the bytes it moves, what the compiler makes."""

import importlib
import itertools
import math
import random
import re

import cases
import operators as op
import pytest
import torch
from launches import POINTWISE
from operators import bf16, drawn, fp16, fp32

from labkit.kernels import affine
from labkit.kernels.common import DeviceLimits
from labkit.measure import correctness, launch_counts

module = importlib.import_module("labkit.kernels.affine")  # the package's attribute is the function
KERNELS = {module: ("fold_kernel", "backward_kernel", "column_sum_kernel")}
AFFINE = cases.AFFINE


def meta(*shape, dtype=fp32):
    return [op.meta(*one, dtype=dtype) for one in (shape, shape[-1:], shape[-1:])]


@pytest.fixture
def multiprocessors(monkeypatch):
    """Makes the GPU one of so many: the number of programs that share the rows in the backward."""
    return lambda count: op.pretend(monkeypatch, DeviceLimits(count, 0, True), module)


@pytest.fixture
def launches(monkeypatch):
    return op.recorded(monkeypatch, KERNELS)


def both(*shape, dtype=fp32):
    """The launches of a forward and a backward, with meta tensors."""
    op.launch_both_ways(affine, *meta(*shape, dtype=dtype))


def copies(width, dtype=torch.float32):
    """How many rows become one, where there are enough."""
    return (
        module.fold_rows(2**40, width, module.ROW_BYTES // dtype.itemsize, dtype.itemsize, width)[1] // width
    )


# --- right --------------------------------------------------------------------------------------------


def test_full_ragged_and_empty_shapes_in_every_dtype_and_layout(monkeypatch, multiprocessors):
    """By two programs, which have up to five tiles each, and by one, whose sums are the result."""
    multiprocessors(1)
    monkeypatch.setattr(module, "TILES", 1)  # taller tiles, and so fewer programs
    op.examine(AFFINE, *correctness.SHAPES, layouts=correctness.LAYOUTS)


@pytest.mark.parametrize(("width", "count"), [(1, 8), (3, 1), (15, 8)])
def test_below_at_and_above_a_whole_folded_row(monkeypatch, multiprocessors, width, count):
    multiprocessors(count)
    monkeypatch.setattr(module, "LEAST_ROWS", 5)  # a tile of the backward, and a ragged one
    monkeypatch.setattr(module, "sum_plan", module.sum_plan.__wrapped__)  # without its cache
    least = 5 * copies(width)
    op.examine(AFFINE, *((batch, width) for batch in (3, 5, least - 1, least + 2)), dtypes=(fp32,))


@pytest.mark.parametrize("width", [17, 161, 2049])
def test_wide_and_odd_widths(multiprocessors, width):
    multiprocessors(8)
    k = copies(width)
    op.examine(AFFINE, (3 * k + 2 if k * width < 50_000 else k + 1, width), dtypes=(fp32,))


def test_tall_tiles(monkeypatch, multiprocessors):
    """Four rows, and eight, which otherwise take more elements."""
    multiprocessors(1)
    monkeypatch.setattr(module, "TILES", 1)
    op.examine(AFFINE, (1000, 3), (2562, 3), (513, 33), (7, 2049), dtypes=(fp32,), gradients=False)


@pytest.mark.parametrize(("rows", "width", "count"), [(3000, 16, 8), (400, 4096, 0)])
def test_half_precision_is_rounded_once(multiprocessors, rows, width, count):
    """A sum over hundreds of rounds of a program's loop that is kept in 16 bits is off by more."""
    multiprocessors(count)
    tensors = drawn(AFFINE, rows, width, dtype=fp16)
    upstream = tensors[0] / 8 + 0.5
    wants = op.exact(AFFINE, tensors, upstream.double())
    for got, want in zip(op.gradients(affine, tensors, upstream), wants, strict=True):
        op.assert_each_rounded_once(got, want)


@op.LARGE
@pytest.mark.parametrize(
    ("rows", "width"),
    [(2**31 // 161 + 3, 161), (2**31 // 4096 + 3, 4096), (17, 2**26 + 1), (17, 2**27 + 1), (1, 2**31 + 16)],
)
def test_more_elements_than_32_bits_count(rows, width):
    x, weight, bias = (torch.randn(s, device="cuda", dtype=bf16) for s in ((rows, width), width, width))
    ends = slice(0, 5), slice(width // 2, width // 2 + 5), slice(width - 5, width)
    y = module.affine_forward(x, weight, bias)
    for at in ends:
        want = x[:, at].float() * weight[at].float() + bias[at].float()
        torch.testing.assert_close(y[:, at].float(), want, rtol=1e-2, atol=1e-2)
    del y
    dx, dweight, dbias = module.affine_backward(x, x, weight)
    for at in ends:
        torch.testing.assert_close(dx[:, at], x[:, at] * weight[at], rtol=1e-2, atol=1e-2)
        column = x[:, at].double()
        torch.testing.assert_close(dweight[at].double(), column.square().sum(0), rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(dbias[at].double(), column.sum(0), rtol=1e-2, atol=1e-2 * rows**0.5)


# --- the plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2**25 + 1, 2**27 - 1, 2**27 + 1, 2**30 + 1])
def test_columns_and_sums_of_the_widest_rows_are_counted_in_32_bits(width):
    for batch in (1, 15, 16, 100):
        for itemsize in (2, 4):
            assert module.fold_rows(batch * width, width, 1024, itemsize, width)[1] < 2**31, batch


@op.INTERPRETED
@pytest.mark.parametrize("dtype", [fp32, bf16])
@pytest.mark.parametrize(("batch", "width"), [(7, 160), (4, 16), (7, 161), (1541, 3), (3, 2049)])
def test_every_byte_is_moved_once_and_none_beyond_the_end(multiprocessors, batch, width, dtype):
    """A load without its mask gives the right result wherever what it read too much is not used."""
    multiprocessors(0)  # one program takes all rows of its columns
    x, weight, bias = drawn(AFFINE, batch, width, dtype=dtype)
    size, item = x.numel(), x.element_size()
    rows, wide, *_ = module.fold_rows(size, width, module.ROW_BYTES // item, item, width)
    (forward,) = op.kernels_of(module.affine_forward, x, weight, bias)
    height = module.tile_rows(size, module.ROW_BYTES // item, (8, 4, 2), DeviceLimits(0, 0, True))
    fetched = max(1, -(-rows // height)) * wide
    assert forward.bytes_written == size * item
    assert forward.bytes_read == (size + 2 * fetched) * item, "x once, weight and bias once for each tile"
    plan = module.sum_plan(size, width, item, module.AFFINE_TILE, width, DeviceLimits(0, 0, True))
    main, *second = op.kernels_of(module.affine_backward, x, x, weight)
    sums = 2 * width * (item if plan.partials == 1 else 4 * plan.partials)
    assert main.bytes_read == (2 * size + plan.width) * item, "dy and x once, the weight once a program"
    assert main.bytes_written == size * item + sums, "dx, and two sums in float32 unless they are the result"
    assert [(one.bytes_read, one.bytes_written) for one in second] == [(sums, 2 * width * item)][
        : plan.partials > 1
    ]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_sums_are_few_beside_the_tensors_at_any_size_of_16_mb_and_more(itemsize):
    """And programs enough to keep 4 MB on their way, with as many tiles each, give or take one in five."""
    limits, rng = DeviceLimits(132, 227 * 1024, True), random.Random(0)
    for _ in range(3000):
        width, count = (round(math.exp(rng.uniform(0, math.log(most)))) for most in (16384, 2**29))
        batch = max(count, 2**24 // itemsize) // width + 1
        plan = module.sum_plan(batch * width, width, itemsize, module.AFFINE_TILE, width, limits)
        assert plan.rows * plan.width + plan.tail == batch * width
        assert plan.tail <= batch * width / 16 and (plan.vector * itemsize == 16)
        moved, sums = 3 * batch * width * itemsize, 2 * plan.partials * width * 4 * (plan.partials > 1)
        assert sums <= 0.09 * moved, "two rounds of 264 programs write 4.3 MB, where 50 are moved at least"
        assert plan.programs >= 176, (batch, width, plan)
        tiles = math.ceil(plan.rows / module.AFFINE_TILE[0])
        assert plan.programs <= 264 or plan.groups == 1
        assert math.ceil(tiles / plan.groups) * plan.groups <= 1.25 * tiles or tiles < 8, (batch, width, plan)


@op.INTERPRETED
def test_inside_autocast_parameters_are_not_copied():
    x, weight, bias = drawn(AFFINE, grad=True)
    half = x.detach().bfloat16()
    with torch.autocast("cpu", bf16):
        launched = launch_counts.count(lambda: affine(half, weight, bias))
    assert [made.name for made in launched] == ["fold_kernel"]


@op.INTERPRETED
def test_with_frozen_parameters_x_is_neither_kept_nor_read_again():
    x, weight, bias = drawn(AFFINE, grad=True)
    weight, bias, up = weight.detach(), bias.detach(), torch.randn_like(x)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = affine(x, weight, bias)
    assert kept == [weight.data_ptr()]
    launched = launch_counts.count(lambda: torch.autograd.grad(y, x, up, retain_graph=True))
    assert [made.name for made in launched if made.name.endswith("_kernel")] == ["fold_kernel"]
    torch.testing.assert_close(torch.autograd.grad(y, x, up)[0], up * weight)


# --- what the compiler makes of it, for GPUs that are not here ----------------------------------------


@pytest.fixture(scope="module")
def variants(cache):
    """Of 9 rows of 161 eight are a whole folded row, a constant to Triton, and one is left."""
    asked = {
        "sm_80": [(100_001, 160, bf16), (100_001, 5, fp32)],
        "sm_90": [(100_001, 160, fp32), (9, 161, bf16), (100_001, 5, bf16), (3001, 2049, bf16)],
        "sm_120": [(100_001, 161, fp32)],
    }
    return op.variants_of(
        KERNELS, asked, lambda *shape_and_dtype: both(*shape_and_dtype[:2], dtype=shape_and_dtype[2])
    )


def test_every_kernel_compiles_for_old_and_new_targets_and_fits(variants):
    assert {(v.title, v.target) for v in variants} == set(itertools.product(KERNELS[module], POINTWISE))
    assert any(v.launch.rows == 1 for v in variants if v.title == "fold_kernel")
    assert {bool(v.launch.NARROW) for v in variants if v.title == "backward_kernel"} == {True, False}
    op.assert_fits(variants)
    op.assert_float32(variants)


def test_parts_are_float32_and_their_sum_waits_for_the_kernel_that_makes_them(variants):
    """On a Hopper the sum is launched before that kernel has ended, and that kernel allows it."""
    for v in variants:
        waits, allows = (f"griddepcontrol.{word}" in v.code.ptx for word in ("wait", "launch_dependents"))
        if v.title == "column_sum_kernel":
            assert v.dtype is fp32 and waits == v.launch.EARLY == (v.target != "sm_80"), v
        elif v.title == "backward_kernel":
            assert allows == v.launch.EARLY, v
    assert any(v.launch.EARLY for v in variants if v.title == "backward_kernel")


def test_loads_are_wide(variants):
    for v in variants:
        c, bits = v.code, 8 * v.case[2].itemsize
        if v.title == "fold_kernel":
            # two of a tile's rows, 16 bytes for each of 128 threads; parameters and the rest narrow
            assert c.loads[128] >= 2 and c.stores[128] >= 2 and set(c.loads) <= {128, bits}, v
        elif v.title == "backward_kernel" and v.launch.VECTOR > 1:
            assert set(c.async_copies) == {128}, v
            assert c.async_copies[128] >= 8, "dy and x, two rows each, ahead of the loop and in it"


def test_what_is_stored_is_rounded_once_and_what_is_summed_is_zero_beyond_the_end(variants):
    """The interpreter fills masked lanes with zeros unasked; a GPU leaves there what it likes."""
    for v in variants:
        stores = re.findall(r"tt\.store .*!tt\.ptr<b?f16>", v.code.ttir)
        assert v.code.ttir.count("arith.truncf") == len(stores), v
        filled = sum(operands.count(",") >= 2 for operands in re.findall(r"tt\.load (.*?) :", v.code.ttir))
        assert filled == {"backward_kernel": 4, "column_sum_kernel": 1}.get(v.title, 0), v


def test_sums_of_many_programs_are_addressed_in_64_bits():
    """rms_recurrence has a row of them for each sequence, affine itself only few."""
    parts = op.meta(1, 2**19 + 3, 4096)

    def launched():
        module.sum_columns(parts, op.meta(4096))

    for v in op.variants_of(KERNELS, {"sm_80": [()], "sm_90": [()]}, launched):
        _, loop = v.code.ttir.split("scf.for", 1)
        products = re.findall(r"arith\.muli .*: (\S+)", loop.split("scf.yield", 1)[0])
        assert v.title == "column_sum_kernel" and products == ["i64"], (v, "the tile's first row, once")
        op.assert_fits([v])


def test_elements_beyond_two_to_the_31_are_addressed_in_64_bits(variants):
    """Those of x, y, dy and dx always; of all other tensors where the width is a number of 64 bits."""
    huge = op.variants_of(KERNELS, {"sm_90": [(2, 2**31 + 16)]}, lambda *shape: both(*shape, dtype=bf16))
    far = ("x", "y", "dx", "dy")
    for v in variants:
        if v.title == "fold_kernel" or (v.title == "backward_kernel" and not v.launch.NARROW):
            # names of values in a narrow one's several loops are used again
            assert {bits for name, bits in op.offsets(v.code.ttir) if name in far} == {"i64"}, v
    op.assert_far(huge)
    for v in huge:
        in_32_bits = rf"arith\.muli .*%c{v.launch.COLS}_i32"
        assert "get_program_id x" in v.code.ttir and not re.search(in_32_bits, v.code.ttir), (
            "the first column"
        )
