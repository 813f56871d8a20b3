"""Is a contender of a sweep right? Beside float64 at a sampled size, and at full size in time that is short.

At full size the output is compared in some rows spread over the batch. Gradients are compared in full where
that is cheap. Elsewhere the upstream gradient is zero but in those rows: the reference of those rows alone
then gives every gradient.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from labkit.measure.correctness import relative_error

EDGE_ROWS, SPREAD_ROWS = 8, 64
"""Rows at each end of the batch, and rows spread evenly over it, that are compared at full size."""
CHUNK_ROWS = 2**14
"""Where all rows are compared: so many at a time."""

Pairs = list[tuple[Tensor, Tensor]]


class RepeatError(RuntimeError):
    """A backward pass that cannot be timed by itself, again and again on one forward pass."""

    def __init__(self, difference: float) -> None:
        super().__init__(
            "a second backward pass of one forward gives other gradients "
            f"(by {difference:.1e}): it overwrites what the forward saved; time forward_backward"
        )


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
            exact = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
            got, want = self.call(*inputs), self.reference(*exact)
            pairs = [(got, want)]
            if self.direction != "forward":
                upstream = (2 * want.detach()).to(got.dtype)
                grads = gradients(got, inputs, upstream, keep=self._keep)
                pairs += zip(grads, gradients(want, exact, upstream.double()), strict=True)
        return _worst(pairs)

    def at_full_size(self, inputs: Sequence[Tensor], *, all_rows: bool) -> float:
        """Largest relative error of the output in some rows, and of the gradients in all rows or in those."""
        with self._grad_mode():
            output = self.call(*inputs)
            some = spread(len(output)).to(output.device)
            with torch.no_grad():
                want = self.reference(*self._take(inputs, some))
            pairs = [(output[some], want)]
            if self.direction != "forward":
                pairs += self._gradients_of_all(inputs, output) if all_rows else []
                pairs += [] if all_rows else self._gradients_of(inputs, output, some)
        return _worst(pairs)

    def repeated(self, inputs: Sequence[Tensor]) -> float:
        """Largest relative difference between a second backward pass of one forward and the first."""
        output = self.call(*inputs)
        first, second = (gradients(output, inputs, output.detach(), keep=True) for _ in range(2))
        return _worst(zip(second, first, strict=True))

    @property
    def _keep(self) -> bool:
        return self.direction == "backward"

    def _grad_mode(self) -> torch.set_grad_enabled:
        # As it is timed: torch.compile makes other code for the other mode.
        return torch.set_grad_enabled(self.direction != "forward")

    def _take(self, inputs: Sequence[Tensor], rows: Tensor | slice) -> list[Tensor]:
        """Float64 leaves: some rows of the inputs that have rows, the others as they are."""
        taken = [t[rows] if i in self.batched else t for i, t in enumerate(inputs)]
        return [t.detach().double().requires_grad_(t.requires_grad) for t in taken]

    def _gradients_of(self, inputs: Sequence[Tensor], output: Tensor, rows: Tensor) -> Pairs:
        upstream = torch.zeros_like(output.detach(), memory_format=torch.contiguous_format)
        upstream[rows] = 2 * output.detach()[rows]
        got = gradients(output, inputs, upstream, keep=self._keep)
        exact = self._take(inputs, rows)
        wanted = gradients(self.reference(*exact), exact, upstream[rows].double())
        pairs: Pairs = []
        for index, (mine, want) in enumerate(zip(got, wanted, strict=True)):
            if index not in self.batched:
                pairs.append((mine, want))
                continue
            pairs.append((mine[rows], want))
            # The rows without an upstream gradient have none: what they hold, beside the size of the others.
            size = torch.linalg.vector_norm(want)
            excess = torch.linalg.vector_norm(mine.index_fill(0, rows, 0), dtype=torch.float64)
            pairs.append((size + excess, size))
        return pairs

    def _gradients_of_all(self, inputs: Sequence[Tensor], output: Tensor) -> Pairs:
        upstream = (2 * output.detach()).contiguous()
        got = gradients(output, inputs, upstream, keep=self._keep)
        shared = [i for i in range(len(inputs)) if i not in self.batched]
        totals = {i: torch.zeros_like(inputs[i], dtype=torch.float64) for i in shared}
        pairs: Pairs = []
        for start in range(0, len(output), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            exact = self._take(inputs, rows)
            wanted = gradients(self.reference(*exact), exact, upstream[rows].double())
            for index, want in enumerate(wanted):
                if index in self.batched:
                    pairs.append((got[index][rows], want.to(got[index].dtype)))  # half the memory, or less
                else:
                    totals[index] += want
        return [*pairs, *((got[i], total) for i, total in totals.items())]


def spread(batch: int) -> Tensor:
    """Row numbers: the first and last EDGE_ROWS, and SPREAD_ROWS evenly over all; each once, in order."""
    ends = [*range(min(EDGE_ROWS, batch)), *range(max(batch - EDGE_ROWS, 0), batch)]
    between = torch.linspace(0, batch - 1, min(SPREAD_ROWS, batch)).long()
    return torch.cat([torch.tensor(ends, dtype=torch.long), between]).unique()


def gradients(
    output: Tensor, inputs: Sequence[Tensor], upstream: Tensor, *, keep: bool = False
) -> tuple[Tensor, ...]:
    """The gradient of each input. ``keep`` leaves what the forward pass saved for another backward pass."""
    return torch.autograd.grad(output, inputs, upstream, retain_graph=keep)


def _worst(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    # np.max, because max() loses a NaN that is not the first
    return float(np.max([relative_error(got.detach(), want.detach()) for got, want in pairs]))
