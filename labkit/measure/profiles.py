"""Profile a call on a GPU: the kernels that it ran, and the gaps between them."""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from labkit import gpu
from labkit.measure import lock
from labkit.measure.kernel_names import shorten

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHING = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class KernelEvent:
    """A kernel, copy or fill on the device. Times in us, from the profile's first event."""

    name: str
    """A name short enough for a table; ``full_name`` is the compiler's."""
    full_name: str
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class Profile:
    """One call: what it ran on the device, in order."""

    kernels: list[KernelEvent]
    launches: int
    """How often the host started work on the device. The replay of a graph is one launch."""

    @property
    def gaps(self) -> list[float]:
        """Idle us before each kernel but the first; 0 where kernels touch or overlap."""
        ends = accumulate((kernel.start_us + kernel.duration_us for kernel in self.kernels), max)
        return [max(0.0, kernel.start_us - end) for kernel, end in zip(self.kernels[1:], ends, strict=False)]

    @property
    def span_us(self) -> float:
        """Time from the start of the first kernel to the end of the last."""
        ends = [kernel.start_us + kernel.duration_us for kernel in self.kernels]
        return max(ends) - self.kernels[0].start_us if ends else 0.0

    @property
    def busy_us(self) -> float:
        """Time in which at least one kernel ran."""
        return self.span_us - sum(self.gaps)


def profile(call: Callable[[], Any], *, warmup: int = 3) -> Profile:
    """Run ``call`` on the GPU and record what it launches.

    ``call`` runs ``warmup`` times and is then profiled three times, each time while this process holds the
    GPU's lock. The profile that was disturbed least is returned.
    """
    return _least_disturbed([from_trace(_trace(call, runs)) for runs in (warmup, 0, 0)])


def _least_disturbed(profiles: Sequence[Profile]) -> Profile:
    """The profile with the least busy time and span, among those with the most frequent list of kernels.

    What disturbs the host or the device makes a profile longer. If all lists differ, the longest one counts.
    """
    seen = Counter(tuple(kernel.name for kernel in made.kernels) for made in profiles)
    usual = max(seen, key=lambda names: (seen[names], len(names)))
    alike = [made for made in profiles if tuple(kernel.name for kernel in made.kernels) == usual]
    return min(alike, key=lambda made: made.busy_us + made.span_us)


def _trace(call: Callable[[], Any], warmup: int) -> list[dict[str, Any]]:
    """The ``traceEvents`` of the chrome trace of one call, which runs twice after ``warmup`` calls."""
    for _ in range(warmup):
        call()
    with (
        lock.gpu_lock(),
        tempfile.TemporaryDirectory() as folder,
        _without_profiler_messages(),
        _cupti_detached_afterwards(),
    ):
        path = str(Path(folder, "trace.json"))
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
            # the first recorded step of a process misses kernels, or has them late
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
            acc_events=True,
        ) as profiler:
            for _ in range(2):
                gpu.synchronize()
                call()
                gpu.synchronize()
                profiler.step()
        events: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    return events


@contextmanager
def _cupti_detached_afterwards() -> Iterator[None]:
    """Detach CUPTI, by which the profiler sees every launch, from the process afterwards.

    By default it stays, and from then on a launch costs the host half as much again (PyTorch issue 144455).
    torch.compile forbids to detach it when it makes graphs, for the sake of CUDA before 12.6.
    """
    os.environ["TEARDOWN_CUPTI"] = "1"
    os.environ.pop("DISABLE_CUPTI_LAZY_REINIT", None)
    yield
    for _ in range(20):  # it is detached during a call to CUDA, a moment after the profiler asked for it
        gpu.synchronize()
        time.sleep(0.005)


@contextmanager
def _without_profiler_messages() -> Iterator[None]:
    """Drop what torch 2.13 writes to stderr when a profile starts and stops; pass on everything else."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile("w+") as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            written.seek(0)
            sys.stderr.writelines(line for line in written if not line.startswith("USDT:"))


def from_trace(events: Iterable[dict[str, Any]]) -> Profile:
    """A profile from the ``traceEvents`` of a chrome trace that torch.profiler exported."""
    complete = sorted((e for e in events if e.get("ph") == "X"), key=lambda event: event["ts"])
    on_device = [event for event in complete if event["cat"] in _ON_DEVICE]
    started = {event["args"]["correlation"] for event in on_device}
    launching = [event for event in complete if event["cat"] in _LAUNCHING]
    launches = [event for event in launching if event["args"].get("correlation") in started]
    operations = [event for event in complete if event["cat"] == "cpu_op"]
    origin = min((event["ts"] for event in [*on_device, *launches, *operations]), default=0.0)
    kernels = [KernelEvent(shorten(e["name"]), e["name"], e["ts"] - origin, e["dur"]) for e in on_device]
    return Profile(kernels, len(launches))
