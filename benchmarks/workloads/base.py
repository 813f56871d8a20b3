"""A piece of work: what is computed, from what, at what cost."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Shape = dict[str, int]


@dataclass(frozen=True)
class Work:
    """What is computed: random inputs for a shape and dtype, the reference, the floor.

    ``inputs(shape)`` returns float32 tensors on the CPU or the device; they are cast. ``reference`` is
    plain PyTorch, called with float64 tensors.
    ``min_bytes(shape, itemsize, direction)`` and ``flops(shape, direction)`` count each input and each
    output once, and the operations of the products.
    """

    inputs: Callable[[Shape], tuple[Tensor, ...]]
    reference: Callable[..., Tensor]
    min_bytes: Callable[[Shape, int, str], int]
    flops: Callable[[Shape, str], int]
