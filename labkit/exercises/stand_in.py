"""What a lesson captures graphs with: torch.cuda and GraphedStep; without a GPU, both on a simulated one.

What a capture keeps and refuses is the same with either. Nothing can be timed with a stand-in.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from labkit import gpu
from labkit.exercises.simulated_gpu import CUDAGraph, SimulatedGpu, Stream
from labkit.kernels import GraphedStep, graphs


def cuda() -> ModuleType:
    """torch.cuda; without a GPU a stand-in for its streams and graphs, which captures on the CPU."""
    if gpu.available():
        return torch.cuda
    machine = SimulatedGpu()
    capture = machine.cuda.graph

    @contextmanager
    def graph(cuda_graph: CUDAGraph, **options: Any) -> Iterator[None]:
        with machine, capture(cuda_graph, **options):
            yield

    vars(machine.cuda).update(graph=graph)
    return machine.cuda


_kept: list[Any] = []
"""PyTorch goes on asking a graph whose capture failed, so graphs have to stay."""


def captured(cuda: Any, call: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of a call, captured on a stream of its own, and the tensors that its replays write."""
    _kept.append(cuda.CUDAGraph())
    # stream(...) around it: PyTorch leaves the stream of a capture that failed current
    with cuda.stream(cuda.current_stream()), cuda.graph(_kept[-1], stream=cuda.Stream()):
        return _kept[-1], call()


def graphed_step(call: Callable[..., Any], keep: Sequence[Any] = (), max_graphs: int = 4) -> Any:
    """A `labkit.kernels.GraphedStep`; without a GPU it captures and replays on a stand-in, on the CPU."""
    step = GraphedStep(call, keep, max_graphs)
    if gpu.available():
        return step
    stand_in = TorchStandIn()

    def on_the_cpu(*inputs: Any) -> Any:
        with (
            stand_in.machine,
            patch.object(graphs, "torch", stand_in),
            patch.object(graphs, "DEVICE_TYPE", "cpu"),
        ):
            return step(*inputs)

    return on_the_cpu


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
