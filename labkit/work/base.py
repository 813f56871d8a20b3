"""A piece of work: what is computed, from what, at what cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Shape = Mapping[str, int]
"""The sizes of a point: ``{"batch": 256, "width": 160}``."""


@dataclass(frozen=True, eq=False)
class Work:
    """What several ways compute. Two ways that are raced do the same work or name their own.

    name: of the file in ``labkit/work`` that defines it.
    inputs(shape): random float32 tensors for a shape, the arguments of every way; they are cast. A number is
        handed on as it is.
    reference(*inputs): plain PyTorch, called in float64.
    min_bytes(shape, itemsize, direction): each input read once and each output written once, in bytes.
    flops(shape, direction): operations.
    direction: "forward", or "backward", which is dy, what it needs of the inputs, and all gradients.
    batched: the inputs whose first dimension is that of the output; the others belong to all rows. None where
        the output's rows need each other.
    """

    name: str
    inputs: Callable[[Shape], tuple[Any, ...]]
    reference: Callable[..., Tensor]
    min_bytes: Callable[[Shape, int, str], int]
    flops: Callable[[Shape, str], int]
    batched: tuple[int, ...] = (0,)
