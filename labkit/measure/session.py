"""What the measurements of one notebook share: its lesson, its device, and the tape that is recorded."""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit import gpu, notebooks
from labkit.measure import clocks, copies, tape
from labkit.measure.clocks import TimedCall
from labkit.measure.correctness import relative_error
from labkit.measure.tape import Row
from labkit.work import Shape, Work

ALLOWED = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest relative error, by norms: TF32 is off by 3e-4, so it is no float32."""
CHECKED_ROWS = 4096
"""So many rows at a time are compared with float64."""
OPTIONS = "LABKIT_SESSION"
"""Environment variable, JSON: ``record``, the tape that `labkit record` has its notebook write; ``device``,
whose tapes are shown, if it is not `tape.SHOWN`."""
Ways = Mapping[str, Callable[..., Any] | tuple[Callable[..., Any], Work]]
"""Ways by name: each a function, or a function and the work that it does."""


@dataclass(frozen=True, eq=False)
class Way:
    """One way to do a piece of work: ``call(*work.inputs(shape))``."""

    name: str
    call: Callable[..., Tensor]
    work: Work


@dataclass(frozen=True, eq=False)
class Point:
    """Ways that are measured in one interleaved run: one size, one dtype and direction, one clock."""

    title: str
    ways: tuple[Way, ...]
    axes: Shape
    dtype: str = "float32"
    direction: str = "forward"
    clock: clocks.Clock = "graph"
    cache: clocks.Cache = "cold"
    allowed: float = 0.0
    """The largest relative error, by norms; 0 for that of the dtype in ALLOWED."""

    def row(self, way: str) -> Row:
        """A row of this point, without a measurement."""
        return Row(self.title, way, dict(self.axes), self.dtype, self.direction, self.clock, self.cache)


def points(title: str, ways: Ways, work: Work | None, how: Mapping[str, Any]) -> list[Point]:
    """The points of a race or sweep: one for each combination of the values in ``how``.

    ``how`` has sizes, and dtype, direction, clock and cache: each a value or a list of them. The order is
    that of nested loops, those over sizes outside. ValueError for a way without a work.
    """
    made = []
    for name, each in ways.items():
        call, own = each if isinstance(each, tuple) else (each, work)
        if own is None:
            raise ValueError(f"ways: {name!r} has no work: give race or sweep one, or write (function, work)")
        made.append(Way(name, call, own))
    axes = [name for name in how if name not in tape.FIELDS]
    names = [*axes, *(name for name in how if name in tape.FIELDS)]
    values = [[how[name]] if isinstance(how[name], int | str) else how[name] for name in names]
    found = []
    for combination in itertools.product(*values):
        chosen = dict(zip(names, combination, strict=True))
        sizes = {name: chosen.pop(name) for name in axes}
        found.append(Point(title, tuple(made), sizes, **chosen))
    return found


class Session:
    """A notebook's measurements: made on a GPU, shown from a tape elsewhere."""

    def __init__(self, lesson: Path | None = None) -> None:
        """``lesson`` is the published notebook; None for one that is no lesson, which has no tape."""
        options = json.loads(os.environ.get(OPTIONS, "{}"))
        self.lesson, self.live = lesson, gpu.available()
        self.styles: dict[str, Any] = {}
        """How each way of the lesson is drawn, from its first figure on."""
        self.panels: dict[str, Any] = {}
        """The panel of each sweep that was shown last: a cell that is run again stops what it started."""
        self.tape: Path | None = Path(options["record"]) if options.get("record") and lesson else None
        tapes = tape.tapes(notebooks.key_of(lesson)) if lesson else {}
        shown = tapes.get(options.get("device", ""), next(iter(tapes.values()), None))
        self.recorded = {row.key: row for row in tape.read(shown)} if shown else {}
        self.known: dict[tape.Key, Row] = {}
        """While recording: rows that were measured before, on this kind of device."""
        if self.tape and lesson:
            earlier = [tapes.get(tape.folder_of(tape.here()["device"])), self.tape.with_suffix(".before")]
            self.known = {row.key: row for path in earlier if path for row in tape.read(path)}

    # ---- what is there already -----------------------------------------------------------------------------

    def find(self, point: Point) -> list[Row]:
        """The recorded rows of a point, of the device that is shown."""
        found = (self.recorded.get(point.row(way.name).key) for way in point.ways)
        return [row for row in found if row is not None]

    def _stamped(self, row: Row, functions: Iterable[Callable[..., Any]], work: str = "") -> Row:
        """While recording, the row with what it measures and its stamp."""
        if self.tape is None or self.lesson is None:
            return row
        found = [tape.uses_of(self.lesson, row.way or row.title, each, work) for each in functions]
        uses = tuple(dict.fromkeys(itertools.chain(*found)))
        return replace(row, uses=uses, stamp=tape.stamp_of(self.lesson, uses))

    def _kept(self, row: Row) -> Row | None:
        """The same measurement of the same code on the same device and versions, made before."""
        known = self.known.get(row.key)
        if known is None or known.stamp != row.stamp or (known.median_us is None and known.value is None):
            return None
        same = all(getattr(known, name) == value for name, value in tape.here().items())
        return known if same else None

    def _keep(self, row: Row) -> Row:
        """Put a row on the tape that is recorded."""
        if self.tape is not None:
            tape.append(self.tape, row)
        return row

    # ---- measuring -----------------------------------------------------------------------------------------

    def measure(self, point: Point) -> list[Row]:
        """A row for each way of a point: measured on a GPU, elsewhere from the tape, as far as it has them.

        On a GPU each way is compared with float64 at this size, and all are timed in one interleaved run
        beside a copy of the same bytes. One that is wrong, fails, or does not fit the memory has no time, and
        a note.
        """
        if not self.live:
            return self.find(point)
        empty = {way: self._stamped(point.row(way.name), [way.call], way.work.name) for way in point.ways}
        kept = [self._kept(row) for row in empty.values()] if self.tape else [None]
        with gpu.locked(), gpu.full_float32():
            # All of its ways, as they are compared: no new time stands beside an old one.
            rows = [row for row in kept if row] if all(kept) else self._timed(point, empty)
        return [self._keep(row) for row in rows]

    def _timed(self, point: Point, rows: Mapping[Way, Row]) -> list[Row]:
        if any(hasattr(way.call, "_torchdynamo_orig_callable") for way in rows):
            from torch._inductor import config  # not before it is needed: it takes a second

            torch.compiler.reset()  # it compiles for this size, not for any, and after eight sizes not at all
            config.compile_threads = 1  # else a pool of processes starts beside what is timed
        dtype: torch.dtype = getattr(torch, point.dtype)
        inputs: dict[str, tuple[Any, ...]] = {}  # by work: ways of one work get the same
        calls: dict[str, TimedCall] = {}
        notes: dict[str, str] = {}
        for way in rows:
            try:
                if way.work.name not in inputs:
                    inputs[way.work.name] = drawn(way.work, point.axes, dtype, point.direction)
                given = inputs[way.work.name]
                allowed = point.allowed or ALLOWED[point.dtype]
                notes[way.name] = what_is_wrong(way, given, point.direction, allowed)
                if not notes[way.name]:
                    calls[way.name] = clocks.timed_call(way.call, given, point.direction)
            except Exception as problem:  # becomes the note of this way's gap
                notes[way.name] = clocks.describe(problem)
        needed = {way: way.work.min_bytes(point.axes, dtype.itemsize, point.direction) for way in rows}
        sizes = {needed[way] for way in rows if way.name in calls and point.clock != "host"}
        beside = {f"{name} {size}": call for size in sizes for name, call in copies.calls(size).items()}
        timings = clocks.measure(calls | beside, clock=point.clock, cache=point.cache)
        torch.cuda.empty_cache()
        where = tape.where_and_when()
        made = []
        for way, row in rows.items():
            row = replace(row, note=notes.get(way.name, ""), **where)
            made.append(replace(row, **_columns(timings, way.name, needed[way], point.clock)))
        return made

    def number(
        self, name: str, function: Callable[[], Any], sources: Sequence[Callable[..., Any]], work: str = ""
    ) -> Row:
        """The row of what a function returns: called on a GPU, from the tape elsewhere, without a value else.

        ``sources`` are the lesson's functions that it measures, and ``work`` what they do.
        """
        row = self._stamped(Row(name), sources, work)
        if not self.live:
            return self.recorded.get(row.key, row)
        if self.tape and (kept := self._kept(row)):
            return self._keep(kept)
        with gpu.locked(), gpu.full_float32():
            value = function()
        return self._keep(replace(row, value=value, **tape.where_and_when()))


def _columns(timings: Mapping[str, Any], way: str, size: int, clock: str) -> dict[str, Any]:
    """The columns of a row that say how long a way took, or why it has no time by this clock.

    Where copies of ``size`` bytes were timed, also how long the faster one took.
    """
    found: dict[str, Any] = {}
    timing = timings.get(way)
    if isinstance(timing, clocks.Timing) and timing.clock == clock:
        times = {"median_us": timing.median_us, "p20_us": timing.p20_us, "p80_us": timing.p80_us}
        found = {name: round(value, 4) for name, value in times.items()} | {"noise": timing.noise}
    elif timing is not None:  # it failed, or a graph could not hold the call
        found["note"] = timing.note
    beside = [timings.get(f"{name} {size}") for name in copies.COPIES]
    took = [copy.median_us for copy in beside if isinstance(copy, clocks.Timing)]
    if took:  # the copies are of whole pages, a little more
        found["copy_us"] = round(min(took) * size / copies.copied_bytes(size), 4)
    return found


# ---- calls and their results -------------------------------------------------------------------------------


def drawn(work: Work, axes: Shape, dtype: torch.dtype, direction: str) -> tuple[Any, ...]:
    """Inputs of a work at a size: tensors on this session's device, with gradients where those are measured.

    What is no tensor, a number of repetitions, stays as it is.
    """
    return tuple(
        each.to(gpu.device(), dtype).requires_grad_(direction != "forward")
        if isinstance(each, Tensor)
        else each
        for each in work.inputs(axes)
    )


def what_is_wrong(way: Way, inputs: Sequence[Any], direction: str, allowed: float) -> str:
    """What is wrong with a way's result, in a sentence; "" if it is right.

    The output is compared with float64 in all rows, some at a time. The gradients are compared for an
    upstream gradient of twice the output in some of the first and last rows, and zero elsewhere.
    """
    work = way.work

    def exact(rows: Tensor | slice) -> list[Any]:
        """The inputs, tensors in float64, and of those that have rows these rows."""
        return [
            (each.detach()[rows] if i in work.batched else each.detach())
            .double()
            .requires_grad_(direction != "forward")
            if isinstance(each, Tensor)
            else each
            for i, each in enumerate(inputs)
        ]

    with torch.set_grad_enabled(direction != "forward"):
        got = way.call(*inputs)
        batch = len(inputs[work.batched[0]]) if work.batched else len(got)
        at_once = CHECKED_ROWS if work.batched else max(1, batch)
        pairs: list[tuple[Tensor, Tensor]] = []
        for first in range(0, batch, at_once):
            rows = slice(first, first + at_once)
            with torch.no_grad():
                pairs.append((got[rows], work.reference(*exact(rows))))
        if direction != "forward":
            ends = min(64, batch) if work.batched else batch
            few = sorted({*range(ends), *range(batch - ends, batch)})
            some = torch.tensor(few, device=got.device)
            leaves = exact(some)
            upstream = torch.zeros_like(got).index_copy(0, some, 2 * got.detach()[some])
            # As it is timed: the graph of a backward pass alone is used again.
            again = direction == "backward"
            gradients = torch.autograd.grad(got, inputs, upstream, retain_graph=again)
            wanted = torch.autograd.grad(work.reference(*leaves), leaves, upstream[some].double())
            chosen = [g[some] if i in work.batched else g for i, g in enumerate(gradients)]
            pairs += zip(chosen, wanted, strict=True)
    if len(got) != batch or got.dtype != inputs[0].dtype:
        return f"wrong result: {tuple(got.shape)} of {got.dtype}"
    for mine, right in pairs:
        if mine.shape != right.shape:
            return f"wrong result: a shape of {tuple(mine.shape)}, not {tuple(right.shape)}"
        error = relative_error(mine.detach(), right.detach())
        if not error <= allowed:  # or NaN
            return f"wrong result: a relative error of {error:.1e}"
    return ""


_current: list[Session] = []


def begin(lesson: Path | None) -> Session:
    """Make the session of a notebook, which `current` gives from then on."""
    _current[:] = [Session(lesson)]
    return _current[0]


def current() -> Session:
    """The session that ``lab.lesson`` began, else one that knows no lesson."""
    return _current[0] if _current else begin(None)
