"""The cold cache: calls rotate through copies of their inputs that together exceed twice the L2."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Job:
    """A call to be timed: ``call(*inputs)``.

    With ``setup``, each set of inputs first passes through ``setup(*inputs)`` outside the timed region and
    ``call`` receives what it returns; a backward pass is set up by its forward pass this way.
    """

    call: Callable[..., Any]
    inputs: tuple[Any, ...] = ()
    setup: Callable[..., tuple[Any, ...]] | None = None


def rotation(job: Job, l2_bytes: int) -> list[tuple[Any, ...]]:
    """Sets of inputs that together exceed twice ``l2_bytes``: the job's own and clones of it.

    The clones keep dtype, strides and ``requires_grad``; inputs that are no tensors are shared.
    """
    tensors = [_stored(t) for t in job.inputs if isinstance(t, torch.Tensor)]
    size = sum(t.numel() * t.element_size() for t in tensors)
    count = 2 * l2_bytes // size + 1 if size else 1
    sets = [job.inputs, *(tuple(_clone(value) for value in job.inputs) for _ in range(count - 1))]
    return [job.setup(*values) for values in sets] if job.setup else sets


def _clone(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    stored = _stored(value)
    copy = torch.empty_strided(stored.size(), stored.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(stored).expand_as(value).requires_grad_(value.requires_grad)


def _stored(value: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that is in memory: one element along each repeated dimension."""
    stored = value.detach()
    for dimension, stride in enumerate(value.stride()):
        if stride == 0 and value.size(dimension):
            stored = stored.narrow(dimension, 0, 1)
    return stored
