"""What the compiler makes of the kernels of labkit.kernels.linear and mlp, for GPUs that are not here."""

import itertools
import re
from unittest import mock

import operators as op
import pytest
import triton
from launches import FAMILIES
from operators import bf16, fp16, fp32, limits_of
from packaging.version import Version
from products import KERNELS, launch_all

from labkit.kernels import linear

WIDE, DEEP, FEW, ODD = (8192, 4096, 1024), (8192, 4096, 8192), (64, 512, 2048), (4096, 1001, 99)
"""(rows, hidden, width): large tiles; where K is large; few; rows not aligned."""
CASES = {
    "sm_80": [(bf16, WIDE, True)],
    "sm_86": [(fp16, WIDE, True)],
    "sm_90": [
        *((bf16, sizes, training) for sizes, training in ((WIDE, True), (FEW, False), (DEEP, False))),
        *((dtype, sizes, True) for dtype, sizes in ((bf16, ODD), (fp32, WIDE))),
    ],
    "sm_100": [(bf16, WIDE, True)],
    "sm_120": [(bf16, WIDE, True), (fp32, FEW, False)],
}
"""By target: dtype, sizes, whether a backward follows, which also keeps what it needs."""
PRODUCTS = ("linear_kernel", "gate_up_kernel")
FULL = {
    "linear_kernel": ("x", "weight", "y"),
    "pad_kernel": ("x", "weight", "padded"),
    "gate_up_kernel": ("x", "weight", "hidden", "kept_gate", "kept_up"),
    "gated_kernel": ("kept", "hidden"),
    "gate_up_grad_kernel": ("dhidden", "kept", "dkept"),
}
"""Pointers to tensors that may have 2**31 elements and more."""


def aligned(v):
    return v.case[1] != ODD


def tile_of(launch):
    return launch.BM, launch.BN, launch.BK, launch.num_warps, launch.num_stages


@pytest.fixture(scope="module")
def variants(cache):
    return op.variants_of(KERNELS, CASES, launch_all)


@pytest.fixture
def products(variants):
    return [v for v in variants if v.title in PRODUCTS]


OLDEST = Version(triton.__version__) < Version("3.7")
"""With Triton 3.6 some products spill some registers on an RTX 50, for which nothing was tuned with it."""


def test_everything_compiles_without_spills_and_fits(variants):
    seen = {(v.title, v.target) for v in variants}
    assert seen >= set(itertools.product(PRODUCTS, FAMILIES)) and {t for t, _ in seen} == set(FULL)
    for v in variants:
        op.assert_fits([v], None if OLDEST and v.target == "sm_120" else 0)


def test_the_cases_reach_the_tiles_they_are_meant_for(products):
    """And as many programs fit a multiprocessor as the tile says."""
    tables = {"sm_80": linear.TILES_160_KIB, "sm_90": linear.TILES_200_KIB, "sm_100": linear.TILES_200_KIB}
    for v in products:
        dtype, (M, H, _), _ = v.case
        table = linear.TILES_FP32 if dtype is fp32 else tables.get(v.target, linear.TILES_SMALL)
        assert tile_of(v.launch) in [choice[:5] for choice in table], v
        assert v.launch.TMA is (v.target in ("sm_90", "sm_100", "sm_120")), v
        assert v.launch.STORE is (v.launch.TMA and aligned(v)), v
        pair = v.title == "gate_up_kernel"
        store, limits = v.launch.STORE or not v.launch.TMA, limits_of(v.target)
        tile = linear.choose_tile(M, 2 * H if pair else H, dtype.itemsize, store, limits)
        assert tile[:5] == tile_of(v.launch), v
        assert op.registers_fit(tile.programs, v.code, v.target), v
    seen = {tile_of(v.launch) for v in products if v.target == "sm_90" and v.case[0] is bf16}
    assert len(seen) >= 3


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90"])
def test_every_tile_of_a_table_compiles_without_spills_and_fits(target):
    """Also those that no case above reaches."""
    tables = {"sm_80": linear.TILES_160_KIB, "sm_90": linear.TILES_200_KIB}
    cases = [(tile,) for tile in tables.get(target, linear.TILES_SMALL)]

    def launch(tile):
        with mock.patch.object(linear, "choose_tile", lambda *_: tile):
            launch_all(bf16, (4096, 4096, 4096), False)

    for v in op.variants_of(KERNELS, {target: cases}, launch):
        op.assert_fits([v], 0 if target == "sm_90" else 64)
        assert op.registers_fit(v.case[0].programs, v.code, target), v


def test_products_use_the_matrix_unit_and_float32_three_products_of_tf32(products):
    """One of tf32 alone has an error of 1e-3; plain fp32 would not use the matrix unit at all."""
    for v in products:
        unit = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(v.target, "mma")
        assert v.code.matrix and set(v.code.matrix) <= {unit}, v
        if v.case[0] is fp32:
            assert "inputPrecision = tf32x3" in v.code.ttir and "tf32" in v.code.ptx, v
    assert {v.case[0] for v in products} == {bf16, fp16, fp32}


def test_aligned_tiles_are_copied_whole_or_in_128_bits(products):
    for v in products:
        if aligned(v) and v.launch.TMA:
            assert v.code.bulk_loads >= 4, v  # x and weight, ahead of the loop and in it
            gated, training = v.title == "gate_up_kernel", v.case[2]
            stored = (3 if training else 1) if gated else 2  # a tile of matmul is stored in two halves
            assert v.code.bulk_stores >= stored and not v.code.async_copies, v
            assert not v.code.loads, v
        elif aligned(v):
            assert set(v.code.async_copies) == {128} and v.code.async_copies[128] >= 4, v
            assert max(v.code.stores) == 128, v


def test_pointwise_kernels_move_128_bits_at_a_time_and_compute_in_float32(variants):
    pointwise = [v for v in variants if v.title not in PRODUCTS]
    op.assert_float32(pointwise)
    for v in pointwise:
        if not aligned(v) or v.launch.options.get("BLOCK", 1024) < 1024:
            continue  # fewer elements than 16 bytes for each thread
        assert set(v.code.loads) == {128} and v.code.loads[128] >= 2, v  # two tensors come in at least
        assert set(v.code.stores) == {128}, v
        assert v.code.stores[128] >= (3 if v.title == "gate_up_grad_kernel" else 1), v


def test_elements_beyond_two_to_the_31_are_addressed_in_64_bits(variants):
    checked = set()
    for v in variants:
        if v.case[2] and not v.launch.options.get("TMA"):  # whose coordinates are rows and columns
            found = [one for one in op.offsets(v.code.ttir) if one[0] in FULL[v.title]]
            assert set(found) == {(name, "i64") for name in FULL[v.title]}, (v, found)
            checked.add(v.title)
            if v.title == "pad_kernel":  # x and the weight together may have 2**31 rows
                assert len(re.findall(r"arith.muli %\S+, \S+ : i32", v.code.ttir)) == 1, "columns' blocks"
    assert checked == set(FULL)


def test_no_size_is_added_to_before_tiles_are_counted(variants):
    """As tl.cdiv does: the sum may exceed 32 bits where 2**31 - 1 rows do not."""
    for v in variants:
        assert not re.findall(r"arith\.addi %[MNH], %c\d+_i32", v.code.ttir), v


def test_a_weight_of_gate_and_up_is_numbered_in_64_bits(variants):
    """Its 2 H rows may be more than 32 bits count, where it goes by pointers."""
    seen = [v for v in variants if v.title == "gate_up_kernel" and not v.launch.TMA]
    assert seen
    for v in seen:
        assert not re.findall(r"arith\.muli .*: tensor<2x1x1xi32>", v.code.ttir), v
        assert not re.findall(r"arith\.muli %H, %c2_i32", v.code.ttir), v
