"""Where the microseconds of a call went: launches, waiting, traffic, arithmetic.

Each entry is the distance between two instruments: from the roofs, which say how long bytes and operations
take at the rate of a large copy and a large product, to the profiler, which says how long kernels ran, to the
graph clock and on to the wall clock. They add up to the wall time where each instrument shows more than the
one before; where one does not, no entry goes below zero, and the sum comes out too large.
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

Layers = Sequence[tuple[float, float]]
"""Bytes that each matrix product reads and writes, and its operations."""


def entries(
    wall: Results,
    device: Results,
    profiles: Mapping[str, Profile],
    moved: Results,
    layers: Layers,
    roofs: Roofs,
    dtype: str,
) -> Results:
    """A row for each contender of ``wall`` that has a profile and a number of bytes, in microseconds.

    ``wall`` are rows by the host's clock, ``device`` by the graph clock; for a contender that is itself a
    graph they are of what it holds. ``moved`` has the bytes of a call in ``peak_bytes``, which `custom_bytes`
    gives; who has none, no profile or no row in ``device`` is left out. Columns: contender, one for each of
    PARTS, ``sum`` of these, ``wall``, ``alone`` (the time without launches), and where the wall time is from.
    """
    found = []
    for row in wall.dropna(subset="median_us").to_dict("records"):
        name = str(row["contender"])
        measured, timed = number(moved.value(name, "peak_bytes")), number(device.time(name))
        busy = profiles[name].busy_us if name in profiles else None
        if measured is None or timed is None or busy is None:
            continue
        floors, alone = _floors(measured, layers, roofs, dtype), timed
        parts = {
            **floors,
            "waiting": max(0.0, busy - sum(floors.values())),
            "between": max(0.0, alone - busy),
            "launches": max(0.0, row["median_us"] - alone),
        }
        stamp = {key: row[key] for key in _STAMP}
        total = {"sum": sum(parts.values()), "wall": row["median_us"], "alone": alone}
        found.append({"contender": name, **parts, **total, **stamp})
    return Results(found, columns=["contender", *PARTS, "sum", "wall", "alone", *_STAMP])


def _floors(moved: float, layers: Layers, roofs: Roofs, dtype: str) -> dict[str, float]:
    """Arithmetic, and traffic that is not hidden behind it, both at their roofs."""
    arithmetic = [flops / roofs.matmul[dtype] * 1e6 for _, flops in layers]
    bytes_us = [each / roofs.bandwidth * 1e6 for each, _ in layers]
    hidden = sum(map(min, arithmetic, bytes_us))
    return {"arithmetic": sum(arithmetic), "traffic": max(0.0, moved / roofs.bandwidth * 1e6 - hidden)}


def what_if(made: Profile, *, kernels: float = 1.0, launches: float = 1.0) -> float | None:
    """Microseconds from the first launch to the last kernel's end, if kernels or launches took so much more.

    Host and device work as they do: kernels run in order, each when it is launched and the one before it has
    ended. With both factors 1 it is the profile's own span, which the profiler has stretched. None without
    times; kernels beyond the launches were started by the last one (a graph).
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
    """Bytes that PyTorch's operations of one call read and write, each its own inputs and outputs.

    Kernels that are launched by other means than an operation of PyTorch's are not seen.
    """
    return sum(launch.touched for launch in launch_counts.operations(call))


def compiled_bytes(call: Callable[..., Any], *inputs: Any) -> int:
    """Bytes that the kernels move which torch.compile makes of ``call``, as Inductor counts them.

    An operator that the compiler does not look into counts with its inputs and outputs. RuntimeError when
    nothing was compiled, or this PyTorch does not count.
    """
    from torch._inductor import compile_fx, config, metrics

    # Inductor counts where its log of metrics is on; this one hears, and prints nothing
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
