"""The cold cache: calls cycle through input copies that together exceed twice the L2.

One output is kept per copy. If a graph holds fewer calls than copies, the L2 is flushed before each replay.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TimedCall:
    """A call to be timed: ``call(*inputs)``.

    With ``setup``, each set of inputs first passes through ``setup(*inputs)`` outside the timed region and
    ``call`` receives what it returns; a backward pass is set up by its forward pass this way.
    """

    call: Callable[..., Any]
    inputs: tuple[Any, ...] = ()
    setup: Callable[..., tuple[Any, ...]] | None = None


def rotating_inputs(timed_call: TimedCall, l2_bytes: int) -> list[tuple[Any, ...]]:
    """Sets of inputs that together exceed twice ``l2_bytes``: those of the call, and clones of them.

    With ``setup`` each set is what ``setup`` returns for it. The clones keep dtype, strides and
    ``requires_grad``; inputs that are no tensors are shared.
    """
    tensors = [_stored(t) for t in timed_call.inputs if isinstance(t, torch.Tensor)]
    size = sum(t.numel() * t.element_size() for t in tensors)
    count = 2 * l2_bytes // size + 1 if size else 1
    inputs = timed_call.inputs
    sets = [inputs, *(tuple(_clone(value) for value in inputs) for _ in range(count - 1))]
    return [timed_call.setup(*values) for values in sets] if timed_call.setup else sets


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
