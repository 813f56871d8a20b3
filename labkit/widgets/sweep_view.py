"""What a sweep panel shows: its controls, and the figure, the sentences and the numbers of a table."""

import html
from collections.abc import Callable
from typing import Any

import ipywidgets as w
import pandas as pd

from labkit import gpu, plots
from labkit.measure.results import Results
from labkit.plots.curves import SPEEDUP, TIME, Quantity
from labkit.plots.formatting import axis_value, origin
from labkit.widgets.sweep_plan import CLOCKS, Selection, SweepPlan

_ROW = {"flex_flow": "row wrap", "align_items": "center", "width": "100%"}


# --- the controls -----------------------------------------------------------------------------------


class Controls:
    """All widgets of a panel; ``changed`` is called after every choice."""

    def __init__(self, plan: SweepPlan, changed: Callable[[], None]) -> None:
        self.plan = plan
        quantities = [("Time", TIME), (f"Times faster than {plan.over}", SPEEDUP)]
        wide = {"width": "auto", "margin": "2px 14px 2px 0"}
        self.quantity = w.RadioButtons(options=quantities, orientation="horizontal", layout=wide)
        self.recorded = _checkbox("recorded")
        # What was recorded is by the first clock.
        clocks = [(CLOCKS[clock], clock) for clock in plan.clocks[: None if gpu.available() else 1]]
        self.menus = {
            "dtype": _menu("dtype", plan.dtypes),
            **{axis: _menu(axis, sizes, value=sizes[-1]) for axis, sizes in plan.others.items()},
            "from": _menu(f"{plan.x} from", plan.values),  # not a slider: its handles have no names
            "to": _menu("to", plan.values, value=plan.values[-1]),
            "clock": _menu("clock", clocks),
        }
        self.contenders = {contender.name: _checkbox(contender.name) for contender in plan.contenders}
        names = ("Run", "Run all", "Stop", "Save CSV")
        buttons = [w.Button(description=name, layout={"width": "auto"}) for name in names]
        self.run, self.run_all, self.stop, self.save = buttons
        self.run.button_style = "primary"
        self.bar = w.IntProgress(layout={"width": "12em", "margin": "0 8px"})
        self._status, self.figure = w.HTML(), w.HTML()
        choices = [self.quantity, self.recorded]
        menus = [menu for menu in self.menus.values() if len(menu.options) > 1]
        lines = [choices, menus, [*self.contenders.values()], [*buttons, self.bar, self._status]]
        frame = {"border": "1px solid var(--jp-border-color2, #bdbdbd)", "padding": "8px 12px"}
        self.widget = w.VBox([*(w.Box(line, layout=_ROW) for line in lines), self.figure], layout=frame)
        for each in (*choices, *self.menus.values(), *self.contenders.values()):
            each.observe(lambda _: changed(), "value")
        self.set_running(False)

    def selection(self) -> Selection:
        """The sweep that is chosen now."""
        chosen = {name: menu.value for name, menu in self.menus.items()}
        low, high = sorted((chosen["from"], chosen["to"]))
        return Selection(
            self.plan.x,
            tuple(name for name, box in self.contenders.items() if box.value),
            tuple(value for value in self.plan.values if low <= value <= high),
            {axis: chosen[axis] for axis in self.plan.others},
            chosen["dtype"],
            chosen["clock"],
        )

    def choose(self, selection: Selection) -> None:
        """Show the selection that is being measured."""
        ends = {"from": selection.values[0], "to": selection.values[-1]}
        how = {"dtype": selection.dtype, "clock": selection.clock}
        for name, value in {**ends, **how, **selection.others}.items():
            self.menus[name].value = value
        for name in selection.contenders:
            self.contenders[name].value = True

    def set_running(self, running: bool) -> None:
        """A sweep begins or has ended; without a GPU none begins."""
        self.run.disabled = self.run_all.disabled = running or not gpu.available()
        self.stop.disabled = not running

    def set_status(self, text: str) -> None:
        """The line beside the buttons; a screen reader reads it out."""
        self._status.value = f'<span role="status" aria-live="polite">{html.escape(text)}</span>'


def _menu(name: str, options: Any, **value: Any) -> w.Dropdown:
    layout = {"width": "auto", "margin": "2px 12px 2px 0"}
    style = {"description_width": "initial"}
    return w.Dropdown(description=name, options=options, style=style, layout=layout, **value)


def _checkbox(name: str) -> w.Checkbox:
    layout = {"width": "auto", "margin": "0 14px 0 4px"}
    return w.Checkbox(description=name, value=True, indent=False, layout=layout)


# --- figure, sentences, numbers ---------------------------------------------------------------------


def sweep_figure(
    plan: SweepPlan, table: Results, quantity: Quantity = TIME, selection: Selection | None = None
) -> plots.Picture:
    """The figure of a table; several dtypes or sizes of another axis become panels.

    With the ``selection`` that the table is of, the axis reaches over its values from the first point on, so
    that it stands still while points appear.
    """
    panel_axes = [name for name in _panel_axes(plan, table) if table[name].nunique() > 1]
    facet, rows, *_ = [*panel_axes, None, None]
    values = selection.values if selection else ()
    how: dict[str, Any] = {"x": plan.x, "facet": facet, "rows": rows, "values": values}
    if quantity is TIME:
        return plots.curves(table, title=plan.title, reference_lines=plan.reference_lines, **how)
    title = f"{plan.title}: times faster than {plan.over}"
    return plots.speedups(speedups(plan, table), title=title, **how)


def _panel_axes(plan: SweepPlan, table: pd.DataFrame) -> list[str]:
    """The columns that tell panels apart."""
    return [name for name in ("dtype", *plan.others) if name in table]


def speedups(plan: SweepPlan, table: Results) -> pd.DataFrame:
    """How many times faster than ``over`` each contender is, in each panel."""
    panel_axes, found = _panel_axes(plan, table), [pd.DataFrame()]
    for values, part in table.groupby(panel_axes, sort=False) if panel_axes else ():
        for name in part["contender"].unique():
            if name != plan.over:
                ratio = part.speedups(name, plan.over, plan.x, series=name)
                found.append(ratio.assign(**dict(zip(panel_axes, values, strict=True))))
    return pd.concat(found, ignore_index=True)


def sentences(plan: SweepPlan, table: Results) -> list[str]:
    """What the figure says, in words: one sentence for each origin and panel that has both to compare."""
    found = []
    parts = [part for _, part in table.groupby(["kind", "device", *_panel_axes(plan, table)], sort=False)]
    for part in [part for part in parts if {plan.of, plan.over} <= set(part["contender"])] or parts:
        where = [str(part["dtype"].iloc[0]), *(axis_value(axis, part[axis].iloc[0]) for axis in plan.others)]
        finding = part.describe_speedup(plan.of, plan.over, plan.x)
        found.append(f"{', '.join(where)}: {finding} ({origin(part, str(part['kind'].iloc[0]))})")
    return found or ["Nothing was measured here yet, and nothing is recorded for this choice."]


def static_page(
    plan: SweepPlan, table: Results, quantity: Quantity = TIME, selection: Selection | None = None
) -> tuple[str, str]:
    """The figure, the sentences and the numbers of a table, as HTML and as text."""
    figure, numbers, said = sweep_figure(plan, table, quantity, selection), "", sentences(plan, table)
    names = [name for name in ("kind", "device", *_panel_axes(plan, table)) if table[name].nunique() > 1]
    wide = table.pivot_table("median_us", [*names, plan.x], "contender", sort=False, aggfunc="first")
    if len(wide):
        cells = wide.sort_index().round(2).to_html(na_rep="—")
        numbers = f"<details><summary>Microseconds per call, as a table</summary>{cells}</details>"
    lines = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in said)
    return f"{figure._repr_html_()}<ul>{lines}</ul>{numbers}", "\n".join([figure.alt, *said])
