"""Halves of a chunk, as a product of both gates gives them: read as they lie, without a copy, and right."""

import operators as op
import pytest
import torch
from operators import assert_close, bf16, fp32

import labkit
from labkit.kernels import affine, gelu_mul, linear_recurrence, min_gru, rms_norm
from labkit.measure import launch_counts


def gated(x, other):
    return torch.nn.functional.gelu(x, approximate="tanh") * other


def loop(a, b):
    h, states = torch.zeros_like(a[:, 0]), []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states, 1)


def zeros(x):
    return x.new_zeros(x.shape[-1])


def rising(x):
    """A weight that differs: with an even one a norm's gradient for its own output is next to nothing."""
    return torch.linspace(1, 2, x.shape[-1], dtype=x.dtype, device=x.device)


CALLS = {
    "gelu_mul": (lambda x, other: gelu_mul(x, zeros(x), other), gated),
    "affine": (lambda x, other: affine(other, zeros(x) + 2, zeros(x)), lambda x, other: 2 * other),
    "rms_norm": (
        lambda x, other: rms_norm(other, rising(other)),
        lambda x, other: rising(other) * torch.nn.functional.rms_norm(other, other.shape[-1:], eps=1e-6),
    ),
    "linear_recurrence": (linear_recurrence, loop),
    "min_gru": (min_gru, lambda z, c: loop(1 - z, z * c)),
}
"""The call and its reference."""


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 20, 12), fp32), ((1, 100, 16), bf16), ((2, 70, 3), fp32), ((7, 2, 161), bf16)],
    ids=str,
)
@pytest.mark.parametrize("name", CALLS)
def test_halves_of_a_chunk_are_right_and_not_copied(name, shape, dtype):
    call, reference = CALLS[name]
    torch.manual_seed(0)
    both = torch.rand(*shape[:2], 2 * shape[2]).to(labkit.gpu.device(), dtype).requires_grad_()
    y = call(*both.chunk(2, -1))
    leaf = both.detach().double().requires_grad_()
    want = reference(*leaf.chunk(2, -1))
    assert y.is_contiguous()
    assert_close(y, want, dtype, 2)
    upstream = 2 * y.detach()  # the same for both: where a norm's row is small its rounding would count
    (got,) = torch.autograd.grad(y, both, upstream)
    (right,) = torch.autograd.grad(want, leaf, upstream.double())
    assert_close(got, right, dtype, 4)
    if not labkit.gpu.available():
        halves = [t.detach() for t in both.chunk(2, -1)]
        made = launch_counts.count(lambda: call(*halves))
        assert len([one for one in made if one.programs]) == 1
        assert not [one.name for one in made if "copy" in one.name or "clone" in one.name]


@op.INTERPRETED
def test_rows_that_are_one_row_expanded_are_copied():
    """Also an upstream gradient that is: that of a sum over rows."""
    row, weight, bias = torch.randn(1, 5), torch.randn(5), torch.randn(5)
    for x in (row.expand(6, 5), row.expand(2, 3, 5), row[None].expand(2, 1, 5)):
        assert_close(affine(x, weight, bias), x.double() * weight + bias)
        assert_close(gelu_mul(x, bias, x), gated(x.double() + bias, x.double()))
    x = torch.randn(6, 5).requires_grad_()
    (dx,) = torch.autograd.grad(affine(x, weight, bias).sum(0) @ bias, x)
    assert_close(dx, (weight * bias).double().expand(6, 5))


@op.INTERPRETED
def test_rows_that_lie_unevenly_are_copied():
    """Time first: the next sequence begins within this one."""
    both = torch.rand(30, 3, 16).transpose(0, 1)
    for name, (call, reference) in CALLS.items():
        assert_close(call(*both.chunk(2, -1)), reference(*both.double().chunk(2, -1))), name
