"""A piece of work: what is computed, from what, at what cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Shape = Mapping[str, int]
"""The sizes of a point: ``{"batch": 256, "width": 160}``."""
Count = Callable[[Shape, str], int]
"""How many, for a shape and a direction."""


@dataclass(frozen=True, eq=False)
class Work:
    """What several ways compute. Two ways that are raced do the same work or name their own.

    name: its own name in ``labkit.work``.
    inputs(shape): random float32 tensors for a shape, the arguments of every way; they are cast. A number is
        handed on as it is.
    reference(*inputs): plain PyTorch, called in float64.
    moved(shape, direction): the fewest elements, each input read once and each output written once.
    flops(shape, direction): operations.
    direction: "forward", or "backward", which is dy, what it needs of the inputs, and all gradients.
    batched: the inputs whose first dimension is that of the output; the others belong to all rows. Empty
        where the output's rows need each other.
    """

    name: str
    inputs: Callable[[Shape], tuple[Any, ...]]
    reference: Callable[..., Tensor]
    moved: Count
    flops: Count
    batched: tuple[int, ...] = (0,)

    def min_bytes(self, shape: Shape, itemsize: int, direction: str) -> int:
        """The fewest bytes of a direction; of "forward_backward" those of one pass after the other."""
        passes = ("forward", "backward") if direction == "forward_backward" else (direction,)
        return itemsize * sum(self.moved(shape, each) for each in passes)


def per_element(forward: int, backward: int) -> Count:
    """So many for each element of a tensor (batch, width), or (batch, time, width)."""

    def count(shape: Shape, direction: str) -> int:
        elements = shape["batch"] * shape.get("time", 1) * shape["width"]
        return {"forward": forward, "backward": backward}[direction] * elements

    return count
