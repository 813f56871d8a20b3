"""Contenders over an axis, as rows of the contract's schema in a table.

A sweep measures where there is a GPU; elsewhere it hands out the rows that a recorded device left on its
tape. Each row is on the disk as soon as it is measured, so an interrupted sweep is continued.
"""

import hashlib
import inspect
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
import triton.language as tl
from torch import Tensor

from labkit import clocks, device, machine, places, roofline, rows
from labkit.checks import relative_error
from labkit.clocks import Cache, Clock, Gap, Job, Timing
from labkit.profile_tapes import TAPE
from labkit.rows import Row

Shape = dict[str, int]
RESUME_WITHIN_S = 3600
"""An interrupted sweep is continued for an hour; later the machine may be in another state."""
ALLOWED_ERROR = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 2e-2}
"""A larger relative error against float64 is a wrong result, not a rounding (TF32 has about 3e-4)."""
EDGE_ROWS = 8
CHECKED_FLOPS, CHECKED_ROWS = 10**11, 2**14
"""Gradients are checked at full size up to so many operations, so many rows at a time."""
PLAIN = (int, float, str, tuple, tl.constexpr)
"""Values that belong to the code of a contender: a tile's size, a flag."""


@dataclass(frozen=True)
class Work:
    """What is computed: random inputs for a shape and dtype, the reference, the floor.

    ``inputs(shape)`` returns float32 tensors on the CPU or the device; they are cast. ``reference`` is
    plain PyTorch, called with float64 tensors; None only for a call whose result is random.
    ``min_bytes(shape, itemsize, direction)`` and ``flops(shape, direction)`` follow the contract.
    ``sample`` caps the axes for which being right is checked at a smaller size ({"batch": 64}); the full
    output's first and last rows are checked as well.
    """

    inputs: Callable[[Shape], tuple[Tensor, ...]]
    reference: Callable[..., Tensor] | None
    min_bytes: Callable[[Shape, int, str], int]
    flops: Callable[[Shape, str], int]
    sample: Mapping[str, int] = field(default_factory=lambda: {"batch": 64})

    def floor_us(self, shape: Shape, dtype: str, roofs: machine.Roofs, direction: str = "forward") -> float:
        """The roofline floor of this work in microseconds; ``dtype`` may be "tf32"."""
        size = torch.float32.itemsize if dtype == "tf32" else getattr(torch, dtype).itemsize
        return roofline.floor_us(
            roofs,
            min_bytes=self.min_bytes(shape, size, direction),
            flops=self.flops(shape, direction),
            dtype=dtype,
        )


@dataclass(frozen=True)
class Contender:
    """One way to do the work. ``compiled`` passes the call through torch.compile afresh for each point.

    ``dtypes`` names the dtypes that it is for, all when empty. ``peer`` names the library behind it and its
    version comes from the installed package.
    """

    name: str
    call: Callable[..., Tensor]
    work: Work
    compiled: bool = False
    peer: str | None = None
    dtypes: tuple[str, ...] = ()

    def takes(self, dtype: str) -> bool:
        """Whether it is a contender for this dtype."""
        return not self.dtypes or dtype in self.dtypes

    def fingerprint(self) -> str:
        """Changes when the call or the work, or what they use of their own modules, is edited."""
        work = (self.work.inputs, self.work.reference, self.work.min_bytes, self.work.flops)
        seen: set[int] = set()
        sources = [source for function in (self.call, *work) for source in _sources(function, seen)]
        return hashlib.sha256("\n".join([*sources, str(self.compiled)]).encode()).hexdigest()[:12]


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
    resume: bool = True,
) -> pd.DataFrame:
    """Measure every contender at every point; a table with a row for each.

    At each point the contenders for this dtype and a copy of the same bytes are interleaved in one run, and
    each contender's result is compared with float64. Out of memory, an error or a wrong result is a row
    without a time and with a note; the others go on. ``progress(done, total, row)`` hears of each row. When
    ``stop()`` turns true the rows measured so far are returned. With ``resume`` a sweep that was interrupted
    within the last hour, of the same code on the same machine, is continued.

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
    how = _How(suite, dtype, direction, clock, cache, budget_s)
    listed = list(points)
    axes = list(dict.fromkeys(axis for shape in listed for axis in shape))
    if not device.has_gpu():
        return rows.table((row for row in rows.recorded(suite) if how.matches(row)), axes)
    journal = Journal.of(how, contenders, resume)
    measured: list[Row] = []
    total = len(listed) * len(contenders)
    try:
        for shape in listed:
            kept = journal.rows_of(shape)
            todo = [contender for contender in contenders if contender.name not in kept]
            with clocks.turn(stop), device.full_float32():
                fresh = how.measure(todo, shape, stop) if todo else {}
            for contender in contenders:
                row = kept.get(contender.name) or fresh[contender.name]
                if contender.name in fresh:
                    journal.add(row)
                measured.append(row)
                if progress:
                    progress(len(measured), total, row)
    except clocks.StoppedError:
        return rows.table(measured, axes)
    journal.close()
    return rows.table(measured, axes)


def grid(
    suite: str, contenders: Sequence[Contender], points: Iterable[Shape], **options: Any
) -> pd.DataFrame:
    """One table of several runs: an option of :func:`run` that is a tuple is taken one value after another.

    ``grid(suite, contenders, points, clock=("host", "graph"), cache="warm")``
    """
    listed = list(points)
    choices = [
        [(name, v) for v in (value if isinstance(value, tuple) else (value,))]
        for name, value in options.items()
    ]
    return pd.concat(
        [run(suite, contenders, listed, **dict(chosen)) for chosen in itertools.product(*choices)],
        ignore_index=True,
    )


@dataclass(frozen=True)
class _How:
    """The part of a row's identity that all rows of a sweep share, and how to measure one point."""

    suite: str
    dtype: str
    direction: str
    clock: Clock
    cache: Cache
    budget_s: float

    def matches(self, row: Row) -> bool:
        mine = (self.suite, self.dtype, self.direction, self.clock, self.cache)
        return mine == (row.suite, row.dtype, row.direction, asked_clock(row), row.cache)

    def measure(
        self, contenders: Sequence[Contender], shape: Shape, stop: Callable[[], bool]
    ) -> dict[str, Row]:
        """Rows of one point, by contender."""
        if any(contender.compiled for contender in contenders):
            torch.compiler.reset()  # it gets fresh code for each shape, not a dynamic one
        jobs: dict[str, Job] = {}
        gaps: dict[str, str] = {}
        errors: dict[str, float] = {}
        shared: dict[int, tuple[Tensor, ...]] = {}
        for contender in contenders:
            if stop():
                raise clocks.StoppedError("stopped before the measurement was complete")
            try:
                work = contender.work
                call = torch.compile(contender.call, dynamic=False) if contender.compiled else contender.call
                if id(work) not in shared:
                    shared[id(work)] = self._cast(work.inputs(shape))
                if work.reference:
                    error = self._error(call, work, work.reference, shape, shared[id(work)])
                    errors[contender.name] = error
                    if not error <= ALLOWED_ERROR[self.dtype]:
                        gaps[contender.name] = f"wrong result: relative error {error:.1e}"
                        continue
                jobs[contender.name] = self._job(call, shared[id(work)])
            except Exception as problem:  # becomes the note of this contender's gap
                gaps[contender.name] = clocks.describe(problem)
        sizes = {c.name: c.work.min_bytes(shape, self._itemsize, self.direction) for c in contenders}
        copies = {} if self.clock == "host" else _copies({size for n, size in sizes.items() if n in jobs})
        outcomes = clocks.measure(
            jobs | copies, clock=self.clock, cache=self.cache, budget_s=self.budget_s, stop=stop
        )
        made = {}
        for contender in contenders:
            outcome = outcomes.get(contender.name) or Gap(gaps[contender.name])
            copy_us = _fastest(outcomes, sizes[contender.name], outcome)
            made[contender.name] = self._row(contender, shape, outcome, copy_us, errors.get(contender.name))
        if device.has_gpu():
            torch.cuda.empty_cache()
        return made

    @property
    def _itemsize(self) -> int:
        return cast(torch.dtype, getattr(torch, self.dtype)).itemsize

    def _cast(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        dtype, differentiable = getattr(torch, self.dtype), self.direction != "forward"
        return tuple(t.to(device.name(), dtype).requires_grad_(differentiable) for t in tensors)

    def _job(self, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Job:
        if self.direction == "forward":
            return Job(torch.no_grad()(call), inputs)

        # The upstream gradient is an input too: a cold run rotates it with the others.
        def forward(*tensors: Tensor) -> tuple[Any, ...]:
            return call(*tensors[:-1]), tensors[:-1], tensors[-1]

        given = (*inputs, torch.randn_like(call(*inputs)))
        if self.direction == "backward":  # its forward runs outside the timed region, once for each set
            return Job(_gradients, given, setup=forward)
        return Job(lambda *tensors: _gradients(*forward(*tensors)), given)

    def _error(
        self,
        call: Callable[..., Tensor],
        work: Work,
        reference: Callable[..., Tensor],
        shape: Shape,
        inputs: tuple[Tensor, ...],
    ) -> float:
        """Largest relative error of a tensor against float64, by norms.

        Of output and gradients at the sampled size; at full size of the output's first and last rows, and of
        the gradients unless the work takes more than CHECKED_FLOPS operations.
        """
        capped = {axis: min(size, work.sample.get(axis, size)) for axis, size in shape.items()}
        small = inputs if capped == shape else self._cast(work.inputs(capped))
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in small]
        got, want = call(*small), reference(*exact)
        pairs = [(got, want)]
        if self.direction != "forward":
            upstream = (2 * want.detach()).to(got.dtype)
            grads = _gradients(got, small, upstream)
            pairs += zip(grads, _gradients(want, exact, upstream.double()), strict=True)
        if capped != shape:
            pairs += _edges(call, reference, inputs)
            if self.direction != "forward" and work.flops(shape, self.direction) <= CHECKED_FLOPS:
                pairs += _full_gradients(call, reference, inputs)
        # np.max, because max() loses a NaN that is not the first
        return float(np.max([relative_error(g.detach(), w.detach()) for g, w in pairs]))

    def _row(
        self,
        contender: Contender,
        shape: Shape,
        outcome: Timing | Gap,
        copy_us: float | None,
        error: float | None,
    ) -> Row:
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
            peer_version=machine.version(contender.peer) if contender.peer else None,
            source=code(contender),
            note=outcome.note,
            **machine.stamp(),
        )


@torch.no_grad()
def _edges(
    call: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> list[tuple[Tensor, Tensor]]:
    """The full output's first and last rows beside the reference of those rows of the first input."""
    full = call(*inputs)
    first, *others = inputs
    parts = (slice(None, EDGE_ROWS), slice(-EDGE_ROWS, None))
    exact = [t.double() for t in others]
    return [(full[part], reference(first[part].double(), *exact)) for part in parts]


def _full_gradients(
    call: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> list[tuple[Tensor, Tensor]]:
    """The gradients at full size beside those of the reference, which takes a slice of rows at a time."""
    output = call(*inputs)
    upstream = (2 * output.detach()).contiguous()
    first, *others = _gradients(output, inputs, upstream)
    exact = [t.detach().double().requires_grad_() for t in inputs[1:]]
    totals = [torch.zeros_like(t) for t in exact]
    pairs = []
    for rows_, up, got in zip(*(t.split(CHECKED_ROWS) for t in (inputs[0], upstream, first)), strict=True):
        part = rows_.detach().double().requires_grad_()
        wanted, *sums = _gradients(reference(part, *exact), [part, *exact], up.double())
        pairs.append((got, wanted.to(got.dtype)))
        totals = [total + term for total, term in zip(totals, sums, strict=True)]
    return [*pairs, *zip(others, totals, strict=True)]


def _gradients(output: Tensor, inputs: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, upstream, retain_graph=True)


def _copies(sizes: Iterable[int]) -> dict[str, Job]:
    """Copies of each size; none of a size that does not fit beside the contenders."""
    jobs: dict[str, Job] = {}
    for size in sizes:
        try:
            jobs |= {f"{name} {size}": job for name, job in machine.copy_jobs(size).items()}
        except torch.cuda.OutOfMemoryError:
            continue  # the row then has no copy beside it
    return jobs


def _fastest(outcomes: Mapping[str, Timing | Gap], size: int, timed: Timing | Gap) -> float | None:
    """Microseconds of the faster copy of ``size`` bytes by the same clock; None when none was measured.

    A copy that is bound by memory (above 8 MiB) is not credited with the bytes it moved in excess.
    """
    named = [outcomes.get(f"{name} {size}") for name in machine.COPIES]
    excess = machine.copied_bytes(size) / size if size > 2**23 else 1.0
    clock = timed.clock if isinstance(timed, Timing) else None
    copies = [o for o in named if isinstance(o, Timing) and o.clock == clock]
    return min((o.median_us / excess for o in copies), default=None)


class Journal:
    """The rows of a sweep on disk, one line each, written as they are measured."""

    def __init__(self, path: Path, known: Iterable[Row], *, keep: bool) -> None:
        self.path, self.keep = path, keep
        self._known = list(known)
        self._gaps = {row.key for row in self._known if row.median_us is None}

    @classmethod
    def of(cls, how: _How, contenders: Sequence[Contender], resume: bool) -> "Journal":
        """The tape that is being recorded, else this sweep's own file in the user's cache."""
        tape = os.environ.get(TAPE)
        if tape:
            path = Path(tape)
            taped = rows.read(path)
            rows.write(path, taped)  # without a torn last line
            return cls(path, (row for row in taped if how.matches(row)), keep=True)
        here = machine.identity()
        code = [f"{c.name} {c.fingerprint()}" for c in contenders]
        key = repr((how, here.device, here.driver, here.torch, here.triton, code))
        name = f"{how.suite.replace('/', '-')}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"
        path = places.cache() / "sweeps" / name
        recent = path.exists() and time.time() - path.stat().st_mtime < RESUME_WITHIN_S
        known = readable(path) if resume and recent else []
        rows.write(path, known)  # without a torn last line
        return cls(path, known, keep=False)

    def rows_of(self, shape: Shape) -> dict[str, Row]:
        """Rows kept from an interrupted run, by contender; gaps are tried again."""
        return {row.contender: row for row in self._known if row.shape == shape and row.median_us is not None}

    def add(self, row: Row) -> None:
        """Put a row on the disk, in the place of a gap that was tried again."""
        if row.key in self._gaps:
            rows.write(self.path, (kept for kept in rows.read(self.path) if kept.key != row.key))
        rows.append(self.path, row)

    def close(self) -> None:
        """The sweep is complete: the next one starts afresh, unless this is a tape."""
        if not self.keep:
            self.path.unlink(missing_ok=True)


def asked_clock(row: Row) -> str:
    """The clock that was asked for: a call that a graph cannot hold is timed with events, and says so."""
    return "graph" if row.clock == "events" and row.note and row.median_us is not None else row.clock


def code(contender: Contender) -> str:
    """What a live row names as its source: the code that was measured."""
    return f"code {contender.fingerprint()}"


def readable(path: Path) -> list[Row]:
    """Rows of a journal; none of a damaged one, which is measured again, not trusted."""
    try:
        return rows.read(path)
    except ValueError:
        return []


def _sources(function: Any, seen: set[int]) -> list[str]:
    """Source of a function or kernel, of those that it uses from its own module, and its plain values."""
    function = _innermost(function)
    if id(function) in seen or not hasattr(function, "__code__"):
        return []
    seen.add(id(function))
    try:
        found = [inspect.getsource(function)]
    except OSError:  # typed into a console: only its bytecode is known
        found = [function.__code__.co_code.hex()]
    names = function.__code__.co_names
    used = [function.__globals__[name] for name in names if name in function.__globals__]
    given = [*(cell.cell_contents for cell in function.__closure__ or ()), *(function.__defaults__ or ())]
    given += getattr(function, "made_of", ())  # ops.differentiable
    found += [repr(value) for value in (*used, *given) if isinstance(value, PLAIN)]
    used = [other for other in used if getattr(_innermost(other), "__module__", None) == function.__module__]
    return found + [source for other in (*used, *given) for source in _sources(other, seen)]


def _innermost(kernel: Any) -> Any:
    """The Python function of a kernel, below what tunes it; any other function itself."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel
