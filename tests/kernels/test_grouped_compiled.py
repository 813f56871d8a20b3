"""Grouped Linears: how the work is cut up, and what the compiler makes of it for GPUs that are not here."""

import itertools
import math
import re

import grouped
import operators as op
import pytest
import torch
import triton
from grouped import KERNELS
from launches import FAMILIES, ROOM
from operators import bf16, fp16, fp32, limits_of, meta
from packaging.version import Version

import labkit
from labkit.kernels import grouped as family
from labkit.kernels import grouped_linear
from labkit.kernels.grouped import backward_tiling, balance_tiles, block_width, forward_tiling


@pytest.fixture
def launches(monkeypatch):
    return op.recorded(monkeypatch, KERNELS)


def is_power(n):
    return n >= 1 and n & (n - 1) == 0


# --- how the work is cut up ---------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [2, 7])
def test_no_program_is_without_a_tile_and_parts_are_few(lead):
    for tiles, columns, places in itertools.product((1, 2, 7, 64, 333, 10**6), (1, 13, 100), (1, 4, 264)):
        per = balance_tiles(tiles, columns, places, lead)
        parts = math.ceil(tiles / per)
        assert 1 <= per <= tiles and (parts - 1) * per < tiles <= parts * per
        assert parts <= 256, "what the gradients' parts take, and the second kernel adds"
    assert balance_tiles(64, 100, 2 * 132, 2) == 26, (
        "groups of 100 on an H200: parts of 26, 26 and 12 fill the places"
    )


RANGE = (1, 5, 16, 17, 20, 32, 33, 50, 64, 65, 100, 128, 129, 200, 256, 257, 512)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_a_plan_is_one_that_the_compiler_takes(target, itemsize):
    one = limits_of(target)
    for d_in, d_out, tma in itertools.product(RANGE, RANGE, (True, False)):
        forward, backward = (
            forward_tiling(d_in, d_out, itemsize, tma, one),
            backward_tiling(d_in, d_out, itemsize, one),
        )
        for plan in filter(None, (forward, backward)):
            case = (d_in, d_out, tma, plan)
            assert all(is_power(n) for n in (plan.pack, plan.rows, plan.cols, plan.warps)), case
            assert plan.rows >= 16 and plan.cols >= 16 and plan.stages >= 1 and plan.resident >= 1, case
        BK, BN = backward.depth, backward.cols
        if backward.pack > 1:  # all of the gradient, or the reshape would not be one
            assert {d_in, d_out} <= {16, 32}, case
            assert (backward.pack * d_in, backward.pack * d_out) == (BK, BN), case
        assert BK * BN <= 2**14 and BK * BN // backward.warps <= 2**12, (case, "the sum stays in registers")
        assert backward.tiles == 0, (case, "a fixed number would take memory without end for the parts")
        if forward is None:
            assert max(d_in, d_out) > 64
            continue
        assert tma or not forward.tma, case
        BK = block_width(forward.pack * d_in)
        if forward.pack > 1:
            assert {d_in, d_out} <= {16, 32} and forward.cols == forward.pack * d_out, case
        assert not forward.tma or forward.pack == 1 or is_power(d_in), case
        assert max(forward.rows, BK, forward.cols) <= 256, (case, "sides of a descriptor's tile")
        held = (BK * forward.cols + forward.stages * forward.rows * BK * forward.tma) * itemsize
        assert held <= ROOM[target] * 1024, case


def walks(made, groups):
    """The tiles of each program of one piece of the columns, and that the grid is whole pieces."""
    pieces = math.ceil(groups / made.PACK) * math.ceil(made.PACK * made.D_OUT / made.BN)
    tiles = made.B * math.ceil(made.T / made.BM)
    if made.title == "backward_kernel":
        pieces *= math.ceil(made.PACK * made.D_IN / made.BK)
        assert made.BM % made.KEEP == 0 and is_power(made.KEEP)
        assert made.parts.shape[0] * pieces == made.grid[0]
    parts, rest = divmod(made.grid[0], pieces)
    assert rest == 0
    if made.title == "backward_kernel":
        starts, stride = [p * made.per for p in range(parts)], 1
    else:
        starts, stride = [p * made.part_stride for p in range(parts)], made.tile_stride
    return [range(start, min(start + made.per * stride, tiles), stride) for start in starts], tiles


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_the_grid_covers_every_tile_and_no_program_is_empty(monkeypatch, launches, target, columns):
    op.pretend(monkeypatch, limits_of(target), family)
    sizes = ((16, 16), (32, 32), (20, 50), (64, 64), (100, 100), (256, 256), (300, 20))
    for (d_in, d_out), groups, rows in itertools.product(sizes, (1, 5, 16), (8, 4104, 40000)):
        launches.clear()
        grouped.launch(bf16, groups, d_in, d_out, rows, columns)
        assert [made.title for made in launches][1:3] == ["backward_kernel", "sum_kernel"]
        for made in launches:
            if made.title == "sum_kernel":
                assert is_power(made.PARTS) and made.P <= made.PARTS < 2 * made.P and made.P <= 256
                assert made.grid[0] * made.BLOCK >= made.size > (made.grid[0] - 1) * made.BLOCK
            elif made.title in ("single_tile_kernel", "wide_kernel"):
                tiles = made.arguments.get("B", 1) * math.ceil(made.T / made.BM)
                slices = math.ceil(made.D_OUT / made.BN) if made.title == "wide_kernel" else 1
                assert made.grid == (tiles * groups * slices,)
            else:
                programs, tiles = walks(made, groups)
                assert all(programs) and sorted(itertools.chain(*programs)) == list(range(tiles))
                assert made.FLAT is (made.B == 1)
                assert made.FLAT or not (made.TMA or made.STORE), "descriptors hold rows of one level"


def test_parts_of_rows_are_those_that_the_plan_balanced(monkeypatch, launches):
    """Unequal ones too: equal parts of 22, 22 and 20 tiles would be two waves of 22 on an H200."""
    op.pretend(monkeypatch, limits_of("sm_90"), family)
    grouped.launch(bf16, 100, 100, 100, 4096, False)
    forward, backward, _ = launches
    assert forward.per == balance_tiles(64, 100, 2 * 132, 2) == 26
    assert backward.per == balance_tiles(64, 100, 132, 7) != math.ceil(64 / math.ceil(64 / backward.per))


def test_no_width_is_cut_off_by_the_shift(monkeypatch, launches):
    taken = set()
    for target, dtype in itertools.product(("sm_90", "sm_120"), (bf16, fp32)):
        op.pretend(monkeypatch, limits_of(target), family)
        align = 16 // dtype.itemsize
        for width in range(1, 258):
            x, weight = meta(64, align * width, dtype=dtype), meta(align, width, width, dtype=dtype)
            launches.clear()
            grouped_linear(x, weight)
            for made in launches:
                if made.options.get("TMA"):
                    shift = max(group * width % align for group in range(align))
                    assert shift + width <= made.BK, (target, dtype, width)
                    taken.add(width)
    assert taken >= {50, 64, 100, 128}


def test_what_is_not_aligned_goes_by_pointers(monkeypatch, launches):
    op.pretend(monkeypatch, limits_of("sm_90"), family)
    like = dict(dtype=bf16, device=labkit.gpu.device())
    weight, block = torch.empty(2, 64, 64, **like), torch.empty(70 * 136 + 1, **like)
    views = {
        "aligned": block[: 70 * 128].view(70, 128),
        "wider rows": block[: 70 * 136].view(70, 136)[:, :128],
        "a base in between": block[1 : 70 * 128 + 1].view(70, 128),
        "rows in between": block[: 70 * 130].view(70, 130)[:, :128],
        "columns": block[: 70 * 128].view(128, 70).T,
        "two levels": block[: 70 * 128].view(35, 2, 128).transpose(0, 1),
    }
    for x in views.values():
        grouped_linear(x, weight)
    taken = dict(
        zip(views, [made.title == "single_tile_kernel" or made.TMA for made in launches], strict=True)
    )
    assert {view for view, tma in taken.items() if tma} == {"aligned", "wider rows"}
    op.pretend(monkeypatch, limits_of("sm_80"), family)
    grouped_linear(views["aligned"], weight)
    assert not launches[-1].TMA


# --- what the compiler makes of it --------------------------------------------------------------------

CASES = {
    "sm_80": [(bf16, 64, 64, 4096, False)],
    "sm_86": [(fp16, 100, 100, 4096, False), (fp32, 128, 128, 4096, False)],
    "sm_90": [
        *((bf16, d, d, 4096, False) for d in (16, 32, 64, 100, 128, 256)),
        *((bf16, 64, 64, 4096, True), (fp32, 64, 64, 4096, False), (bf16, 100, 200, 4096, True)),
    ],
    "sm_100": [(bf16, 64, 64, 4096, False), (bf16, 100, 100, 4096, False)],
    "sm_120": [(bf16, 64, 64, 4096, True)],
}
"""By target: dtype, widths in and out, rows, whether the data is (B, C, T)."""
UNITS = {"sm_90": "wgmma", "sm_100": "tcgen05"}


TUNED = Version(triton.__version__) < Version("3.8")
"""The tiles were chosen with Triton 3.6 and 3.7: a later compiler may spill some bytes until they are tuned
for it."""


@pytest.fixture(scope="module")
def variants(cache):
    return op.variants_of(KERNELS, CASES, lambda dtype, *widths: grouped.launch(dtype, 16, *widths))


def assert_fits(v):
    """Bytes are spilled of three products in float32, for one."""
    allowed = 1024 if v.dtype is fp32 else 64 if v.title == "wide_kernel" else 0
    op.assert_fits([v], allowed if TUNED else None)


def products_of(variants):
    return [v for v in variants if v.title != "sum_kernel"]


def test_every_kernel_compiles_for_every_family_of_targets_and_fits(variants):
    seen = {(v.title, v.target) for v in variants}
    always = ("forward_kernel", "backward_kernel", "sum_kernel")
    assert seen >= {*itertools.product(always, FAMILIES), ("wide_kernel", "sm_86")}
    for v in variants:
        assert_fits(v)


def test_products_use_the_matrix_unit_and_float32_three_products_of_tf32(variants):
    """One alone has an error of 1e-3; plain fp32 would not use the matrix unit at all."""
    for v in products_of(variants):
        (dtype, *widths, _, _), unit, used = v.case, UNITS.get(v.target, "mma"), set(v.code.matrix)
        assert used and used <= {unit, "mma"}, (v, used)
        assert min(widths) < 64 or dtype is fp32 or used == {unit}, (v, used)
        if dtype is fp32:
            assert "inputPrecision = tf32x3" in v.code.ttir and "tf32" in v.code.ptx, v
            assert "inputPrecision = tf32," not in v.code.ttir, v
    made = {v.title for v in products_of(variants) if v.case[0] is fp32}
    assert made == {"forward_kernel", "wide_kernel", "backward_kernel"}


def test_as_many_programs_fit_an_h200_as_the_plan_says(variants):
    for v in variants:
        dtype, *widths, _, columns = v.case
        back = v.title == "backward_kernel"
        if (v.target, dtype, columns) != ("sm_90", bf16, False) or not (back or v.title == "forward_kernel"):
            continue
        one = (*widths, 2) if back else (*widths, 2, v.launch.TMA)
        plan = (backward_tiling if back else forward_tiling)(*one, limits_of("sm_90"))
        assert plan.warps == v.code.num_warps, v
        if not plan.tiles and widths[0] <= 128:  # elsewhere the number decides nothing
            assert op.registers_fit(plan.resident, v.code, "sm_90"), v


def test_aligned_tiles_are_copied_whole_or_in_128_bits(variants):
    """x and y forward; x, dy and dx backward; the widths that are powers of two, in rows and columns."""
    for v in products_of(variants):
        if not all(is_power(width) for width in v.case[1:3]):
            continue
        back, c = v.title == "backward_kernel", v.code
        if v.title == "single_tile_kernel":
            assert c.bulk_loads == 1 and not c.async_copies and max(c.loads) == 128, v
            assert c.bulk_stores == 1, v
            continue
        if v.launch.options.get("TMA"):
            assert c.bulk_loads >= 1 + back and not c.async_copies, v
        elif back or v.title == "wide_kernel":
            assert set(c.async_copies or c.loads) == {128}, v
            assert c.loads[128] >= 2, v
        else:
            assert c.loads[128] >= 2, v
        assert c.bulk_stores >= 1 if v.launch.options.get("STORE") else max(c.stores) == 128, v


def test_no_product_reads_a_tile_that_the_next_may_overwrite(variants):
    """The wait that ends a turn of the backward's loop is for all products, that of dW among them."""
    seen = 0
    for v in variants:
        if v.title != "backward_kernel" or v.launch.dx is None or v.target != "sm_90":
            continue
        steps = re.findall(
            r"scf\.for|scf\.yield|ttng\.warp_group_dot(?:_wait[^{]*\{pendings = \d+)?", v.code.ttgir
        )
        turn = steps[steps.index("scf.for") : steps.index("scf.yield")]
        if any("warp_group_dot" in step for step in turn):
            assert turn[-1].endswith("pendings = 0"), (v, turn)
            seen += 1
    assert seen >= 3


def test_no_size_is_added_to_before_tiles_are_counted(variants):
    """As tl.cdiv does: the sum may exceed 32 bits where 2**31 - 1 rows do not."""
    for v in products_of(variants):
        assert not re.findall(r"arith\.addi %(?:T|D_OUT), %c\d+_i32", v.code.ttir), v


def test_a_bias_of_any_stride_is_addressed_in_64_bits():
    def launch(groups, width):
        x, weight = meta(4096, groups * width, dtype=bf16), meta(groups, width, width, dtype=bf16)
        grouped_linear(x, weight, meta(width, groups, dtype=bf16).T)

    (wide,) = op.variants_of(KERNELS, {"sm_86": [(16, 300)]}, launch)
    assert wide.title == "wide_kernel"
    assert_fits(wide)
    bias = wide.code.ttir.split("%bias,", 1)[1].split("tt.load", 1)[0]
    assert re.findall(r"arith\.muli .*: tensor<\d+x(\w+)>", bias) == ["i64"], "columns, by their stride"


def test_parts_of_any_number_of_groups_are_counted_in_64_bits(variants):
    back = [v for v in variants if v.title == "backward_kernel"]
    assert back
    for v in back:
        assert not re.findall(r"arith\.muli %\w+, %G : i32", v.code.ttir), v
