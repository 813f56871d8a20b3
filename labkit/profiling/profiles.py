"""Profile a call: the kernels that it ran, the gaps between them, and the launches on the host.

On a GPU a profile comes from torch.profiler. Without one it comes from a recorded lesson. If nothing is
recorded either, the launches are counted by ``launch_counts``: the same sequence, without times.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from labkit import gpu
from labkit.measure import lock, machine
from labkit.measure.rows import LIVE
from labkit.profiling import launch_counts, recorded_profiles
from labkit.profiling.kernel_names import shorten
from labkit.profiling.recorded_profiles import HostEvent, KernelEvent

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHING = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Profile:
    """One call: what it ran on the device (``kernels``, ``host``), or would have run (``counted``)."""

    kernels: list[KernelEvent] = field(default_factory=list)
    host: list[HostEvent] = field(default_factory=list)
    """The calls of CUDA that started work on the device (cudaLaunchKernel, cuLaunchKernelEx, ...)."""
    counted: launch_counts.Counts | None = None
    """The launches without times, if there was no GPU and nothing recorded; else None."""
    kind: str = LIVE
    """"live" or "recorded"."""
    device: str = ""
    """The GPU that ran the call; empty if the launches were counted."""
    date: str = ""
    """When the call ran, in ISO 8601; empty if the launches were counted."""

    @property
    def timed(self) -> bool:
        """Whether there are times, from this GPU or from the one that was recorded."""
        return self.counted is None

    @property
    def launches(self) -> int:
        """How often the host started work on the device. The replay of a graph is one launch."""
        return len(self.host if self.counted is None else self.counted.launches)

    @property
    def gaps(self) -> list[float]:
        """Idle us before each kernel but the first; 0 where kernels touch or overlap."""
        ends = accumulate((kernel.start_us + kernel.duration_us for kernel in self.kernels), max)
        return [max(0.0, kernel.start_us - end) for kernel, end in zip(self.kernels[1:], ends, strict=False)]

    @property
    def span_us(self) -> float | None:
        """Time from the start of the first kernel to the end of the last; None without times."""
        if not self.timed:
            return None
        ends = [kernel.start_us + kernel.duration_us for kernel in self.kernels]
        return max(ends) - self.kernels[0].start_us if ends else 0.0

    @property
    def busy_us(self) -> float | None:
        """Time in which at least one kernel ran; None without times."""
        span = self.span_us
        return None if span is None else span - sum(self.gaps)

    def table(self) -> pd.DataFrame:
        """Kernels in the order of their first run, equal ones in one row: count, us of all, share of time.

        Counted launches have a row for each operation: count, Triton programs (if there are any), bytes read
        and bytes written.
        """
        if self.counted is not None:
            listed = pd.DataFrame(
                [(n.name, 1, n.programs, n.bytes_read, n.bytes_written) for n in self.counted.launches],
                columns=["operation", "count", "programs", "bytes read", "bytes written"],
            )
            unused = [] if self.counted.programs else ["programs"]
            return listed.drop(columns=unused).groupby("operation", sort=False, as_index=False).sum()
        rows = [(kernel.full_name, kernel.name, 1, kernel.duration_us) for kernel in self.kernels]
        frame = pd.DataFrame(rows, columns=["full name", "kernel", "count", "us"])
        # Grouped by the full name, since two kernels may have the same short one.
        frame = frame.groupby(["full name", "kernel"], sort=False, as_index=False).sum()
        return frame.assign(share=frame["us"] / frame["us"].sum()).drop(columns="full name")


def profile(call: Callable[[], Any], *, tape: str | None = None, warmup: int = 3) -> Profile:
    """Run ``call`` and record what it launches.

    On a GPU ``call`` runs ``warmup`` times and is then profiled three times, each time while this process
    holds the GPU's lock. The profile that was disturbed least is returned. Without a GPU the recorded profile
    named ``tape`` ("launch_overhead/eager") is returned, and ``call`` does not run. If there is none, its
    launches are counted.

    Raises ValueError if the file of recorded profiles is damaged.
    """
    if not gpu.available():
        row = recorded_profiles.recorded_profile(tape) if tape else None
        if row is None:
            return Profile(counted=launch_counts.count(call))
        events = recorded_profiles.decode(row.trace or {})
        return Profile(*events, kind=row.kind, device=row.device, date=row.date)
    made = _least_disturbed([from_trace(_trace(call, runs)) for runs in (warmup, 0, 0)])
    stamp = machine.row_columns()
    return replace(made, device=stamp["device"], date=stamp["date"])


def _least_disturbed(profiles: Sequence[Profile]) -> Profile:
    """The profile with the least busy time and span, among those with the most frequent list of kernels.

    What disturbs the host or the device makes a profile longer. If all lists differ, the longest one counts.
    """
    seen = Counter(tuple(kernel.name for kernel in made.kernels) for made in profiles)
    usual = max(seen, key=lambda names: (seen[names], len(names)))
    alike = [made for made in profiles if tuple(kernel.name for kernel in made.kernels) == usual]
    return min(alike, key=lambda made: (made.busy_us or 0.0) + (made.span_us or 0.0))


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
    return Profile(kernels, [HostEvent(e["name"], e["ts"] - origin, e["dur"]) for e in launches])
