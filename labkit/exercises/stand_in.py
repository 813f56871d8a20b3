"""What a lesson captures graphs with: torch.cuda; without a GPU, a simulated one.

What a capture keeps and refuses is the same with either. Nothing can be timed with a stand-in.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from labkit import gpu
from labkit.exercises.simulated_gpu import CUDAGraph, SimulatedGpu


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
