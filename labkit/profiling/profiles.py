"""What ran: the kernels of one call, the gaps between them, and the host's launches.

On a GPU from torch.profiler. Without one from a recorded lesson, else from ``counts``: the same sequence
of launches, without times.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from labkit import child_process, gpu
from labkit.measure import lock, machine
from labkit.measure.rows import LIVE, TAPE
from labkit.profiling import kernel_names, launch_counts, traces
from labkit.profiling.kernel_names import shorten
from labkit.profiling.traces import HostEvent, KernelEvent

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHING = ("cuda_runtime", "cuda_driver")
BRACKETS = str.maketrans("<>", "‹›")
"""For names in tables: pandas' Styler would take template arguments for tags, and a page not show them."""
MOST_RUNS = 6
"""So often the name of the kernel changes in a sequence that a table still shows."""
TEXT_LIMIT_S = 120.0
"""Longest run of :func:`profile_text`; importing torch and starting CUDA take some ten seconds of it."""


@dataclass(frozen=True)
class Profile:
    """One call: what it ran on the device (``kernels``, ``host``), or would have run (``counted``)."""

    kernels: list[KernelEvent] = field(default_factory=list)
    host: list[HostEvent] = field(default_factory=list)
    """The calls of CUDA that started work on the device (cudaLaunchKernel, cuLaunchKernelEx, ...)."""
    operations: list[HostEvent] = field(default_factory=list)
    """PyTorch's operations on the host; of nested ones the outermost. None are kept of a recorded call."""
    counted: launch_counts.Counts | None = None
    """The launches without times, when there was no GPU and nothing recorded; else None."""
    kind: str = LIVE
    """"live" or "recorded"."""
    device: str = ""
    """The GPU that ran the call; empty when it was counted."""
    date: str = ""
    """When it ran, in ISO 8601; empty when it was counted."""

    @property
    def timed(self) -> bool:
        """Whether there are times: a GPU ran the call, here or where it was recorded."""
        return self.counted is None

    @property
    def launches(self) -> int:
        """How often the host started work on the device; the replay of a graph is one launch."""
        return len(self.host if self.counted is None else self.counted.launches)

    @property
    def gaps(self) -> list[float]:
        """Idle us before each kernel but the first; 0 where kernels touch or overlap."""
        idle: list[float] = []
        end = 0.0
        for number, kernel in enumerate(self.kernels):
            if number:
                idle.append(max(0.0, kernel.start_us - end))
            end = max(end, kernel.start_us + kernel.duration_us)
        return idle

    @property
    def span_us(self) -> float | None:
        """From the first kernel's start to the last one's end; None without a GPU."""
        if not self.timed:
            return None
        ends = [kernel.start_us + kernel.duration_us for kernel in self.kernels]
        return max(ends) - self.kernels[0].start_us if ends else 0.0

    @property
    def busy_us(self) -> float | None:
        """Time in which at least one kernel ran; None without a GPU."""
        span = self.span_us
        return None if span is None else span - sum(self.gaps)

    def table(self) -> pd.DataFrame:
        """Kernels in the order of their first run, equal ones in one row: count, us in all, share.

        Of counted launches: operation, count, Triton programs (where there are any), bytes read and written.
        """
        if self.counted is not None:
            counted = [
                (launch.name, 1, launch.programs, launch.bytes_read, launch.bytes_written)
                for launch in self.counted.launches
            ]
            columns = ["operation", "count", "programs", "bytes read", "bytes written"]
            listed = pd.DataFrame(counted, columns=columns)
            if not self.counted.programs:
                listed = listed.drop(columns="programs")
            return listed.groupby("operation", sort=False, as_index=False).sum()
        rows = [(kernel.full_name, kernel.name, 1, kernel.duration_us) for kernel in self.kernels]
        frame = pd.DataFrame(rows, columns=["full name", "kernel", "count", "us"])
        # kernels that differ only where the name was shortened stay apart
        frame = frame.groupby(["full name", "kernel"], sort=False, as_index=False).sum()
        frame["share"] = frame["us"] / frame["us"].sum()
        return frame[["kernel", "count", "us", "share"]]


def profile(call: Callable[[], Any], *, tape: str | None = None, warmup: int = 3) -> Profile:
    """Run ``call`` and record what it launches; on a GPU three times, after ``warmup`` calls that are not
    recorded, each time in a turn of this process. Of the three it is the shortest.

    ``tape`` names the profile ("launch_overhead/eager"): a lesson that is being recorded keeps it under this
    name. Without a GPU ``call`` does not run where a profile of this name is recorded, which is returned;
    elsewhere its launches are counted.

    Raises ValueError for a name that a lesson being recorded has used already, and for a damaged file of
    recorded profiles.
    """
    if not gpu.available():
        return _recorded(tape) or Profile(counted=launch_counts.count(call))
    taken = [from_trace(_trace(call, warmup if first else 0)) for first in (True, False, False)]
    return _stamped(_quietest(taken), tape)


@contextmanager
def lasting(call: Callable[[], Any]) -> Iterator[None]:
    """Profile ``call`` as PyTorch does by itself, which leaves CUPTI in the process: there it watches every
    launch of this block, at whose end it leaves. Without a GPU nothing is called.
    """
    if not gpu.available():
        yield
        return
    try:
        with lock.gpu_turn(), _without_profiler_chatter():
            os.environ["TEARDOWN_CUPTI"] = "0"
            with torch.profiler.profile(acc_events=True):
                call()
                gpu.synchronize()
        yield
    finally:
        _trace(gpu.synchronize, 0)  # has it leave


def profile_text(
    text: str, *, setup: str = "", environment: Mapping[str, str] | None = None, tape: str | None = None
) -> Profile:
    """Profile Python code in a process of its own, with other environment variables.

    For what a process decides once: which library its first matmul chooses, say. ``setup`` runs first, then
    ``text`` as ``call`` does in :func:`profile`, all with ``torch``, ``F`` (torch.nn.functional) and
    ``device`` ("cuda", or "cpu" without a GPU) at hand; what they print is dropped. ``environment`` is set on
    top of this process's own. ``tape`` as in :func:`profile`; without a GPU and a recorded profile the
    launches are counted in such a process too. On a GPU it works in a turn of this process, in which it
    starts, too.

    Raises RuntimeError with the last line of the traceback when the code raises, or says how the process
    ended, and TimeoutError when it takes longer than ``TEXT_LIMIT_S``, the wait for the turn aside;
    ValueError as :func:`profile` does.
    """
    if not gpu.available() and (kept := _recorded(tape)):
        return kept
    with lock.gpu_turn():  # taken here: this process can say that it waits, and nothing limits the wait
        here = {name: value for name, value in os.environ.items() if name != TAPE}
        around = {**here, **(environment or {}), lock.WITHIN: lock.held()}
        made = child_process.run(_profile_code, setup, text, environment=around, seconds=TEXT_LIMIT_S)
    if isinstance(made, str):
        raise RuntimeError(made)
    return _stamped(made, tape) if made.timed else made


def _profile_code(setup: str, text: str) -> Profile | str:
    """What ``profile_text`` does in its process; or which part of the code raised what."""
    namespace = {"torch": torch, "F": torch.nn.functional, "device": gpu.device()}
    part = "setup"
    try:
        exec(compile(setup, "<setup>", "exec"), namespace)
        part = "text"
        code = compile(text, "<text>", "exec")
        return profile(lambda: exec(code, namespace))
    except BaseException as error:  # SystemExit too: whatever it is, the code raised it
        return f"{part}: {traceback.format_exception_only(error)[-1].strip()}"


def _recorded(tape: str | None) -> Profile | None:
    """The recorded profile of this name."""
    kept = traces.recorded(tape) if tape else None
    if kept is None:
        return None
    return Profile(*traces.unpack(kept.trace or {}), kind=kept.kind, device=kept.device, date=kept.date)


def _quietest(taken: Sequence[Profile]) -> Profile:
    """The shortest in device time and span together: what disturbs host or device makes a profile longer.

    Of those that saw the same kernels as most did; where each saw others, of those that saw the most.
    """
    seen = Counter(tuple(kernel.name for kernel in made.kernels) for made in taken)
    usual = max(seen, key=lambda names: (seen[names], len(names)))
    alike = [made for made in taken if tuple(kernel.name for kernel in made.kernels) == usual]
    times = [(made.busy_us or 0.0, made.span_us or 0.0) for made in alike]
    least = [min(each) or 1.0 for each in zip(*times, strict=True)]
    longer = [sum(us / shortest for us, shortest in zip(one, least, strict=True)) for one in times]
    return alike[longer.index(min(longer))]


def _stamped(made: Profile, tape: str | None) -> Profile:
    """The profile with device and date; kept under its name where a lesson is being recorded."""
    stamp = machine.stamp()
    if tape:
        traces.keep(tape, traces.pack(made.kernels, made.host), stamp)
    return replace(made, device=stamp["device"], date=stamp["date"])


def census(profiles: Mapping[str, Profile]) -> pd.DataFrame:
    """What each case ran on the device: a row each, with its launches sorted by what their names say.

    Columns case; launches, and of these matrix products, reductions (which add up what a product split
    among blocks), copies (and fills) and other; kernels, their short names in order, or each once where the
    names change more than a few times, template arguments in ‹›; us, of all of them together; kind,
    "counted" where there was no GPU and nothing recorded: then operations of PyTorch stand for kernels, and
    us is NaN.
    """
    return pd.DataFrame([{"case": case, **_sorted(made)} for case, made in profiles.items()])


def _clipped(name: str, length: int = 40) -> str:
    """A long name without its middle: its head names the library, its tail the epilogue."""
    half = length // 2 - 1
    return name if len(name) <= length else f"{name[:half]}...{name[-half:]}"


def _sorted(made: Profile) -> dict[str, Any]:
    if made.counted is None:
        names = [kernel.name for kernel in made.kernels]
        sorts = [kernel_names.sort(kernel.full_name) for kernel in made.kernels]
        us, kind = sum(kernel.duration_us for kernel in made.kernels), made.kind
    else:
        names = [launch.name for launch in made.counted.launches]
        sorts = [kernel_names.sort_of_operation(name) for name in names]
        us, kind = float("nan"), "counted"
    runs = [(_clipped(name), len(list(group))) for name, group in groupby(names)]
    if len(runs) > MOST_RUNS:
        runs = list(Counter(map(_clipped, names)).items())
    named = [(name.translate(BRACKETS), count) for name, count in runs]
    return {
        "launches": len(names),
        "matrix products": sorts.count("matrix product"),
        "reductions": sorts.count("reduction"),
        "copies": sorts.count("copy"),
        "other": sorts.count("other"),
        "kernels": " + ".join(f"{count} x {name}" if count > 1 else name for name, count in named),
        "us": us,
        "kind": kind,
    }


def _trace(call: Callable[[], Any], warmup: int) -> list[dict[str, Any]]:
    """The events of the chrome trace of one call."""
    for _ in range(warmup):
        call()
    with (
        lock.gpu_turn(),
        tempfile.TemporaryDirectory() as folder,
        _without_profiler_chatter(),
        _leaving_no_trace(),
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
def _leaving_no_trace() -> Iterator[None]:
    """Have CUPTI, by which the profiler sees every launch, leave the process afterwards.

    It stays by default, and from then on a launch costs the host half as much again (PyTorch issue 144455).
    torch.compile forbids it to leave where it makes graphs, for the sake of CUDA before 12.6.
    """
    os.environ["TEARDOWN_CUPTI"] = "1"
    os.environ.pop("DISABLE_CUPTI_LAZY_REINIT", None)
    yield
    for _ in range(20):  # it leaves during a call to CUDA, a moment after the profiler asked it to
        gpu.synchronize()
        time.sleep(0.005)


@contextmanager
def _without_profiler_chatter() -> Iterator[None]:
    """Hold back what torch 2.13 prints when a profile starts and stops; pass on everything else."""
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
    launches = [
        event
        for event in complete
        if event["cat"] in _LAUNCHING and event["args"].get("correlation") in started
    ]
    ops = list(_outermost(event for event in complete if event["cat"] == "cpu_op"))
    origin = min((event["ts"] for event in [*on_device, *launches, *ops]), default=0.0)
    kernels = [
        KernelEvent(
            name=shorten(event["name"]),
            full_name=event["name"],
            start_us=event["ts"] - origin,
            duration_us=event["dur"],
            stream=int(event["args"]["stream"]),
            grid=tuple(event["args"].get("grid", ())),
            block=tuple(event["args"].get("block", ())),
        )
        for event in on_device
    ]
    return Profile(kernels, _host_events(launches, origin), _host_events(ops, origin))


def _host_events(events: list[dict[str, Any]], origin: float) -> list[HostEvent]:
    return [HostEvent(event["name"], event["ts"] - origin, event["dur"]) for event in events]


def _outermost(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of events sorted by start, those that lie in no other one of their thread."""
    ends: dict[Any, float] = {}
    for event in events:
        if event["ts"] >= ends.get(event["tid"], float("-inf")):
            ends[event["tid"]] = event["ts"] + event["dur"]
            yield event
