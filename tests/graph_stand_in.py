"""torch for `labkit.kernels.graphs` on a machine without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from labkit.exercises.simulated_gpu import CUDAGraph, SimulatedGpu, Stream


class TorchStandIn:
    """torch as `labkit.kernels.graphs` needs it, with a simulated GPU's torch.cuda."""

    def __init__(self) -> None:
        self.machine, self.cuda = SimulatedGpu(), self
        self._C = SimpleNamespace(
            _cuda_getCurrentRawStream=lambda gpu: self.machine.streams.index(self.machine.current)
        )
        self.graph_pool_handle = partial(next, count())  # nothing of the pools is simulated
        self.is_available = lambda: False  # no memory of a GPU's is to be freed, no random state to be kept
        self.current_device = lambda: 0
        self.device = nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine.cuda if hasattr(self.machine.cuda, name) else torch, name)

    def set_stream(self, stream: Stream) -> None:
        """Make a stream the current one."""
        self.machine.current = stream

    @contextmanager
    def graph(self, graph: CUDAGraph, pool: int, stream: Stream) -> Iterator[None]:
        """A capture; where it fails, its stream stays current, as PyTorch leaves it."""
        try:
            with self.machine.cuda.graph(graph, pool, stream):
                yield
        except BaseException:
            self.machine.current = stream
            raise
