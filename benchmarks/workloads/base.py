"""A piece of work: what is computed, from what, at what cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

Shape = dict[str, int]


@dataclass(frozen=True)
class Work:
    """What is computed: random inputs for a shape and dtype, the reference, the floor.

    ``inputs(shape)`` returns float32 tensors on the CPU or the device; they are cast. ``reference`` is
    plain PyTorch, called with float64 tensors; None only for a call whose result is random.
    ``min_bytes(shape, itemsize, direction)`` and ``flops(shape, direction)`` count each input and each
    output once, and the operations of the products. ``sample`` caps the axes for which being right is
    checked at a smaller size ({"batch": 64}). ``batched`` are the inputs that have the output's rows along
    their first dimension; the others belong to all rows.
    """

    inputs: Callable[[Shape], tuple[Tensor, ...]]
    reference: Callable[..., Tensor] | None
    min_bytes: Callable[[Shape, int, str], int]
    flops: Callable[[Shape, str], int]
    sample: Mapping[str, int] = field(default_factory=lambda: {"batch": 64})
    batched: tuple[int, ...] = (0,)
