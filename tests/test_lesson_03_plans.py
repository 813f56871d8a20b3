"""Lesson 3: how the work is cut up, and what the compiler makes of it for GPUs that are not here."""

import heapq
import itertools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import launches as launches_of
import pytest
import torch
from grouped import KERNELS, NAME, bf16, fp16, fp32, launch_both_ways, pretend
from launches import FAMILIES, ROOM

from labkit import codegen, device, lessons

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def lesson(cache):
    return lessons.load(NAME)


@pytest.fixture
def launches(lesson, monkeypatch):
    return launches_of.recorded(lesson, KERNELS, monkeypatch)


# --- how the work is cut up ---------------------------------------------------------------------------


def duration(tiles, columns, places, lead, per):
    """Until the last program ends, in tiles: each begins, in order, where the first place is free."""
    free = [0] * places
    for start in range(0, tiles, per):
        for _ in range(columns):
            heapq.heapreplace(free, free[0] + lead + min(per, tiles - start))
    return max(free)


@pytest.mark.parametrize("lead", [2, 7])
def test_no_other_number_of_tiles_a_program_ends_sooner(lesson, lead):
    for tiles, columns, places in itertools.product((1, 2, 7, 64, 333, 1000), (1, 13, 100), (1, 4, 264, 660)):
        per = lesson.spread(tiles, columns, places, lead)
        parts = math.ceil(tiles / per)
        assert 1 <= per <= tiles and (parts - 1) * per < tiles <= parts * per, "no program without a tile"
        assert parts <= 256, "what the gradients' parts take, and the second kernel adds"
        least = math.ceil(tiles / 256)
        others = range(least, min(tiles, least + 512) + 1)
        soonest = min(duration(tiles, columns, places, lead, other) for other in others)
        assert duration(tiles, columns, places, lead, per) == soonest, (tiles, columns, places)


def test_parts_of_two_lengths_fill_the_places(lesson):
    """Lesson 3's groups of 100: two parts of 26 tiles and one of 12."""
    assert lesson.spread(64, 100, 2 * 132, 2) == 26


def test_few_tiles_have_a_program_each_and_few_places_a_program_for_all(lesson):
    assert lesson.spread(10, 13, 132, 2) == 1
    assert lesson.spread(100, 13, 4, 2) >= 25


RANGE = (1, 5, 16, 17, 20, 32, 33, 50, 64, 65, 100, 128, 129, 200, 256, 257, 512)
GIVEN = list(itertools.product(("sm_80", "sm_86", "sm_90", "sm_120"), (2, 4)))


def is_power(n):
    return n >= 1 and n & (n - 1) == 0


@pytest.mark.parametrize(("target", "itemsize"), GIVEN)
def test_a_forward_plan_is_one_that_the_compiler_takes(lesson, monkeypatch, target, itemsize):
    pretend(lesson, monkeypatch, target)
    for d_in, d_out, tma in itertools.product(RANGE, RANGE, (True, False)):
        plan = lesson.forward_plan(d_in, d_out, itemsize, tma)
        if plan is None:
            assert max(d_in, d_out) > 64
            continue
        case = (d_in, d_out, tma, plan)
        assert all(is_power(n) for n in (plan.pack, plan.rows, plan.cols, plan.warps)), case
        assert plan.rows >= 16 and plan.cols >= 16 and plan.stages >= 1 and plan.resident >= 1, case
        assert tma or not plan.tma, case
        BK = lesson.power(plan.pack * d_in)
        if plan.pack > 1:
            assert {d_in, d_out} <= {16, 32} and plan.cols == plan.pack * d_out, case
        if plan.tma:
            assert plan.pack == 1 or is_power(d_in), case
        assert max(plan.rows, BK, plan.cols) <= 256, (case, "sides of a descriptor's tile")
        held = (BK * plan.cols + plan.stages * plan.rows * BK * plan.tma) * itemsize
        assert held <= ROOM[target] * 1024, case


@pytest.mark.parametrize(("target", "itemsize"), GIVEN)
def test_a_backward_plan_is_one_that_the_compiler_takes(lesson, monkeypatch, target, itemsize):
    pretend(lesson, monkeypatch, target)
    for d_in, d_out in itertools.product(RANGE, RANGE):
        plan = lesson.backward_plan(d_in, d_out, itemsize)
        case = (d_in, d_out, plan)
        assert all(is_power(n) for n in (plan.pack, plan.rows, plan.cols, plan.warps)), case
        assert plan.rows >= 16 and plan.cols >= 16 and plan.stages >= 1 and plan.resident >= 1, case
        BK, BN = (min(lesson.power(plan.pack * d), plan.cols) for d in (d_in, d_out))
        if plan.pack > 1:  # all of the gradient, or the reshape would not be one
            assert {d_in, d_out} <= {16, 32} and (plan.pack * d_in, plan.pack * d_out) == (BK, BN), case
        assert BK * BN <= 128 * 128 and BK * BN // plan.warps <= 2**12, (case, "the sum stays in registers")
        assert plan.tiles == 0, (case, "a fixed number would take memory without end for the parts")


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_the_grid_covers_every_tile_and_no_program_is_empty(lesson, monkeypatch, launches, target, columns):
    pretend(lesson, monkeypatch, target)
    sizes = ((16, 16), (32, 32), (20, 50), (64, 64), (100, 100), (256, 256), (300, 20))
    for (d_in, d_out), groups, rows in itertools.product(sizes, (1, 5, 16), (8, 4104, 40000)):
        launches.clear()
        launch_both_ways(lesson, bf16, groups, d_in, d_out, rows, columns)
        names = [made.title for made in launches]
        assert names[1:3] == ["backward_kernel", "sum_kernel"], names
        for made in launches:
            if made.title == "sum_kernel":
                assert is_power(made.PARTS) and made.P <= made.PARTS < 2 * made.P and made.P <= 256
                assert made.grid[0] * made.BLOCK >= made.size > (made.grid[0] - 1) * made.BLOCK
                continue
            tiles = made.arguments.get("B", 1) * math.ceil(made.T / made.BM)
            if made.title == "once_kernel":
                assert made.grid == (tiles * groups,)
                continue
            if made.title == "wide_kernel":
                assert made.grid == (tiles * groups * math.ceil(made.D_OUT / made.BN),)
                continue
            pieces = math.ceil(groups / made.PACK) * math.ceil(made.PACK * made.D_OUT / made.BN)
            hop, step = made.per, 1
            if made.title == "backward_kernel":
                pieces *= math.ceil(made.PACK * made.D_IN / made.BK)
                assert made.BM % made.KEEP == 0 and is_power(made.KEEP)
                assert made.parts.shape[0] * pieces == made.grid[0]
            if made.title == "forward_kernel":
                hop, step = made.hop, made.step
            parts, rest = divmod(made.grid[0], pieces)
            walks = [range(p * hop, min(p * hop + made.per * step, tiles), step) for p in range(parts)]
            assert rest == 0 and all(walks)
            assert sorted(itertools.chain(*walks)) == list(range(tiles))
            assert made.FLAT is (made.B == 1)
            if made.TMA or made.STORE:
                assert made.FLAT, "descriptors hold rows of one level"


def test_what_is_not_aligned_goes_by_pointers(lesson, monkeypatch, launches):
    pretend(lesson, monkeypatch, "sm_90")
    weight = torch.empty(2, 64, 64, dtype=bf16)
    block = torch.empty(70 * 136 + 1, dtype=bf16)
    views = {
        "aligned": block[: 70 * 128].view(70, 128),
        "wider rows": block[: 70 * 136].view(70, 136)[:, :128],
        "a base in between": block[1 : 70 * 128 + 1].view(70, 128),
        "rows in between": block[: 70 * 130].view(70, 130)[:, :128],
        "columns": block[: 70 * 128].view(128, 70).T,
        "two levels": block[: 70 * 128].view(35, 2, 128).transpose(0, 1),
    }
    for x in views.values():
        lesson.grouped_linear(x, weight)
    taken = dict(zip(views, [made.title == "once_kernel" or made.TMA for made in launches], strict=True))
    assert {view for view, tma in taken.items() if tma} == {"aligned", "wider rows"}
    monkeypatch.setattr(device, "has_tile_copies", lambda: False)
    lesson.grouped_linear(views["aligned"], weight)
    assert not launches[-1].TMA


# --- what the compiler makes of it, for GPUs that are not here ----------------------------------------

CASES = {
    "sm_80": [(bf16, 64, 64, False), (fp32, 100, 100, False)],
    "sm_86": [(fp16, 100, 100, False), (bf16, 128, 128, False), (bf16, 300, 300, False)],
    "sm_90": [
        *((bf16, d, d, False) for d in (16, 32, 64, 100, 128, 256)),
        (bf16, 64, 64, True),
        (bf16, 20, 50, False),
        (fp32, 64, 64, False),
    ],
    "sm_100": [(bf16, 64, 64, False), (bf16, 100, 100, False), (fp32, 16, 16, False)],
    "sm_120": [(bf16, 64, 64, True), (fp32, 128, 128, False)],
}
"""By target: dtype, widths in and out, whether the data is (B, C, T)."""
PRODUCTS = ("once_kernel", "forward_kernel", "wide_kernel", "backward_kernel")
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
def variants(lesson):
    """The cases above, compiled; two processes, because each does one kernel at a time."""
    asked = {}
    for target, cases in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            made = launches_of.recorded(lesson, KERNELS, patch)
            pretend(lesson, patch, target)
            for dtype, d_in, d_out, columns in cases:
                made.clear()
                launch_both_ways(lesson, dtype, 16, d_in, d_out, 4096, columns)
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


def products_of(variants):
    return [v for v in variants if v.launch.title in PRODUCTS]


def spills_allowed(v):
    """Of three products in float32, for one."""
    return 1024 if v.dtype is fp32 else 64 if v.launch.title == "wide_kernel" else 0


def test_every_kernel_compiles_for_every_family_of_targets_and_fits(variants):
    seen = {(v.launch.title, v.target) for v in variants}
    always = ("forward_kernel", "backward_kernel", "sum_kernel")
    assert seen >= {*itertools.product(always, FAMILIES), ("wide_kernel", "sm_86")}
    for v in variants:
        assert v.compiled.spills <= spills_allowed(v), (v, v.compiled.spills)
        assert v.compiled.shared_bytes <= ROOM[v.target] * 1024, (v, v.compiled.shared_bytes)


def test_products_use_the_matrix_unit(variants):
    for v in products_of(variants):
        unit, narrow = UNITS.get(v.target, "mma"), min(v.widths) < 64
        assert v.compiled.matrix and set(v.compiled.matrix) <= {unit, "mma"}, (v, v.compiled.matrix)
        assert narrow or v.dtype is fp32 or set(v.compiled.matrix) == {unit}, (v, v.compiled.matrix)


def test_groups_of_64_use_hoppers_matrix_unit_both_ways(variants):
    made = {
        v.launch.title: v
        for v in products_of(variants)
        if (v.target, *v.widths, v.dtype) == ("sm_90", 64, 64, bf16)
    }
    assert made.keys() == {"once_kernel", "forward_kernel", "backward_kernel"}
    for v in made.values():
        assert set(v.compiled.matrix) == {"wgmma"}, v


def test_float32_products_are_made_of_three_of_tf32(variants):
    """One alone has an error of 1e-3; plain fp32 would not use the matrix unit at all."""
    made = [v for v in products_of(variants) if v.dtype is fp32]
    assert {v.launch.title for v in made} == set(PRODUCTS) - {"once_kernel"}
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


def test_what_starts_at_multiples_of_8_bytes_is_copied_in_64_bits(variants):
    made = [v for v in variants if v.widths == (100, 100) and v.dtype is not fp32]
    assert made
    for v in made:
        if v.launch.title == "backward_kernel":
            assert set(v.compiled.async_copies) == {64}, v
        elif v.launch.title == "forward_kernel":
            assert v.compiled.loads[64] >= 8, (v, "the weight, and x where descriptors do not load it")
            assert max(v.compiled.stores) == 64, v


def test_as_many_programs_fit_an_h200_as_the_plan_says(lesson, variants, monkeypatch):
    pretend(lesson, monkeypatch, "sm_90")
    made = [v for v in variants if v.target == "sm_90" and v.dtype is bf16 and not v.columns]
    for v in made:
        if v.launch.title not in ("forward_kernel", "backward_kernel"):
            continue
        widths = v.launch.D_IN, v.launch.D_OUT
        back = v.launch.title == "backward_kernel"
        plan = lesson.backward_plan(*widths, 2) if back else lesson.forward_plan(*widths, 2, v.launch.TMA)
        assert plan.warps == v.compiled.num_warps, v
        if plan.tiles or v.launch.D_IN != v.launch.D_OUT or v.launch.D_IN > 128:
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


def test_whole_weights_come_by_descriptors(variants):
    made = [v for v in variants if v.launch.title == "forward_kernel" and v.target == "sm_90"]
    for v in made:
        whole = v.widths in ((128, 128), (256, 256), (64, 64)) and not v.columns and v.launch.swo == 1
        assert (v.launch.w_tiles is not None) == whole, v
    assert any(v.launch.w_tiles is not None for v in made)


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
