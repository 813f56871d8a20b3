"""The copy beside which everything is timed: the roof of what memory bounds."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit import gpu
from labkit.measure.clocks import TimedCall


@triton.jit
def _copy_kernel(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(target + at, tl.load(source + at, inside), inside)


def triton_copy(source: Tensor, target: Tensor) -> Tensor:
    """Copy a contiguous tensor with the package's own kernel: 4 KiB per program, 16 bytes per thread."""
    block, count = 4096 // source.element_size(), source.numel()
    _copy_kernel[(triton.cdiv(count, block),)](source, target, count, BLOCK=block, num_warps=8)
    return target


COPIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Tensor.copy_": lambda source, target: target.copy_(source),
    "Triton copy": triton_copy,
}


def copied_bytes(total_bytes: int) -> int:
    """How much the copy beside a kernel really moves: rounded up, to 1 KiB, above 8 MiB to 2 MiB.

    Odd sizes cost a copy up to half its speed, and a kernel must not look good beside a slow copy.
    """
    unit = 2**21 if total_bytes > 2**23 else 2**10
    return -(-total_bytes // unit) * unit


def calls(total_bytes: int) -> dict[str, TimedCall]:
    """Two ways to move ``copied_bytes(total_bytes)``, half of them read, half written."""
    source = torch.randn(copied_bytes(total_bytes) // 8, device=gpu.device())
    pair = (source, torch.empty_like(source))
    return {name: TimedCall(copy, pair) for name, copy in COPIES.items()}
