"""What an answer does beside its result: launches, and the addresses that its interpreted kernels use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from torch import Tensor

from labkit import interpreter
from labkit.measure import launch_counts


class Recorded(interpreter.Observer):
    """Of one call. Each array holds the addresses of one load or store, masked lanes excluded."""

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
def recording() -> Iterator[Recorded]:
    """Record what is done inside."""
    seen = Recorded()
    with interpreter.watching(seen), launch_counts.recording() as found:
        yield seen
    seen.names = [one.name for one in found]
    seen.read = [one.bytes_read for one in found]


def elements(addresses: list[np.ndarray], tensor: Tensor) -> np.ndarray:
    """Elements of a contiguous tensor at these addresses, in ascending order."""
    if not addresses:
        return np.zeros(0, np.int64)
    first = (np.concatenate(addresses).astype(np.int64) - tensor.data_ptr()) // tensor.element_size()
    return np.sort(first[(first >= 0) & (first < tensor.numel())])
