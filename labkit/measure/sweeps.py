"""Contenders over an axis, as rows of the contract's schema in a table.

A sweep measures where there is a GPU; elsewhere it hands out the rows that a recorded device left on its
tape. Each row is on the disk as soon as it is measured, so an interrupted sweep is continued.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from labkit import gpu, paths
from labkit.measure import accuracy, clocks, journal, lock, machine, memory, roofline, rows
from labkit.measure.clocks import Cache, Clock, Gap, Timing
from labkit.measure.cold_cache import Job
from labkit.measure.contender import Contender, Shape, Work, quiet, repeatable
from labkit.measure.journal import Journal, Key, Way
from labkit.measure.results import Results
from labkit.measure.rows import TAPE, Row

ALLOWED_ERROR = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 2e-2}
"""A larger relative error against float64 is a wrong result, not a rounding (TF32 has about 3e-4)."""
CHAINED = 5
"""A larger multiple of the allowed error is no rounding, however long the chain."""
CHECKED_FLOPS = 10**11
"""Gradients are checked in all rows at full size up to so many operations, beyond in some rows."""
REPEATS = 2
"""How often a disturbed point is measured again for a tape: others will read it, and cannot."""


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
    ``stop()`` turns true the rows measured so far are returned. A sweep that was interrupted within the last
    hour is continued (:mod:`labkit.measure.journal`). With ``tape`` the rows stay in that file, and what it
    holds of this sweep, however old, is not measured again.

    What disturbed a point is in its rows' ``noise``. A sweep that is continued measures such points again.
    For a tape a disturbed point is measured up to REPEATS times more right away, and its quietest run is
    kept, with its noise: a card that is always at its power limit can be recorded, too. And the process has
    its turn on the GPU for all of a point, checks included: of two benchmarks neither works, or holds
    memory, while the other is timed.

    Without a GPU nothing is measured: the rows of this suite, dtype, direction, clock and cache state come
    from a recorded device, and the table is empty when there is none.

    Raises ValueError for an unknown direction, clock or cache state, or contenders with one name.
    """
    if direction not in ("forward", "backward", "forward_backward"):
        raise ValueError(f"direction: {direction!r} is none of forward, backward, forward_backward")
    clocks.expect(clock, cache)
    contenders = [contender for contender in contenders if contender.takes(dtype)]
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise ValueError(f"contenders: two of them have one name among {', '.join(names)}")
    named = tape or os.environ.get(TAPE)
    repeats, whole = (REPEATS, lock.gpu_turn) if named else (0, lock.turn)
    how = _How(suite, dtype, direction, clock, cache, budget_s, repeats)
    listed = list(points)
    axes = list(dict.fromkeys(axis for shape in listed for axis in shape))
    if not gpu.available():
        return rows.table((row for row in rows.recorded(suite) if how.matches(row)), axes)
    ways = {contender.name: way(contender) for contender in contenders}
    whose = [(one, shape) for shape in listed for one in contenders if one.fits(shape)]
    file = Path(named) if named else own_file(suite)
    if not named:
        journal.drop_expired([file])
    wanted = {how.key(one, shape): ways[one.name] for one, shape in whose}
    store = Journal(file, wanted, tape=bool(named))
    measured: list[Row] = []
    try:
        for shape in listed:
            here = [contender for contender in contenders if contender.fits(shape)]
            todo = [contender for contender in here if how.key(contender, shape) not in store.kept]
            with whole(stop) if todo else lock.turn(stop), gpu.full_float32():
                fresh = how.measure(todo, shape, stop) if todo else {}
            for contender in here:
                row = store.kept.get(how.key(contender, shape)) or fresh[contender.name]
                if contender.name in fresh:
                    store.add(row)
                measured.append(row)
                if progress:
                    progress(len(measured), len(whose), row)
    except lock.StoppedError:
        return rows.table(measured, axes)
    store.close()
    return rows.table(measured, axes)


def sweep(suite: str, contenders: Sequence[Contender], points: Iterable[Shape], **options: Any) -> Results:
    """Measure every contender at every point, beside a copy of the same bytes; rows of the contract's schema.

    ``options`` are those of :func:`run`: dtype, direction ("forward", "backward"), clock ("graph", "events",
    "host") and cache ("cold", "warm"). A tuple of values measures one after the other. Without a GPU the rows
    are those of a recorded one.
    """
    listed = list(points)
    choices = [
        [(name, v) for v in (value if isinstance(value, tuple) else (value,))]
        for name, value in options.items()
    ]
    found = [run(suite, contenders, listed, **dict(chosen)) for chosen in itertools.product(*choices)]
    return Results(pd.concat(found, ignore_index=True))


@dataclass
class _Trial:
    """What is known of a contender at one point before it is timed."""

    job: Job | None = None
    gap: str = ""
    error: float | None = None
    peak_bytes: int | None = None


def _go_on(stop: Callable[[], bool]) -> None:
    if stop():
        raise lock.StoppedError("stopped before the measurement was complete")


@dataclass(frozen=True)
class _How:
    """The part of a row's identity that all rows of a sweep share, and how to measure one point."""

    suite: str
    dtype: str
    direction: str
    clock: Clock
    cache: Cache
    budget_s: float
    repeats: int = field(default=0, repr=False)

    def matches(self, row: Row) -> bool:
        mine = (self.suite, self.dtype, self.direction, self.clock, self.cache)
        return mine == (row.suite, row.dtype, row.direction, journal.asked_clock(row), row.cache)

    def key(self, contender: Contender, shape: Shape) -> Key:
        """The key of a contender's row at a point, where a graph can hold the call."""
        return rows.key(self.suite, contender.name, self.direction, self.dtype, shape, self.clock, self.cache)

    def measure(
        self, contenders: Sequence[Contender], shape: Shape, stop: Callable[[], bool]
    ) -> dict[str, Row]:
        """Rows of one point, by contender."""
        if any(contender.compiled for contender in contenders):
            torch.compiler.reset()  # it gets fresh code for each shape, not a dynamic one
        shared: dict[int, tuple[Tensor, ...]] = {}
        tried: dict[str, _Trial] = {}
        for contender in contenders:
            trial = tried[contender.name] = _Trial()
            try:
                with repeatable(self.direction), quiet():
                    self._try(trial, contender, shape, shared, stop)
            except lock.StoppedError:
                raise
            except Exception as problem:  # becomes the note of this contender's gap
                trial.gap = clocks.describe(problem)
        jobs = {name: trial.job for name, trial in tried.items() if trial.job and not trial.gap}
        sizes = {c.name: c.work.min_bytes(shape, self._itemsize, self.direction) for c in contenders}
        copies = {} if self.clock == "host" else _copies({size for n, size in sizes.items() if n in jobs})
        outcomes = self._timed(jobs | copies, stop)
        made = {}
        for contender in contenders:
            trial = tried[contender.name]
            outcome = outcomes.get(contender.name) or Gap(trial.gap)
            copy_us = _fastest(outcomes, sizes[contender.name], outcome)
            made[contender.name] = self._row(contender, shape, outcome, copy_us, trial)
        if gpu.available():
            torch.cuda.empty_cache()
        return made

    def _timed(self, jobs: Mapping[str, Job], stop: Callable[[], bool]) -> dict[str, Timing | Gap]:
        """All in one run, the quietest of those with fewest gaps: times of two runs are not mixed."""
        runs: list[dict[str, Timing | Gap]] = []
        while not runs or (_disturbed(_quietest(runs)) and len(runs) <= self.repeats):
            runs.append(
                clocks.measure(jobs, clock=self.clock, cache=self.cache, budget_s=self.budget_s, stop=stop)
            )
        return _quietest(runs)

    def _try(
        self,
        trial: _Trial,
        contender: Contender,
        shape: Shape,
        shared: dict[int, tuple[Tensor, ...]],
        stop: Callable[[], bool],
    ) -> None:
        """Is it right, what does it take to time it, and how much memory is in use meanwhile?"""
        _go_on(stop)
        call, work = contender.made(), contender.work
        if id(work) not in shared:
            shared[id(work)] = self._cast(work.inputs(shape))
        inputs = shared[id(work)]
        if work.reference:
            trial.error = self._error(call, contender, shape, inputs)
            if not self._rounded(trial.error, work, shape, inputs):
                trial.gap = f"wrong result: relative error {trial.error:.1e}"
                return
            if self.direction == "backward":
                self._expect_repeatable(call, contender, shape, inputs)
        _go_on(stop)
        trial.job = self._job(call, inputs)
        # Compiled to be repeated, a backward pass may not reuse memory as it does otherwise: no fair number.
        if not (contender.compiled and self.direction == "backward"):
            trial.peak_bytes = self._peak_bytes(call, trial.job)

    @property
    def _itemsize(self) -> int:
        return cast(torch.dtype, getattr(torch, self.dtype)).itemsize

    def _cast(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        dtype, differentiable = getattr(torch, self.dtype), self.direction != "forward"
        return tuple(t.to(gpu.device(), dtype).requires_grad_(differentiable) for t in tensors)

    def _job(self, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Job:
        if self.direction == "forward":
            return Job(torch.no_grad()(call), inputs)

        # The upstream gradient is an input too: a cold run rotates it with the others.
        def forward(*tensors: Tensor) -> tuple[Any, ...]:
            return call(*tensors[:-1]), tensors[:-1], tensors[-1]

        given = (*inputs, torch.randn_like(call(*inputs)))
        if self.direction == "backward":  # its forward runs outside the timed region, once for each set
            return Job(partial(accuracy.gradients, keep=True), given, setup=forward)
        return Job(lambda *tensors: accuracy.gradients(*forward(*tensors)), given)

    def _error(
        self, call: Callable[..., Tensor], contender: Contender, shape: Shape, inputs: tuple[Tensor, ...]
    ) -> float:
        """Largest relative error of a tensor against float64, by norms.

        Of output and gradients at the sampled size, and of some rows at full size; the gradients there are
        compared in all rows when the work takes no more than CHECKED_FLOPS operations. What torch.compile
        makes for the sampled size is not what is timed, and takes time to make: it is checked at full size.
        """
        work = contender.work
        assert work.reference
        comparison = accuracy.Comparison(call, work.reference, self.direction, work.batched)
        capped = _capped(work, shape)
        errors = []
        if capped == shape or not contender.compiled:
            errors.append(comparison.complete(self._sampled(contender, shape, inputs)))
        if capped != shape:
            cheap = work.flops(shape, self.direction) <= CHECKED_FLOPS
            errors.append(comparison.at_full_size(inputs, all_rows=cheap))
        return float(np.max(errors))  # max() loses a NaN that is not the first

    def _sampled(self, contender: Contender, shape: Shape, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Inputs of the sampled size; those given, where that is theirs or another size would be compiled."""
        capped = _capped(contender.work, shape)
        given = capped == shape or contender.compiled
        return inputs if given else self._cast(contender.work.inputs(capped))

    def _rounded(self, error: float, work: Work, shape: Shape, inputs: tuple[Tensor, ...]) -> bool:
        """Whether an error comes from rounding: a long chain in half precision may be off by more than
        ALLOWED_ERROR, but not by far more than plain PyTorch is itself."""
        allowed = ALLOWED_ERROR[self.dtype]
        if self.dtype == "float32" or not allowed < error < CHAINED * allowed:
            return error <= allowed
        assert work.reference
        plain = Contender("plain PyTorch", work.reference, work)
        try:
            return error <= 2 * self._error(plain.call, plain, shape, inputs)
        except RuntimeError:  # out of memory, or no such operation in half precision: nothing to go by
            return False

    def _expect_repeatable(
        self, call: Callable[..., Tensor], contender: Contender, shape: Shape, inputs: tuple[Tensor, ...]
    ) -> None:
        """RepeatError if a second backward pass of one forward gives other gradients."""
        work = contender.work
        assert work.reference
        comparison = accuracy.Comparison(call, work.reference, self.direction, work.batched)
        again = comparison.repeated(self._sampled(contender, shape, inputs))
        if not again <= ALLOWED_ERROR[self.dtype]:
            raise accuracy.RepeatError(again)

    def _peak_bytes(self, call: Callable[..., Tensor], job: Job) -> int:
        if self.direction == "forward":
            return memory.peak_bytes(lambda: job.call(*job.inputs))

        def both() -> tuple[Any, ...]:
            output = call(*job.inputs[:-1])
            return output, accuracy.gradients(output, job.inputs[:-1], job.inputs[-1])

        return memory.peak_bytes(both)

    def _row(
        self,
        contender: Contender,
        shape: Shape,
        outcome: Timing | Gap,
        copy_us: float | None,
        trial: _Trial,
    ) -> Row:
        error = trial.error
        timing = outcome if isinstance(outcome, Timing) else None
        return Row(
            suite=self.suite,
            contender=contender.name,
            direction=self.direction,
            dtype=self.dtype,
            shape=shape,
            clock=timing.clock if timing else self.clock,
            cache=self.cache,
            median_us=timing.median_us if timing else None,
            p20_us=timing.p20_us if timing else None,
            p80_us=timing.p80_us if timing else None,
            runs=timing.runs if timing else 0,
            min_bytes=contender.work.min_bytes(shape, self._itemsize, self.direction),
            flops=contender.work.flops(shape, self.direction),
            copy_us=copy_us,
            relative_error=error if error is None or math.isfinite(error) else None,  # JSON has no NaN
            peer=contender.peer,
            peer_version=_version(contender.peer) if contender.peer else None,
            source=code(contender),
            note=outcome.note,
            peak_bytes=trial.peak_bytes,
            noise=timing.noise if timing else "",
            **machine.stamp(),
        )


def _capped(work: Work, shape: Shape) -> Shape:
    """The size at which all is compared."""
    return {axis: min(size, work.sample.get(axis, size)) for axis, size in shape.items()}


def _quietest(runs: Sequence[dict[str, Timing | Gap]]) -> dict[str, Timing | Gap]:
    """Of the runs with fewest gaps the one with fewest disturbed timings: a gap is quiet in its own way."""
    return min(runs, key=lambda run: (sum(isinstance(o, Gap) for o in run.values()), _disturbed(run)))


def _disturbed(outcomes: Mapping[str, Timing | Gap]) -> int:
    """How many of a run's timings were disturbed."""
    return sum(bool(outcome.noise) for outcome in outcomes.values() if isinstance(outcome, Timing))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # the row is a gap that says so
        return None


def _copies(sizes: Iterable[int]) -> dict[str, Job]:
    """Copies of each size; none of a size that does not fit beside the contenders."""
    jobs: dict[str, Job] = {}
    for size in sizes:
        try:
            jobs |= {f"{name} {size}": job for name, job in roofline.copy_jobs(size).items()}
        except torch.cuda.OutOfMemoryError:
            continue  # the row then has no copy beside it
    return jobs


def _fastest(outcomes: Mapping[str, Timing | Gap], size: int, timed: Timing | Gap) -> float | None:
    """Microseconds of the faster copy of ``size`` bytes by the same clock; None when none was measured.

    A copy that is bound by memory (above 8 MiB) is not credited with the bytes it moved in excess.
    """
    named = [outcomes.get(f"{name} {size}") for name in roofline.COPIES]
    excess = roofline.copied_bytes(size) / size if size > 2**23 else 1.0
    clock = timed.clock if isinstance(timed, Timing) else None
    copies = [o for o in named if isinstance(o, Timing) and o.clock == clock]
    return min((o.median_us / excess for o in copies), default=None)


def own_file(suite: str) -> Path:
    """Where the rows of a sweep are until it is complete, unless they go on a tape."""
    return paths.cache() / "sweeps" / machine.identity().slug / f"{suite.replace('/', '-')}.jsonl"


def code(contender: Contender) -> str:
    """What a live row names as its source: the code that was measured."""
    return f"code {contender.fingerprint()}"


def way(contender: Contender) -> Way:
    """How a contender would be measured now."""
    return journal.way(code(contender), _version(contender.peer) if contender.peer else None)


# ---- what a lesson measures in its own way ----------------------------------------------------------------


def custom_times(
    suite: str, timers: Mapping[str, Callable[[], float]], dtype: str = "float32", alone: bool = True
) -> Results:
    """A table as a sweep's, a row for each function: it is called once, and returns microseconds.

    Clock and cache stay empty, because it is the lesson's business how it times, and may be to show how not
    to. Each function has the GPU to itself (`clocks.gpu_turn`), unless ``alone`` is false:
    for what mostly keeps the host busy, and for long. Without a GPU nothing is called: the rows are those of
    a recorded device, and there may be none.
    """
    return _measured_by(suite, timers, "median_us", dtype, lock.gpu_turn if alone else nullcontext)


def custom_bytes(suite: str, meters: Mapping[str, Callable[[], int]], dtype: str = "float32") -> Results:
    """The same for memory: each function returns bytes, and they are the row's ``peak_bytes``."""
    return _measured_by(suite, meters, "peak_bytes", dtype, nullcontext)


def _measured_by(
    suite: str,
    measures: Mapping[str, Callable[[], float]],
    column: str,
    dtype: str,
    turn: Callable[[], AbstractContextManager[None]],
) -> Results:
    if not gpu.available():
        # a sweep may have the same name: its rows have a clock
        return rows.table([row for row in rows.recorded(suite) if not row.clock])
    found = []
    for name, measure in measures.items():
        with turn():
            measured = measure()
        found.append(_noted(_custom_row(suite, name, dtype, {column: measured})))
    return rows.table(found)


def _custom_row(suite: str, name: str, dtype: str, measured: dict[str, Any]) -> Row:
    return Row(
        suite=suite,
        contender=name,
        direction="forward",
        dtype=dtype,
        shape={},
        clock="",
        cache="",
        runs=1,
        **(measured | machine.stamp()),
    )


def _noted(row: Row) -> Row:
    """On the tape, while one is recorded."""
    tape = os.environ.get(TAPE)
    if tape:
        rows.put(Path(tape), row)
    return row
