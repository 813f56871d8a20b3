"""What ran: the kernels of one call, the gaps between them, and the host's launches.

On a GPU from torch.profiler. Without one from a recorded lesson, else from ``counts``: the same sequence
of launches, without times.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from labkit import counts, device, machine, profile_tapes
from labkit.profile_tapes import HostEvent, Kept, KernelEvent
from labkit.rows import LIVE

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHING = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Profile:
    """One call: what it ran on the device (``kernels``, ``host``), or would have run (``counted``)."""

    kernels: list[KernelEvent] = field(default_factory=list)
    host: list[HostEvent] = field(default_factory=list)
    """The calls of CUDA that started work on the device (cudaLaunchKernel, cuLaunchKernelEx, ...)."""
    operations: list[HostEvent] = field(default_factory=list)
    """PyTorch's operations on the host; of nested ones the outermost. None are kept of a recorded call."""
    counted: counts.Counts | None = None
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
    """Run ``call`` and record what it launches; on a GPU after ``warmup`` calls that are not recorded.

    ``tape`` names the profile ("launch_overhead/eager"): a lesson that is being recorded keeps it under this
    name. Without a GPU ``call`` does not run where a profile of this name is recorded, which is returned;
    elsewhere its launches are counted.

    Raises ValueError for a name that a lesson being recorded has used already, and for a damaged file of
    recorded profiles.
    """
    if not device.has_gpu():
        kept = profile_tapes.recorded(tape) if tape else None
        if kept is None:
            return Profile(counted=counts.count(call))
        return Profile(kept.kernels, kept.host, kind=kept.kind, device=kept.device, date=kept.date)
    stamp = machine.stamp()
    made = replace(from_trace(_trace(call, warmup)), device=stamp["device"], date=stamp["date"])
    if tape:
        profile_tapes.keep(Kept(tape, made.kernels, made.host, **stamp))
    return made


def _trace(call: Callable[[], Any], warmup: int) -> list[dict[str, Any]]:
    """The events of the chrome trace of one call."""
    for _ in range(warmup):
        call()
    with tempfile.TemporaryDirectory() as folder, _without_profiler_chatter():
        path = str(Path(folder, "trace.json"))
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
            # the first recorded step of a process misses kernels, or has them late
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
            acc_events=True,
        ) as profiler:
            for _ in range(2):
                device.synchronize()
                call()
                device.synchronize()
                profiler.step()
        events: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    return events


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


_PLAIN = {
    "void",
    "const",
    "char",
    "bool",
    "int",
    "long",
    "unsigned",
    "float",
    "double",
    "std::array",
    "array",
}
"""Words of a template's arguments that tell kernels apart less than they lengthen the name."""


def shorten(name: str) -> str:
    """A kernel's name without namespaces, signature and plain types.

    Of each template argument the innermost functor is kept: of PyTorch's elementwise kernels that is what
    tells a product from a sum.
    """
    text = _without_brackets(name.removeprefix("void "))
    head, _, arguments = text.partition("<")
    kept = [argument for part in _split(arguments.rpartition(">")[0]) if (argument := _argument(part))]
    return _last_name(head) + (f"<{', '.join(kept)}>" if kept else "")


def _without_brackets(name: str) -> str:
    """Drop parameter lists, lambdas and anonymous namespaces: everything in () and {}."""
    text = name.replace("(anonymous namespace)::", "")
    previous = ""
    while previous != text:
        previous, text = text, re.sub(r"\([^(){}]*\)|\{[^(){}]*\}", "", text)
    return re.sub(r"(::(operator|const)?\s*(const)?)+(?=\s*(>|,|$))", "", text).strip()


def _split(arguments: str) -> list[str]:
    """Split template arguments at their outermost commas."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character == "<") - (character == ">")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _argument(text: str) -> str:
    """A template argument in one word; empty when it says little."""
    functors: list[str] = re.findall(r"\w*[Ff]unctor\w*", text)
    if functors:
        return functors[-1]
    word = _last_name(text.partition("<")[0].removesuffix("*").strip())
    return "" if not word or word in _PLAIN or word.split()[0] in _PLAIN else word


def _last_name(text: str) -> str:
    return text.strip().rpartition("::")[2]
