"""What runs on a simulated GPU: a lesson's captures, and layers that answers call, benchmark and capture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from labkit import gpu
from labkit.exercises.simulated_gpu import COMPILE_US, CUDAGraph, LogEntry, SimulatedGpu, count, detached

# ---- what a lesson captures graphs with --------------------------------------------------------------------


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


# ---- layers of exercises -----------------------------------------------------------------------------------


class CompiledLayer:
    """Something that is compiled when it is first called, which no capture allows; it counts its calls."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu, self.calls = gpu, 0

    def begin_call(self) -> None:
        """Compile in the first call; RuntimeError where that is in a capture."""
        if not self.calls:
            self.gpu.not_while_capturing("call compiles its kernels when it is first called")
            self.gpu.host_us += self.gpu.compile_us
            self.gpu.note("compile")
        self.calls += 1


class CompiledFunction(CompiledLayer):
    """A layer that computes a function of a tensor."""

    def __init__(self, gpu: SimulatedGpu, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(gpu)
        self.function = function
        self.streams: set[str] = set()
        """On which it ran, and was not captured: "side", and "current" for the default one."""
        self.in_graphs = 0
        """How often it was captured."""
        self.captured: Tensor | None = None
        """Its result in the last capture, which a replay computes anew."""
        self.goes_backward = True
        """Whether autograd recorded all calls, captured or not."""
        self.given: list[Tensor] = []
        """What it was called with outside of captures."""

    def __call__(self, x: Tensor) -> Tensor:
        self.begin_call()
        y = self.function(x)
        self.goes_backward &= torch.is_grad_enabled()
        if self.gpu.capturing is not None:
            self.captured = detached(y)
            self.in_graphs += 1
        else:
            self.given.append(detached(x).clone())
            self.streams.add("current" if self.gpu.current is self.gpu.default else "side")
        return y


class KernelSequence(CompiledLayer):
    """A layer that takes time only: a call launches a number of kernels, on a GPU of its own."""

    def __init__(self, kernels: int, kernel_us: float, launch_us: float) -> None:
        super().__init__(SimulatedGpu())
        self.device_us, self.host_us = kernels * kernel_us, kernels * launch_us
        self._kernels, self._kernel_us, self._launch_us = kernels, kernel_us, launch_us

    def __call__(self) -> None:
        self.begin_call()
        for _ in range(self._kernels):
            self.gpu.launch(self._launch_us, self._kernel_us)
        if self.gpu.capturing is not None:
            self.gpu.note("captured")

    def __repr__(self) -> str:
        several = "s" if self._kernels > 1 else ""
        return f"({self._kernels} kernel{several}, {self._launch_us:g} us to launch each)"


@dataclass(frozen=True)
class RandomTensor:
    """A tensor of a `BenchmarkGpu`: a shape without values."""

    batch: int
    width: int


class BenchmarkGpu(SimulatedGpu):
    """A GPU to benchmark, with its own speeds: random numbers are work, too, and some calls are slow.

    ``slow_every``: every so many-th call is; ``slow_early``: numbers of further ones.
    """

    def __init__(
        self,
        launch_us: float,
        wait_us: float,
        slow_every: int,
        slow_early: tuple[int, ...],
        compile_us: float = COMPILE_US,
    ) -> None:
        super().__init__(wait_us, compile_us)
        self.launch_us, self.slow_every, self.slow_early = launch_us, slow_every, slow_early

    def randn(self, batch: int, width: int) -> RandomTensor:
        """Launch the drawing of a tensor of normal random numbers."""
        self.launch(self.launch_us, batch * width * 1e-3)
        self.note("draw")
        return RandomTensor(batch, width)

    def timed_parts(self) -> list[list[LogEntry]]:
        """The log between two readings of the clock, with both, wherever a layer is called between them.

        Readings while the device is busy count only where there are no such parts between the others.
        """
        readings = [i for i, entry in enumerate(self.log) if entry.event == "clock"]
        for chosen in ([i for i in readings if not self.log[i].pending], readings):
            parts = [self.log[first : last + 1] for first, last in pairwise(chosen)]
            if found := [part for part in parts if count(part, "call")]:
                return found
        return []


class BenchmarkLayer(CompiledLayer):
    """A layer on a `BenchmarkGpu` for x of one shape: a call launches one kernel, longer than a launch."""

    gpu: BenchmarkGpu

    def __init__(self, gpu: BenchmarkGpu, ns_per_element: float, batch: int, width: int) -> None:
        super().__init__(gpu)
        self.ns_per_element, self.shape = ns_per_element, (batch, width)

    def __call__(self, x: RandomTensor) -> RandomTensor:
        """Launch the layer; TypeError unless `BenchmarkGpu.randn` drew ``x``, in the layer's shape."""
        if not isinstance(x, RandomTensor):
            raise TypeError(f"layer(x) takes what gpu.randn drew, not {type(x).__name__}")
        shape = (x.batch, x.width)
        if shape != self.shape:
            raise TypeError(f"layer(x) is to be timed for an x of (batch, width) {self.shape}, not {shape}")
        self.begin_call()
        # Early ones, too: who times few calls, or takes one reading of many, finds out.
        early = self.calls in self.gpu.slow_early
        slow = 1.4 if early or self.calls % self.gpu.slow_every == 0 else 1.0
        self.gpu.launch(self.gpu.launch_us, slow * x.batch * x.width * self.ns_per_element / 1000)
        self.gpu.note("call")
        return x
