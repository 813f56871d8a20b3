"""A contender is one way to do a piece of work; the work says what is computed, from what, at what cost."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from labkit.measure import roofline

Shape = dict[str, int]


@dataclass(frozen=True)
class Work:
    """What is computed: random inputs for a shape and dtype, the reference, the floor.

    ``inputs(shape)`` returns float32 tensors on the CPU or the device; they are cast. ``reference`` is
    plain PyTorch, called with float64 tensors, and with those of the dtype where a contender is a little
    further off than it should be; None only for a call whose result is random.
    ``min_bytes(shape, itemsize, direction)`` and ``flops(shape, direction)`` follow the contract.
    ``sample`` caps the axes for which being right is checked at a smaller size ({"batch": 64}); some rows are
    checked at full size as well. ``batched`` are the inputs that have the output's rows along their first
    dimension; the others belong to all rows.
    """

    inputs: Callable[[Shape], tuple[Tensor, ...]]
    reference: Callable[..., Tensor] | None
    min_bytes: Callable[[Shape, int, str], int]
    flops: Callable[[Shape, str], int]
    sample: Mapping[str, int] = field(default_factory=lambda: {"batch": 64})
    batched: tuple[int, ...] = (0,)

    def floor_us(self, shape: Shape, dtype: str, roofs: roofline.Roofs, direction: str = "forward") -> float:
        """The roofline floor of this work in microseconds."""
        return roofline.floor_us(
            roofs,
            min_bytes=self.min_bytes(shape, getattr(torch, dtype).itemsize, direction),
            flops=self.flops(shape, direction),
            dtype=dtype,
        )


@dataclass(frozen=True)
class Contender:
    """One way to do the work. ``compiled`` passes the call through torch.compile afresh for each point.

    ``sizes`` names the sizes of an axis that it is for, where it is slow to get ready.
    """

    name: str
    call: Callable[..., Tensor]
    work: Work
    compiled: bool = False
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def build(self) -> Callable[..., Tensor]:
        """The call; when ``compiled``, passed through torch.compile for the shapes that it will see."""
        return torch.compile(self.call, dynamic=False) if self.compiled else self.call

    def fits(self, shape: Shape) -> bool:
        """Whether it is a contender at this size."""
        return all(shape.get(axis) in sizes for axis, sizes in self.sizes.items())


def silence_compiler() -> None:
    """From here on torch.compile does not advise to allow TF32, which the course's float32 does without."""
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
