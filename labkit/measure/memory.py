"""The memory that a call needs on the GPU, and that in the pools of graphs."""

import gc
from collections.abc import Callable
from typing import Any

import torch


class PeakMemory:
    """The most bytes that were in use at one time inside the ``with`` block, above those in use before it.

    Bytes as they were asked for: the allocator hands out up to 2 MiB more for a tensor, depending on what
    was freed before, and ``torch.cuda.max_memory_allocated`` counts those too.
    """

    def __enter__(self) -> "PeakMemory":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = self._stat("current")
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.bytes = self._stat("peak") - self._before

    def _stat(self, which: str) -> int:
        return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes in use at one time during ``call()``, above what was in use before.

    Its inputs do not count, its outputs and intermediates do. It is called once before: compiling and the
    workspaces that a library keeps are no part of it.
    """
    call()
    with PeakMemory() as meter:
        call()
    return meter.bytes


def pool_bytes(make: Callable[[], Any]) -> int:
    """Bytes in the memory pools of CUDA graphs that are there because of what ``make()`` returns.

    Whole segments of the allocator, so 2 MiB count for a tensor of one number. Static inputs that were made
    outside the capture are no part of it, nor are the workspaces that a library keeps for a stream; one that
    a capture took for itself (graphs.release_cublas_workspaces) is.
    """
    before = _in_pools()
    made = make()
    after = _in_pools()
    del made
    return after - before


def _in_pools() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))
