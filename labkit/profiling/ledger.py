"""A ledger of a call's time: launches, waiting, traffic, arithmetic.

Each entry is the difference between two instruments. The roofs say how long the bytes and operations take at
the rate of a large copy and of a large product. The profiler says how long kernels ran. The graph clock
measures the device alone, and the host's clock the wall time. The entries add up to the wall time if each
instrument shows more than the one before. If one does not, its entry is zero, and the sum is too large.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from labkit.measure.results import Results, number
from labkit.measure.roofline import Roofs
from labkit.profiling import launch_counts
from labkit.profiling.profiles import Profile

_STAMP = ("kind", "device", "date", "clock", "cache", "source")

PARTS = {
    "arithmetic": "the products, at the rate of a large one; bytes move meanwhile",
    "traffic": "more bytes, at the rate of a large copy (from the cache they may be faster)",
    "waiting": "the rest of the kernels' time: latency, uneven shares, other arithmetic",
    "between": "one kernel has ended, the next has not begun",
    "launches": "the GPU waits for the host",
}
"""The entries of a ledger, and what each means."""


def entries(
    wall: Results,
    device: Results,
    profiles: Mapping[str, Profile],
    moved: Results,
    layers: Sequence[tuple[float, float]],
    roofs: Roofs | None,
    dtype: str,
) -> Results:
    """A row for each contender of ``wall``, in microseconds.

    ``wall`` has rows by the host's clock, ``device`` by the graph clock; if a contender is a graph itself,
    its rows in ``device`` are of the call that the graph holds. ``moved`` has the bytes of a call in the
    column ``peak_bytes``, as `custom_bytes` gives them. ``layers`` are the bytes that each matrix product
    reads and writes, and its operations. A contender without a profile, bytes or a row in ``device`` is left
    out, and all are where nothing was measured and so there are no roofs.

    Columns: contender, one for each of PARTS, ``sum`` of these, ``wall``, ``alone`` (the time without
    launches), and the origin of the wall time.
    """
    columns = ["contender", *PARTS, "sum", "wall", "alone", *_STAMP]
    if roofs is None:
        return Results([], columns=columns)
    flops_us = [flops / roofs.matmul[dtype] * 1e6 for _, flops in layers]
    bytes_us = [nbytes / roofs.bandwidth * 1e6 for nbytes, _ in layers]
    arithmetic, hidden = sum(flops_us), sum(map(min, flops_us, bytes_us))  # bytes move during the products
    found = []
    for row in wall.dropna(subset="median_us").to_dict("records"):
        name = str(row["contender"])
        measured, alone = number(moved.value(name, "peak_bytes")), number(device.time(name))
        busy = profiles[name].busy_us if name in profiles else None
        if measured is None or alone is None or busy is None:
            continue
        traffic = max(0.0, measured / roofs.bandwidth * 1e6 - hidden)
        parts = {
            "arithmetic": arithmetic,
            "traffic": traffic,
            "waiting": max(0.0, busy - arithmetic - traffic),
            "between": max(0.0, alone - busy),
            "launches": max(0.0, row["median_us"] - alone),
        }
        stamp = {key: row[key] for key in _STAMP}
        total = {"sum": sum(parts.values()), "wall": row["median_us"], "alone": alone}
        found.append({"contender": name, **parts, **total, **stamp})
    return Results(found, columns=columns)


def predicted_span_us(made: Profile, *, kernels: float = 1.0, launches: float = 1.0) -> float | None:
    """Time from the first launch to the last kernel's end, if durations were multiplied by these factors.

    Kernels run in order; each starts when it is launched and the one before it has ended. If both factors are
    1 the result is the profile's own span, which the profiler has stretched. Kernels beyond the number of
    launches were started by the last one (a graph). None without times.
    """
    if not made.timed or not made.host:
        return None
    ends = [event.start_us + event.duration_us for event in made.host]
    spent = [end - before for end, before in zip(ends, [made.host[0].start_us, *ends], strict=False)]
    spent += [0.0] * (len(made.kernels) - len(spent))
    ready = done = 0.0
    for launch, kernel in zip(spent, made.kernels, strict=False):
        ready += launches * launch
        done = max(done, ready) + kernels * kernel.duration_us
    return done


def eager_bytes(call: Callable[[], Any]) -> int:
    """Bytes that PyTorch's operations of one call read and write: the inputs and outputs of each.

    Kernels that are launched by other means than an operation of PyTorch are not seen.
    """
    return sum(launch.distinct_bytes for launch in launch_counts.operations(call))


def compiled_bytes(call: Callable[..., Any], *inputs: Any) -> int:
    """Bytes that the kernels move which torch.compile makes of ``call``, as Inductor counts them.

    An operator that the compiler does not look into counts with its inputs and outputs. Raises RuntimeError
    if nothing was compiled, or this PyTorch does not count.
    """
    from torch._inductor import compile_fx, config, metrics

    # Inductor counts only if its log of metrics is on. This logger is on, and prints nothing.
    listener = SimpleNamespace(isEnabledFor=lambda level: level >= logging.INFO, info=lambda *_: None)
    torch.compiler.reset()
    metrics.reset()
    with patch.object(compile_fx, "inductor_metrics_log", listener), config.patch(fx_graph_cache=False):
        torch.compile(call, dynamic=False)(*inputs)
    counted = int(metrics.num_bytes_accessed)
    torch.compiler.reset()
    if not counted:
        raise RuntimeError("nothing was compiled, or this PyTorch does not count bytes")
    return counted
