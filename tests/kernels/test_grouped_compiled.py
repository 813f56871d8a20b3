"""Grouped Linears: how the work is cut up, and what the compiler makes of it for GPUs that are not here."""

import heapq
import itertools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import launches as launches_of
import pytest
import torch
import triton
from grouped import KERNELS, bf16, fp16, fp32, gpu, launch_both_ways, meta, pretend
from launches import FAMILIES, ROOM
from packaging.version import Version
from test_grouped_memory import SIZES

from labkit import codegen, device
from labkit.kernels import grouped as family
from labkit.kernels import grouped_linear
from labkit.kernels.grouped import backward_plan, forward_plan, power, spread

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def launches(monkeypatch):
    return launches_of.recorded(family, KERNELS, monkeypatch)


def is_power(n):
    return n >= 1 and n & (n - 1) == 0


# --- how the work is cut up ---------------------------------------------------------------------------


def duration(tiles, columns, places, lead, per):
    """Until the last program ends, in tiles: each begins, in order, where the first place is free."""
    free = [0] * places
    for start in range(0, tiles, per):
        for _ in range(columns):
            heapq.heapreplace(free, free[0] + lead + min(per, tiles - start))
    return max(free)


@pytest.mark.parametrize("lead", [2, 7])
def test_no_other_number_of_tiles_a_program_ends_sooner(lead):
    for tiles, columns, places in itertools.product((1, 2, 7, 64, 333), (1, 13, 100), (1, 4, 264)):
        per = spread(tiles, columns, places, lead)
        parts = math.ceil(tiles / per)
        assert 1 <= per <= tiles and (parts - 1) * per < tiles <= parts * per, "no program without a tile"
        assert parts <= 256, "what the gradients' parts take, and the second kernel adds"
        least = math.ceil(tiles / 256)
        others = range(least, min(tiles, least + 512) + 1)
        soonest = min(duration(tiles, columns, places, lead, other) for other in others)
        assert duration(tiles, columns, places, lead, per) == soonest, (tiles, columns, places)
    assert math.ceil(10**6 / spread(10**6, 3, 264, lead)) <= 256


def test_parts_of_two_lengths_fill_the_places():
    """Groups of 100 on an H200: two parts of 26 tiles and one of 12."""
    assert spread(64, 100, 2 * 132, 2) == 26


RANGE = (1, 5, 16, 17, 20, 32, 33, 50, 64, 65, 100, 128, 129, 200, 256, 257, 512)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_a_plan_is_one_that_the_compiler_takes(target, itemsize):
    one = gpu(target)
    for d_in, d_out, tma in itertools.product(RANGE, RANGE, (True, False)):
        forward, backward = (
            forward_plan(d_in, d_out, itemsize, tma, one),
            backward_plan(d_in, d_out, itemsize, one),
        )
        for plan in filter(None, (forward, backward)):
            case = (d_in, d_out, tma, plan)
            assert all(is_power(n) for n in (plan.pack, plan.rows, plan.cols, plan.warps)), case
            assert plan.rows >= 16 and plan.cols >= 16 and plan.stages >= 1 and plan.resident >= 1, case
        BK, BN = (min(power(backward.pack * d), backward.cols) for d in (d_in, d_out))
        if backward.pack > 1:  # all of the gradient, or the reshape would not be one
            assert {d_in, d_out} <= {16, 32}, case
            assert (backward.pack * d_in, backward.pack * d_out) == (BK, BN), case
        assert BK * BN <= 2**14 and BK * BN // backward.warps <= 2**12, (case, "the sum stays in registers")
        assert backward.tiles == 0, (case, "a fixed number would take memory without end for the parts")
        if forward is None:
            assert max(d_in, d_out) > 64
            continue
        assert tma or not forward.tma, case
        BK = power(forward.pack * d_in)
        if forward.pack > 1:
            assert {d_in, d_out} <= {16, 32} and forward.cols == forward.pack * d_out, case
        assert not forward.tma or forward.pack == 1 or is_power(d_in), case
        assert max(forward.rows, BK, forward.cols) <= 256, (case, "sides of a descriptor's tile")
        held = (BK * forward.cols + forward.stages * forward.rows * BK * forward.tma) * itemsize
        assert held <= ROOM[target] * 1024, case


def walks(made, groups):
    """The tiles of each program of one piece of the columns, and that the grid is whole pieces."""
    pieces = math.ceil(groups / made.PACK) * math.ceil(made.PACK * made.D_OUT / made.BN)
    hop, step = (made.per, 1) if made.title == "backward_kernel" else (made.hop, made.step)
    tiles = made.B * math.ceil(made.T / made.BM)
    if made.title == "backward_kernel":
        pieces *= math.ceil(made.PACK * made.D_IN / made.BK)
        assert made.BM % made.KEEP == 0 and is_power(made.KEEP)
        assert made.parts.shape[0] * pieces == made.grid[0]
    parts, rest = divmod(made.grid[0], pieces)
    assert rest == 0
    return [range(p * hop, min(p * hop + made.per * step, tiles), step) for p in range(parts)], tiles


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_the_grid_covers_every_tile_and_no_program_is_empty(monkeypatch, launches, target, columns):
    pretend(monkeypatch, gpu(target))
    sizes = ((16, 16), (32, 32), (20, 50), (64, 64), (100, 100), (256, 256), (300, 20))
    for (d_in, d_out), groups, rows in itertools.product(sizes, (1, 5, 16), (8, 4104, 40000)):
        launches.clear()
        launch_both_ways(bf16, groups, d_in, d_out, rows, columns)
        assert [made.title for made in launches][1:3] == ["backward_kernel", "sum_kernel"]
        for made in launches:
            if made.title == "sum_kernel":
                assert is_power(made.PARTS) and made.P <= made.PARTS < 2 * made.P and made.P <= 256
                assert made.grid[0] * made.BLOCK >= made.size > (made.grid[0] - 1) * made.BLOCK
            elif made.title in ("once_kernel", "wide_kernel"):
                tiles = made.arguments.get("B", 1) * math.ceil(made.T / made.BM)
                slices = math.ceil(made.D_OUT / made.BN) if made.title == "wide_kernel" else 1
                assert made.grid == (tiles * groups * slices,)
            else:
                programs, tiles = walks(made, groups)
                assert all(programs) and sorted(itertools.chain(*programs)) == list(range(tiles))
                assert made.FLAT is (made.B == 1)
                assert made.FLAT or not (made.TMA or made.STORE), "descriptors hold rows of one level"


def test_the_sizes_that_are_tried_take_every_path(monkeypatch, launches):
    """A change of the conditions could leave them all on one path, and nothing would tell."""
    pretend(monkeypatch, gpu("sm_90", multiprocessors=1))
    for groups, d_in, d_out, rows in SIZES:
        launch_both_ways(bf16, groups, d_in, d_out, rows)
    forwards, backwards = (
        [made for made in launches if made.title == f"{way}_kernel"] for way in ("forward", "backward")
    )
    assert {made.PACK > 1 for made in forwards} == {made.PACK > 1 for made in backwards} == {True, False}
    assert {(made.TMA, made.STORE) for made in forwards} >= set(itertools.product((True, False), repeat=2))
    assert {(made.TMA, made.STORE) for made in backwards} == {(True, True), (False, True), (False, False)}
    assert {made.D_IN == made.BK for made in forwards if made.TMA} == {True, False}
    assert {made.dx is None for made in backwards} == {True, False}
    assert any(made.step > 1 and made.per > 1 for made in forwards), "tiles that lie far apart"
    assert any(made.step == 1 and made.per > 1 for made in forwards), "one after the other"
    assert any(made.per > 1 for made in backwards)
    assert any(made.parts.shape[0] > 1 for made in backwards)
    assert {made.w_tiles is None for made in forwards if made.TMA} == {True, False}
    assert "once_kernel" in {made.title for made in launches}
    assert not any(made.LARGE for made in forwards + backwards)


def test_no_width_is_cut_off_by_the_shift(monkeypatch, launches):
    taken = set()
    for target, dtype in itertools.product(("sm_90", "sm_120"), (bf16, fp32)):
        pretend(monkeypatch, gpu(target))
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
    pretend(monkeypatch, gpu("sm_90"))
    like = dict(dtype=bf16, device=device.name())
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
    taken = dict(zip(views, [made.title == "once_kernel" or made.TMA for made in launches], strict=True))
    assert {view for view, tma in taken.items() if tma} == {"aligned", "wider rows"}
    pretend(monkeypatch, gpu("sm_80"))
    grouped_linear(views["aligned"], weight)
    assert not launches[-1].TMA


# --- what the compiler makes of it --------------------------------------------------------------------

CASES = {
    "sm_80": [(bf16, 64, 64, False), (fp32, 100, 100, False)],
    "sm_86": [(fp16, 100, 100, False), (bf16, 300, 300, False)],
    "sm_89": [(bf16, 16, 16, False)],
    "sm_90": [
        *((bf16, d, d, False) for d in (16, 32, 64, 100, 128, 256)),
        (bf16, 64, 64, True),
        (fp32, 64, 64, False),
    ],
    "sm_100": [(bf16, 64, 64, False), (bf16, 100, 100, False)],
    "sm_120": [(bf16, 64, 64, True), (fp32, 128, 128, False)],
}
"""By target: dtype, widths in and out, whether the data is (B, C, T)."""
UNITS = {"sm_90": "wgmma", "sm_100": "tcgen05"}


class Variant(NamedTuple):
    """A kernel compiled as one launch would have it."""

    launch: launches_of.Launch
    target: str
    dtype: torch.dtype
    widths: tuple[int, int]
    columns: bool
    compiled: codegen.Compiled

    def __repr__(self):
        layout = "columns" if self.columns else "rows"
        return f"{self.launch.title} {self.target} {self.dtype} {self.widths} {layout}"


@pytest.fixture(scope="module")
def variants(cache):
    """The cases above, compiled; two processes, because each does one kernel at a time."""
    asked = {}
    for target, cases in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            made = launches_of.recorded(family, KERNELS, patch)
            pretend(patch, gpu(target))
            for dtype, d_in, d_out, columns in cases:
                made.clear()
                launch_both_ways(dtype, 16, d_in, d_out, 4096, columns)
                for launch in made:
                    request = codegen.request(
                        launch.kernel, launch.arguments, target=target, **launch.options
                    )
                    asked.setdefault(request.key, (launch, target, dtype, (d_in, d_out), columns, request))
    requests = [request for *_, request in asked.values()]
    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(codegen.compile_many, (requests[::2], requests[1::2])))
    ordered = [one for pair in itertools.zip_longest(*halves) for one in pair if one is not None]
    return [Variant(*rest, one) for (*rest, _), one in zip(asked.values(), ordered, strict=True)]


TUNED = Version(triton.__version__) < Version("3.8")
"""The tiles were chosen with Triton 3.6 and 3.7: a later compiler may spill some bytes until they are tuned
for it."""


def products_of(variants):
    return [v for v in variants if v.launch.title != "sum_kernel"]


def test_every_kernel_compiles_for_every_family_of_targets_and_fits(variants):
    seen = {(v.launch.title, v.target) for v in variants}
    always = ("forward_kernel", "backward_kernel", "sum_kernel")
    assert seen >= {*itertools.product(always, FAMILIES), ("wide_kernel", "sm_86")}
    for v in variants:
        # of three products in float32, for one
        allowed = 1024 if v.dtype is fp32 else 64 if v.launch.title == "wide_kernel" else 0
        if TUNED:
            assert v.compiled.spills <= allowed, (v, v.compiled.spills)
        assert v.compiled.shared_bytes <= ROOM[v.target] * 1024, (v, v.compiled.shared_bytes)


def test_products_use_the_matrix_unit(variants):
    for v in products_of(variants):
        unit, narrow = UNITS.get(v.target, "mma"), min(v.widths) < 64
        assert v.compiled.matrix and set(v.compiled.matrix) <= {unit, "mma"}, (v, v.compiled.matrix)
        assert narrow or v.dtype is fp32 or set(v.compiled.matrix) == {unit}, (v, v.compiled.matrix)


def test_float32_products_are_made_of_three_of_tf32(variants):
    """One alone has an error of 1e-3; plain fp32 would not use the matrix unit at all."""
    made = [v for v in products_of(variants) if v.dtype is fp32]
    assert {v.launch.title for v in made} == {"forward_kernel", "wide_kernel", "backward_kernel"}
    for v in made:
        assert "inputPrecision = tf32x3" in v.compiled.ttir, v
        assert "inputPrecision = tf32," not in v.compiled.ttir and "tf32" in v.compiled.ptx, v


def test_aligned_tiles_are_copied_whole_or_in_128_bits(variants):
    """x and y forward; x, dy and dx backward; the widths that are powers of two, in rows and columns."""
    for v in products_of(variants):
        if not all(is_power(width) for width in v.widths):
            continue
        back, c = v.launch.title == "backward_kernel", v.compiled
        if v.launch.title == "once_kernel":
            assert c.bulk_loads == 1 and not c.async_copies and max(c.loads) == 128, v
            assert c.bulk_stores == 1, v
            continue
        if v.launch.options.get("TMA"):
            assert c.bulk_loads >= 1 + back and not c.async_copies, v
        elif back or v.launch.title == "wide_kernel":
            assert set(c.async_copies or c.loads) == {128}, v
            assert c.loads[128] >= 2, v
        else:
            assert c.loads[128] >= 2, v
        assert c.bulk_stores >= 1 if v.launch.options.get("STORE") else max(c.stores) == 128, v


def test_as_many_programs_fit_an_h200_as_the_plan_says(variants):
    for v in variants:
        if (v.target, v.dtype, v.columns) != ("sm_90", bf16, False):
            continue
        if v.launch.title not in ("forward_kernel", "backward_kernel"):
            continue
        back = v.launch.title == "backward_kernel"
        one = (*v.widths, 2) if back else (*v.widths, 2, v.launch.TMA)
        plan = (backward_plan if back else forward_plan)(*one, gpu("sm_90"))
        assert plan.warps == v.compiled.num_warps, v
        if plan.tiles or v.widths[0] > 128:
            continue  # the number decides nothing there
        # one KiB for each block is the system's own, registers come in units of 8
        registers = math.ceil(v.compiled.registers / 8) * 8 * 32 * v.compiled.num_warps
        assert plan.resident * (v.compiled.shared_bytes + 1024) <= (ROOM[v.target] + 1) * 1024, v
        assert plan.resident * registers <= 65536, v


def test_the_weight_of_one_tile_is_on_its_way_until_the_tile_has_come(variants):
    """The compiler stores it in shared memory where it is defined last: after the wait for x, not before."""
    made = [v for v in variants if v.launch.title == "once_kernel"]
    assert made
    for v in made:
        marks = ("tt.load", "async_tma_copy_global_to_local", "ttng.wait_barrier", r"ttg.local_alloc %\S+ : ")
        places = [re.search(mark, v.compiled.ttgir).start() for mark in marks]
        assert places == sorted(places), v


def test_sums_are_added_in_a_fixed_order(variants):
    for v in variants:
        assert not re.search(r"\b(atom|red)\.", v.compiled.ptx), v


def test_no_product_reads_a_tile_that_the_next_may_overwrite(variants):
    """The wait that ends a turn of the backward's loop is for all products, that of dW among them."""
    seen = 0
    for v in variants:
        if v.launch.title != "backward_kernel" or v.launch.dx is None or v.target != "sm_90":
            continue
        steps = re.findall(
            r"scf\.for|scf\.yield|ttng\.warp_group_dot(?:_wait[^{]*\{pendings = \d+)?", v.compiled.ttgir
        )
        turn = steps[steps.index("scf.for") : steps.index("scf.yield")]
        if any("warp_group_dot" in step for step in turn):
            assert turn[-1].endswith("pendings = 0"), (v, turn)
            seen += 1
    assert seen >= 3
