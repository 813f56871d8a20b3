"""Lesson 4: every way to many Linears, its taught kernels, solved, and its execution."""

import math
from functools import partial

import operators as op
import pytest
import torch
from counting import calls_checked
from taught import INTERPRETED, assert_no_backward, bf16, counted, drawn, examine

from labkit import gpu
from labkit.exercises import judge
from labkit.measure import correctness
from labkit.workloads import grouped as work

pytestmark = pytest.mark.usefixtures("cache")
NAME = "old/04_grouped_matmul"
SHAPES = ((70, 5, 20), (64, 3, 16), (1, 1, 1), (5, 2, 33), (0, 2, 8))


def groups(shape):
    R, G, D = shape
    return torch.randn(R, G * D), torch.randn(G, D, D) * D**-0.5, torch.randn(G, D)


# ---- the ways of PyTorch ---------------------------------------------------------------------------------


ROWS = {
    **dict.fromkeys(("loop", "scripted", "streamed", "vmapped"), work.GROUPED_LINEARS),
    **dict.fromkeys(("conv_ones", "conv_rows"), work.GROUPED_CONV),
    **dict.fromkeys(("bmm", "einsum", "grouped_mm"), work.GROUPED),
}
TIME = ("conv_time", "combined", "vmapped_time")


def alike(call, layer, shape):
    """The result and the gradients of a call are those of the reference."""
    torch.manual_seed(0)
    inputs = [each.requires_grad_() for each in layer.inputs(shape)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    y, want = call(*inputs), layer.reference(*exact)
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(y, inputs, 2 * y.detach())
    for mine, right in zip(found, torch.autograd.grad(want, exact, 2 * want.detach()), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("name", ROWS)
def test_each_way_by_rows_is_right_forward_and_backward(lesson, name):
    if name == "streamed" and not gpu.available():
        pytest.skip("streams need a GPU")
    alike(getattr(lesson, name), ROWS[name], {"batch": 37, "groups": 3, "width": 8})


@pytest.mark.parametrize("name", TIME)
def test_each_way_over_time_and_its_block_are_right_forward_and_backward(lesson, name):
    shape = {"batch": 32, "groups": 3, "width": 8, "time": 16}
    alike(getattr(lesson, name), work.CHANNELS, shape)
    alike(work.block(getattr(lesson, name)), work.BLOCK, shape)


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("name", ["padded", "in_groups"])
@pytest.mark.parametrize("rows", [37, 3])
def test_experts_of_any_size_are_those_of_the_loop(lesson, name, skewed, rows):
    """With 3 rows most experts have none."""
    x, weight = (t.to(gpu.device(), bf16) for t in (torch.randn(rows, 16), torch.randn(5, 16, 16)))
    want = lesson.by_loop(x.double(), weight.double(), skewed)
    assert not correctness.diagnose(
        getattr(lesson, name)(x, weight, skewed), want, correctness.TOLERANCE[bf16]
    )
    sizes, ends, places = lesson.routed(rows, 5, skewed)
    assert sum(sizes) == rows == ends[-1] == len(places.unique())


# ---- the taught kernels ----------------------------------------------------------------------------------


def kernels(lesson):
    return {
        "grouped": lesson.grouped,
        "one tile each": partial(lesson.stays, per=1),
        "two tiles each": partial(lesson.stays, per=2),
        "stays": lesson.stays,
        "packed": lesson.packed,
    }


@pytest.mark.parametrize("name", ["grouped", "one tile each", "two tiles each", "stays"])
def test_a_taught_kernel_is_right_on_any_size(lesson, name):
    contiguous = dict(layouts=("contiguous",), dtypes=tuple(correctness.DTYPES))
    examine(kernels(lesson)[name], work.grouped_reference, groups, *SHAPES, (200, 2, 8), **contiguous)


def test_packed_groups_are_right_where_they_fill_64_columns(lesson):
    shapes = ((70, 5, 16), (64, 3, 32), (1, 1, 1), (5, 2, 64), (3, 40, 4), (0, 4, 16))
    contiguous = dict(layouts=("contiguous",), dtypes=tuple(correctness.DTYPES))
    examine(lesson.packed, work.grouped_reference, groups, *shapes, **contiguous)
    with pytest.raises(ValueError, match="weight: groups of 20"):
        lesson.packed(*groups((3, 2, 20)))


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter multiplies them
def test_a_neighbour_that_is_not_finite_stays_outside(lesson):
    x, weight, bias = groups((70, 3, 20))
    x[:, 20:40], weight[1] = math.nan, math.inf
    for name in ("grouped", "two tiles each"):
        y = kernels(lesson)[name](x, weight, bias).view(70, 3, 20)
        assert y[:, ::2].isfinite().all()


@pytest.mark.parametrize("name", ["grouped", "stays", "packed"])
def test_a_taught_kernel_that_has_no_backward_says_so(lesson, name):
    assert_no_backward(name, getattr(lesson, name), drawn(groups, 3, 2, 16))


@INTERPRETED
@pytest.mark.parametrize("name", ["grouped", "one tile each", "two tiles each", "packed"])
def test_x_and_y_cross_memory_once_and_a_weight_once_for_each_program(lesson, name):
    x, weight, bias = drawn(groups, 330, 5, 16)
    (made,) = counted(kernels(lesson)[name], x, weight, bias)
    parts = 3 if name == "two tiles each" else 6
    assert made.programs == parts * (2 if name == "packed" else 5)
    assert made.bytes_read == 4 * (x.numel() + parts * (weight.numel() + bias.numel()))
    assert made.bytes_written == 4 * x.numel()


def test_what_races_beside_the_cures_is_right_and_staying_is_raced_with_as_many_warps(monkeypatch):
    tensors = groups((130, 3, 20))
    for name in ("stays", "packed"):
        for call in judge.find(NAME)[name].race.rivals.values():
            torch.testing.assert_close(call(*tensors), work.grouped_reference(*tensors), rtol=1e-4, atol=1e-4)
    solved = judge.solutions(NAME)
    made = op.recorded(monkeypatch, {solved: ("grouped_kernel", "stays_kernel")})
    wide = groups((64, 3, 128))
    judge.find(NAME)["stays"].race.rivals["one tile, 8 warps"](*wide)
    solved.stays(*wide)
    single, stays = made
    assert single.num_warps == stays.num_warps == 8 and (single.BM, single.BD) == (stays.BM, stays.BD)


WIDEST = {96: 128, 100: 64, 102: 32, 104: 128, 112: 128, 128: 128}
"""Bits of the widest load, by the width of a group in bf16."""


# ---- the lesson as a whole -------------------------------------------------------------------------------


def test_it_runs_to_its_end_in_silence_and_checks_its_kernels(checks_passed):
    assert set(checks_passed) == {"peak"}
    assert all(passed >= calls_checked((7, 100)) for passed in checks_passed.values())
