"""The sweep panel: choose, run, watch the points appear, stop, keep. With nobody there it runs by itself.

Measuring happens in a thread, so other cells stay usable; a figure is drawn between two points, never
beside a measurement. Which thread a button's callback runs on depends on the version of ipykernel, so
callbacks only hand over to the loop that the panel was built on.
"""

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import clocks, device, live, places, rows, sweeps, traffic
from labkit.measure import lock
from labkit.results import Results
from labkit.rows import Row
from labkit.sweep_controls import Controls
from labkit.sweep_plan import TRAFFIC, Kept, Known, Look, Plan, Selection, place, slug, tape
from labkit.sweep_views import noise, page, picture
from labkit.sweeps import Contender, Shape

PATIENCE_S = 0.4
"""How long Stop waits for the call under way, before it ends in the background."""
STOPPED = "Stopped. What was measured is kept."

_shown: "weakref.WeakValueDictionary[str, SweepPanel]" = weakref.WeakValueDictionary()
"""The panel of each suite that was shown last: a cell that is run again stops what it started before."""


class SweepPanel:
    """A plan with what is known of it, and the widgets to sweep it; see :func:`labkit.panels.sweep`."""

    def __init__(self, plan: Plan, budget_s: float) -> None:
        self.plan, self.budget_s = plan, budget_s
        self.kept = Kept(plan)
        self.own: list[Row] = self.kept.rows()
        self.tape = tape(plan)
        self.counted: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.controls: Controls | None = None
        self.running: asyncio.Task[None] | None = None
        self._run: _Run | None = None
        self._worker: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._redraw_due = False
        self._twin = live.Twin("", "")

    # -- what there is to see

    async def show(self) -> None:
        """Show the panel. Where nobody can press Run, sweep everything first and leave it as a page."""
        self._loop = asyncio.get_running_loop()
        before = _shown.get(self.plan.suite)
        if before is not None and before is not self:
            before.stop()
        _shown[self.plan.suite] = self
        if not live.interactive():
            everything = self.plan.everything()
            self._run = _Run(None, self._count_of(everything))
            await self._sweep(everything, self._run)
            self._twin.update(*page(self.plan, self.table(), Look()))
            self._twin.show()
            return
        if self.controls is None:
            self.controls = self._connected()
            self.controls.say(self._greeting())
            self.redraw()
            self._update_twin()
        self._twin.show(self.controls.widget)

    def table(self) -> Results:
        """Rows of every selection by the first clock: this machine's where there are any, else recorded."""
        return Results(Known(self.plan, self.own, self.tape).measured())

    def _connected(self) -> Controls:
        controls = Controls(self.plan, counting=not device.has_gpu())
        controls.on_run(lambda: self._hand_over(self.start))
        controls.on_run_all(lambda: self._hand_over(self.start, self.plan.everything()))
        controls.on_stop(self.stop)
        controls.on_again(lambda: self._hand_over(self.measure_noisy_again))
        controls.on_save(lambda: self._hand_over(self._save))
        controls.on_change(lambda: self._hand_over(self._redraw_soon))
        return controls

    def _greeting(self) -> str:
        assert self.controls
        if not device.has_gpu():
            return "No GPU here: Run counts launches and bytes. The times shown are recorded ones."
        selection = self.controls.selection()
        mine = [row for row in self.own if row.kind == rows.LIVE and selection.includes(row, self.plan.x)]
        wanted = self._count_of([selection])
        if 0 < len(mine) < wanted:
            known = f"{len(mine)} of {wanted} points are measured already"
            return f"{known}. Run goes on where this sweep was interrupted, else it starts again."
        return "Nothing runs. Press Run to measure on this machine."

    def _visible(self) -> tuple[pd.DataFrame, Look]:
        """What is drawn: the rows of what is chosen, and how to look at them."""
        assert self.controls
        selection, look = self.controls.selection(), self.controls.look()
        if look.view == TRAFFIC:
            found = [self.counted[key] for key, *_ in self._to_count(selection) if key in self.counted]
            return pd.DataFrame(found), look
        return Known(self.plan, self.own, self.tape).table(selection, tape=look.tape), look

    def _picture(self) -> str:
        assert self.controls
        shown = picture(self.plan, *self._visible(), self.controls.selection())
        return str(shown._repr_html_())

    def redraw(self) -> None:
        """Draw what is chosen and known now."""
        assert self.controls
        self._redraw_due = False
        self.controls.figure.value = self._picture()
        self._list_noise()

    def _noisy(self) -> list[Row]:
        """This machine's rows of what is chosen that were disturbed."""
        assert self.controls
        selection = self.controls.selection()
        return [row for row in self.own if row.noise and selection.includes(row, self.plan.x)]

    def _list_noise(self) -> None:
        assert self.controls
        noisy = self._noisy() if self.controls.look().view != TRAFFIC else []
        self.controls.list_noise(noise(self.plan, noisy))

    def _update_twin(self) -> None:
        assert self.controls
        self._twin.update(*page(self.plan, *self._visible(), self.controls.selection()))

    def _redraw_soon(self) -> None:
        """Draw once after several changes: a choice of Run all is one of each control."""
        assert self._loop
        if not self._redraw_due:
            self._redraw_due = True
            self._loop.call_soon(self._safely, self.redraw)

    # -- run and stop

    def _hand_over(self, act: Callable[..., None], *given: Any) -> None:
        """Call on the panel's loop, whichever thread this is."""
        assert self._loop, "callbacks exist only after show()"
        self._loop.call_soon_threadsafe(self._safely, act, *given)

    def _safely(self, act: Callable[..., Any], *given: Any) -> None:
        """A callback has no cell to raise in: what goes wrong is said in the panel and logged."""
        try:
            act(*given)
        except Exception as problem:
            words = self._failure(problem)
            if self.controls:
                self.controls.say(words)

    def _failure(self, problem: Exception) -> str:
        logging.getLogger(__name__).error("%s: a sweep panel failed", self.plan.suite, exc_info=problem)
        notes = getattr(problem, "__notes__", ())  # what to do where nothing can be written
        return " ".join(["It ended with an error.", clocks.describe(problem), *notes])

    def measure_noisy_again(self) -> None:
        """Measure the points of what is chosen that were disturbed, and no others, unless a sweep runs."""
        assert self.controls
        parts = self.controls.selection().only(self._noisy(), self.plan.x)
        if parts:
            self.start(parts, choosing=False)

    def start(self, selections: Sequence[Selection] = (), *, choosing: bool = True) -> None:
        """Sweep these, by default what is chosen, unless a sweep runs.

        Of several the controls show the one that is being measured, unless they are to stay (``choosing``).
        """
        assert self.controls
        if self.running is not None and not self.running.done():
            return
        chosen = list(selections) or [self.controls.selection()]
        total = self._count_of(chosen)
        if not total:
            self.controls.say("Choose at least one contender.")
            return
        self._run = _Run(self.controls, total, choosing=choosing and len(chosen) > 1)
        self.controls.started()
        self.running = asyncio.ensure_future(self._sweep_and_tell(chosen, self._run))

    def stop(self) -> None:
        """Ask the sweep to stop; what is measured is kept."""
        if self._run and self._loop and not self._loop.is_closed():
            self._run.stop.set()  # here, because a cell may keep the loop busy
            self._loop.call_soon_threadsafe(self._run.stopped.set)

    async def _sweep_and_tell(self, selections: list[Selection], run: "_Run") -> None:
        assert self.controls
        try:
            await self._sweep(selections, run)
        except Exception as problem:
            self.controls.finished(self._failure(problem), complete=False)
        else:
            late = self._worker is not None and not self._worker.done()
            words = f"{STOPPED} One call still ends in the background." if late else STOPPED
            stopped = run.stop.is_set() or run.done < run.total
            self.controls.finished(words if stopped else "Done.", complete=not stopped)
        self._safely(self._update_twin)

    def _count_of(self, selections: Sequence[Selection]) -> int:
        return sum(len(self._here(s, shape)) for s in selections for shape in s.points(self.plan.x))

    def _here(self, selection: Selection, shape: Shape) -> list[Contender]:
        """The chosen contenders at one size."""
        return [contender for contender in self.plan.chosen(selection) if contender.fits(shape)]

    async def _sweep(self, selections: list[Selection], run: "_Run") -> None:
        if self._worker is not None and not self._worker.done():
            if self.controls:
                self.controls.say("Waiting for the call that was stopped.")
            await run.until(self._worker)
        for selection in selections:
            if run.stop.is_set():
                return
            if self.controls and run.choosing:
                self.controls.choose(selection)
            if device.has_gpu():
                await self._measure(selection, run)
            elif self.controls:
                await self._count(selection, run)

    async def _measure(self, selection: Selection, run: "_Run") -> None:
        """Sweep in a thread; Stop does not wait for a slow call, such as a compilation."""
        assert self._loop
        wake = self._loop.call_soon_threadsafe
        beside_no_cell = clocks.SECTION.set(lambda act: clocks.on_main_thread(act, wake, run.stop.is_set))
        before = lock.TELL.get()
        in_the_line = lock.TELL.set(partial(self._hand_over, self._waits, run) if self.controls else before)
        worker = asyncio.ensure_future(asyncio.to_thread(self._points, selection, run))  # in this context
        lock.TELL.reset(in_the_line)
        clocks.SECTION.reset(beside_no_cell)
        self._worker = worker
        try:
            await run.until(worker)
            await asyncio.wait({worker}, timeout=PATIENCE_S)
        finally:
            if not worker.done():  # Stop was pressed, or this task was cancelled
                run.stop.set()
        if worker.done():
            worker.result()
        else:
            worker.add_done_callback(lambda _: self._ended_late(worker, run))

    def _waits(self, run: "_Run", words: str) -> None:
        """Say in the line how long the queue for the GPU is; without words the wait is over."""
        if self.controls and run is self._run and not run.stop.is_set():
            self.controls.say(words or "Measuring.")
            if not words:
                run.tell()

    def _ended_late(self, worker: "asyncio.Future[None]", run: "_Run") -> None:
        if self.controls and run is self._run:
            self.controls.say(STOPPED)
        if not worker.cancelled():  # with the loop
            self._safely(worker.result)

    def _points(self, selection: Selection, run: "_Run") -> None:
        def heard(done: int, total: int, row: Row) -> None:
            """In the measuring thread: keep the row, and draw when its point is complete."""
            if row not in self.own:
                self.kept.add(row)
            self.own = [*(known for known in self.own if place(known) != place(row)), row]
            run.done += 1
            if self.controls:
                chosen = self.controls.selection(), self.controls.look()
                complete = row.contender == self._here(selection, row.shape)[-1].name
                drawn = self._picture() if complete else ""
                self._hand_over(self._advance, run, drawn, chosen)

        sweeps.run(
            self.plan.suite,
            self.plan.chosen(selection),
            selection.points(self.plan.x),
            dtype=selection.dtype,
            direction=selection.direction,
            clock=selection.clock,
            cache=selection.cache,
            budget_s=self.budget_s,
            progress=heard,
            stop=run.stop.is_set,
        )

    def _advance(self, run: "_Run", drawn: str, chosen: tuple[Selection, Look]) -> None:
        assert self.controls
        # Another choice made meanwhile has had itself drawn.
        if drawn and chosen == (self.controls.selection(), self.controls.look()):
            self.controls.figure.value = drawn
        self._list_noise()
        run.tell()

    def _to_count(self, selection: Selection) -> Iterator[tuple[tuple[Any, ...], Contender, Shape]]:
        """Each call of a selection, and what identifies its counts."""
        for shape in selection.points(self.plan.x):
            size = tuple(traffic.counted_shape(shape, self.plan.x).values())
            for contender in self._here(selection, shape):
                yield (contender.name, selection.dtype, selection.direction, *size), contender, shape

    async def _count(self, selection: Selection, run: "_Run") -> None:
        """Count on this thread, a call at a time: the interpreter is one for the whole process."""
        assert self.controls
        self.controls.show_traffic()
        for done, (key, contender, shape) in enumerate(self._to_count(selection), start=1):
            if run.stop.is_set():
                return
            self.counted[key] = traffic.row(
                contender, shape, self.plan.x, selection.dtype, selection.direction
            )
            run.done += 1
            if done % len(self.plan.chosen(selection)) == 0:
                self.redraw()
            run.tell()
            await asyncio.sleep(0)

    def _save(self) -> None:
        assert self.controls
        moment = time.strftime("%Y%m%d-%H%M%S")
        path = Path("measurements") / f"{slug(self.plan.suite)}-{moment}.csv"
        table, _ = self._visible()
        places.write_text(path.absolute(), table.drop(columns="shape", errors="ignore").to_csv(index=False))
        self.controls.say(f"Saved {len(table)} rows: {path}")


class _Run:
    """One run: how far it is, how long it will take, and whether it is to stop."""

    def __init__(self, controls: Controls | None, total: int, *, choosing: bool = False) -> None:
        self.controls, self.total, self.done = controls, total, 0
        self.choosing = choosing
        """Whether the controls follow what is being measured."""
        self.began = time.monotonic()
        self.stop, self.stopped = threading.Event(), asyncio.Event()
        """The same to the measuring thread, which looks, and to the loop, which waits."""

    async def until(self, worker: "asyncio.Future[None]") -> None:
        """Wait for the worker or for Stop."""
        stopped = asyncio.ensure_future(self.stopped.wait())
        try:
            both: set[asyncio.Future[Any]] = {worker, stopped}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

    def tell(self) -> None:
        """Show how far it is."""
        if self.controls and not self.stop.is_set() and 0 < self.done < self.total:
            elapsed = time.monotonic() - self.began
            self.controls.advance(self.done, self.total, elapsed / self.done * (self.total - self.done))
