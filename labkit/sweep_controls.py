"""The widgets of a sweep panel: what they offer, what is chosen, what they say. They decide nothing."""

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ipywidgets as w

from labkit.sweep_plan import CLOCKS, SPEEDUP, TIME, TRAFFIC, Look, Plan, Selection

_ROW_OF = {"flex_flow": "row wrap", "align_items": "center", "width": "100%"}
_ROW = w.Layout(**_ROW_OF)
_GROUP = {"description_width": "initial"}


class Controls:
    """One widget with everything in it. ``counting`` where no GPU can be timed."""

    def __init__(self, plan: Plan, *, counting: bool) -> None:
        self.plan = plan
        first = plan.first()
        self._run = w.Button(description="Run", button_style="primary", layout=w.Layout(width="6.5em"))
        self._run_all = w.Button(description="Run all", layout=w.Layout(width="6.5em"))
        self._stop = w.Button(description="Stop", disabled=True, layout=w.Layout(width="6.5em"))
        self._save = w.Button(description="Save CSV", layout=w.Layout(width="8em"))
        self._bar = w.IntProgress(min=0, max=1, value=0, layout=w.Layout(width="14em", margin="0 8px"))
        self._status = w.HTML()
        self._noise = w.HTML()
        self._again = w.Button(
            description="Measure the noisy points again",
            layout=w.Layout(width="auto", margin="2px 12px 2px 0"),
        )
        self._noisy = w.Box([self._again, self._noise], layout=w.Layout(**_ROW_OF, display="none"))
        views = [("Time", TIME), (f"Times faster than {plan.over}", SPEEDUP)]
        views += [("Bytes moved, counted here", TRAFFIC)] if counting else []
        self._view = w.RadioButtons(  # not ToggleButtons, which tell a screen reader nothing of their state
            options=views,
            value=TIME,
            orientation="horizontal",
            style=_GROUP,
            layout=w.Layout(width="auto", margin="2px 14px 2px 0"),
        )
        self._tape = _box("recorded", True)
        self._published = _box("published", not plan.published.empty)
        self._floor = _box("floor", True)
        self._dtype = _choice("dtype", [(dtype, dtype) for dtype in plan.dtypes], first.dtype)
        self._direction = _choice(
            "direction", [(d.replace("_", " + "), d) for d in plan.directions], first.direction
        )
        self._others = {
            axis: _choice(axis, [(str(size), size) for size in sizes], first.others[axis])
            for axis, sizes in plan.others.items()
        }
        self._clock = _choice("clock", [(CLOCKS[clock], clock) for clock in plan.clocks], first.clock)
        # Not a slider: its handles have no names.
        sizes = [(str(value), value) for value in plan.values]
        self._from = _choice(f"{plan.x} from", sizes, plan.values[0])
        self._to = _choice("to", sizes, plan.values[-1])
        self._names = {contender.name: _box(contender.name, True) for contender in plan.contenders}
        self._dtype.observe(lambda _: self._offer_contenders(), "value")
        self.figure = w.HTML()
        self._offer_contenders()
        shown = [self._tape, *([] if plan.published.empty else [self._published]), self._floor]
        clock = [] if counting else [self._clock]
        how = self._several(
            self._dtype, self._direction, *self._others.values(), self._from, self._to, *clock
        )
        act = [self._run, self._run_all, self._stop, self._save, self._bar, self._status]
        self.widget = w.VBox(
            [
                w.Box([self._view, *shown], layout=_ROW),
                w.Box(how, layout=_ROW),
                w.Box(list(self._names.values()), layout=_ROW),
                w.Box(act, layout=_ROW),
                self._noisy,
                self.figure,
            ],
            layout=w.Layout(border="1px solid var(--jp-border-color2, #bdbdbd)", padding="8px 12px"),
        )

    @staticmethod
    def _several(*choices: w.Dropdown) -> list[w.Dropdown]:
        """Those that leave a choice."""
        return [choice for choice in choices if len(choice.options) > 1]

    def _offer_contenders(self) -> None:
        for contender in self.plan.contenders:
            self._names[contender.name].disabled = not contender.takes(self._dtype.value)

    # -- what is chosen

    def selection(self) -> Selection:
        """The sweep that is chosen now."""
        low, high = sorted((self._from.value, self._to.value))
        return Selection(
            contenders=tuple(
                c.name
                for c in self.plan.contenders
                if self._names[c.name].value and c.takes(self._dtype.value)
            ),
            values=tuple(value for value in self.plan.values if low <= value <= high),
            others={axis: choice.value for axis, choice in self._others.items()},
            dtype=self._dtype.value,
            direction=self._direction.value,
            clock=self._clock.value,
        )

    def look(self) -> Look:
        """How it is looked at."""
        return Look(self._view.value, self._tape.value, self._published.value, self._floor.value)

    def choose(self, selection: Selection) -> None:
        """Show the choice that is being measured."""
        self._dtype.value, self._direction.value = selection.dtype, selection.direction
        self._clock.value = selection.clock
        self._from.value, self._to.value = selection.values[0], selection.values[-1]
        for axis, size in selection.others.items():
            self._others[axis].value = size
        for name in selection.contenders:
            self._names[name].value = True

    def show_traffic(self) -> None:
        """Turn to what is counted."""
        self._view.value = TRAFFIC

    # -- what happens

    def on_run(self, act: Callable[[], None]) -> None:
        """Hear of the Run button."""
        self._run.on_click(lambda _: act())

    def on_run_all(self, act: Callable[[], None]) -> None:
        """Hear of the button for every dtype, direction and size."""
        self._run_all.on_click(lambda _: act())

    def on_stop(self, act: Callable[[], None]) -> None:
        """Hear of the Stop button."""
        self._stop.on_click(lambda _: act())

    def on_save(self, act: Callable[[], None]) -> None:
        """Hear of the Save button."""
        self._save.on_click(lambda _: act())

    def on_again(self, act: Callable[[], None]) -> None:
        """Hear of the button for the noisy points."""
        self._again.on_click(lambda _: act())

    def on_change(self, act: Callable[[], None]) -> None:
        """Hear of every other choice."""
        boxes = [self._tape, self._published, self._floor, *self._names.values()]
        choices = [self._view, self._dtype, self._direction, self._clock, self._from, self._to]
        for each in (*choices, *self._others.values(), *boxes):
            each.observe(lambda _: act(), "value")

    # -- what is said

    def started(self) -> None:
        """A run begins."""
        self._enable(running=True)
        self._bar.value, self._bar.bar_style = 0, ""
        self.say("Starting.")

    def advance(self, done: int, total: int, left_s: float) -> None:
        """So many measurements of so many are done."""
        self._bar.max, self._bar.value = total, done
        left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
        self.say(f"{done} of {total}, {left} left")

    def finished(self, words: str, *, complete: bool) -> None:
        """A run has ended."""
        self._enable(running=False)
        if complete:
            self._bar.value, self._bar.bar_style = self._bar.max, "success"
        self.say(words)

    def _enable(self, *, running: bool) -> None:
        self._run.disabled = self._run_all.disabled = self._again.disabled = running
        self._stop.disabled = not running

    def list_noise(self, notes: Sequence[str]) -> None:
        """The points that were disturbed, and the button to measure them again; hidden without any."""
        self._noisy.layout.display = None if notes else "none"
        lines = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
        self._noise.value = f"Ringed points were disturbed:<ul>{lines}</ul>" if notes else ""

    def say(self, words: str) -> None:
        """The line beside the buttons; a screen reader reads it out."""
        self._status.value = f'<span role="status" aria-live="polite">{html.escape(words)}</span>'


def _choice(name: str, options: Iterable[tuple[str, Any]], value: Any) -> w.Dropdown:
    return w.Dropdown(
        description=name,
        options=list(options),
        value=value,
        style=_GROUP,
        layout=w.Layout(width="auto", margin="2px 12px 2px 0"),
    )


def _box(name: str, value: bool) -> w.Checkbox:
    return w.Checkbox(
        description=name, value=value, indent=False, layout=w.Layout(width="auto", margin="0 14px 0 4px")
    )
