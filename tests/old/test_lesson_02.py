"""Lesson 2: its taught kernels, solved, and its execution. The finished layer is tried in tests/kernels."""

import math

import pytest
import torch
from cases import gated as chain_inputs
from counting import calls_checked
from taught import INTERPRETED, assert_no_backward, counted, drawn, examine
from torch.nn import functional

from labkit.measure import correctness
from labkit.workloads.mlp import chain

pytestmark = pytest.mark.usefixtures("cache")
NAME = "old/02_kernel_fusion"
SHAPES = ((4, 6), (1, 1), (3, 513), (1, 4097), (0, 8))


def test_the_chain_is_right_beyond_one_block_and_without_rows(lesson):
    examine(lesson.chain, chain, chain_inputs, *SHAPES, layouts=("contiguous",))


@pytest.mark.parametrize(("gelus", "fast"), [(1, False), (3, False), (2, True)])
def test_gelu_after_gelu_is_right(lesson, gelus, fast):
    def reference(x, bias, other):
        z = x + bias
        for _ in range(gelus):
            z = functional.gelu(z, approximate="tanh")
        return z * other

    examine(lesson.repeated(gelus, fast), reference, chain_inputs, *SHAPES[:-1], layouts=("contiguous",))


def test_the_backward_is_right_for_a_correlated_gradient(lesson):
    """The layer's gradients, its upstream gradient being twice its output."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, bias, other):
            ctx.save_for_backward(x, bias, other)
            return chain(x, bias, other)

        @staticmethod
        def backward(ctx, dy):
            dx, dother = lesson.chain_backward(dy.contiguous(), *(t.contiguous() for t in ctx.saved_tensors))
            return dx, dx.float().sum(0).to(dx.dtype), dother

    correctness.check(Layer.apply, chain, chain_inputs, shapes=SHAPES[:-1], name="backward")


def test_the_backward_of_large_values_is_finite(lesson):
    x = torch.tensor([[-60.0, -12.0, 0.0, 12.0, 60.0]])
    one, zero = torch.ones_like(x), torch.zeros(5)
    dx, dother = lesson.chain_backward(one, x, zero, one)
    assert torch.allclose(dx, torch.tensor([[0.0, 0.0, 0.5, 1.0, 1.0]]), atol=1e-5)
    assert torch.allclose(dother, torch.tensor([[0.0, 0.0, 0.0, 12.0, 60.0]]), atol=1e-5)


@pytest.mark.parametrize("atomic", [True, False])
def test_sums_over_rows_are_right(lesson, atomic):
    for shape in ((1, 1), (37, 70), (64, 64), (100, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(lesson.column_sums(x, atomic), x.sum(0), rtol=1e-5, atol=1e-5)


def test_the_chain_is_not_cut_off_from_autograd_in_silence(lesson):
    assert_no_backward("chain", lesson.chain, drawn(chain_inputs, 3, 8))


@INTERPRETED
@pytest.mark.parametrize("shape", [(3, 500), (5, 1024), (37, 33)])
def test_the_chain_reads_and_writes_nothing_beyond_the_end(lesson, shape):
    (fused,) = counted(lesson.chain, *drawn(chain_inputs, *shape))
    size = 4 * math.prod(shape)
    assert (fused.bytes_read, fused.bytes_written) == (3 * size, size)  # the bias is fetched for each row


# --- the lesson as a whole ----------------------------------------------------------------------------


def test_it_runs_to_its_end_in_silence_and_checks_the_layer(checks_passed):
    assert checks_passed.keys() == {"the chain as a layer"}
    assert checks_passed["the chain as a layer"] >= sum(
        calls_checked(shape) for shape in ((4, 6), (1, 1), (37, 33))
    )


def test_the_debugger_stops_inside_the_kernel_and_finds_the_infinity(outputs):
    (session,) = [output.text for output in outputs if "gelu_kernel()" in output.get("text", "")]
    assert session.count("(Pdb)") == 4 and "inf]" in session and session.count("nan]") == 2
