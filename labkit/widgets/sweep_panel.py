"""The sweep panel: choose, run, watch the points appear, stop, keep. With nobody there it runs by itself.

Measuring happens in a thread, so other cells stay usable; a figure is drawn between two points, never
beside a measurement. Which thread a button's callback runs on depends on the version of ipykernel, so
callbacks only hand over to the loop that the panel was built on.
"""

import asyncio
import contextvars
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import gpu, paths
from labkit.measure import clocks, journal, lock, rows, sweeps
from labkit.measure.contender import Contender, Shape
from labkit.measure.results import Results
from labkit.profiling import counted_sweep
from labkit.widgets.static import Twin, interactive
from labkit.widgets.sweep_plan import Plan, Selection
from labkit.widgets.sweep_view import TRAFFIC, Controls, Look, page, picture

PATIENCE_S = 0.4
"""How long Stop waits for the call under way, before it ends in the background."""
LOOK_S = 0.1
"""How often the loop looks whether Stop was pressed."""
STOPPED = "Stopped. What was measured is kept."

_shown: "weakref.WeakValueDictionary[str, SweepPanel]" = weakref.WeakValueDictionary()
"""The panel of each suite that was shown last: a cell that is run again stops what it started before."""


def sweep(suite: str, contenders: Sequence[Contender], values: Sequence[int], **options: Any) -> "SweepPanel":
    """A panel that sweeps an axis over ``values``; ``await panel.show()`` shows it.

    ``options`` are the fields of :class:`labkit.widgets.sweep_plan.Plan`: title, of and over, and as needed
    x, others, dtypes, directions, clocks, published, floor, regimes, expected and budget_s.

    Executed without a reader, ``show`` measures every dtype, direction and size by the first clock, and
    leaves a figure, a sentence and a table. Without a GPU, Run counts launches and bytes, and times are those
    of a tape.

    Raises ValueError for sizes that do not increase, or names that are no contenders.
    """
    return SweepPanel(Plan(suite, contenders, values, **options))


class _Run:
    """One run: what it sweeps, how far it is, and whether it is to stop.

    With ``follow`` the controls show what is being measured.
    """

    def __init__(self, plan: Plan, selections: Sequence[Selection], follow: bool = False) -> None:
        self.selections, self.follow = selections, follow
        self.done, self.total = 0, sum(len(plan.calls(selection)) for selection in selections)
        self.began, self.stop = time.monotonic(), threading.Event()

    async def until(self, worker: "asyncio.Future[None]") -> None:
        """Wait for the worker or for Stop."""
        while not worker.done() and not self.stop.is_set():
            await asyncio.wait({worker}, timeout=LOOK_S)


class SweepPanel:
    """A plan with what is known of it, and the widgets to sweep it; see :func:`sweep`."""

    controls: Controls
    """Where somebody is there to use them."""
    _loop: asyncio.AbstractEventLoop
    """That on which it was shown."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.own, self.tape = plan.own(), plan.tape()
        self.running: asyncio.Task[None] | None = None
        self._counted: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._run: _Run | None = None
        self._worker: asyncio.Future[None] | None = None
        self._twin, self._there = Twin(), interactive()
        if self._there:
            self._build()

    async def show(self) -> None:
        """Show the panel. Where nobody can press Run, sweep everything first and leave it as a page."""
        self._loop = asyncio.get_running_loop()
        before = _shown.get(self.plan.suite)
        if before is not None and before is not self:
            before.stop()
        _shown[self.plan.suite] = self
        if self._there:
            self._twin.show(self.controls.widget)
            return
        self._run = _Run(self.plan, self.plan.everything())
        await self._sweep(self._run)
        self._twin.update(*page(self.plan, self.table(), Look()))
        self._twin.show()

    def table(self) -> Results:
        """Rows of every selection by the first clock: this machine's where there are any, else recorded."""
        return Results(self.plan.measured(self.own, self.tape))

    # -- the widgets

    def _build(self) -> None:
        hear = partial(self._hand_over, self._redraw)
        controls = self.controls = Controls(self.plan, hear, counting=not gpu.available())
        for button, act in {
            controls.run: lambda: self._start([controls.selection()]),
            controls.run_all: lambda: self._start(self.plan.everything(), follow=True),
            controls.again: lambda: self._start([self._noisy()]),
            controls.save: self._save,
        }.items():
            button.on_click(lambda _, act=act: self._hand_over(act))
        controls.stop.on_click(lambda _: self.stop())  # here, because a cell may keep the loop busy
        controls.say(self._greeting())
        self._redraw()
        self._update_twin()

    def _update_twin(self) -> None:
        self._twin.update(*page(self.plan, *self._visible()))

    def _greeting(self) -> str:
        if not gpu.available():
            return "No GPU here: Run counts launches and bytes. The times shown are recorded ones."
        selection = self.controls.selection()
        known = sum(row.kind == rows.LIVE for row in selection.of(self.own))
        wanted = len(self.plan.calls(selection))
        if 0 < known < wanted:
            goes_on = "Run goes on where this sweep was interrupted, else it starts again."
            return f"{known} of {wanted} points are measured already. {goes_on}"
        return "Nothing runs. Press Run to measure on this machine."

    def _visible(self) -> tuple[pd.DataFrame, Look, Selection]:
        """What is drawn: the rows of what is chosen, how to look at them, and the choice."""
        selection, look = self.controls.selection(), self.controls.look()
        if look.view == TRAFFIC:
            wanted = [self._key(selection, *call) for call in self.plan.calls(selection)]
            found = [self._counted[key] for key in wanted if key in self._counted]
            return pd.DataFrame(found), look, selection
        own = selection.of(self.own)
        devices = {row.device for row in own}  # of one device only what it measured itself
        taped = [row for row in selection.of(self.tape) if row.device not in devices]
        return self.plan.table([*own, *(taped if look.recorded or not own else [])]), look, selection

    def _redraw(self) -> None:
        """Draw what is chosen and known now."""
        self.controls.figure.value = picture(self.plan, *self._visible())._repr_html_()
        self.controls.again.layout.display = None if self._noisy().values else "none"

    def _noisy(self) -> Selection:
        """What is chosen, at the sizes where a point was disturbed: contenders are measured side by side."""
        chosen = self.controls.selection()
        sizes = {row.shape[self.plan.x] for row in chosen.of(self.own) if row.noise}
        return replace(chosen, values=tuple(sorted(sizes)))

    def _save(self) -> None:
        path = Path("measurements") / f"{self.plan.slug}-{time.strftime('%Y%m%d-%H%M%S')}.csv"
        table, *_ = self._visible()
        paths.write_text(path.absolute(), table.drop(columns="shape", errors="ignore").to_csv(index=False))
        self.controls.say(f"Saved {len(table)} rows: {path}")

    # -- run and stop

    def _hand_over(self, act: Callable[..., None], *given: Any) -> None:
        """Call on the panel's loop, whichever thread this is."""
        self._loop.call_soon_threadsafe(self._safely, act, *given)

    def _safely(self, act: Callable[..., Any], *given: Any) -> None:
        """A callback has no cell to raise in: what goes wrong is said in the panel and logged."""
        try:
            act(*given)
        except Exception as problem:
            self.controls.say(self._failure(problem))

    def _failure(self, problem: Exception) -> str:
        logging.getLogger(__name__).error("%s: a sweep panel failed", self.plan.suite, exc_info=problem)
        notes = getattr(problem, "__notes__", ())  # what to do where nothing can be written
        return " ".join(["It ended with an error.", clocks.describe(problem), *notes])

    def _start(self, selections: Sequence[Selection], *, follow: bool = False) -> None:
        """Sweep these, unless a sweep runs."""
        if self.running is not None and not self.running.done():
            return
        run = _Run(self.plan, selections, follow)
        if not run.total:
            self.controls.say("Choose at least one contender.")
            return
        self._run = run
        self.controls.running(True)
        self.controls.bar.max, self.controls.bar.value = run.total, 0
        self.controls.say("Starting.")
        self.running = asyncio.ensure_future(self._sweep_and_tell(run))

    def stop(self) -> None:
        """Ask the sweep to stop; what is measured is kept."""
        if self._run:
            self._run.stop.set()

    async def _sweep_and_tell(self, run: _Run) -> None:
        try:
            await self._sweep(run)
            words = STOPPED if run.stop.is_set() or run.done < run.total else "Done."
            if self._worker is not None and not self._worker.done():
                words = f"{STOPPED} One call still ends in the background."
        except Exception as problem:
            words = self._failure(problem)
        self.controls.running(False)
        self.controls.say(words)
        self._safely(self._update_twin)

    async def _sweep(self, run: _Run) -> None:
        if self._worker is not None and not self._worker.done():
            if self._there:
                self.controls.say("Waiting for the call that was stopped.")
            await run.until(self._worker)
        for selection in run.selections:
            if run.stop.is_set():
                return
            if run.follow:
                self.controls.choose(selection)
            if gpu.available():
                await self._measure(selection, run)
            elif self._there:
                await self._count(selection, run)

    async def _measure(self, selection: Selection, run: _Run) -> None:
        """Sweep in a thread; Stop does not wait for a slow call, such as a compilation."""
        wake, context = self._loop.call_soon_threadsafe, contextvars.copy_context()
        context.run(lock.SECTION.set, lambda act: lock.on_main_thread(act, wake, run.stop.is_set))
        if self._there:
            context.run(lock.TELL.set, partial(self._hand_over, self._waits, run))
        worker = self._loop.run_in_executor(None, context.run, self._points, selection, run)
        self._worker = worker
        try:
            await run.until(worker)
            await asyncio.wait({worker}, timeout=PATIENCE_S)
        finally:
            if not worker.done():  # Stop was pressed, or this task was cancelled
                run.stop.set()
        if worker.done():
            worker.result()

    def _waits(self, run: _Run, words: str) -> None:
        """Say in the line how long the queue for the GPU is; without words the wait is over."""
        if run is self._run and not run.stop.is_set():
            self.controls.say(words or "Measuring.")

    def _points(self, selection: Selection, run: _Run) -> None:
        chosen = self.plan.chosen(selection)

        def heard(done: int, total: int, row: rows.Row) -> None:
            """In the measuring thread, which goes on when the row is kept and shown."""
            if row not in self.own:
                rows.append(self.plan.path, row)
            key = journal.asked_key(row)
            self.own = [*(known for known in self.own if journal.asked_key(known) != key), row]
            run.done += 1
            if self._there:
                *_, last = (one.name for one in chosen if one.fits(row.shape))
                lock.SECTION.get()(partial(self._advance, run, row.contender == last))

        sweeps.run(
            self.plan.suite,
            chosen,
            selection.points,
            dtype=selection.dtype,
            direction=selection.direction,
            clock=selection.clock,
            cache=selection.cache,
            budget_s=self.plan.budget_s,
            progress=heard,
            stop=run.stop.is_set,
        )

    def _advance(self, run: _Run, complete: bool) -> None:
        """Show how far it is, how long the rest may take, and a point when it is complete."""
        if complete:
            self._redraw()
        self.controls.bar.value = run.done
        if not run.stop.is_set() and run.done < run.total:
            left_s = (time.monotonic() - run.began) / run.done * (run.total - run.done)
            left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
            self.controls.say(f"{run.done} of {run.total}, {left} left")

    @staticmethod
    def _key(selection: Selection, contender: Contender, shape: Shape) -> tuple[Any, ...]:
        """What identifies the counts of a call."""
        return contender.name, selection.dtype, selection.direction, *shape.values()

    async def _count(self, selection: Selection, run: _Run) -> None:
        """Count on this thread, a call at a time: the interpreter is one for the whole process."""
        self.controls.view.value = TRAFFIC
        how = (self.plan.x, selection.dtype, selection.direction)
        for contender, shape in self.plan.calls(selection):
            if run.stop.is_set():
                return
            row = counted_sweep.counted_row(contender, shape, *how)
            self._counted[self._key(selection, contender, shape)] = row
            run.done += 1
            self._advance(run, contender is self.plan.chosen(selection)[-1])
            await asyncio.sleep(0)
