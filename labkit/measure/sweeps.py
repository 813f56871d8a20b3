"""Contenders over an axis, as rows of the contract's schema in a table.

A sweep measures where there is a GPU; elsewhere it hands out the rows that a recorded device left on its
tape. With a tape each row is on the disk as soon as it is measured, so an interrupted recording goes on.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor

from labkit import gpu
from labkit.measure import accuracy, clocks, lock, machine, roofline, rows
from labkit.measure.clocks import Cache, Clock, NotTimed, Timing
from labkit.measure.cold_cache import TimedCall
from labkit.measure.contender import Contender, Shape, Work, repeatable_backward, silence_compiler
from labkit.measure.lock import StoppedError, raise_if_stopped
from labkit.measure.results import Results
from labkit.measure.rows import TAPE, Environment, Key, Row

REPEATS = 2
"""How often a disturbed point is measured again for a tape: others will read it, and cannot."""


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

    ``direction`` is "forward", "backward" or "forward_backward"; ``clock`` is "graph", "events" or "host";
    ``cache`` is "cold" or "warm". For a tuple of values there is a run for each; for several tuples there is
    one for each combination. ``budget_s`` is the device time in seconds for each contender at each point, see
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
    dtype: str = "float32",
    direction: str = "forward",
    clock: Clock = "graph",
    cache: Cache = "cold",
    budget_s: float = 0.15,
    progress: Callable[[int, int, Row], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    tape: Path | None = None,
) -> Results:
    """Measure every contender at every point; a table with a row for each.

    At each point the contenders for this dtype and a copy of the same bytes are interleaved in one run, and
    each contender's result is compared with float64. Out of memory, an error or a wrong result is a row
    without a time and with a note; the others go on. ``progress(done, total, row)`` hears of each row. When
    ``stop()`` turns true the rows measured so far are returned. With ``tape`` the rows are kept in that file,
    and what it holds of this sweep is not measured again (`labkit.measure.rows.resumed`).

    What disturbed a point is in its rows' ``noise``. For a tape a disturbed point is measured up to REPEATS
    times more right away, and its quietest run is kept, with its noise: a card that is always at its power
    limit can be recorded, too. And the process keeps the GPU's lock for all of a point, checks included: of
    two benchmarks neither works, or holds memory, while the other is timed.

    Without a GPU nothing is measured: the rows of these contenders in this suite, dtype, direction, clock
    and cache state come from a recorded device, at all points; the table is empty when there is none.

    Raises ValueError for an unknown direction, clock or cache state, or contenders with one name.
    """
    if direction not in ("forward", "backward", "forward_backward"):
        raise ValueError(f"direction: {direction!r} is none of forward, backward, forward_backward")
    clocks.check_names(clock, cache)
    contenders = [contender for contender in contenders if contender.takes(dtype)]
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise ValueError(f"contenders: two of them have one name among {', '.join(names)}")
    tape = tape or (Path(os.environ[TAPE]) if os.environ.get(TAPE) else None)
    this = _Sweep(suite, dtype, direction, clock, cache, budget_s, repeats=REPEATS if tape else 0)
    shapes = list(points)
    axes = list(dict.fromkeys(axis for shape in shapes for axis in shape))
    if not gpu.available():
        recorded = [row for row in rows.recorded_rows(suite) if row.contender in names and this.matches(row)]
        return rows.as_results(recorded, axes)
    now = {contender.name: contender_environment(contender) for contender in contenders}
    plan = [(shape, [contender for contender in contenders if contender.fits(shape)]) for shape in shapes]
    wanted = {this.key(contender, shape): now[contender.name] for shape, here in plan for contender in here}
    kept = rows.resumed(tape, wanted) if tape else {}
    measured: list[Row] = []
    with suppress(StoppedError):
        for shape, here in plan:
            todo = [contender for contender in here if this.key(contender, shape) not in kept]
            fresh: dict[str, Row] = {}
            if todo:
                with (lock.gpu_lock if tape else lock.thread_lock)(stop), gpu.full_float32():
                    fresh = {row.contender: row for row in this.measure_point(todo, shape, stop)}
            for contender in here:
                row = fresh.get(contender.name) or kept[this.key(contender, shape)]
                if tape and contender.name in fresh:
                    rows.append(tape, row)
                measured.append(row)
                if progress:
                    progress(len(measured), len(wanted), row)
    return rows.as_results(measured, axes)


@dataclass(frozen=True)
class _Sweep:
    """What all rows of a sweep share, and how one point is measured."""

    suite: str
    dtype: str
    direction: str
    clock: Clock
    cache: Cache
    budget_s: float
    repeats: int
    """How often a disturbed point is measured again."""

    def measure_point(
        self, contenders: Sequence[Contender], shape: Shape, stop: Callable[[], bool]
    ) -> list[Row]:
        """A row for each contender: is it right, and how long does it take?"""
        silence_compiler()
        if any(contender.compiled for contender in contenders):
            torch.compiler.reset()  # it gets fresh code for each shape, not a dynamic one
        itemsize = cast(torch.dtype, getattr(torch, self.dtype)).itemsize
        shared: dict[int, tuple[Tensor, ...]] = {}  # inputs by work: contenders of one work get the same
        columns: dict[str, dict[str, Any]] = {}  # of the row, by contender
        calls: dict[str, TimedCall] = {}
        for contender in contenders:
            work = contender.work
            known = columns[contender.name] = {
                "clock": self.clock,
                "cache": self.cache,
                "min_bytes": work.min_bytes(shape, itemsize, self.direction),
                "flops": work.flops(shape, self.direction),
                "peer": contender.peer,
                "peer_version": _version(contender.peer),
                "source": source_label(contender),
            }
            try:
                with repeatable_backward(self.direction):
                    raise_if_stopped(stop)
                    call = contender.build()
                    if id(work) not in shared:
                        shared[id(work)] = self._inputs(work, shape)
                    inputs = shared[id(work)]
                    if work.reference:
                        checked = accuracy.check_contender(contender, call, shape, inputs, self.direction)
                        error, known["note"] = checked
                        known["relative_error"] = error if math.isfinite(error) else None  # JSON has no NaN
                        if known["note"]:
                            continue
                    raise_if_stopped(stop)
                    calls[contender.name] = self._timed_call(call, inputs)
            except StoppedError:
                raise
            except Exception as problem:  # becomes the note of this contender's gap
                known["note"] = clocks.describe(problem)
        sizes = {columns[name]["min_bytes"] for name in calls}
        copies = _copy_calls(sizes) if self.clock != "host" else {}
        outcomes = self._time(calls | copies, stop)
        for name in calls:
            timing = outcomes[name]
            if isinstance(timing, NotTimed):
                columns[name]["note"] = timing.note
                continue
            # the clock is events where a graph cannot hold the call
            copy_us = _copy_us(outcomes, columns[name]["min_bytes"], timing.clock)
            columns[name] |= vars(timing) | {"copy_us": copy_us}
        torch.cuda.empty_cache()
        where = machine.row_columns()
        return [
            Row(self.suite, name, self.direction, self.dtype, shape, **known, **where)
            for name, known in columns.items()
        ]

    def _inputs(self, work: Work, shape: Shape) -> tuple[Tensor, ...]:
        dtype, differentiable = getattr(torch, self.dtype), self.direction != "forward"
        return tuple(t.to(gpu.device(), dtype).requires_grad_(differentiable) for t in work.inputs(shape))

    def _timed_call(self, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> TimedCall:
        """What is timed of a call: its forward pass, its backward pass, or both."""
        if self.direction == "forward":
            return TimedCall(torch.no_grad()(call), inputs)

        # The upstream gradient is an input too: a cold run rotates it with the others.
        def forward(*tensors: Tensor) -> tuple[Any, ...]:
            return call(*tensors[:-1]), tensors[:-1], tensors[-1]

        given = (*inputs, torch.randn_like(call(*inputs)))
        if self.direction == "forward_backward":
            return TimedCall(lambda *tensors: torch.autograd.grad(*forward(*tensors)), given)
        # Its forward pass runs outside the timed region, once for each set of inputs.
        return TimedCall(partial(torch.autograd.grad, retain_graph=True), given, setup=forward)

    def _time(self, calls: Mapping[str, TimedCall], stop: Callable[[], bool]) -> dict[str, Timing | NotTimed]:
        """Time all calls in one run; of several runs the one with fewest errors, then least disturbed."""

        def disturbance(outcomes: dict[str, Timing | NotTimed]) -> tuple[int, int]:
            timings = [outcome for outcome in outcomes.values() if isinstance(outcome, Timing)]
            return len(outcomes) - len(timings), sum(bool(timing.noise) for timing in timings)

        options: dict[str, Any] = {"clock": self.clock, "cache": self.cache, "budget_s": self.budget_s}
        best = clocks.measure(calls, **options, stop=stop)
        for _ in range(self.repeats):
            if not disturbance(best)[1]:
                break
            best = min(best, clocks.measure(calls, **options, stop=stop), key=disturbance)
        return best

    def matches(self, row: Row) -> bool:
        """Whether a row is one of this sweep."""
        mine = (self.suite, self.dtype, self.direction, self.clock, self.cache)
        return mine == (row.suite, row.dtype, row.direction, row.asked_clock, row.cache)

    def key(self, contender: Contender, shape: Shape) -> Key:
        """The key of a contender's row at a point, where a graph can hold the call."""
        return rows.key(self.suite, contender.name, self.direction, self.dtype, shape, self.clock, self.cache)


# ---- what a lesson measures in its own way ----------------------------------------------------------------


def custom_times(suite: str, timers: Mapping[str, Callable[[], float]], dtype: str = "float32") -> Results:
    """A table as a sweep's, a row for each function: it is called once, and returns microseconds.

    Clock and cache stay empty, because it is the lesson's business how it times, and may be to show how not
    to. Each function has the GPU to itself (`lock.gpu_lock`). Without a GPU nothing is called: the rows are
    those of a recorded device, and there may be none.
    """
    return _custom(suite, timers, "median_us", dtype, lock.gpu_lock)


def custom_bytes(suite: str, meters: Mapping[str, Callable[[], int]]) -> Results:
    """The same for memory: each function returns bytes, and they are the row's ``peak_bytes``."""
    return _custom(suite, meters, "peak_bytes", "float32", nullcontext)


def _custom(
    suite: str,
    functions: Mapping[str, Callable[[], float]],
    column: str,
    dtype: str,
    locked: Callable[[], AbstractContextManager[None]],
) -> Results:
    if not gpu.available():
        # a sweep may have the same name: its rows have a clock
        return rows.as_results([row for row in rows.recorded_rows(suite) if not row.clock])
    found = []
    for name, function in functions.items():
        with locked():
            columns = {column: function()} | machine.row_columns()
        found.append(Row(suite, name, "forward", dtype, {}, clock="", cache="", runs=1, **columns))
        if tape := os.environ.get(TAPE):
            rows.replace_row(Path(tape), found[-1])
    return rows.as_results(found)


# ---- what the above share ----------------------------------------------------------------------------------


def source_label(contender: Contender) -> str:
    """What a live row names as its source: the code that was measured."""
    return f"code {contender.code_hash()}"


def contender_environment(contender: Contender) -> Environment:
    """How a contender would be measured now."""
    here, peer = machine.identity(), _version(contender.peer)
    return source_label(contender), peer, here.device, here.driver, here.torch, here.triton


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


def _version(package: str | None) -> str | None:
    """The installed version of a peer's package, if there is one."""
    try:
        return version(package) if package else None
    except PackageNotFoundError:  # the row is a gap that says so
        return None
