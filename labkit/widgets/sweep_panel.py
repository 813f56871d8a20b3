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

from labkit import gpu, paths
from labkit.measure import clocks, lock, rows, sweeps
from labkit.measure.contender import Contender, Shape
from labkit.measure.results import Results
from labkit.profiling import counted_sweep
from labkit.widgets.static import StaticCopy, interactive
from labkit.widgets.sweep_plan import Selection, SweepPlan
from labkit.widgets.sweep_view import TRAFFIC, Controls, ViewOptions, static_page, sweep_figure

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
    needed x, others, dtypes, directions, clocks, published, floor, regimes, expected and budget_s.

    Executed without a reader, ``show`` measures every dtype, direction and size by the first clock, and
    leaves a figure, a sentence and a table. Without a GPU, Run counts launches and bytes, and times are those
    of a tape.

    Raises ValueError for sizes that do not increase, or names that are no contenders.
    """
    return SweepPanel(SweepPlan(suite, contenders, values, **options))


class _Run:
    """The selections that are swept after Run, how many of their points are done, and whether to stop.

    With ``show_selection`` the controls show what is being measured.
    """

    def __init__(self, plan: SweepPlan, selections: Sequence[Selection], show_selection: bool) -> None:
        self.selections, self.show_selection = selections, show_selection
        self.done, self.total = 0, sum(len(plan.calls(selection)) for selection in selections)
        self.began, self.stop = time.monotonic(), threading.Event()

    async def wait_for(self, worker: "asyncio.Future[None]") -> None:
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
        self.own, self.recorded = plan.kept_rows(), plan.recorded_rows()
        self.running: asyncio.Task[None] | None = None
        self._counted: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._run: _Run | None = None
        self._worker: asyncio.Future[None] | None = None
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
        self._run = _Run(self.plan, self.plan.all_selections(), show_selection=False)
        await self._sweep(self._run)
        self._static.update(*static_page(self.plan, self.table(), ViewOptions()))
        self._static.show()

    def table(self) -> Results:
        """Rows of every selection by the first clock: this machine's where there are any, else recorded."""
        return self.plan.results(self.own, self.recorded)

    # -- the widgets

    def _build(self) -> None:
        redraw = partial(self._call_on_loop, self._redraw)
        controls = self.controls = Controls(self.plan, redraw, counting=not gpu.available())
        for button, action in {
            controls.run: lambda: self._start([controls.selection()]),
            controls.run_all: lambda: self._start(self.plan.all_selections(), show_selection=True),
            controls.again: lambda: self._start([self._noisy_selection()]),
            controls.save: self._save,
        }.items():
            button.on_click(lambda _, action=action: self._call_on_loop(action))
        controls.stop.on_click(lambda _: self.stop())  # here, because a cell may keep the loop busy
        controls.set_status(self._first_status())
        self._redraw()
        self._update_static()

    def _first_status(self) -> str:
        if not gpu.available():
            return "No GPU here: Run counts launches and bytes. The times shown are recorded ones."
        selection = self.controls.selection()
        known = sum(row.kind == rows.LIVE for row in selection.matching(self.own))
        wanted = len(self.plan.calls(selection))
        if 0 < known < wanted:
            goes_on = "Run goes on where this sweep was interrupted, else it starts again."
            return f"{known} of {wanted} points are measured already. {goes_on}"
        return "Nothing runs. Press Run to measure on this machine."

    def _visible(self) -> tuple[Results, ViewOptions, Selection]:
        """What is drawn: the rows of the selection, what the figure shows of them, and the selection."""
        selection, options = self.controls.selection(), self.controls.view_options()
        if options.quantity == TRAFFIC:
            keys = [self._count_key(selection, *call) for call in self.plan.calls(selection)]
            return Results([self._counted[key] for key in keys if key in self._counted]), options, selection
        own = selection.matching(self.own)
        devices = {row.device for row in own}  # of one device only what it measured itself
        recorded = [row for row in selection.matching(self.recorded) if row.device not in devices]
        table = self.plan.table([*own, *(recorded if options.recorded or not own else [])])
        return table, options, selection

    def _redraw(self) -> None:
        self.controls.figure.value = sweep_figure(self.plan, *self._visible())._repr_html_()
        self.controls.again.layout.display = None if self._noisy_selection().values else "none"

    def _update_static(self) -> None:
        self._static.update(*static_page(self.plan, *self._visible()))

    def _noisy_selection(self) -> Selection:
        """What is chosen, at the sizes where a point was disturbed: contenders are measured side by side."""
        selection = self.controls.selection()
        sizes = {row.shape[self.plan.x] for row in selection.matching(self.own) if row.noise}
        return replace(selection, values=tuple(sorted(sizes)))

    def _save(self) -> None:
        path = Path("measurements") / f"{self.plan.file_name}-{time.strftime('%Y%m%d-%H%M%S')}.csv"
        table, *_ = self._visible()
        paths.write_text(path.absolute(), table.drop(columns="shape", errors="ignore").to_csv(index=False))
        self.controls.set_status(f"Saved {len(table)} rows: {path}")

    # -- run and stop

    def _call_on_loop(self, action: Callable[..., None], *given: Any) -> None:
        """Call on the panel's loop, whichever thread this is."""
        self._loop.call_soon_threadsafe(self._show_errors, action, *given)

    def _show_errors(self, action: Callable[..., Any], *given: Any) -> None:
        """Call; an error has no cell to be raised in, so the panel shows it and it is logged."""
        try:
            action(*given)
        except Exception as problem:
            self.controls.set_status(self._described(problem))

    def _described(self, problem: Exception) -> str:
        logging.getLogger(__name__).error("%s: a sweep panel failed", self.plan.suite, exc_info=problem)
        notes = getattr(problem, "__notes__", ())  # what to do where nothing can be written
        return " ".join(["It ended with an error.", clocks.describe(problem), *notes])

    def _start(self, selections: Sequence[Selection], *, show_selection: bool = False) -> None:
        """Sweep these, unless a sweep runs."""
        if self.running is not None and not self.running.done():
            return
        run = _Run(self.plan, selections, show_selection)
        if not run.total:
            self.controls.set_status("Choose at least one contender.")
            return
        self._run = run
        self.controls.set_running(True)
        self.controls.bar.max, self.controls.bar.value = run.total, 0
        self.controls.set_status("Starting.")
        self.running = asyncio.ensure_future(self._sweep_and_tell(run))

    def stop(self) -> None:
        """Ask the sweep to stop; what is measured is kept."""
        if self._run:
            self._run.stop.set()

    async def _sweep_and_tell(self, run: _Run) -> None:
        try:
            await self._sweep(run)
            status = STOPPED if run.stop.is_set() or run.done < run.total else "Done."
            if self._worker is not None and not self._worker.done():
                status = f"{STOPPED} One call still ends in the background."
        except Exception as problem:
            status = self._described(problem)
        self.controls.set_running(False)
        self.controls.set_status(status)
        self._show_errors(self._update_static)

    async def _sweep(self, run: _Run) -> None:
        if self._worker is not None and not self._worker.done():
            if self._interactive:
                self.controls.set_status("Waiting for the call that was stopped.")
            await run.wait_for(self._worker)
        for selection in run.selections:
            if run.stop.is_set():
                return
            if run.show_selection:
                self.controls.choose(selection)
            if gpu.available():
                await self._measure(selection, run)
            elif self._interactive:
                await self._count(selection, run)

    async def _measure(self, selection: Selection, run: _Run) -> None:
        """Sweep in a thread; Stop does not wait for a slow call, such as a compilation."""
        wake, context = self._loop.call_soon_threadsafe, contextvars.copy_context()
        context.run(lock.RUN_SECTION.set, lambda act: lock.on_main_thread(act, wake, run.stop.is_set))
        if self._interactive:
            context.run(lock.SHOW_QUEUE.set, partial(self._call_on_loop, self._show_queue, run))
        worker = self._loop.run_in_executor(None, context.run, self._measure_in_thread, selection, run)
        self._worker = worker
        try:
            await run.wait_for(worker)
            await asyncio.wait({worker}, timeout=STOP_WAIT_S)
        finally:
            if not worker.done():  # Stop was pressed, or this task was cancelled
                run.stop.set()
        if worker.done():
            worker.result()

    def _show_queue(self, run: _Run, text: str) -> None:
        """Show how long the queue for the GPU is; without a text the wait is over."""
        if run is self._run and not run.stop.is_set():
            self.controls.set_status(text or "Measuring.")

    def _measure_in_thread(self, selection: Selection, run: _Run) -> None:
        contenders = self.plan.selected(selection)

        def on_row(done: int, total: int, row: rows.Row) -> None:
            """In the measuring thread, which goes on when the row is kept and shown."""
            if row not in self.own:
                rows.append(self.plan.path, row)
            key = row.asked_key
            self.own = [*(known for known in self.own if known.asked_key != key), row]
            run.done += 1
            if self._interactive:
                *_, last = (one.name for one in contenders if one.fits(row.shape))
                lock.RUN_SECTION.get()(partial(self._show_progress, run, row.contender == last))

        sweeps.run(
            self.plan.suite,
            contenders,
            selection.shapes,
            dtype=selection.dtype,
            direction=selection.direction,
            clock=selection.clock,
            cache=selection.cache,
            budget_s=self.plan.budget_s,
            progress=on_row,
            stop=run.stop.is_set,
        )

    def _show_progress(self, run: _Run, is_point_complete: bool) -> None:
        """Show how far the run is, how long the rest may take, and a point when it is complete."""
        if is_point_complete:
            self._redraw()
        self.controls.bar.value = run.done
        if not run.stop.is_set() and run.done < run.total:
            left_s = (time.monotonic() - run.began) / run.done * (run.total - run.done)
            left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
            self.controls.set_status(f"{run.done} of {run.total}, {left} left")

    @staticmethod
    def _count_key(selection: Selection, contender: Contender, shape: Shape) -> tuple[Any, ...]:
        """What identifies the counts of a call."""
        return contender.name, selection.dtype, selection.direction, *shape.values()

    async def _count(self, selection: Selection, run: _Run) -> None:
        """Count on this thread, a call at a time: the interpreter is one for the whole process."""
        self.controls.quantity.value = TRAFFIC
        how = (self.plan.x, selection.dtype, selection.direction)
        for contender, shape in self.plan.calls(selection):
            if run.stop.is_set():
                return
            row = counted_sweep.counted_row(contender, shape, *how)
            self._counted[self._count_key(selection, contender, shape)] = row
            run.done += 1
            self._show_progress(run, contender is self.plan.selected(selection)[-1])
            await asyncio.sleep(0)
