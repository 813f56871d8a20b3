"""What a sweep panel shows: its controls, and the figure, the sentences and the numbers of a table."""

import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ipywidgets as w
import pandas as pd

from labkit import plots
from labkit.plots.words import named, origin
from labkit.widgets.sweep_plan import CLOCKS, Plan, Selection

TIME, SPEEDUP, TRAFFIC = "time", "speedup", "traffic"
_ROW = {"flex_flow": "row wrap", "align_items": "center", "width": "100%"}
_LABEL = {"description_width": "initial"}


@dataclass(frozen=True)
class Look:
    """How a selection is looked at: time, speedup or traffic, and what is drawn beside this machine's own."""

    view: str = TIME
    recorded: bool = True
    published: bool = True
    floor: bool = True


# --- the controls ---------------------------------------------------------------------------------


class Controls:
    """One widget with everything in it; ``changed`` hears of every choice. ``counting`` without a GPU."""

    def __init__(self, plan: Plan, changed: Callable[[], None], *, counting: bool) -> None:
        self.plan = plan
        views = [("Time", TIME), (f"Times faster than {plan.over}", SPEEDUP)]
        views += [("Bytes moved, counted here", TRAFFIC)] * counting
        self.view = w.RadioButtons(options=views, orientation="horizontal")
        self.view.layout = {"width": "auto", "margin": "2px 14px 2px 0"}
        beside = ["recorded", *["published"] * (not plan.published.empty), "floor"]
        self.shown = {name: _box(name) for name in beside}
        sizes, last = {str(value): value for value in plan.values}, plan.values[-1]
        clocks = {CLOCKS[clock]: clock for clock in plan.clocks[: 1 if counting else None]}
        self.picked = {
            "dtype": _choice("dtype", {dtype: dtype for dtype in plan.dtypes}),
            "direction": _choice("direction", {name.replace("_", " + "): name for name in plan.directions}),
            **{axis: _choice(axis, {str(n): n for n in of}, of[-1]) for axis, of in plan.others.items()},
            "from": _choice(f"{plan.x} from", sizes),  # not a slider: its handles have no names
            "to": _choice("to", sizes, last),
            "clock": _choice("clock", clocks),
        }
        self.who = {contender.name: _box(contender.name) for contender in plan.contenders}
        names = ("Run", "Run all", "Stop", "Save CSV", "Measure noisy sizes again")
        buttons = [w.Button(description=name, layout={"width": "auto"}) for name in names]
        self.run, self.run_all, self.stop, self.save, self.again = buttons
        self.run.button_style = "primary"
        self.bar, self._status, self.figure = w.IntProgress(), w.HTML(), w.HTML()
        self.bar.layout = {"width": "12em", "margin": "0 8px"}
        asked = [choice for choice in self.picked.values() if len(choice.options) > 1]
        act = [*buttons, self.bar, self._status]
        lines = [[self.view, *self.shown.values()], asked, [*self.who.values()], act]
        frame = {"border": "1px solid var(--jp-border-color2, #bdbdbd)", "padding": "8px 12px"}
        self.widget = w.VBox([*(w.Box(line, layout=_ROW) for line in lines), self.figure], layout=frame)
        self.picked["dtype"].observe(lambda _: self._offer(), "value")
        self._offer()
        for each in (self.view, *self.shown.values(), *self.picked.values(), *self.who.values()):
            each.observe(lambda _: changed(), "value")
        self.running(False)
        self.again.layout.display = "none"

    def _offer(self) -> None:
        for contender in self.plan.contenders:
            self.who[contender.name].disabled = not contender.takes(self.picked["dtype"].value)

    def selection(self) -> Selection:
        """The sweep that is chosen now."""
        picked = {name: choice.value for name, choice in self.picked.items()}
        low, high = sorted((picked["from"], picked["to"]))
        return Selection(
            self.plan.x,
            tuple(name for name, box in self.who.items() if box.value and not box.disabled),
            tuple(value for value in self.plan.values if low <= value <= high),
            {axis: picked[axis] for axis in self.plan.others},
            *(picked[name] for name in ("dtype", "direction", "clock")),
        )

    def choose(self, selection: Selection) -> None:
        """Show the choice that is being measured."""
        ends = {"from": selection.values[0], "to": selection.values[-1]}
        how = {"dtype": selection.dtype, "direction": selection.direction, "clock": selection.clock}
        for name, value in {**ends, **how, **selection.others}.items():
            self.picked[name].value = value
        for name in selection.contenders:
            self.who[name].value = True

    def look(self) -> Look:
        """How it is looked at."""
        return Look(self.view.value, **{name: box.value for name, box in self.shown.items()})

    def running(self, running: bool) -> None:
        """A run begins or has ended."""
        self.run.disabled = self.run_all.disabled = self.again.disabled = running
        self.stop.disabled = not running

    def say(self, words: str) -> None:
        """The line beside the buttons; a screen reader reads it out."""
        self._status.value = f'<span role="status" aria-live="polite">{html.escape(words)}</span>'


def _choice(name: str, options: Mapping[str, Any], value: Any = None) -> w.Dropdown:
    chosen = next(iter(options.values())) if value is None else value
    layout = {"width": "auto", "margin": "2px 12px 2px 0"}
    return w.Dropdown(description=name, options=options.items(), value=chosen, style=_LABEL, layout=layout)


def _box(name: str) -> w.Checkbox:
    layout = {"width": "auto", "margin": "0 14px 0 4px"}
    return w.Checkbox(description=name, value=True, indent=False, layout=layout)


# --- figure, sentences, numbers -------------------------------------------------------------------


def picture(plan: Plan, table: pd.DataFrame, look: Look, selection: Selection | None = None) -> plots.Picture:
    """The figure of a table; several dtypes, directions or sizes of another axis become panels.

    With the ``selection`` that the table is of, the axis reaches over its values from the first point on, so
    that it stands still while points appear.
    """
    facet, down, *_ = [*(name for name in _apart(plan, table) if table[name].nunique() > 1), None, None]
    values = selection.values if selection else ()
    how: dict[str, Any] = {"x": plan.x, "facet": facet, "rows": down, "values": values}
    if look.view == TRAFFIC:
        return plots.traffic(table, title=f"{plan.title}: bytes moved", **how)
    posted = _posted(plan, table, look, selection) if look.published else []
    if look.view == TIME:
        if look.floor:
            how |= {"floor": plan.floor, "regimes": plan.regimes}
        return plots.curves(pd.concat([table, *posted], ignore_index=True), title=plan.title, **how)
    found = [*speedups(plan, table), *posted] or [pd.DataFrame()]
    title = f"{plan.title}: times faster than {plan.over}"
    expected = plan.expected if look.floor else None
    return plots.speedups(pd.concat(found, ignore_index=True), title=title, naive=expected, **how)


def _apart(plan: Plan, table: pd.DataFrame) -> list[str]:
    """The columns that tell panels apart."""
    return [name for name in ("dtype", "direction", *plan.others) if name in table]


def _posted(plan: Plan, table: pd.DataFrame, look: Look, selection: Selection | None) -> list[pd.DataFrame]:
    """What was published, in each panel of the figure whose dtype, direction and sizes it does not deny.

    While there are no rows, and so no panels, the selection says what would be shown.
    """
    column = "median_us" if look.view == TIME else "speedup"
    if column not in plan.published:
        return []
    published = plan.published[plan.published[column].notna()]
    if table.empty:
        asked = selection and {"dtype": selection.dtype, "direction": selection.direction, **selection.others}
        return [_fitting(published, asked or {})]
    panels = table[_apart(plan, table)].drop_duplicates().to_dict("records")
    parts = [_fitting(published, where).assign(**where) for where in panels]
    return [part for part in parts if len(part)]


def _fitting(published: pd.DataFrame, where: Mapping[Any, Any]) -> pd.DataFrame:
    """The rows that say nothing else about these columns; what they leave unsaid fits."""
    for name, value in where.items():
        if name in published:
            published = published[published[name].isna() | (published[name] == value)]
    return published


def speedups(plan: Plan, table: pd.DataFrame) -> Iterable[pd.DataFrame]:
    """How many times faster than ``over`` each contender is, one table each."""
    apart = _apart(plan, table)
    for values, part in table.groupby(apart, sort=False):
        for name in part["contender"].unique():
            if name != plan.over:
                ratio = part.speedups(str(name), plan.over, plan.x, series=str(name))
                yield ratio.assign(**dict(zip(apart, values, strict=True)))


def sentences(plan: Plan, table: pd.DataFrame) -> list[str]:
    """What the figure says, in words: one sentence for each origin and panel that has both to compare."""
    found = []
    parts = [part for _, part in table.groupby(["kind", "device", *_apart(plan, table)], sort=False)]
    for part in [part for part in parts if {plan.of, plan.over} <= set(part["contender"])] or parts:
        where = [str(part["dtype"].iloc[0]), *(named(axis, part[axis].iloc[0]) for axis in plan.others)]
        what = part.finding(plan.of, plan.over, plan.x)
        found.append(f"{', '.join(where)}: {what} ({origin(part, str(part['kind'].iloc[0]))})")
    return found or ["Nothing was measured here yet, and nothing is recorded for this choice."]


def page(plan: Plan, table: pd.DataFrame, look: Look, selection: Selection | None = None) -> tuple[str, str]:
    """The figure, the sentences and the numbers of a table, as HTML and as text."""
    shown, listing = picture(plan, table, look, selection), ""
    said = ["Counted, not timed."] if look.view == TRAFFIC else sentences(plan, table)
    if look.view != TRAFFIC and len(table):
        apart = [name for name in ("kind", "device", *_apart(plan, table)) if table[name].nunique() > 1]
        wide = table.pivot_table("median_us", [*apart, plan.x], "contender", sort=False, aggfunc="first")
        numbers = wide.sort_index().round(2).to_html(na_rep="—")
        listing = f"<details><summary>Microseconds per call, as a table</summary>{numbers}</details>"
    lines = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in said)
    return f"{shown._repr_html_()}<ul>{lines}</ul>{listing}", "\n".join([shown.alt, *said])
