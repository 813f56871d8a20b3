"""The finished kernels as cases: what is called, the same in plain PyTorch, and how inputs are drawn."""

import torch
from operators import Case, Inputs, scaled
from torch import Tensor
from torch.nn import functional

from benchmarks.workloads import mlp
from benchmarks.workloads import recurrent as recurrent
from benchmarks.workloads.elementwise import affine as plain_affine
from benchmarks.workloads.grouped import grouped_reference
from labkit import kernels

# --- one number after the other, and rows


def vectors(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])


def normal_rows(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.randn(shape), 0.3 * torch.randn(shape[-1:]), 1 + 0.1 * torch.randn(shape[-1:])


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


AFFINE = Case(kernels.affine, plain_affine, vectors, (6, 33), "affine")
GELU_MUL = Case(kernels.gelu_mul, mlp.chain, gated, (6, 33))
RMS_NORM = Case(kernels.rms_norm, recurrent.rms_norm, rows_of, (2, 3, 20))

# --- sequences


def sequences(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.sigmoid(1 + torch.randn(shape)), torch.randn(shape), torch.randn(shape[0], shape[2])


def normed_sequences(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    a, b, h0 = sequences(shape)
    return a, b, weight_of(shape[2]), h0


LINEAR = Case(kernels.linear_recurrence, recurrent.linear_recurrence, sequences, (2, 3, 20))
GRU = Case(kernels.min_gru, recurrent.min_gru, sequences, (2, 3, 20))
RMS = Case(kernels.rms_recurrence, recurrent.rms_recurrence, normed_sequences, (2, 3, 20))

# --- products


def with_weight(out: int) -> Inputs:
    return lambda shape: (torch.randn(shape), scaled(out, shape[-1]))


def with_gate_up(hidden: int) -> Inputs:
    return lambda shape: (torch.randn(shape), scaled(2, hidden, shape[-1]))


def with_mlp(hidden: int) -> Inputs:
    return lambda shape: (*with_gate_up(hidden)(shape), scaled(shape[-1], hidden))


def matmul(out: int) -> Case:
    return Case(kernels.matmul, functional.linear, with_weight(out), (37, 24))


def geglu_mlp(hidden: int) -> Case:
    return Case(kernels.geglu_mlp, mlp.geglu, with_mlp(hidden), (37, 24))


def plain_grouped(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return grouped_reference(x, weight, weight.new_zeros(()) if bias is None else bias)


def grouped(groups: int, d_in: int, d_out: int | None = None, bias: bool = True) -> Inputs:
    """Inputs whose x has the leading dimensions that are asked for."""
    out = d_in if d_out is None else d_out

    def inputs(leading: tuple[int, ...]) -> tuple[Tensor, ...]:
        weight = torch.randn(groups, d_in, out) * max(d_in, 1) ** -0.5
        tensors = torch.randn(*leading, groups * d_in), weight, torch.randn(groups, out)
        return tensors[: 2 + bias]

    return inputs


GROUPED = Case(kernels.grouped_linear, plain_grouped, grouped(5, 16), (2, 35))
