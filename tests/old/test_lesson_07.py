"""Lesson 7: its taught kernels, solved, its exercise of loads that run ahead, and its execution."""

import math
from functools import partial

import pytest
import torch
from cases import weight_of
from counting import calls_checked
from taught import GPU, INTERPRETED, assert_no_backward, bf16, counted, drawn, examine

from labkit import gpu
from labkit.exercises import judge
from labkit.measure import correctness
from labkit.workloads import recurrent as work

pytestmark = pytest.mark.usefixtures("cache")
NAME = "old/07_recurrent_kernel"
LOOPS = ("recurrence", "one step ahead", "ahead", "tree")


def loops(lesson):
    """All ways to the linear recurrence."""
    return {
        "recurrence": lesson.recurrence,
        "one step ahead": partial(lesson.ahead, steps=1),
        "ahead": lesson.ahead,
        "tree": lesson.tree,
    }


def sequences(shape):
    return torch.sigmoid(1 + torch.randn(shape)), torch.randn(shape)


def normed_sequences(shape):
    return *sequences(shape), weight_of(shape[-1])


CONTIGUOUS = dict(layouts=("contiguous",), dtypes=tuple(correctness.DTYPES))


# ---- the taught kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPS)
def test_every_way_to_the_recurrence_is_right_on_any_size(lesson, name):
    wide = 10 if name == "tree" else 130  # more features than a program has
    shapes = ((2, 3, wide), (1, 1, 1), (1, 19, 20), (0, 3, 8), (2, 0, 8), (1, 130, 9))
    examine(loops(lesson)[name], work.linear_recurrence, sequences, *shapes, **CONTIGUOUS)


def test_sums_and_norms_over_time_are_right_on_any_size(lesson):
    shapes = ((2, 3, 130), (1, 1, 1), (0, 3, 8))
    examine(lesson.over_time, lambda x: x.sum(1), lambda shape: (torch.randn(shape),), *shapes, **CONTIGUOUS)
    for warps in (1, 2):
        call = partial(lesson.normed, warps=warps)
        examine(call, work.rms_recurrence, normed_sequences, *shapes, (2, 5, 600), **CONTIGUOUS)


def test_the_layer_of_both_exercises_has_the_gradients_of_the_recurrence(lesson):
    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            h = lesson.ahead(a, b)
            ctx.save_for_backward(a, h)
            return h

        @staticmethod
        def backward(ctx, dh):
            return lesson.recurrence_backward(dh.contiguous(), *ctx.saved_tensors)

    shapes = ((2, 3, 130), (1, 1, 1), (3, 19, 20))
    examine(Layer.apply, work.linear_recurrence, sequences, *shapes, gradients=True, **CONTIGUOUS)
    empty = torch.empty(2, 0, 4, device=gpu.device())
    assert all(each.shape == empty.shape for each in lesson.recurrence_backward(empty, empty, empty))


@GPU
@pytest.mark.parametrize("name", LOOPS)
def test_two_thousand_steps_are_right(lesson, name):
    a, b = drawn(sequences, 64, 2048, 256)
    want = work.linear_recurrence(a.double(), b.double())
    assert correctness.relative_error(loops(lesson)[name](a, b), want) < 1e-5


@pytest.mark.parametrize("name", LOOPS)
def test_half_precision_keeps_the_state_in_float32(lesson, name):
    """One, and 63 times a 512th, which a sum in bf16 would not notice."""
    ones = torch.ones(1, 64, 1, dtype=bf16, device=gpu.device())
    given = ones / 512
    given[:, 0] = 1
    assert loops(lesson)[name](ones, given)[:, -1].item() == pytest.approx(1 + 63 / 512, abs=2**-7)


def test_nan_does_not_run_back_in_the_tree(lesson):
    a, b = drawn(sequences, 2, 9, 20)
    want = lesson.tree(a, b)
    b[1, 5, 3] = math.nan
    got = lesson.tree(a, b)
    assert got[1, 5:, 3].isnan().all()
    got[1, 5:, 3] = want[1, 5:, 3] = 0
    assert torch.equal(got, want)


def test_what_has_no_backward_refuses_to_be_differentiated(lesson):
    for name in ("recurrence", "ahead", "tree"):
        assert_no_backward(name, getattr(lesson, name), drawn(sequences, 2, 3, 20))
    assert_no_backward("normed", lesson.normed, drawn(normed_sequences, 2, 3, 20))
    assert_no_backward("over_time", lesson.over_time, drawn(sequences, 2, 3, 20)[:1])
    begins = torch.zeros(2, 3, dtype=torch.bool, device=gpu.device())
    call = partial(lesson.with_reset, reset=begins)
    assert_no_backward("with_reset", call, drawn(sequences, 2, 3, 20))


@INTERPRETED
def test_every_number_is_read_and_written_once(lesson):
    N = 2 * 19 * 130
    for name, call in loops(lesson).items():
        (made,) = counted(call, *drawn(sequences, 2, 19, 130))
        assert (made.bytes_read, made.bytes_written) == (4 * 2 * N, 4 * N), name
    dh, a = drawn(sequences, 2, 19, 130)
    (made,) = counted(lesson.recurrence_backward, dh, a, a)
    first = 2 * 130  # before step 0 there is no state to read
    assert (made.bytes_read, made.bytes_written) == (4 * (3 * N - first), 4 * 2 * N)


# ---- what the lesson says of compiled code -----------------------------------------------------------------


# ---- exercises ---------------------------------------------------------------------------------------------


def test_what_races_beside_the_exercises_is_right():
    tensors = sequences((2, 7, 20))
    want = work.linear_recurrence(*tensors)
    for exercise in judge.find(NAME).values():
        for call in exercise.race.rivals.values() if exercise.race else ():
            torch.testing.assert_close(call(*tensors), want, rtol=1e-4, atol=1e-4)


# ---- the lesson as a whole ---------------------------------------------------------------------------------


def test_it_runs_to_its_end_in_silence_and_checks_its_kernels(checks_passed):
    assert set(checks_passed) == {"over_time", "layer", "tree", "normed"}
    assert all(passed >= calls_checked((2, 7, 20)) for passed in checks_passed.values())


def test_growing_gates_break_the_tree_alone(outputs):
    said = "".join(output.get("text", "") for output in outputs)
    for line in ("loop     [0.0, 1.0]", "tree     [nan, nan]", "labkit   [0.0, 1.0]"):
        assert line in said, line
