"""The finished kernels as cases: what is called, the same in plain PyTorch, and how inputs are drawn."""

from collections.abc import Callable

import torch
from operators import Case, Inputs, scaled
from torch import Tensor
from torch.nn import functional

from labkit import kernels, work

# --- one number after the other, and rows


def vectors(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])


def weight_of(width: int) -> Tensor:
    """Every fourth is zero: what it was multiplied with cannot be told from the product."""
    weight = 1 + 0.1 * torch.randn(width)
    weight[1::4] = 0
    return weight


def rows_of(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Rows of different sizes: that one was normalised by another's would not show otherwise."""
    return torch.randn(shape) * torch.randn(*shape[:-1], 1).exp(), weight_of(shape[-1])


def gated(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


AFFINE = Case(kernels.affine, work.affine.reference, vectors, (6, 33), "affine")
GELU_MUL = Case(kernels.gelu_mul, work.gelu_mul.reference, gated, (6, 33))
RMS_NORM = Case(kernels.rms_norm, plain_rms_norm, rows_of, (2, 3, 20))

# --- sequences


def sequences(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.sigmoid(1 + torch.randn(shape)), torch.randn(shape), torch.randn(shape[0], shape[2])


def normed_sequences(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    a, b, h0 = sequences(shape)
    return a, b, weight_of(shape[2]), h0


def states(step: Callable[..., Tensor], h0: Tensor | None, *inputs: Tensor) -> Tensor:
    """The states after each step, (B, T, H); ``step`` takes a state (B, H) and the inputs of one time."""
    batch, _, width = inputs[0].shape
    h, found = inputs[0].new_zeros(batch, width) if h0 is None else h0, []
    for now in zip(*(x.unbind(1) for x in inputs), strict=True):
        h = step(h, *now)
        found.append(h)
    # Without steps the result is (B, 0, H), still a function of all inputs.
    return torch.stack(found, 1) if found else step(h.unsqueeze(1), *inputs)


def plain_recurrence(a: Tensor, b: Tensor, h0: Tensor | None = None) -> Tensor:
    return states(lambda h, a, b: a * h + b, h0, a, b)


def plain_min_gru(z: Tensor, candidate: Tensor, h0: Tensor | None = None) -> Tensor:
    return states(lambda h, z, candidate: (1 - z) * h + z * candidate, h0, z, candidate)


def plain_rms_recurrence(
    a: Tensor, b: Tensor, weight: Tensor, h0: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    return states(lambda h, a, b: plain_rms_norm(a * h + b, weight, eps), h0, a, b)


LINEAR = Case(kernels.linear_recurrence, plain_recurrence, sequences, (2, 3, 20))
GRU = Case(kernels.min_gru, plain_min_gru, sequences, (2, 3, 20))
RMS = Case(kernels.rms_recurrence, plain_rms_recurrence, normed_sequences, (2, 3, 20))

# --- products


def with_weight(out: int) -> Inputs:
    return lambda shape: (torch.randn(shape), scaled(out, shape[-1]))


def with_gate_up(hidden: int) -> Inputs:
    return lambda shape: (torch.randn(shape), scaled(2, hidden, shape[-1]))


def with_mlp(hidden: int) -> Inputs:
    return lambda shape: (*with_gate_up(hidden)(shape), scaled(shape[-1], hidden))


def matmul(out: int) -> Case:
    return Case(kernels.matmul, functional.linear, with_weight(out), (37, 24))


def plain_geglu(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    return functional.linear(work.gate_up.reference(x, w_gate_up), w_down)


def geglu_mlp(hidden: int) -> Case:
    return Case(kernels.geglu_mlp, plain_geglu, with_mlp(hidden), (37, 24))


def plain_grouped(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., groups * d_in), weight (groups, d_in, d_out), bias (groups, d_out)."""
    y = torch.einsum("...gi,gio->...go", x.unflatten(-1, weight.shape[:2]), weight)
    return (y if bias is None else y + bias).flatten(-2)


def grouped(groups: int, d_in: int, d_out: int | None = None, bias: bool = True) -> Inputs:
    """Inputs whose x has the leading dimensions that are asked for."""
    out = d_in if d_out is None else d_out

    def inputs(leading: tuple[int, ...]) -> tuple[Tensor, ...]:
        weight = torch.randn(groups, d_in, out) * max(d_in, 1) ** -0.5
        tensors = torch.randn(*leading, groups * d_in), weight, torch.randn(groups, out)
        return tensors[: 2 + bias]

    return inputs


GROUPED = Case(kernels.grouped_linear, plain_grouped, grouped(5, 16), (2, 35))
