"""What a call would launch, and the bytes it moves, where nothing can be timed.

Two kinds of launches, in order: operations of PyTorch, each taken for one kernel that touches all of its
tensors once; and interpreted Triton kernels, whose loads and stores are counted lane by lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._pytree import tree_leaves

from labkit import backend, dispatch_mode, gpu

_ALLOCATES = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
    "resize_",
    "set_",
    "_unsafe_view",
}
"""Operations that launch nothing, and that their schema does not show to be views."""

_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
"""Operations that write their first tensor without reading it."""


@dataclass
class Launch:
    """One launch. Bytes that several lanes of a Triton kernel load from one address count for each."""

    name: str
    programs: int = 0
    """Program instances of a Triton kernel; 0 for an operation of PyTorch."""
    bytes_read: int = 0
    bytes_written: int = 0
    touched: int = 0
    """Bytes of the distinct addresses that were read, and of those that were written: what crosses memory
    when a cache keeps whatever one launch uses, and nothing from one launch to the next."""


@dataclass(frozen=True)
class Counts:
    """The launches of a call, in order."""

    launches: list[Launch] = field(default_factory=list)

    @property
    def programs(self) -> int:
        """Program instances of all Triton kernels."""
        return sum(launch.programs for launch in self.launches)

    @property
    def bytes_read(self) -> int:
        """Bytes that all launches read."""
        return sum(launch.bytes_read for launch in self.launches)

    @property
    def bytes_written(self) -> int:
        """Bytes that all launches write."""
        return sum(launch.bytes_written for launch in self.launches)

    @property
    def touched(self) -> int:
        """Bytes of distinct addresses, summed over all launches."""
        return sum(launch.touched for launch in self.launches)


def count(call: Callable[[], Any]) -> Counts:
    """Run ``call`` once and count what it launches.

    On a GPU a compiled Triton kernel's accesses cannot be seen: RuntimeError, use ``profiles.profile``.
    torch.compile steps aside while operations are recorded: its functions count as they are written, unfused
    (with ``fullgraph=True`` torch refuses to run them here).
    """
    if gpu.available():
        raise RuntimeError("counts are for machines without a GPU; here profiles.profile shows what ran")
    with recording() as counts:
        call()
    return counts


@contextmanager
def recording() -> Iterator[Counts]:
    """Count what is launched inside, where no GPU is seen."""
    counts = Counts()
    operations = _Operations(counts.launches)
    with ExitStack() as stack:
        if backend.interpreting():
            stack.enter_context(_interpreted(counts.launches, operations))
        stack.enter_context(operations)
        yield counts


def operations(call: Callable[[], Any]) -> list[Launch]:
    """Run ``call`` once and list PyTorch's operations that start work, on any device; Triton is not seen."""
    found: list[Launch] = []
    with _Operations(found):
        call()
    return found


class _Operations(dispatch_mode.Mode):
    """Records the operations below autograd, backward passes included."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches = launches
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = len(self.launches)
        own = OPDEFS.get(func._schema.name)
        if own is not None:
            with self:  # an operator of somebody's own is Python that launches things: look inside
                return own._init_fn(*args, **kwargs)
        result = func(*args, **kwargs)
        if not self.paused and _launches(func) and len(self.launches) == before:
            self.launches.append(_operation(func, args, kwargs, result))
        return result


def _launches(func: Any) -> bool:
    """Whether an operation starts work on a device: neither a view nor an allocation."""
    aliases = [value.alias_info for value in func._schema.returns]
    view = any(alias is not None and not alias.is_write for alias in aliases)
    view = view or torch.Tag.inplace_view in func.tags
    return not view and func._schema.name.split("::")[1] not in _ALLOCATES


def _operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Launch:
    name = func._schema.name.split("::")[1]
    read, written = [], tree_leaves(result)
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes:
            written += tree_leaves(given)
        unread = argument.is_out or name in _OVERWRITES if writes else _takes_a_shape(name)
        if not unread:
            read += tree_leaves(given)
    read_bytes, written_bytes = _touched_bytes(read), _touched_bytes(written)
    return Launch(name, 0, read_bytes, written_bytes, read_bytes + written_bytes)


def _takes_a_shape(name: str) -> bool:
    """Whether an operation takes the shape of its tensor, and no value: ``zeros_like``, ``new_full``."""
    return name.endswith("_like") or name.startswith("new_")


def _touched_bytes(leaves: list[Any]) -> int:
    """Bytes of the distinct tensors among ``leaves``; a broadcast dimension (stride 0) counts once."""
    distinct = {
        (leaf.data_ptr(), tuple(leaf.shape), leaf.stride()): leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }
    return sum(
        math.prod(size for size, stride in zip(leaf.shape, leaf.stride(), strict=True) if stride)
        * leaf.element_size()
        if leaf.numel()
        else 0
        for leaf in distinct.values()
    )


@contextmanager
def _interpreted(launches: list[Launch], operations: _Operations) -> Iterator[None]:
    """Record interpreted Triton launches: grid, and bytes moved by lanes that are not masked off."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    launch_kernel = GridExecutor.__call__
    set_grid = InterpreterBuilder.set_grid_dim
    addresses: dict[tuple[bool, int], list[Any]] = {}  # of this launch, by (written, bytes of an element)

    def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(Launch(executor.fn.__name__))
        addresses.clear()
        operations.paused = True  # the interpreter's own copies are no launches
        try:
            return launch_kernel(executor, *args, **kwargs)
        finally:
            operations.paused = False
            found = {key: np.unique(np.concatenate(parts)).size for key, parts in addresses.items()}
            launches[-1].touched = sum(count * size for (_, size), count in found.items())

    def grid_set(builder: Any, *grid: int) -> None:
        launches[-1].programs = math.prod(grid)
        set_grid(builder, *grid)

    def counted(method: str, reads: bool, writes: bool, mask_at: int | None) -> Any:
        original = getattr(InterpreterBuilder, method)

        def access(builder: Any, *args: Any, **kwargs: Any) -> Any:
            pointers = args[1] if method == "create_atomic_rmw" else args[0]
            on = True if mask_at is None else np.asarray(args[mask_at].data, dtype=bool)
            used = np.asarray(pointers.data)[np.broadcast_to(on, np.shape(pointers.data))].ravel()
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            for written in [False] * reads + [True] * writes:
                addresses.setdefault((written, size), []).append(used)
            moved = used.size * size
            launches[-1].bytes_read += moved * reads
            launches[-1].bytes_written += moved * writes
            return original(builder, *args, **kwargs)

        return patch.object(InterpreterBuilder, method, access)

    with ExitStack() as stack:
        stack.enter_context(patch.object(GridExecutor, "__call__", launched))
        stack.enter_context(patch.object(InterpreterBuilder, "set_grid_dim", grid_set))
        # Unmasked accesses, block pointers and descriptors come down to these.
        stack.enter_context(counted("create_masked_load", True, False, mask_at=1))
        stack.enter_context(counted("create_masked_store", False, True, mask_at=2))
        stack.enter_context(counted("create_atomic_rmw", True, True, mask_at=3))
        stack.enter_context(counted("create_atomic_cas", True, True, mask_at=None))
        yield
