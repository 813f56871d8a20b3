"""The sweep panel: choose, run, watch the points appear, stop, keep. With nobody there it runs by itself.

A task on the notebook's loop measures. It gives way after each contender and each point: then buttons are
heard, and other cells run. Which thread a button's callback runs on depends on the version of ipykernel, so
callbacks only hand over to the loop that the panel was shown on.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit import gpu, paths
from labkit.display.style import interactive
from labkit.measure import clocks, rows, sweeps
from labkit.measure.contender import Contender
from labkit.measure.lock import StoppedError
from labkit.measure.results import Results
from labkit.plots.curves import Quantity
from labkit.widgets.static import StaticCopy
from labkit.widgets.sweep_plan import Selection, SweepPlan
from labkit.widgets.sweep_view import Controls, static_page, sweep_figure

PAUSE_S = 0.02
"""How long a sweep gives way: a message of a button takes the loop several turns."""

_shown: "weakref.WeakValueDictionary[str, SweepPanel]" = weakref.WeakValueDictionary()
"""The panel of each suite that was shown last: a cell that is run again stops what it started before."""


def sweep(suite: str, contenders: Sequence[Contender], values: Sequence[int], **options: Any) -> "SweepPanel":
    """A panel that sweeps an axis over ``values``; ``await panel.show()`` shows it.

    ``options`` are the fields of :class:`labkit.widgets.sweep_plan.SweepPlan`: title, of and over, and as
    needed x, others, dtypes, clocks, reference_lines and budget_s.

    Executed without a reader, ``show`` measures the first dtype at the usual sizes by the first clock, and
    leaves a figure, a sentence and a table. Without a GPU nothing runs, and times are those of a tape.

    Raises ValueError for sizes that do not increase, or names that are no contenders.
    """
    return SweepPanel(SweepPlan(suite, contenders, values, **options))


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
        self._stopped = False
        self._static, self._interactive = StaticCopy(), interactive()
        if self._interactive:
            self._build()

    async def show(self) -> None:
        """Show the panel. Where nobody can press Run, sweep first and leave a page."""
        self._loop = asyncio.get_running_loop()
        before = _shown.get(self.plan.suite)
        if before is not None and before is not self:
            before.stop()
        _shown[self.plan.suite] = self
        if self._interactive:
            self._static.show(self.controls.widget)
            return
        if gpu.available():
            await self._sweep([self.plan.usual_selection()], lambda measured: None)
        self._static.update(*static_page(self.plan, self.table()))
        self._static.show()

    def table(self) -> Results:
        """Rows of every selection by the first clock: this machine's where there are any, else recorded."""
        return self.plan.results(self.own, self.recorded)

    def stop(self) -> None:
        """Ask the sweep to stop; what is measured is kept."""
        self._stopped = True

    # -- the widgets

    def _build(self) -> None:
        controls = self.controls = Controls(self.plan, lambda: self._call_on_loop(self._redraw))
        for button, action in {
            controls.run: lambda: self._start([controls.selection()]),
            controls.run_all: lambda: self._start(self.plan.all_selections()),
            controls.stop: self.stop,
            controls.save: self._save,
        }.items():
            button.on_click(lambda _, action=action: self._call_on_loop(action))
        here = "Nothing runs. Press Run to measure on this machine."
        controls.set_status(here if gpu.available() else "No GPU here: the times shown are recorded ones.")
        self._redraw()
        self._static.update(*static_page(self.plan, *self._visible()))

    def _call_on_loop(self, action: Callable[[], None]) -> None:
        """Call on the panel's loop, whichever thread this is; an error is shown by the panel."""

        def call() -> None:
            try:
                action()
            except Exception as problem:
                self._show_error(problem)

        self._loop.call_soon_threadsafe(call)

    def _show_error(self, problem: Exception) -> None:
        """Show an error in the panel, as it has no cell to be raised in, and log it with its traceback."""
        logging.getLogger(__name__).error("%s: a sweep panel failed", self.plan.suite, exc_info=problem)
        notes = getattr(problem, "__notes__", ())  # what to do where nothing can be written
        self.controls.set_status(" ".join(["It ended with an error.", clocks.describe(problem), *notes]))

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

    def _save(self) -> None:
        name = self.plan.suite.replace("/", "-")
        path = Path("measurements") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.csv"
        table, *_ = self._visible()
        paths.write_text(path.absolute(), table.drop(columns="shape", errors="ignore").to_csv(index=False))
        self.controls.set_status(f"Saved {len(table)} rows: {path}")

    # -- run and stop

    def _start(self, selections: Sequence[Selection]) -> None:
        """Sweep these, unless a sweep runs."""
        if self.running is not None and not self.running.done():
            return
        total = sum(len(self.plan.calls(selection)) for selection in selections)
        if not total:
            self.controls.set_status("Choose at least one contender.")
            return
        self._stopped = False
        self.running = self._loop.create_task(self._sweep_and_tell(selections, total))

    async def _sweep_and_tell(self, selections: Sequence[Selection], total: int) -> None:
        """Sweep; the bar, the figure and a line say how far it is, how long it may take, and how it ended."""
        controls, done, began = self.controls, 0, time.monotonic()
        controls.set_running(True)
        controls.bar.max, controls.bar.value = total, 0
        controls.set_status("Starting.")

        def tell(measured: int) -> None:
            nonlocal done
            controls.bar.value = done = done + measured
            self._redraw()
            left_s = (time.monotonic() - began) / done * (total - done)
            left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
            controls.set_status(f"{done} of {total}, {left} left")

        try:
            await self._sweep(selections, tell)
            controls.set_status("Done.")
        except StoppedError:
            controls.set_status("Stopped. What was measured is kept.")
        except Exception as problem:
            self._show_error(problem)
        controls.set_running(False)
        self._call_on_loop(lambda: self._static.update(*static_page(self.plan, *self._visible())))

    async def _sweep(self, selections: Sequence[Selection], tell: Callable[[int], None]) -> None:
        """Measure, and give way after each contender and point; ``tell`` hears how many rows a point has."""
        for selection in selections:
            if len(selections) > 1:
                self.controls.choose(selection)  # the controls show what is being measured
            how = (selection.dtype, "forward", selection.clock, selection.cache, self.plan.budget_s)
            this, contenders = sweeps.Sweep(self.plan.suite, *how), self.plan.selected(selection)
            for shape in selection.shapes:
                found = []
                for row in this.point(contenders, shape, lambda: self._stopped):
                    if row:
                        found.append(row)
                    else:
                        await asyncio.sleep(PAUSE_S)
                if found:
                    again = {row.key for row in found}
                    self.own = [*(row for row in self.own if row.key not in again), *found]
                    tell(len(found))
                    await asyncio.sleep(PAUSE_S)
