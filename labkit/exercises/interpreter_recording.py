"""Records what an answer launches, and the addresses that its interpreted kernels load and store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl

from labkit import interpreter
from labkit.exercises.engine import RecordedLaunches
from labkit.measure import launch_counts


@contextmanager
def record_launches() -> Iterator[RecordedLaunches]:
    """Record what is launched inside."""
    seen = RecordedLaunches()
    with interpreter.watching(_Recorder(seen)), launch_counts.recording() as found:
        yield seen
    seen.names = [one.name for one in found]
    seen.read = [one.bytes_read for one in found]


def arguments(kernel: Any, args: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What a kernel is launched with, by name."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    return {name: value for name, value in given.items() if name not in ("grid", "warmup")}


class _Recorder(interpreter.Observer):
    def __init__(self, seen: RecordedLaunches) -> None:
        self.seen = seen

    def launch(self, run: Callable[..., Any], kernel: Any, args: Any, options: dict[str, Any]) -> None:
        self.seen.kernels.append((kernel, arguments(kernel, args, options)))
        run(*args, **options)

    def load(self, addresses: np.ndarray, size: int, unfilled: bool) -> None:
        self.seen.loads.append(addresses)
        self.seen.unfilled |= unfilled
        self.seen.stores_before.append(len(self.seen.stores))

    def store(self, addresses: np.ndarray, size: int) -> None:
        self.seen.stores.append(addresses)

    def atomic(self, addresses: np.ndarray, size: int) -> None:
        self.seen.atomics = True

    def dot(self, inputs: Any, total: Any, tf32: bool) -> None:
        self.seen.half_sums |= total == tl.float16
        self.seen.float32_products |= inputs == tl.float32
        self.seen.tf32 |= inputs == tl.float32 and tf32
