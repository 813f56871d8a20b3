"""A contender is one way to do a piece of work; the work says what is computed, from what, at what cost."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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

    ``mode`` is torch.compile's ("max-autotune-no-cudagraphs"); ValueError without ``compiled``. ``dtypes``
    names the dtypes that it is for, all when empty; ``sizes`` those of an axis, for one slow to get
    ready. ``peer`` names the library behind it; its version is that of the installed package.
    """

    name: str
    call: Callable[..., Tensor]
    work: Work
    compiled: bool = False
    peer: str | None = None
    dtypes: tuple[str, ...] = ()
    mode: str | None = None
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode and not self.compiled:
            raise ValueError(f"mode: {self.mode!r} is for torch.compile, so {self.name} needs compiled=True")

    def build(self) -> Callable[..., Tensor]:
        """The call; when ``compiled``, passed through torch.compile for the shapes that it will see."""
        return torch.compile(self.call, dynamic=False, mode=self.mode) if self.compiled else self.call

    def takes(self, dtype: str) -> bool:
        """Whether it is a contender for this dtype."""
        return not self.dtypes or dtype in self.dtypes

    def fits(self, shape: Shape) -> bool:
        """Whether it is a contender at this size."""
        return all(shape.get(axis) in sizes for axis, sizes in self.sizes.items())


# ---- torch.compile, as a measurement needs it -------------------------------------------------------------


@contextmanager
def repeatable_backward(direction: str) -> Iterator[None]:
    """A backward pass that torch.compile makes here can run again and again on one forward pass.

    It leaves what the forward saved alone when the first backward asks for that. But compiled code is cached,
    and the cache does not tell it from code that overwrites it: a tag does. The backward thread would not
    see the tag, so there is none.
    """
    if direction != "backward":
        yield
        return
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} labkit: repeatable"
    with config.patch(cache_key_tag=tag), torch.autograd.set_multithreading_enabled(False):
        yield


def silence_compiler() -> None:
    """From here on torch.compile does not log every candidate of max-autotune, nor advise to allow TF32.

    That TF32 is off is the course's rule for float32.
    """
    from torch._inductor import config  # not before it is needed: importing it takes a second

    config.autotune_num_choices_displayed = 0
    config.max_autotune_report_choices_stats = False
    logging.getLogger("torch._inductor.select_algorithm").addFilter(_is_no_candidate)
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")


def _is_no_candidate(record: logging.LogRecord) -> bool:
    """Whether a log record is not of a candidate that asks for too much shared memory."""
    return not str(record.msg).startswith("Runtime error during autotuning")
