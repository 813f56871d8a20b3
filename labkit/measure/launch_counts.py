"""Count what a call would launch, and the bytes that it would move, without a GPU.

There are two kinds of launches. An operation of PyTorch is taken for one kernel that touches each of its
tensors once. Of an interpreted Triton kernel the loads and stores are counted lane by lane. `recorded` keeps
their addresses, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
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


class _Operations(TorchDispatchMode):
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


# ---- the addresses that interpreted kernels use ------------------------------------------------------------


class Recorded(interpreter.Observer):
    """What a call does beside its result.

    Each array holds the addresses of one load or store, masked lanes excluded.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        """Kernels and operations of PyTorch that do work, in order."""
        self.read: list[int] = []
        """Bytes that each of them reads."""
        self.kernels: list[tuple[Any, dict[str, Any]]] = []
        """Each Triton kernel with its arguments by name."""
        self.began: list[tuple[int, int]] = []
        """For each of them, how many loads and how many stores came before it."""
        self.loads: list[np.ndarray] = []
        self.stores: list[np.ndarray] = []
        self.stores_before: list[int] = []
        """For each load, how many stores came before it."""
        self.unfilled = False
        """Whether a load had masked lanes, and no number to fill them with."""
        self.atomics = False
        """Whether a kernel added to memory atomically."""
        self.scans = False
        """Whether a kernel made an associative scan."""
        self.most_turns = 0
        """Of the longest loop of a kernel."""
        self.tf32 = self.float32_products = self.half_sums = False
        """Whether a product was one in TF32, one of float32 blocks, or was summed up in float16."""

    def loaded(self, tensor: Tensor) -> np.ndarray:
        """Elements of a contiguous tensor that were loaded, one entry a lane, in ascending order."""
        return elements(self.loads, tensor)

    def stored(self, tensor: Tensor) -> np.ndarray:
        """The same for stores."""
        return elements(self.stores, tensor)

    def launch(self, run: Callable[..., Any], kernel: Any, args: Any, options: dict[str, Any]) -> None:
        """Keep what the kernel is launched with, by name."""
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        arguments = {name: value for name, value in given.items() if name not in ("grid", "warmup")}
        self.kernels.append((kernel, arguments))
        self.began.append((len(self.loads), len(self.stores)))
        run(*args, **options)

    def load(self, addresses: np.ndarray, size: int, unfilled: bool) -> None:
        """Keep the addresses, and how many stores came before."""
        self.loads.append(addresses)
        self.unfilled |= unfilled
        self.stores_before.append(len(self.stores))

    def store(self, addresses: np.ndarray, size: int) -> None:
        """Keep the addresses."""
        self.stores.append(addresses)

    def atomic(self, addresses: np.ndarray, size: int) -> None:
        """Keep that there was one."""
        self.atomics = True

    def scan(self, steps: int) -> None:
        """Keep that there was one."""
        self.scans = True

    def loop(self, turns: int) -> None:
        """Keep how many turns the longest loop takes."""
        self.most_turns = max(self.most_turns, turns)

    def dot(self, inputs: Any, total: Any, tf32: bool) -> None:
        """Keep how a product is taken."""
        self.half_sums |= total == tl.float16
        self.float32_products |= inputs == tl.float32
        self.tf32 |= inputs == tl.float32 and tf32


@contextmanager
def recorded() -> Iterator[Recorded]:
    """Record what is done inside."""
    seen = Recorded()
    with interpreter.watching(seen), recording() as found:
        yield seen
    seen.names = [one.name for one in found]
    seen.read = [one.bytes_read for one in found]


def elements(addresses: list[np.ndarray], tensor: Tensor) -> np.ndarray:
    """Elements of a contiguous tensor at these addresses, in ascending order."""
    if not addresses:
        return np.zeros(0, np.int64)
    first = (np.concatenate(addresses).astype(np.int64) - tensor.data_ptr()) // tensor.element_size()
    return np.sort(first[(first >= 0) & (first < tensor.numel())])
