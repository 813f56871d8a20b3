"""The most memory that a call has in use on the GPU at one time."""

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes in use at one time during ``call()``, above what was in use before.

    Its inputs do not count, its outputs and intermediates do, as they were asked for: the allocator hands out
    up to 2 MiB more for a tensor. It is called once before: compiling and the workspaces that a library keeps
    are no part of it.
    """
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"]) - before
