"""Lesson 3: its taught products, and its execution. The finished ones are tried in kernels/."""

from functools import partial

import pytest
import torch
from counting import calls_checked
from taught import INTERPRETED, assert_no_backward, bf16, counted, drawn, examine, meta
from torch.nn import functional

from labkit.lessons import notebooks
from labkit.measure import correctness
from labkit.profiling import codegen
from labkit.workloads.mlp import gate_up, linear_gelu

pytestmark = pytest.mark.usefixtures("cache")
NAME = "old/03_matrix_product"


def matrices(shape, out=50):
    return torch.randn(shape), torch.randn(out, shape[-1]) * max(1, shape[-1]) ** -0.5


def layer(shape):
    return *matrices(shape), torch.randn(50)


def pair(shape, hidden=40):
    return torch.randn(shape), torch.randn(2, hidden, shape[-1]) * max(1, shape[-1]) ** -0.5


PRODUCTS = {
    "tiled": dict(BM=32, BN=16, BK=16, GROUP=3),
    "product": {},
    "described": {},
    "staying": dict(stay=1),
    "two stay": dict(stay=2, warps=4),
}


def product(lesson, name):
    """One of the ways to the same product."""
    return partial(getattr(lesson, name, lesson.described), **PRODUCTS[name])


SHAPES = ((64, 128), (37, 33), (150, 20), (1, 1), (0, 8), (4, 0))
"""Full, ragged in K too, several tiles, one element, without rows, without a sum."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_taught_product_is_right_whatever_the_size_and_layout(lesson, name):
    call = product(lesson, name)
    correctness.check(call, functional.linear, matrices, shapes=SHAPES, gradients=False, name=name)


def test_the_outer_product_the_epilogue_and_half_the_mlp_are_right(lesson):
    correctness.check(lesson.linear_gelu, linear_gelu, layer, shapes=SHAPES, gradients=False)
    correctness.check(lesson.gate_up, gate_up, pair, shapes=SHAPES, gradients=False)

    def vectors(shape):
        return torch.randn(shape[0]), torch.randn(shape[1])

    shapes = ((70, 130), (1, 1), (0, 8), (4, 0))
    examine(lesson.outer, torch.outer, vectors, *shapes, layouts=("contiguous", "strided"))


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("sizes", [(1, 1), (5, 3), (3, 8), (9, 7)])
def test_each_tile_has_one_place_and_groups_go_column_by_column(lesson, group, sizes):
    rows, cols = sizes
    place = lesson.tile_place.fn
    places = [place(number, rows, cols, group) for number in range(rows * cols)]
    assert sorted(places) == [(m, n) for m in range(rows) for n in range(cols)]
    height = min(group, rows)
    assert places[: height * cols] == [(m, n) for n in range(cols) for m in range(height)]


@INTERPRETED
@pytest.mark.parametrize("name", ["product", "described", "staying"])
def test_a_product_stores_each_element_once(lesson, name):
    *_, made = counted(product(lesson, name), *drawn(matrices, 70, 64))
    assert made.bytes_written == 4 * 70 * 50


@INTERPRETED
def test_what_is_not_aligned_is_filled_up_and_what_is_stays_where_it_is(lesson):
    weight = torch.randn(6, 40)
    assert lesson.descriptors(weight, weight)[0].base.data_ptr() == weight.data_ptr()
    for odd in (torch.randn(6, 37), torch.randn(241)[1:].view(6, 40), torch.empty(6, 0)):
        for found in lesson.descriptors(odd, odd):
            width = found.base.shape[1]
            assert width % 8 == 0 and width >= 8 and found.base.stride() == (width, 1)
            assert torch.equal(found.base[:, : odd.shape[1]], odd)
            assert not found.base[:, odd.shape[1] :].any()


@INTERPRETED
@pytest.mark.parametrize("choice", range(4))
def test_a_choice_of_the_autotuner_is_right(lesson, choice):
    """The lesson's cell, whose autotuner finds the one choice only that is left to it."""
    (cell,) = [
        cell["source"]
        for cell in notebooks.read_json(notebooks.resolve(NAME))["cells"]
        if "triton.autotune(" in "".join(cell["source"]) and cell["cell_type"] == "code"
    ]
    names = dict(vars(lesson))
    exec("".join(cell).replace("(choices,", f"(choices[{choice} : {choice + 1}],"), names)
    call = partial(lesson.tiled, kernel=names["tuned_kernel"])
    correctness.check(call, functional.linear, matrices, shapes=SHAPES[:4], gradients=False)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        *((name, matrices) for name in ("product", "tiled", "described")),
        ("linear_gelu", layer),
        ("gate_up", pair),
    ],
)
def test_a_taught_kernel_that_has_no_backward_says_so(lesson, name, inputs):
    call = product(lesson, name) if name == "tiled" else getattr(lesson, name)
    assert_no_backward(name, call, drawn(inputs, 3, 8))


SIZES = dict(M=4096, N=4096, K=4096)
TARGETS = ("sm_80", "sm_86", "sm_90", "sm_120")


@pytest.fixture(scope="module")
def compiled(lesson):
    """The tiled kernels in bfloat16, as they are launched, for the GPUs that they suit."""
    matrix = meta(4096, 4096, dtype=bf16)
    described = dict(zip(("x", "weight"), lesson.descriptors(matrix, matrix), strict=True))
    described |= {"y": "*bf16:16"}
    ask = partial(codegen.request, num_stages=3, BM=128, BN=128, BK=64)
    by_pointers = dict.fromkeys(("x", "w", "y"), "*bf16:16") | SIZES
    asked = [ask(lesson.tile_kernel, by_pointers, target=each, GROUP=8, num_warps=8) for each in TARGETS]
    for kernel, warps in (("described", 8), ("staying", 8), ("staying", 4)):
        kernel = getattr(lesson, f"{kernel}_kernel")
        asked.append(ask(kernel, described | SIZES, target="sm_90", num_warps=warps))
    return codegen.compile_many(asked)


# --- the lesson as a whole ----------------------------------------------------------------------------


def test_it_runs_to_its_end_in_silence_and_checks_its_kernels(checks_passed):
    assert set(checks_passed) == {"tiled", "described", "staying", "gate_up"}
    assert all(passed >= calls_checked((37, 33)) for passed in checks_passed.values())
