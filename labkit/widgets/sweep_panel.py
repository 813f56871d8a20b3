"""The sweep panel: choose, run, watch the points appear, stop, keep. With nobody there it runs by itself.

Measuring happens in a thread, so other cells stay usable; a figure is drawn between two points, never
beside a measurement. Which thread a button's callback runs on depends on the version of ipykernel, so
callbacks only hand over to the loop that the panel was built on.
"""

import asyncio
import contextvars
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from labkit import gpu, paths
from labkit.measure import clocks, lock, rows, sweeps
from labkit.measure.contender import Contender
from labkit.measure.results import Results
from labkit.plots.curves import Quantity
from labkit.widgets.static import StaticCopy, interactive
from labkit.widgets.sweep_plan import Selection, SweepPlan
from labkit.widgets.sweep_view import Controls, static_page, sweep_figure

STOP_WAIT_S = 0.4
"""How long Stop waits for the call under way, before it ends in the background."""
STOP_POLL_S = 0.1
"""How often the loop checks whether Stop was pressed."""
STOPPED = "Stopped. What was measured is kept."

_shown: "weakref.WeakValueDictionary[str, SweepPanel]" = weakref.WeakValueDictionary()
"""The panel of each suite that was shown last: a cell that is run again stops what it started before."""


def sweep(suite: str, contenders: Sequence[Contender], values: Sequence[int], **options: Any) -> "SweepPanel":
    """A panel that sweeps an axis over ``values``; ``await panel.show()`` shows it.

    ``options`` are the fields of :class:`labkit.widgets.sweep_plan.SweepPlan`: title, of and over, and as
    needed x, others, dtypes, clocks, published, reference_lines, expected and budget_s.

    Executed without a reader, ``show`` measures the first dtype at the usual sizes by the first clock, every
    dtype and size for a recording, and leaves a figure, a sentence and a table. Without a GPU nothing runs,
    and times are those of a tape.

    Raises ValueError for sizes that do not increase, or names that are no contenders.
    """
    return SweepPanel(SweepPlan(suite, contenders, values, **options))


@dataclass
class _Run:
    """The selections that are swept after Run, how many of their points are done, and whether to stop."""

    selections: Sequence[Selection] = ()
    total: int = 0
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    stop: threading.Event = field(default_factory=threading.Event)

    async def wait_for(self, worker: "asyncio.Future[Any]") -> None:
        """Wait for the worker or for Stop."""
        while not worker.done() and not self.stop.is_set():
            await asyncio.wait({worker}, timeout=STOP_POLL_S)


class SweepPanel:
    """A plan with what is known of it, and the widgets to sweep it; see :func:`sweep`."""

    controls: Controls
    """Where somebody is there to use them."""
    _loop: asyncio.AbstractEventLoop
    """That on which it was shown."""

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = plan
        self.own: list[rows.Row] = []
        """What this panel has measured: the last row of each measurement."""
        self.recorded = plan.recorded_rows()
        self.running: asyncio.Task[None] | None = None
        self._run = _Run()
        self._worker: asyncio.Future[Any] | None = None
        self._static, self._interactive = StaticCopy(), interactive()
        if self._interactive:
            self._build()

    async def show(self) -> None:
        """Show the panel. Where nobody can press Run, sweep everything first and leave it as a page."""
        self._loop = asyncio.get_running_loop()
        before = _shown.get(self.plan.suite)
        if before is not None and before is not self:
            before.stop()
        _shown[self.plan.suite] = self
        if self._interactive:
            self._static.show(self.controls.widget)
            return
        recording = os.environ.get(rows.TAPE)
        self._run = _Run(self.plan.all_selections() if recording else [self.plan.usual_selection()])
        await self._sweep(self._run)
        self._static.update(*static_page(self.plan, self.table()))
        self._static.show()

    def table(self) -> Results:
        """Rows of every selection by the first clock: this machine's where there are any, else recorded."""
        return self.plan.results(self.own, self.recorded)

    def stop(self) -> None:
        """Ask the sweep to stop; what is measured is kept."""
        self._run.stop.set()

    # -- the widgets

    def _build(self) -> None:
        redraw = partial(self._call_on_loop, self._redraw)
        controls = self.controls = Controls(self.plan, redraw)
        for button, action in {
            controls.run: lambda: self._start([controls.selection()]),
            controls.run_all: lambda: self._start(self.plan.all_selections(), show_selection=True),
            controls.save: self._save,
        }.items():
            button.on_click(lambda _, action=action: self._call_on_loop(action))
        controls.stop.on_click(lambda _: self.stop())  # here, because a cell may keep the loop busy
        status = "Nothing runs. Press Run to measure on this machine."
        if not gpu.available():
            status = "No GPU here: the times shown are recorded ones."
        controls.set_status(status)
        self._redraw()
        self._update_static()

    def _visible(self) -> tuple[Results, Quantity, Selection]:
        """What is drawn: the rows of the selection, whether time or speedup, and the selection."""
        selection, quantity = self.controls.selection(), self.controls.quantity.value
        own = selection.matching(self.own)
        devices = {row.device for row in own}  # of one device only what it measured itself
        recorded = [row for row in selection.matching(self.recorded) if row.device not in devices]
        beside = recorded if self.controls.recorded.value or not own else []
        return self.plan.table([*own, *beside]), quantity, selection

    def _redraw(self) -> None:
        self.controls.figure.value = sweep_figure(self.plan, *self._visible())._repr_html_()

    def _update_static(self) -> None:
        self._static.update(*static_page(self.plan, *self._visible()))

    def _save(self) -> None:
        name = self.plan.suite.replace("/", "-")
        path = Path("measurements") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.csv"
        table, *_ = self._visible()
        paths.write_text(path.absolute(), table.drop(columns="shape", errors="ignore").to_csv(index=False))
        self.controls.set_status(f"Saved {len(table)} rows: {path}")

    # -- run and stop

    def _call_on_loop(self, action: Callable[..., None], *given: Any) -> None:
        """Call on the panel's loop, whichever thread this is; an error is shown by the panel."""

        def call() -> None:
            try:
                action(*given)
            except Exception as problem:
                self._show_error(problem)

        self._loop.call_soon_threadsafe(call)

    def _show_error(self, problem: Exception) -> None:
        """Show an error in the panel, as it has no cell to be raised in, and log it with its traceback."""
        logging.getLogger(__name__).error("%s: a sweep panel failed", self.plan.suite, exc_info=problem)
        notes = getattr(problem, "__notes__", ())  # what to do where nothing can be written
        self.controls.set_status(" ".join(["It ended with an error.", clocks.describe(problem), *notes]))

    def _start(self, selections: Sequence[Selection], *, show_selection: bool = False) -> None:
        """Sweep these, unless a sweep runs. ``show_selection``: the controls show what is being measured."""
        if self.running is not None and not self.running.done():
            return
        run = _Run(selections, sum(len(self.plan.calls(selection)) for selection in selections))
        if not run.total:
            self.controls.set_status("Choose at least one contender.")
            return
        self._run = run
        self.controls.set_running(True)
        self.controls.bar.max, self.controls.bar.value = run.total, 0
        self.controls.set_status("Starting.")
        self.running = asyncio.ensure_future(self._sweep_and_tell(run, show_selection))

    async def _sweep_and_tell(self, run: _Run, show_selection: bool) -> None:
        problem = None
        try:
            await self._sweep(run, show_selection)
        except Exception as raised:
            problem = raised
        self.controls.set_running(False)  # before the line below: who reads it may press Run
        if problem is not None:
            self._show_error(problem)
        elif self._worker is not None and not self._worker.done():
            self.controls.set_status(f"{STOPPED} One call still ends in the background.")
        else:
            self.controls.set_status(STOPPED if run.stop.is_set() or run.done < run.total else "Done.")
        self._call_on_loop(self._update_static)

    async def _sweep(self, run: _Run, show_selection: bool = False) -> None:
        if self._worker is not None and not self._worker.done():
            if self._interactive:
                self.controls.set_status("Waiting for the call that was stopped.")
            await run.wait_for(self._worker)
        for selection in run.selections:
            if run.stop.is_set():
                return
            if show_selection:
                self.controls.choose(selection)
            if gpu.available():
                await self._measure(selection, run)

    async def _measure(self, selection: Selection, run: _Run) -> None:
        """Sweep in a thread; Stop does not wait for a slow call, such as a compilation."""
        contenders = self.plan.selected(selection)

        def keep(done: int, total: int, row: rows.Row) -> None:
            """Keep a row and show it; the measuring thread, whose call this is, goes on afterwards."""
            key = row.asked_key
            self.own = [*(known for known in self.own if known.asked_key != key), row]
            run.done += 1
            if self._interactive:
                *_, last = (one.name for one in contenders if one.fits(row.shape))
                lock.RUN_ON_MAIN_THREAD.get()(partial(self._show_progress, run, row.contender == last))

        def show_queue(text: str) -> None:
            """Show how long the queue for the GPU is; without a text the wait is over."""
            if run is self._run and not run.stop.is_set():
                self.controls.set_status(text or "Measuring.")

        context = contextvars.copy_context()
        wake = self._loop.call_soon_threadsafe
        context.run(lock.RUN_ON_MAIN_THREAD.set, lambda act: lock.on_main_thread(act, wake, run.stop.is_set))
        if self._interactive:
            context.run(lock.SHOW_QUEUE.set, partial(self._call_on_loop, show_queue))
        how: dict[str, Any] = dict(dtype=selection.dtype, clock=selection.clock, cache=selection.cache)
        how |= dict(budget_s=self.plan.budget_s, progress=keep, stop=run.stop.is_set)
        measure = partial(sweeps.run, self.plan.suite, contenders, selection.shapes, **how)
        self._worker = worker = self._loop.run_in_executor(None, context.run, measure)
        try:
            await run.wait_for(worker)
            await asyncio.wait({worker}, timeout=STOP_WAIT_S)
        finally:
            if not worker.done():  # Stop was pressed, or this task was cancelled
                run.stop.set()
        if worker.done():
            worker.result()

    def _show_progress(self, run: _Run, is_point_complete: bool) -> None:
        """Show how far the run is, how long the rest may take, and a point when it is complete."""
        if is_point_complete:
            self._redraw()
        self.controls.bar.value = run.done
        if not run.stop.is_set() and run.done < run.total:
            left_s = (time.monotonic() - run.began) / run.done * (run.total - run.done)
            left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
            self.controls.set_status(f"{run.done} of {run.total}, {left} left")
