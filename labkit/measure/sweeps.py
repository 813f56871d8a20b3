"""Contenders over an axis, as rows of the contract's schema in a table.

A sweep measures where there is a GPU; elsewhere it hands out the rows that a recorded device left.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor

from labkit import gpu
from labkit.measure import accuracy, clocks, machine, roofline, rows
from labkit.measure.clocks import Cache, Clock, NotTimed, Timing
from labkit.measure.cold_cache import TimedCall
from labkit.measure.contender import Contender, Shape, Work, silence_compiler
from labkit.measure.lock import Stop, StoppedError, gpu_lock, raise_if_stopped
from labkit.measure.results import Results
from labkit.measure.rows import Row


def sweep(
    suite: str,
    contenders: Sequence[Contender],
    points: Iterable[Shape],
    *,
    dtype: str | tuple[str, ...] = "float32",
    direction: str | tuple[str, ...] = "forward",
    clock: Clock | tuple[Clock, ...] = "graph",
    cache: Cache | tuple[Cache, ...] = "cold",
    budget_s: float = 0.15,
) -> Results:
    """Measure every contender at every point, beside a copy of the same bytes; rows of the contract's schema.

    ``direction`` is "forward" or "forward_backward"; ``clock`` is "graph", "events" or "host"; ``cache`` is
    "cold" or "warm". For a tuple of values there is a run for each; for several tuples there is one for each
    combination. ``budget_s`` is the device time in seconds for each contender at each point, see
    `clocks.measure`. Without a GPU the rows are those of a recorded one.
    """
    shapes = list(points)
    choices = [value if isinstance(value, tuple) else (value,) for value in (dtype, direction, clock, cache)]
    found = []
    for chosen in itertools.product(*choices):
        options: dict[str, Any] = dict(zip(("dtype", "direction", "clock", "cache"), chosen, strict=True))
        found.append(run(suite, contenders, shapes, **options, budget_s=budget_s))
    return Results(pd.concat(found, ignore_index=True))


def run(
    suite: str,
    contenders: Sequence[Contender],
    points: Iterable[Shape],
    *,
    stop: Stop = lambda: False,
    **options: Any,
) -> Results:
    """Measure every contender at every point; a table with a row for each. ``options`` are those of `Sweep`.

    Contenders that are not for a size are left out there. The process holds the GPU's lock for all of a
    point. When ``stop()`` turns true the rows of the points before are returned.

    Without a GPU nothing is measured: the rows of these contenders in this sweep come from a recorded device,
    at all points; the table is empty when there is none.

    Raises ValueError for an unknown direction, clock or cache state, or contenders with one name.
    """
    this = Sweep(suite, **options)
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise ValueError(f"contenders: two of them have one name among {', '.join(names)}")
    shapes = list(points)
    axes = list(dict.fromkeys(axis for shape in shapes for axis in shape))
    if not gpu.available():
        recorded = rows.recorded_rows(this.suite)
        return rows.as_results([r for r in recorded if r.contender in names and this.matches(r)], axes)
    measured: list[Row] = []
    with suppress(StoppedError):
        for shape in shapes:
            with gpu_lock(stop):
                measured += filter(None, this.point(contenders, shape, stop))
    return rows.as_results(measured, axes)


@dataclass(frozen=True)
class Sweep:
    """What all rows of a sweep share, and how one point is measured.

    Raises ValueError for an unknown direction, clock or cache state.
    """

    suite: str
    dtype: str = "float32"
    direction: str = "forward"
    clock: Clock = "graph"
    cache: Cache = "cold"
    budget_s: float = 0.15

    def __post_init__(self) -> None:
        if self.direction not in ("forward", "forward_backward"):
            raise ValueError(f"direction: {self.direction!r} is neither forward nor forward_backward")
        clocks.check_names(self.clock, self.cache)

    def matches(self, row: Row) -> bool:
        """Whether a row is one of this sweep."""
        mine = (self.suite, self.dtype, self.direction, self.clock, self.cache)
        return mine == (row.suite, row.dtype, row.direction, row.asked_clock, row.cache)

    def point(self, contenders: Sequence[Contender], shape: Shape, stop: Stop) -> Iterator[Row | None]:
        """Measure the contenders that are for this size: are they right, and how long do they take?

        Comes up for air after each contender that was checked, with None, so that a panel can look whether
        Stop was pressed. Then all contenders and a copy of the same bytes are interleaved in one run, and the
        rows follow. Out of memory, an error or a wrong result is a row without a time and with a note; the
        others go on. Raises StoppedError soon after ``stop()`` turns true.
        """
        here = [contender for contender in contenders if contender.fits(shape)]
        if not here:
            return
        silence_compiler()
        if any(contender.compiled for contender in here):
            torch.compiler.reset()  # it gets fresh code for each shape, not a dynamic one
        shared: dict[int, tuple[Tensor, ...]] = {}  # inputs by work: contenders of one work get the same
        columns: dict[str, dict[str, Any]] = {}  # of the row, by contender
        calls: dict[str, TimedCall] = {}
        for contender in here:
            with _gpu_to_oneself(stop):
                known = columns[contender.name] = self._columns(contender, shape)
                try:
                    call, work = contender.build(), contender.work
                    if id(work) not in shared:
                        shared[id(work)] = self._inputs(work, shape)
                    inputs = shared[id(work)]
                    if work.reference:
                        checked = accuracy.check_contender(contender, call, shape, inputs, self.direction)
                        error, known["note"] = checked
                        known["relative_error"] = error if math.isfinite(error) else None  # as JSON has it
                    if not known.get("note"):
                        calls[contender.name] = clocks.timed_call(call, inputs, self.direction)
                except Exception as problem:  # becomes the note of this contender's gap
                    known["note"] = clocks.describe(problem)
            yield None
        with _gpu_to_oneself(stop):
            sizes = {columns[name]["min_bytes"] for name in calls}
            copies = _copy_calls(sizes) if self.clock != "host" else {}
            how: dict[str, Any] = {"clock": self.clock, "cache": self.cache, "budget_s": self.budget_s}
            outcomes = clocks.measure(calls | copies, **how, stop=stop)
            torch.cuda.empty_cache()
        for name in calls:
            timing = outcomes[name]
            if isinstance(timing, Timing):
                # the clock is events where a graph cannot hold the call
                copy_us = _copy_us(outcomes, columns[name]["min_bytes"], timing.clock)
                columns[name] |= vars(timing) | {"copy_us": copy_us}
            else:
                columns[name]["note"] = timing.note
        where = machine.row_columns()
        for name, known in columns.items():
            yield Row(self.suite, name, self.direction, self.dtype, shape, **known, **where)

    def _columns(self, contender: Contender, shape: Shape) -> dict[str, Any]:
        """What is known of a contender's row before it is measured."""
        work = contender.work
        itemsize = cast(torch.dtype, getattr(torch, self.dtype)).itemsize
        min_bytes, flops = work.min_bytes(shape, itemsize, self.direction), work.flops(shape, self.direction)
        return {"clock": self.clock, "cache": self.cache, "min_bytes": min_bytes, "flops": flops}

    def _inputs(self, work: Work, shape: Shape) -> tuple[Tensor, ...]:
        dtype, differentiable = getattr(torch, self.dtype), self.direction != "forward"
        return tuple(t.to(gpu.device(), dtype).requires_grad_(differentiable) for t in work.inputs(shape))


# ---- what a lesson measures in its own way ----------------------------------------------------------------


def custom_times(suite: str, timers: Mapping[str, Callable[[], float]], dtype: str = "float32") -> Results:
    """A table as a sweep's, a row for each function: it is called once, and returns microseconds.

    Clock and cache stay empty, because it is the lesson's business how it times, and may be to show how not
    to. Each function has the GPU to itself (`lock.gpu_lock`). Without a GPU nothing is called: the rows are
    those of a recorded device, and there may be none.
    """
    return _custom(suite, timers, "median_us", dtype)


def _custom(suite: str, functions: Mapping[str, Callable[[], float]], column: str, dtype: str) -> Results:
    if not gpu.available():
        # a sweep may have the same name: its rows have a clock
        return rows.as_results([row for row in rows.recorded_rows(suite) if not row.clock])
    found = []
    for name, function in functions.items():
        with gpu_lock():
            columns = {column: function()} | machine.row_columns()
        found.append(Row(suite, name, "forward", dtype, {}, clock="", cache="", runs=1, **columns))
    return rows.as_results(found)


# ---- what the above share ----------------------------------------------------------------------------------


@contextmanager
def _gpu_to_oneself(stop: Stop) -> Iterator[None]:
    """A step of a point: not beside another process, with full float32, and not after Stop."""
    raise_if_stopped(stop)
    with gpu_lock(stop), gpu.full_float32():
        yield


def _copy_calls(sizes: Iterable[int]) -> dict[str, TimedCall]:
    """Copies of each size in bytes; none of a size that does not fit beside the contenders."""
    calls: dict[str, TimedCall] = {}
    for size in sizes:
        with suppress(torch.cuda.OutOfMemoryError):
            calls |= {f"{name} {size}": copy for name, copy in roofline.copy_calls(size).items()}
    return calls


def _copy_us(outcomes: Mapping[str, Timing | NotTimed], size: int, clock: Clock) -> float | None:
    """Microseconds of the faster copy of ``size`` bytes with this clock; None if none was measured.

    A copy that is bound by memory (above 8 MiB) is not credited with the bytes it moved in excess.
    """
    excess = roofline.copied_bytes(size) / size if size > 2**23 else 1.0
    copies = [outcomes.get(f"{name} {size}") for name in roofline.COPIES]
    same_clock = [one for one in copies if isinstance(one, Timing) and one.clock == clock]
    return min((one.median_us / excess for one in same_clock), default=None)
