"""Is a contender of a sweep right? Beside float64 at a sampled size, and at full size in time that is short.

At full size the output is compared in some rows spread over the batch. For the gradients the upstream
gradient is zero but in those rows: the reference of those rows alone then gives every gradient.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.measure.contender import Contender, Shape
from labkit.measure.correctness import dtype_name, relative_error

ALLOWED_ERROR = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 2e-2}
"""A larger relative error against float64 is a wrong result, not a rounding (TF32 has about 3e-4)."""
CHAIN_FACTOR = 5
"""A larger multiple of the allowed error is no rounding, however long the chain."""
EDGE_ROWS, SPREAD_ROWS = 8, 64
"""Rows at each end of the batch, and rows spread evenly over it, that are compared at full size."""


def check_contender(
    contender: Contender,
    call: Callable[..., Tensor],
    shape: Shape,
    inputs: tuple[Tensor, ...],
    direction: str,
) -> tuple[float, str]:
    """The relative error of ``call``, which is the contender's, and what is wrong with it: "" if it is right.

    The error is the largest of any tensor, by norms: of output and gradients at the sampled size, and of some
    rows at full size. What torch.compile makes for the sampled size is not what is timed, and takes time to
    make: it is checked at full size only.

    A long chain in half precision may be off by more than ALLOWED_ERROR, but not by far more than plain
    PyTorch is itself.
    """
    work, dtype = contender.work, dtype_name(inputs[0].dtype)
    allowed = ALLOWED_ERROR[dtype]
    assert work.reference is not None, "a random result cannot be compared"
    capped = {axis: min(size, work.sample.get(axis, size)) for axis, size in shape.items()}
    sampled = inputs
    if capped != shape and not contender.compiled:
        drawn = zip(work.inputs(capped), inputs, strict=True)
        sampled = tuple(t.to(like).requires_grad_(like.requires_grad) for t, like in drawn)

    def error_of(comparison: Comparison) -> float:
        errors = [] if sampled is inputs and capped != shape else [comparison.complete(sampled)]
        if capped != shape:
            errors.append(comparison.at_full_size(inputs))
        return float(np.max(errors))  # max() loses a NaN that is not the first

    error = error_of(Comparison(call, work.reference, direction, work.batched))
    right = error <= allowed
    if dtype != "float32" and allowed < error < CHAIN_FACTOR * allowed:
        try:
            right = error <= 2 * error_of(Comparison(work.reference, work.reference, direction, work.batched))
        except RuntimeError:  # out of memory, or no such operation in half precision: nothing to go by
            right = False
    return error, "" if right else f"wrong result: relative error {error:.1e}"


@dataclass(frozen=True)
class Comparison:
    """A call beside its reference, which is plain PyTorch. ``batched`` are the inputs that have the output's
    rows; the others are the same for all rows."""

    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    direction: str
    batched: tuple[int, ...] = (0,)

    def complete(self, inputs: Sequence[Tensor]) -> float:
        """Largest relative error of the output and the gradients, by norms; needs float64 copies of all."""
        with self._grad_mode():
            exact = self._exact(inputs)
            got, want = self.call(*inputs), self.reference(*exact)
            pairs = [(got, want)]
            if self.direction != "forward":
                upstream = (2 * want.detach()).to(got.dtype)
                grads = torch.autograd.grad(got, inputs, upstream)
                pairs += zip(grads, torch.autograd.grad(want, exact, upstream.double()), strict=True)
        return _worst(pairs)

    def at_full_size(self, inputs: Sequence[Tensor]) -> float:
        """Largest relative error of the output in some rows, and of the gradients that come of these rows.

        Where no input has the output's rows there is no reference of some of them: all are compared.
        """
        with self._grad_mode():
            output = self.call(*inputs)
            rows: Any = sampled_rows(len(output)).to(output.device) if self.batched else slice(None)
            exact = self._exact(inputs, rows)
            want = self.reference(*exact)
            pairs = [(output[rows], want)]
            if self.direction != "forward":
                upstream = torch.zeros_like(output, memory_format=torch.contiguous_format)
                upstream[rows] = 2 * output.detach()[rows]
                got = torch.autograd.grad(output, inputs, upstream)
                wanted = torch.autograd.grad(want, exact, upstream[rows].double())
                for index, (grad, right) in enumerate(zip(got, wanted, strict=True)):
                    if index not in self.batched:
                        pairs.append((grad, right))
                        continue
                    pairs.append((grad[rows], right))
                    # The other rows have no gradient: what they hold, beside the size of those that have one.
                    size = torch.linalg.vector_norm(right)
                    rest = torch.linalg.vector_norm(grad.index_fill(0, rows, 0), dtype=torch.float64)
                    pairs.append((size + rest, size))
        return _worst(pairs)

    def _grad_mode(self) -> torch.set_grad_enabled:
        # As it is timed: torch.compile makes other code for the other mode.
        return torch.set_grad_enabled(self.direction != "forward")

    def _exact(self, inputs: Sequence[Tensor], rows: Tensor | slice = slice(None)) -> list[Tensor]:
        """Float64 leaves: some rows of the inputs that have rows, the others as they are."""
        chosen = [t[rows] if i in self.batched else t for i, t in enumerate(inputs)]
        return [t.detach().double().requires_grad_(t.requires_grad) for t in chosen]


def sampled_rows(batch: int) -> Tensor:
    """Row numbers: the first and last EDGE_ROWS, and SPREAD_ROWS evenly over all; each once, in order."""
    ends = [*range(min(EDGE_ROWS, batch)), *range(max(batch - EDGE_ROWS, 0), batch)]
    between = torch.linspace(0, batch - 1, min(SPREAD_ROWS, batch)).long()
    return torch.cat([torch.tensor(ends, dtype=torch.long), between]).unique()


def _worst(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    # np.max, because max() loses a NaN that is not the first
    return float(np.max([relative_error(got.detach(), want.detach()) for got, want in pairs]))
