"""A sweep over one axis as a live panel: Run and Stop, time or speedup, and what others have published."""

import asyncio
import html
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as w
import pandas as pd
from IPython.display import display

from labkit.display import figures, style
from labkit.display.figures import Curve, Panel
from labkit.display.numbers import Roofs
from labkit.display.style import Picture, interactive
from labkit.display.table import Table, in_words, numbers_html, origin
from labkit.measure import session
from labkit.measure.session import Point, Session, Ways
from labkit.measure.tape import FIELDS, Row
from labkit.work import Work

TIME, SPEEDUP = "time per call", "speedup"
Lines = dict[str, list[tuple[float, float]]]
"""Thin lines by name: points (size, value)."""


class Sweep(Table):
    """A table that is swept over the axis with the most sizes. It shows itself as curves, or as a panel.

    Its rows are those that were measured here, once all points of a choice are; else the recorded ones.
    """

    def __init__(
        self,
        title: str,
        points: Sequence[Point],
        known: Session,
        published: pd.DataFrame | None,
        roofs: Roofs | None,
        lines: Mapping[str, Callable[[float], float]] | None = None,
    ) -> None:
        self.points, self.published, self.roofs = points, published, roofs
        self.over = points[0].ways[0].name
        """The way that speedups are over: the first one."""
        self.further = lines or {}
        sizes = {axis: list(dict.fromkeys(point.axes[axis] for point in points)) for axis in points[0].axes}
        self.x = max(sizes, key=lambda axis: len(sizes[axis]))
        self.choices: dict[str, list[Any]] = {axis: found for axis, found in sizes.items() if axis != self.x}
        self.choices |= {name: list(dict.fromkeys(getattr(p, name) for p in points)) for name in FIELDS}
        self.live_rows: dict[Point, list[Row]] = {}
        """What was measured in this session."""
        super().__init__(title, [row for point in points for row in known.find(point)], False, known)

    # ---- what is shown -------------------------------------------------------------------------------------

    def usual(self) -> dict[str, Any]:
        """The choice that is shown first: the first value of everything."""
        return {name: values[0] for name, values in self.choices.items()}

    def chosen(self, choice: Mapping[str, Any]) -> list[Point]:
        """The points of a choice, by increasing size."""
        fits = [
            p
            for p in self.points
            if all(({**p.axes, **{n: getattr(p, n) for n in FIELDS}})[n] == v for n, v in choice.items())
        ]
        return sorted(fits, key=lambda point: point.axes[self.x])

    def rows_of(self, choice: Mapping[str, Any]) -> tuple[list[Row], bool]:
        """The rows of a choice, and whether they are live: from the first measured point on they are."""
        points = self.chosen(choice)
        own = [row for point in points for row in self.live_rows.get(point, [])]
        return (own, True) if own else ([row for point in points for row in self._session.find(point)], False)

    def picture_of(self, choice: Mapping[str, Any], quantity: str = TIME) -> Picture:
        """The curves of a choice."""
        rows, live = self.rows_of(choice)
        base = {row.axes[self.x]: row.median_us for row in rows if row.way == self.over and row.median_us}
        found = []
        for way in dict.fromkeys(row.way for row in rows):
            if quantity == SPEEDUP and way == self.over:
                continue
            points = [
                self._point(row, base.get(row.axes[self.x]) if quantity == SPEEDUP else None)
                for row in rows
                if row.way == way and row.median_us and (quantity == TIME or row.axes[self.x] in base)
            ]
            look = style.style_of(way, self._session.styles)
            found.append(Curve(way, points, look, "live" if live else "recorded"))
        if quantity == SPEEDUP:
            found += self._published(choice)
        thin = self._floors(choice, quantity)
        if quantity == SPEEDUP:
            sizes = {float(p.axes[self.x]) for p in self.points} | {
                at[0] for curve in found for at in curve.points
            }
            thin["as fast as " + self.over] = [(x, 1.0) for x in sorted(sizes)]
        title = "Time per call" if quantity == TIME else f"Speedup over {self.over}"
        written = style.duration if quantity == TIME else style.times
        better = "lower" if quantity == TIME else "higher"
        span = [point.axes[self.x] for point in self.chosen(choice)]
        lines = origin(rows, live) if rows else ["Nothing was measured here yet, and nothing is recorded."]
        gaps = [f"{row.way} at {self.x} {row.axes[self.x]}: {row.note}" for row in rows if not row.median_us]
        lines += [f"Without a time: {'; '.join(gaps)}."] if gaps else []
        if quantity == SPEEDUP and self.published is not None:
            lines += [f"Published: {'; '.join(self.published['source'].unique())}."]
        several = len(self.choices["direction"]) > 1
        return figures.curves(
            f"{title}, {self.title}" + (f", {choice['direction']}" if several else ""),
            Panel(found, self.x, quantity, better, written, thin, span),
            lines,
        )

    def _floors(self, choice: Mapping[str, Any], quantity: str) -> Lines:
        """The floor of each work that the ways do, or the ratio of the base's floor to each of the others.

        Beside the floors there are the lines that the lesson gave, which are times.
        """
        points = self.chosen(choice)
        sizes = [float(point.axes[self.x]) for point in points]
        further = {name: [(size, line(size)) for size in sizes] for name, line in self.further.items()}
        if self.roofs is None:
            return further if quantity == TIME else {}
        works: dict[Work, str] = {}  # each by the name of its first way
        for way in points[0].ways:
            works.setdefault(way.work, way.name)
        floors = {
            name: [self.roofs.floor_us(work, p.axes, p.dtype, p.direction) for p in points]
            for work, name in works.items()
        }
        if quantity == SPEEDUP:
            base = floors.pop(works[next(way.work for way in points[0].ways if way.name == self.over)])
            floors = {
                name: [over / own for over, own in zip(base, us, strict=True)] for name, us in floors.items()
            }
        said = "ratio of the floors, {}"
        if quantity == TIME:
            said = "floor of {}" if len(floors) > 1 else "the floor"
        found = {said.format(name): list(zip(sizes, line, strict=True)) for name, line in floors.items()}
        return found | (further if quantity == TIME else {})

    def _point(self, row: Row, base: float | None) -> tuple[float, float, float, float]:
        values = [
            row.median_us or 0.0,
            row.p20_us or row.median_us or 0.0,
            row.p80_us or row.median_us or 0.0,
        ]
        if base is not None:
            values = [base / values[0], base / values[2], base / values[1]]
        return (float(row.axes[self.x]), *values)  # type: ignore[return-value]

    def _published(self, choice: Mapping[str, Any]) -> list[Curve]:
        """What others found; where their table has directions, in the one that is chosen."""
        table, found = self.published, []
        if table is None:
            return []
        if "direction" in table:
            table = table[table["direction"] == choice["direction"]]
        for number, (series, part) in enumerate(table.groupby("series", sort=False)):
            look = style.Style(("#6B6B6B", "#A0522D", "#2F6F6F")[number % 3], "Dph"[number % 3])
            points = [
                (x, y, y, y)
                for x, y in sorted(
                    zip(part[self.x].astype(float), part["speedup"].astype(float), strict=True)
                )
            ]
            found.append(Curve(str(series), points, look, "published"))
        return found

    def page(self, choice: Mapping[str, Any], quantity: str = TIME) -> str:
        """The figure of a choice and its numbers, as HTML."""
        return self.picture_of(choice, quantity)._repr_html_() + numbers_html(self.rows_of(choice)[0])

    def _refresh(self) -> None:
        """Take the live rows for the table's, once every point has them, or at once if none is recorded."""
        if self.live or not self.rows or all(point in self.live_rows for point in self.points):
            self.rows = [row for point in self.points for row in self.live_rows.get(point, [])]
            self.live = bool(self.rows)

    # ---- measuring -----------------------------------------------------------------------------------------

    def measure(self, points: Sequence[Point]) -> None:
        """Measure points, one after the other."""
        self.live_rows |= {point: self._session.measure(point) for point in points}
        self._refresh()

    def _ipython_display_(self) -> None:
        if interactive():
            panel = SweepPanel(self)
            before = self._session.panels.get(self.title)
            if before is not None:
                before.running = False
            self._session.panels[self.title] = panel
            display(panel.widget)
        menus = [[(name, value) for value in values] for name, values in self.choices.items()]
        page = "".join(self.page(dict(choice)) for choice in itertools.product(*menus))
        if self.published is not None:
            page += self.picture_of(self.usual(), SPEEDUP)._repr_html_()
        text = self.picture_of(self.usual()).alt
        if interactive():
            page = (
                f"<details><summary>The same, for a page without a running kernel</summary>{page}</details>"
            )
        display({"text/html": page, "text/plain": text}, raw=True)


class SweepPanel:
    """The widgets of a sweep. Measuring holds the notebook up for one point; Stop is heard between two."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.running = sweep, False
        self._loop = asyncio.get_event_loop()
        self._task: asyncio.Task[None] | None = None
        menus = {name: values for name, values in sweep.choices.items() if len(values) > 1}
        self.menus = {name: _menu(name, values) for name, values in menus.items()}
        self.quantity = w.RadioButtons(
            options=[TIME, SPEEDUP], orientation="horizontal", layout={"width": "auto"}
        )
        self.run, self.stop = (
            w.Button(description=name, layout={"width": "auto"}) for name in ("Run", "Stop")
        )
        self.run.button_style, self.stop.disabled = "primary", True
        self.status, self.figure = w.HTML(), w.HTML()
        choices: list[Any] = [self.quantity, *self.menus.values()]
        live = [self.run, self.stop] if sweep._session.live else []
        row = {"flex_flow": "row wrap", "align_items": "center"}
        frame = {"border": "1px solid var(--jp-border-color2, #bdbdbd)", "padding": "8px 12px"}
        boxes = [w.Box(choices, layout=row), w.Box([*live, self.status], layout=row), self.figure]
        self.widget = w.VBox(boxes, layout=frame)
        for each in choices:
            each.observe(lambda _: self._call(self.redraw), "value")
        self.run.on_click(lambda _: self._call(self._start))
        self.stop.on_click(lambda _: setattr(self, "running", False))
        self.announce(
            "Press Run to measure this on your GPU."
            if live
            else "No GPU here: you explore the recorded sweep."
        )
        self.redraw()

    def _call(self, action: Callable[[], None]) -> None:
        """Call on the notebook's loop: which thread a callback runs on depends on ipykernel's version."""
        self._loop.call_soon_threadsafe(action)

    def choice(self) -> dict[str, Any]:
        """What is chosen."""
        return self.sweep.usual() | {name: menu.value for name, menu in self.menus.items()}

    def announce(self, text: str) -> None:
        """The line beside the buttons; a screen reader reads it out."""
        self.status.value = f'<span role="status" aria-live="polite">{html.escape(text)}</span>'

    def redraw(self) -> None:
        """Draw what is chosen."""
        self.figure.value = self.sweep.page(self.choice(), self.quantity.value)

    def _start(self) -> None:
        if not self.running:
            self.running = True
            self._task = asyncio.ensure_future(self.measure())

    async def measure(self) -> None:
        """Measure the points of the choice one by one, drawing each, until Stop is pressed."""
        points, choice = self.sweep.chosen(self.choice()), self.choice()
        self.run.disabled, self.stop.disabled = True, False
        try:
            for number, point in enumerate(points, start=1):
                size = in_words(self.sweep.x, point.axes[self.sweep.x])
                self.announce(f"Measuring {size}, {number} of {len(points)}.")
                await asyncio.sleep(0.05)  # the page shows it, and Stop is heard
                if not self.running:
                    break
                self.sweep.live_rows[point] = self.sweep._session.measure(point)
                if choice == self.choice():
                    self.redraw()
            self.sweep._refresh()
            self.announce("Done." if self.running else "Stopped. What was measured is kept.")
        except Exception as problem:
            self.announce(f"It ended with an error: {type(problem).__name__}: {problem}")
            raise
        finally:
            self.running, self.run.disabled, self.stop.disabled = False, False, True


def _menu(name: str, options: Sequence[Any]) -> w.Dropdown:
    layout, look = {"width": "auto", "margin": "2px 12px 2px 0"}, {"description_width": "initial"}
    return w.Dropdown(
        description=name,
        options=[(in_words(name, each), each) for each in options],
        style=look,
        layout=layout,
    )


def sweep(
    title: str,
    ways: Ways,
    work: Work | None = None,
    *,
    published: pd.DataFrame | None = None,
    roofs: Roofs | None = None,
    lines: Mapping[str, Callable[[float], float]] | None = None,
    **how: Any,
) -> Sweep:
    """Time ways over many sizes and show curves: on a GPU in a panel with Run and Stop, else as recorded.

    Args:
        title, ways, work, how: as of ``lab.race``; the axis with most sizes is swept, the others are menus.
            Speedups are over the first way.
        published: other people's speedups (``lab.published``), drawn beside.
        roofs: those of the GPU (``lab.roofs``), if the floors are to be drawn as thin lines.
        lines: further thin lines by name: of each size that is swept a time in microseconds.

    Where nobody can press Run, a GPU measures the first choice, and while a lesson is recorded all of them.
    """
    known = session.current()
    points = session.points(title, ways, work, how)
    made = Sweep(title, points, known, published, roofs, lines)
    if known.live and (known.tape or not interactive()):
        made.measure(points if known.tape else made.chosen(made.usual()))
    return made
