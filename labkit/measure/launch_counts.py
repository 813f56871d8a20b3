"""Count what a call would launch, and the bytes that it would move, without a GPU.

There are two kinds of launches. An operation of PyTorch is taken for one kernel that touches each of its
tensors once. Of an interpreted Triton kernel the loads and stores are counted lane by lane.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit import gpu, interpreter

_ALLOCATES = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_",
    "set_", "_unsafe_view",
}  # fmt: skip
"""Operations that launch nothing, though their schema does not show them to be views."""

_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
"""Operations that write their first tensor without reading it."""


@dataclass
class Launch:
    """One launch. Bytes that several lanes of a Triton kernel load from one address count for each lane."""

    name: str
    programs: int = 0
    """Program instances of a Triton kernel; 0 for an operation of PyTorch."""
    bytes_read: int = 0
    bytes_written: int = 0


def count(call: Callable[[], Any]) -> list[Launch]:
    """Run ``call`` once and count what it launches, in order.

    A function of torch.compile counts as it is written, unfused: the compiler does nothing while operations
    are recorded. With ``fullgraph=True`` torch refuses to run it here.

    Raises RuntimeError on a GPU, where the accesses of a compiled Triton kernel cannot be seen.
    """
    if gpu.available():
        raise RuntimeError("launches are counted only without a GPU; on one profiles.profile shows what ran")
    with recording() as launches:
        call()
    return launches


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Count what is launched inside the block, on a machine without a GPU."""
    launches: list[Launch] = []
    operations = _Operations(launches)
    with interpreter.watching(_Kernels(launches, operations)), operations:
        yield launches


class LightDispatchMode(TorchDispatchMode):
    """A TorchDispatchMode whose first operation does not import torch's compiler, which takes a second.

    PyTorch disables the compiler inside every mode, and imports it for that. If nobody else has imported it,
    there is nothing to disable.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        plain = cls.__torch_dispatch__
        without_compiler = torch._disable_dynamo(plain)

        def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            chosen = without_compiler if "torch._dynamo" in sys.modules else plain
            return chosen(self, func, types, args, kwargs)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Turn off PyTorch's own way of disabling the compiler; the method above does it."""
        return False


class _Operations(LightDispatchMode):
    """Records the operations below autograd, backward passes included."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches = launches
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = len(self.launches)
        custom = OPDEFS.get(func._schema.name)
        if custom is not None:
            with self:  # a custom operator is Python code that launches things itself
                return custom._init_fn(*args, **kwargs)
        result = func(*args, **kwargs)
        if not self.paused and starts_work(func) and len(self.launches) == before:
            self.launches.append(_operation(func, args, kwargs, result))
        return result


class _Kernels(interpreter.Observer):
    """Records the launches of interpreted Triton kernels: programs, and bytes moved by unmasked lanes."""

    def __init__(self, launches: list[Launch], operations: _Operations) -> None:
        self.launches, self.operations = launches, operations

    def launch(self, run: Callable[..., Any], kernel: Any, args: Any, options: dict[str, Any]) -> None:
        self.launches.append(Launch(kernel.__name__))
        self.operations.paused = True  # the interpreter copies tensors, which is no launch
        try:
            run(*args, **options)
        finally:
            self.operations.paused = False

    def grid(self, *sizes: int) -> None:
        self.launches[-1].programs = math.prod(sizes)

    def load(self, addresses: np.ndarray, size: int, unfilled: bool) -> None:
        self.launches[-1].bytes_read += addresses.size * size

    def store(self, addresses: np.ndarray, size: int) -> None:
        self.launches[-1].bytes_written += addresses.size * size

    def atomic(self, addresses: np.ndarray, size: int) -> None:
        self.load(addresses, size, False)
        self.store(addresses, size)


def starts_work(func: Any) -> bool:
    """Whether an operation starts work on a device: neither a view nor an allocation."""
    aliases = [value.alias_info for value in func._schema.returns]
    view = any(alias is not None and not alias.is_write for alias in aliases)
    view = view or torch.Tag.inplace_view in func.tags
    return not view and func._schema.name.split("::")[1] not in _ALLOCATES


def _operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Launch:
    """The launch of an operation, from its schema: which arguments it reads, and which it writes."""
    name = func._schema.name.split("::")[1]
    takes_shapes_only = name.endswith("_like") or name.startswith("new_")  # zeros_like, new_full
    read, written = [], tree_leaves(result)
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes:
            written += tree_leaves(given)
        unread = argument.is_out or name in _OVERWRITES if writes else takes_shapes_only
        if not unread:
            read += tree_leaves(given)
    return Launch(name, 0, _distinct_bytes(read), _distinct_bytes(written))


def _distinct_bytes(leaves: list[Any]) -> int:
    """Bytes of the distinct tensors among ``leaves``. A broadcast dimension (stride 0) counts once."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()]
    distinct = {(tensor.data_ptr(), tensor.shape, tensor.stride()): tensor for tensor in tensors}
    return sum(
        math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        * tensor.element_size()
        for tensor in distinct.values()
    )
