"""What the compiler makes of the kernels of labkit.kernels.linear and geglu, for GPUs that are not here."""

import itertools
import math
import re
from typing import NamedTuple

import pytest
import torch
from launches import ROOM, Launch
from products import bf16, fp16, fp32, gpu, requests, tile_of

from labkit import codegen
from labkit.kernels import linear

pytestmark = pytest.mark.usefixtures("cache")
WIDE, DEEP, FEW, ODD = (8192, 4096, 1024), (8192, 4096, 8192), (64, 512, 256), (4096, 1001, 99)
"""(rows, hidden, width): the largest tiles; where K is large; small ones; rows that are not aligned."""
CASES = {
    "sm_80": [(bf16, WIDE, True), (fp32, FEW, False)],
    "sm_86": [(fp16, WIDE, True)],
    "sm_89": [(bf16, FEW, False)],
    "sm_90": [
        *((bf16, sizes, training) for sizes, training in ((WIDE, True), (FEW, True), (DEEP, False))),
        *((dtype, sizes, True) for dtype, sizes in ((bf16, ODD), (fp32, WIDE))),
    ],
    "sm_100": [(bf16, WIDE, True), (bf16, DEEP, False)],
    "sm_120": [(bf16, WIDE, True), (fp32, FEW, False)],
}
"""By target: dtype, sizes, whether a backward follows, which also keeps what it needs."""
PRODUCTS = ("linear_kernel", "gate_up_kernel")
FULL = {
    "linear_kernel": ("x", "weight", "y", "kept"),
    "gate_up_kernel": ("x", "weight", "hidden", "kept_gate", "kept_up"),
    "dz_kernel": ("dy", "z", "dz"),
    "gated_kernel": ("dhidden", "kept", "dkept"),
}
"""Pointers to tensors that may have 2**31 elements and more."""


class Variant(NamedTuple):
    """A kernel compiled as one launch would have it."""

    target: str
    dtype: torch.dtype
    sizes: tuple[int, int, int]
    training: bool
    launch: Launch
    compiled: codegen.Compiled

    @property
    def aligned(self):
        return self.sizes != ODD

    def __repr__(self):
        return f"{self.launch.title} {self.target} {self.dtype} {self.sizes} training={self.training}"


@pytest.fixture(scope="module")
def variants(cache):
    asked = list(requests(CASES))
    made = codegen.compile_many([request for *_, request in asked])
    return [Variant(*rest, compiled) for (*rest, _), compiled in zip(asked, made, strict=True)]


@pytest.fixture
def products(variants):
    return [v for v in variants if v.launch.title in PRODUCTS]


@pytest.fixture
def pointwise(variants):
    return [v for v in variants if v.launch.title not in PRODUCTS]


def test_everything_compiles_without_spills_and_fits(variants):
    seen = {(v.launch.title, v.target) for v in variants}
    assert seen >= set(itertools.product(PRODUCTS, codegen.TARGETS)) and {t for t, _ in seen} == set(FULL)
    for v in variants:
        assert v.compiled.spills == 0, v
        assert v.compiled.shared_bytes <= ROOM[v.target] * 1024, (v, v.compiled.shared_bytes)
        assert not re.search(r"\b(atom|red)\.", v.compiled.ptx), f"{v}: sums are added in a fixed order"


def test_the_cases_reach_the_tiles_they_are_meant_for(products):
    tables = {"sm_80": linear.MIDDLE, "sm_90": linear.LARGE, "sm_100": linear.LARGE}
    for v in products:
        table = linear.DEEP if v.sizes == DEEP else tables.get(v.target, linear.SMALL)
        table = linear.ODD if not v.aligned else linear.FP32 if v.dtype is fp32 else table
        assert tile_of(v.launch) in [choice[:5] for choice in table], v
        assert v.launch.TMA is (v.aligned and v.target in ("sm_90", "sm_100", "sm_120")), v
    seen = {tile_of(v.launch) for v in products if v.target == "sm_90" and v.dtype is bf16}
    assert len(seen) >= 4, "the deepest and the largest of the others, a small one, and that of odd sizes"


def test_products_use_the_matrix_unit_and_float32_three_products_of_tf32(products):
    """One of tf32 alone has an error of 1e-3; plain fp32 would not use the matrix unit at all."""
    for v in products:
        unit = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(v.target, "mma")
        assert v.compiled.matrix and set(v.compiled.matrix) <= ({unit} if v.aligned else {unit, "mma"}), v
        if v.dtype is fp32:
            assert "inputPrecision = tf32x3" in v.compiled.ttir and "tf32" in v.compiled.ptx, v
    assert {v.dtype for v in products} == {bf16, fp16, fp32}


def test_aligned_tiles_are_copied_whole_or_in_128_bits(products):
    for v in products:
        if v.aligned and v.launch.TMA:
            assert v.compiled.bulk_loads >= 4, v  # x and weight, ahead of the loop and in it
            gated = v.launch.title == "gate_up_kernel"
            stored = (3 if gated else 4) if v.training else 1 if gated else 2  # a linear tile in two halves
            assert v.compiled.bulk_stores >= stored and not v.compiled.async_copies, v
            assert max(v.compiled.loads, default=0) in (0, 32, 64, 128), v  # the bias
        elif v.aligned:
            assert set(v.compiled.async_copies) == {128} and v.compiled.async_copies[128] >= 4, v
            assert max(v.compiled.stores) == 128, v


def test_as_many_programs_fit_a_multiprocessor_as_the_tile_says(products):
    for v in products:
        M, H, K = v.sizes
        N = 2 * H if v.launch.title == "gate_up_kernel" else H
        *tile, programs = linear.tiling(M, N, K, v.dtype, v.aligned, gpu(v.target))
        assert tuple(tile) == tile_of(v.launch), v
        if v.aligned:  # else there is one tile for all: the number decides nothing
            # one KiB for each block is the system's own, registers come in units of 8
            registers = math.ceil(v.compiled.registers / 8) * 8 * 32 * v.compiled.num_warps
            assert programs * (v.compiled.shared_bytes + 1024) <= (ROOM[v.target] + 1) * 1024, v
            assert programs * registers <= 65536, v


def test_pointwise_kernels_move_128_bits_at_a_time_and_compute_in_float32(pointwise):
    for v in pointwise:
        half = re.findall(r"arith\.\w+f .*xb?f16>", v.compiled.ttir)
        assert not [line for line in half if not re.match(r"arith\.(extf|truncf) ", line)], v
        if not v.aligned or v.launch.options.get("BLOCK", 1024) < 1024:
            continue  # fewer elements than 16 bytes for each thread
        if v.launch.title == "dz_kernel":  # the next tiles of dy and z are on their way
            assert set(v.compiled.async_copies) == {128} and v.compiled.async_copies[128] >= 4, v
        else:
            assert set(v.compiled.loads) == {128} and v.compiled.loads[128] >= 3, v
            assert set(v.compiled.stores) == {128}, v
        assert v.compiled.stores[128] >= (3 if v.launch.title == "gated_kernel" else 1), v


def offsets_of(ttir, parameters):
    """Bits of the first offset that is added to each of the pointers, or to a splat of it."""
    found = {}
    for name in parameters:
        bases = {f"%{name}", *re.findall(rf"(%\w+) = tt\.splat %{name} :", ttir)}
        for base, types in re.findall(r"tt\.addptr (%\w+), %\w+ : (.*)", ttir):
            if base in bases:
                last = re.findall(r"(?:\b|x)i(\d+)\b", types.split(" loc(")[0])[-1]
                found.setdefault(name, set()).add(int(last))
    return found


def test_elements_beyond_two_to_the_31_are_addressed_in_64_bits(variants):
    checked = set()
    for v in variants:
        if v.training and not v.launch.options.get("TMA"):  # whose coordinates are rows and columns
            names = FULL[v.launch.title]
            assert offsets_of(v.compiled.ttir, names) == {name: {64} for name in names}, v
            checked.add(v.launch.title)
    assert checked == set(FULL)
