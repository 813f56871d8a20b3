"""Count what a call would launch, and the bytes that it would move, without a GPU.

There are two kinds of launches. An operation of PyTorch is taken for one kernel that touches each of its
tensors once. Of an interpreted Triton kernel the loads and stores are counted lane by lane.
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


@dataclass(frozen=True)
class Counts:
    """The launches of a call, in order."""

    launches: list[Launch] = field(default_factory=list)

    @property
    def programs(self) -> int:
        """Program instances of all Triton kernels."""
        return sum(launch.programs for launch in self.launches)


def count(call: Callable[[], Any]) -> Counts:
    """Run ``call`` once and count what it launches.

    A function of torch.compile counts as it is written, unfused: the compiler does nothing while operations
    are recorded. With ``fullgraph=True`` torch refuses to run it here.

    Raises RuntimeError on a GPU, where the accesses of a compiled Triton kernel cannot be seen.
    """
    if gpu.available():
        raise RuntimeError("launches are counted only without a GPU; on one profiles.profile shows what ran")
    with recording() as counts:
        call()
    return counts


@contextmanager
def recording() -> Iterator[Counts]:
    """Count what is launched inside the block, on a machine without a GPU."""
    counts = Counts()
    operations = _Operations(counts.launches)
    with ExitStack() as stack:
        if backend.interpreting():
            stack.enter_context(_interpreted_kernels(counts.launches, operations))
        stack.enter_context(operations)
        yield counts


class _Operations(dispatch_mode.LightDispatchMode):
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


@contextmanager
def _interpreted_kernels(launches: list[Launch], operations: _Operations) -> Iterator[None]:
    """Record launches of interpreted Triton kernels: grid, and bytes moved by lanes that are not masked."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    launch_kernel = GridExecutor.__call__
    set_grid = InterpreterBuilder.set_grid_dim

    def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(Launch(executor.fn.__name__))
        operations.paused = True  # the interpreter copies tensors, which is no launch
        try:
            return launch_kernel(executor, *args, **kwargs)
        finally:
            operations.paused = False

    def grid_set(builder: Any, *grid: int) -> None:
        launches[-1].programs = math.prod(grid)
        set_grid(builder, *grid)

    def counted(method: str, reads: bool, writes: bool, mask_at: int | None) -> Any:
        original = getattr(InterpreterBuilder, method)

        def access(builder: Any, *args: Any, **kwargs: Any) -> Any:
            pointers = args[1] if method == "create_atomic_rmw" else args[0]
            on = True if mask_at is None else np.asarray(args[mask_at].data, dtype=bool)
            used = np.broadcast_to(on, np.shape(pointers.data)).sum()
            moved = int(used) * max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            launches[-1].bytes_read += moved * reads
            launches[-1].bytes_written += moved * writes
            return original(builder, *args, **kwargs)

        return patch.object(InterpreterBuilder, method, access)

    with ExitStack() as stack:
        stack.enter_context(patch.object(GridExecutor, "__call__", launched))
        stack.enter_context(patch.object(InterpreterBuilder, "set_grid_dim", grid_set))
        # Unmasked accesses, block pointers and descriptors call these too.
        stack.enter_context(counted("create_masked_load", True, False, mask_at=1))
        stack.enter_context(counted("create_masked_store", False, True, mask_at=2))
        stack.enter_context(counted("create_atomic_rmw", True, True, mask_at=3))
        stack.enter_context(counted("create_atomic_cas", True, True, mask_at=None))
        yield
