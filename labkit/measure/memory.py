"""The memory in the pools of CUDA graphs."""

import gc
from collections.abc import Callable
from typing import Any

import torch


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
