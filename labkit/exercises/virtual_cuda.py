"""A stand-in for torch.cuda and for the clocks of ``time``, in virtual time: graphs, events, waiting.

Host and device have a time each, in virtual microseconds. A launch costs the host some and is queued; the
device works off its queue while the host goes on. A replay costs the host little, however much was captured,
but for a graph's first replay, which uploads it. All streams are the one queue.
"""

import inspect
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

COMPILE_US, CAPTURE_US, UPLOAD_US, REPLAY_US, WAIT_US = 40_000.0, 900.0, 400.0, 8.0, 2.0
"""What these cost the host; a capture beside its launches, waiting beside the device's work."""


class Entry(NamedTuple):
    """One thing that happened: "clock" or "event" (a time stamp), "captured" (a call), "upload", "replay"."""

    event: str
    us: float
    """What a time stamp shows; the host's time for everything else."""
    pending: bool
    """Whether the device still has work."""
    calls: int
    """That a replay runs."""


class Gpu:
    """A device; ``log`` is what happened, in order."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.host = self.device = 1000.0  # a clock has been running before anybody looks at it
        self.capturing: Graph | None = None

    def note(self, event: str, us: float | None = None, calls: int = 0) -> None:
        """Append to the log."""
        self.log.append(Entry(event, self.host if us is None else us, self.device > self.host, calls))

    def timed(self) -> list[Entry]:
        """What lies between the first reading of a clock and the last one, with both."""
        at = [i for i, entry in enumerate(self.log) if entry.event in ("clock", "event")]
        return self.log[at[0] : at[-1] + 1] if at else []

    @property
    def captured(self) -> int:
        """How many calls were captured."""
        return sum(entry.event == "captured" for entry in self.log)

    def not_while_capturing(self, what: str) -> None:
        """Raise what CUDA raises, during a capture."""
        if self.capturing is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def launch(self, host_us: float, device_us: float) -> None:
        """Queue work; in a capture it is only added to the graph."""
        self.host += host_us
        if self.capturing is None:
            self.device = max(self.device, self.host) + device_us
        else:
            self.capturing.device_us += device_us

    def clock_us(self) -> float:
        """What the host's clock shows. It doesn't wait for the device."""
        self.host += 0.05
        self.note("clock")
        return self.host

    def wait(self, until: float) -> None:
        """Let the host wait until the device has come so far."""
        self.not_while_capturing("the host waited for the device")
        self.host = max(self.host, until) + WAIT_US

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for all work."""
        self.wait(self.device)

    @contextmanager
    def graph(self, cuda_graph: "Graph", pool: Any = None, stream: Any = None, **options: Any) -> Any:
        """Capture what is launched inside. Like torch's, it waits for the device before."""
        self.synchronize()
        self.capturing = cuda_graph
        try:
            yield
        finally:
            self.capturing = None
        self.host += CAPTURE_US
        cuda_graph.captured = True

    @contextmanager
    def stands_in(self, answer: Any) -> Iterator[None]:
        """Replace torch.cuda and the clocks, also where the answer's module imported them by name."""
        stream = SimpleNamespace(
            synchronize=self.synchronize, wait_stream=lambda other: None, wait_event=lambda event: None
        )
        cuda: dict[str, Any] = dict(graph=self.graph, synchronize=self.synchronize, stream=nullcontext)
        cuda |= dict.fromkeys(("Stream", "current_stream", "default_stream"), lambda *args, **options: stream)
        cuda |= dict(CUDAGraph=partial(Graph, self), Event=partial(Event, self))
        clocks: dict[str, Any] = dict.fromkeys(
            ("perf_counter", "monotonic", "time"), lambda: self.clock_us() / 1e6
        )
        clocks |= {f"{name}_ns": lambda: round(self.clock_us() * 1e3) for name in clocks}
        own = getattr(inspect.unwrap(answer), "__globals__", {})
        with ExitStack() as stack:
            for module, names in ((torch.cuda, cuda), (time, clocks)):
                for name, new in names.items():
                    old = getattr(module, name)
                    imported = {alias: new for alias, value in own.items() if value is old}
                    stack.enter_context(patch.dict(own, imported))
                    stack.enter_context(patch.object(module, name, new))
            yield


class Graph:
    """What was captured, as one piece of work."""

    def __init__(self, gpu: Gpu, keep_graph: bool = False) -> None:
        self._gpu = gpu
        self.device_us, self.calls = 0.0, 0
        self.captured = self._uploaded = False

    def replay(self) -> None:
        """Queue all that was captured."""
        self._gpu.not_while_capturing("a graph was replayed")
        if not self.captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if not self._uploaded:
            self._gpu.host += UPLOAD_US
            self._gpu.note("upload")
        self._uploaded = True
        self._gpu.launch(REPLAY_US, self.device_us)
        self._gpu.note("replay", calls=self.calls)


class Event:
    """A time stamp that the device makes when it comes to it."""

    def __init__(self, gpu: Gpu, enable_timing: bool = False, blocking: bool = False) -> None:
        self._gpu, self._timing = gpu, enable_timing
        self._us: float | None = None

    def record(self, stream: Any = None) -> None:
        """Queue the time stamp; in a capture there is none."""
        if self._gpu.capturing is None:
            self._gpu.launch(1.0, 0.0)
            self._us = self._gpu.device
            self._gpu.note("event", self._us)

    def synchronize(self) -> None:
        """Let the host wait until it is made."""
        self._gpu.wait(self._us or 0.0)

    def elapsed_time(self, later: "Event") -> float:
        """Milliseconds from this time stamp to another one."""
        if not (self._timing and later._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._us is None or later._us is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if max(self._us, later._us) > self._gpu.host:
            raise RuntimeError("CUDA error: device not ready")
        return (later._us - self._us) / 1000


class Layer:
    """A layer on a device of its own: a call launches its kernels, and compiles them the first time."""

    def __init__(self, kernels: int, kernel_us: float, launch_us: float) -> None:
        self.gpu = Gpu()
        self.device_us = kernels * kernel_us
        self._kernels, self._kernel_us, self._launch_us = kernels, kernel_us, launch_us
        self._compiled = False

    def __call__(self) -> None:
        """Launch it; RuntimeError where it would have to compile in a capture."""
        if not self._compiled:
            self.gpu.not_while_capturing("call compiles its kernels when it is first called")
            self.gpu.host += COMPILE_US
        self._compiled = True
        for _ in range(self._kernels):
            self.gpu.launch(self._launch_us, self._kernel_us)
        if self.gpu.capturing is not None:
            self.gpu.capturing.calls += 1
            self.gpu.note("captured")

    def __repr__(self) -> str:
        return f"({self._kernels} x {self._launch_us:g} us to launch)"
