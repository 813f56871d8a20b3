"""The sweep panel with its real widgets, in virtual time: run, stop, keep; and with nobody there."""

import asyncio
import base64
import functools
import html
import logging
import re
import time

import ipywidgets
import pandas as pd
import pytest
from simulated import DOUBLING, doubling
from taped import recorded

from labkit import plots, widgets
from labkit.measure import noise, rows
from labkit.measure.contender import Contender
from labkit.widgets import static, sweep_panel

WIDTHS, NAMES = (16, 32, 64), ("labkit", "eager")
HELD = "slowed down by power limit"
KEPT = "Stopped. What was measured is kept."
IDLE = "Nothing runs. Press Run to measure on this machine."


@pytest.fixture(autouse=True)
def somebody(own_folders, tmp_path, monkeypatch):
    """Folders of their own, and a reader who could press a button."""
    monkeypatch.setenv("LABKIT_HEADLESS", "0")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def fingerprints(monkeypatch):
    """In the place of every picture the points of its lines: drawing the pixels costs more than all else."""

    def points(shown, kind, **options):
        lines = [line.get_xydata().tolist() for axes in shown.figure.axes for line in axes.lines]
        return repr(lines).encode()

    with monkeypatch.context() as patch:
        patch.setattr(plots.Picture, "_encoded", points)
        yield patch


@pytest.fixture
def nobody(monkeypatch):
    monkeypatch.setenv("LABKIT_HEADLESS", "1")


@pytest.fixture
def tape(somebody):
    """An H200 that measured both contenders at every width."""
    path = somebody / "recorded" / "h200" / "old" / "lesson.jsonl"
    both = [recorded(name, width, us=float(width)) for name in ("labkit", "eager") for width in WIDTHS]
    rows.write(path, both)


def in_a_loop(test):
    """A test that is a coroutine."""
    return functools.wraps(test)(lambda *given, **named: asyncio.run(test(*given, **named)))


def made(contenders, values=WIDTHS, suite="suite", **options):
    chosen = {"others": {"batch": (2,)}, "of": "labkit", "over": "eager", "title": "Doubling"}
    return widgets.sweep(suite, contenders, values, **(chosen | options))


async def shown(contenders, *given, **options):
    panel = made(contenders, *given, **options)
    await panel.show()
    return panel


def watched(gpu, name, seen):
    """A contender that tells the widths that it is called with."""

    def call(x):
        seen(x.shape[1])
        gpu.launch(4.0, 50.0)
        return 2 * x

    return Contender(name, call, DOUBLING)


def pair(gpu):
    return [doubling(gpu), doubling(gpu, "eager", 3.0)]


async def until(condition, seconds=15.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.005)


async def settled(panel):
    """Wait for what was clicked to begin and to end."""
    await asyncio.sleep(0.01)
    if panel.running is not None:
        await asyncio.wait_for(asyncio.shield(panel.running), 30)


async def begun(contenders, points=1, **options):
    """A panel whose sweep has measured so many points; Run was heard in another thread."""
    panel = await shown(contenders, **options)
    await asyncio.to_thread(click, panel, "Run")
    await until(lambda: len(panel.own) == 2 * points)
    return panel


def parts(panel):
    found, todo = [], [panel.controls.widget]
    while todo:
        found.append(todo.pop())
        todo += getattr(found[-1], "children", ())
    return found


def control(panel, name):
    (found,) = [each for each in parts(panel) if getattr(each, "description", None) == name]
    return found


def click(panel, name):
    button = control(panel, name)
    assert not button.disabled, f"{name} can't be pressed"
    button.click()


async def done(panel, name="Run", says="Done."):
    click(panel, name)
    await settled(panel)
    assert status(panel) == says


def line(panel):
    (found,) = [e for e in parts(panel) if isinstance(e, ipywidgets.HTML) and 'role="status"' in e.value]
    return found


def words(page):
    return html.unescape(re.sub("<.*?>", "", page))


def status(panel):
    return words(line(panel).value)


def alt(panel):
    return html.unescape(re.search('alt="(.*?)"', panel.controls.figure.value)[1])


def choose(panel, *, width=None, **values):
    for name, value in values.items():
        control(panel, name).value = value
    if width:
        control(panel, "width from").value, control(panel, "to").value = width


def heard(widget):
    seen = []
    widget.observe(lambda change: seen.append(change["new"]), "value")
    return seen


# --- run ----------------------------------------------------------------------------------------------


@in_a_loop
async def test_run_measures_what_is_chosen_and_tells_how_far_it_is(gpu, monkeypatch, caplog):
    reached, picture = [], sweep_panel.sweep_figure
    monkeypatch.setattr(sweep_panel, "sweep_figure", lambda *a: reached.append(a[3].values) or picture(*a))
    caplog.set_level(logging.WARNING)
    panel = await shown(pair(gpu))
    (bar,) = [w for w in parts(panel) if isinstance(w, ipywidgets.IntProgress)]
    said, filled, drawn = heard(line(panel)), heard(bar), heard(panel.controls.figure)
    assert status(panel) == IDLE and "nothing measured yet" in alt(panel)
    click(panel, "Run")
    await until(lambda: control(panel, "Run").disabled)
    assert control(panel, "Run all").disabled and not control(panel, "Stop").disabled
    await settled(panel)
    told = [words(each) for each in said]
    assert told[0] == "Starting." and told[-1] == "Done."
    assert [re.sub(r"\d+ s", "? s", each) for each in told[1:-1]] == [
        f"{n} of 6, ? s left" for n in (2, 4, 6)
    ]
    assert filled == [2, 4, 6] and bar.max == 6
    assert control(panel, "Stop").disabled and not control(panel, "Run all").disabled
    assert len(set(drawn)) == 3, "a point at each measurement"
    assert set(reached) == {WIDTHS} and not caplog.records, "the axis stands still"
    table = panel.table()
    found = set(zip(table["contender"], table["width"], strict=True))
    assert len(table) == 6 and found == {(name, at) for name in ("labkit", "eager") for at in WIDTHS}
    assert set(table["kind"]) == {"live"} and set(table["batch"]) == {2}
    assert table.loc[table["contender"] == "eager", "median_us"].tolist() == pytest.approx([48, 96, 192])


@in_a_loop
async def test_while_it_runs_it_can_be_looked_at_and_not_started_again(gpu):
    panel = await begun(pair(gpu), others={"batch": (2, 4)})
    widget, first = panel.controls.widget, panel.running
    for name in ("Run", "Run all"):
        assert control(panel, name).disabled
        control(panel, name).click()
    await panel.show()
    assert panel.controls.widget is widget, "one panel, which goes on"
    choose(panel, batch=2)
    await until(lambda: "nothing measured yet" in alt(panel))
    assert not first.done()
    await settled(panel)
    assert panel.running is first and status(panel) == "Done."
    assert "nothing measured yet" in alt(panel), "batch 2 is looked at"
    choose(panel, batch=4)
    await until(lambda: "labkit" in alt(panel))
    assert {row.shape["batch"] for row in panel.own} == {4} and len(panel.own) == 6


@in_a_loop
async def test_only_what_is_ticked_in_range_and_for_this_size_is_measured(gpu):
    slow = doubling(gpu, "slow", sizes={"width": (32,)})
    panel = await shown([*pair(gpu), slow], others={"batch": (2, 4)}, dtypes=("float32", "bfloat16"))
    choose(panel, eager=False, dtype="bfloat16", batch=2, clock="events", width=(64, 32))  # whichever way
    await done(panel)
    choose(panel, clock="host", width=(32, 32), slow=False)
    await done(panel)
    wanted = [("labkit", 32, "events"), ("slow", 32, "events"), ("labkit", 64, "events")]
    wanted += [("labkit", 32, "host")]
    assert [(r.contender, r.shape["width"], r.clock) for r in panel.own] == wanted
    assert {(r.dtype, r.shape["batch"]) for r in panel.own} == {("bfloat16", 2)}
    assert {(r.clock, r.cache) for r in panel.own} == {("events", "cold"), ("host", "warm")}
    assert panel.table().empty, "the table is by the first clock"
    choose(panel, labkit=False)
    await done(panel, says="Choose at least one contender.")


# --- stop and go on -----------------------------------------------------------------------------------


@in_a_loop
async def test_stop_is_heard_before_the_next_contender_and_run_starts_again(gpu):
    called = []

    def seen(name, width):
        called.append((name, width))
        if stops and (name, width) == ("labkit", 32):
            click(panel, "Stop")

    panel, stops = await shown([watched(gpu, name, functools.partial(seen, name)) for name in NAMES]), True
    await done(panel, says=KEPT)
    assert panel.table()["width"].tolist() == [16, 16] and ("eager", 32) not in called
    assert not control(panel, "Run").disabled and control(panel, "Stop").disabled
    stops = False
    await done(panel)
    assert len(panel.table()) == len(panel.own) == 6, "the last row of each measurement"


@in_a_loop
async def test_other_cells_run_while_it_measures(gpu):
    """Between two contenders the loop is free for as long as a message takes, which is several turns."""
    turns = []

    async def cells():
        while True:
            turns.append(len(panel.own))
            await asyncio.sleep(0)

    panel = await shown(pair(gpu))
    others = asyncio.ensure_future(cells())
    await done(panel)
    others.cancel()
    assert all(turns.count(measured) > 20 for measured in (0, 2, 4))


@in_a_loop
async def test_disturbed_points_are_marked_until_they_are_measured_again(gpu, monkeypatch):
    panel = await shown(pair(gpu))
    with monkeypatch.context() as patch:
        patch.setattr(noise, "throttle_bits", lambda: 0x4)
        await done(panel)
    assert f"Disturbed: {HELD}" in alt(panel)
    await done(panel)
    assert "isturbed" not in alt(panel) and set(panel.table()["noise"]) == {""}


# --- what goes wrong in the panel itself --------------------------------------------------------------


@in_a_loop
async def test_an_error_in_the_panel_reaches_the_line_and_the_next_run_works(gpu, caplog):
    def broken_lines(table):
        if broken and len(table):
            raise KeyError("no such column <b>")
        return {}

    broken = [True]
    panel = await shown(pair(gpu), reference_lines=broken_lines)
    await done(panel, says="It ended with an error. KeyError: 'no such column <b>'")
    assert "no such column" in caplog.text, "with its traceback, for whoever wrote the lesson"
    broken.clear()
    await done(panel)
    assert len(panel.table()) == 6


@in_a_loop
async def test_the_tape_stands_there_first_a_live_point_joins_it_and_both_are_saved(gpu, tape, somebody):
    panel = await shown(pair(gpu))
    assert "Recorded on NVIDIA H200" in alt(panel)
    await done(panel)
    assert "Live on Simulated" in alt(panel) and "Recorded on NVIDIA H200" in alt(panel)
    click(panel, "Save CSV")
    await until(lambda: status(panel).startswith("Saved 12 rows: measurements/suite-"))
    (path,) = (somebody / "measurements").glob("*.csv")
    saved = pd.read_csv(path)
    assert saved["kind"].value_counts().to_dict() == {"live": 6, "recorded": 6}
    assert set(saved["device"]) == {"Simulated", "NVIDIA H200"} and set(saved["width"]) == set(WIDTHS)
    assert "shape" not in saved
    choose(panel, recorded=False)
    await until(lambda: "H200" not in alt(panel))
    assert set(panel.table()["kind"]) == {"live"}
    choose(panel, clock="host")
    await until(lambda: "nothing measured yet" in alt(panel))


@in_a_loop
async def test_of_one_device_only_what_it_measured_itself_is_shown(gpu, somebody):
    path = somebody / "recorded" / "same" / "old" / "lesson.jsonl"
    rows.write(path, [recorded("labkit", width, device="Simulated") for width in WIDTHS])
    panel = await shown(pair(gpu))
    choose(panel, recorded=False)
    await asyncio.sleep(0.05)
    assert "Recorded on Simulated" in alt(panel), "alone it cannot be switched off"
    choose(panel, recorded=True, width=(16, 16))
    await done(panel)
    choose(panel, width=(16, 64))
    await asyncio.sleep(0.05)
    assert "Recorded" not in alt(panel) and "Live on Simulated" in alt(panel)


# --- run all, choices, several panels -----------------------------------------------------------------


@in_a_loop
async def test_run_all_measures_every_dtype_and_size_by_the_first_clock(gpu):
    dtypes = ("float32", "float16")
    panel = await shown(pair(gpu), values=(16, 32), others={"batch": (2, 4)}, dtypes=dtypes)
    choose(panel, clock="host", width=(32, 32), eager=False)
    await done(panel, "Run all")
    assert control(panel, "eager").value and panel.controls.selection().values == (16, 32)
    table = panel.table()
    assert len(table) == 16 and set(table["clock"]) == {"graph"}
    assert len(table.groupby(["dtype", "batch"])) == 4


@in_a_loop
async def test_a_cell_that_is_run_again_stops_what_it_had_started(gpu):
    old = await begun(pair(gpu))
    new = await shown(pair(gpu))
    await settled(old)
    assert status(old).startswith("Stopped.")
    await done(new)
    assert len(new.table()) == 6


# --- without a GPU ------------------------------------------------------------------------------------

HERE = [Contender(name, lambda x: 2 * x, DOUBLING) for name in ("labkit", "eager")]


@in_a_loop
async def test_without_a_gpu_the_tape_is_shown_and_nothing_runs(no_gpu, tape):
    panel = await shown(HERE)
    assert status(panel) == "No GPU here: the times shown are recorded ones."
    assert "Recorded on NVIDIA H200" in alt(panel) and set(panel.table()["kind"]) == {"recorded"}
    assert control(panel, "Run").disabled and control(panel, "Run all").disabled


# --- with nobody there --------------------------------------------------------------------------------


@pytest.fixture
def page(monkeypatch):
    """What a notebook would show: the MIME bundles of each display."""
    found = []
    display = lambda *objects, raw=False, display_id=None, **_: found.extend(objects)  # noqa: E731
    monkeypatch.setattr(static, "get_ipython", lambda: object())
    monkeypatch.setattr(static, "display", display)
    monkeypatch.setattr("IPython.core.display_functions.display", display)
    return found


def test_with_nobody_there_the_usual_sizes_of_the_first_dtype_are_measured(gpu, nobody, page):
    panel = made(pair(gpu), dtypes=("float32", "float16"), others={"batch": (1, 2)})
    asyncio.run(panel.show())
    found = panel.table()
    assert set(found["dtype"]) == {"float32"} and set(found["batch"]) == {2} and len(found) == 6


def test_with_nobody_there_the_cell_awaits_the_sweep_and_leaves_a_page(gpu, nobody, page, fingerprints):
    fingerprints.undo()
    panel = made(pair(gpu))
    asyncio.run(panel.show())
    assert len(panel.table()) == 6 and not hasattr(panel, "controls")
    (bundle,) = page
    assert re.search('<img alt="Doubling.*ive on Simulated', bundle["text/html"], re.S)
    data = re.search('src="data:image/webp;base64,(.*?)"', bundle["text/html"])[1]
    assert base64.b64decode(data).startswith(b"RIFF") and "<table" in bundle["text/html"]
    said = "float32, batch 2: labkit is never slower than eager, and 3x at width"
    assert said in bundle["text/plain"]


def test_with_nobody_there_and_no_gpu_the_page_is_the_tapes(no_gpu, nobody, page, tape):
    asyncio.run(made(HERE).show())
    assert "recorded on NVIDIA H200" in page[-1]["text/plain"] and len(page) == 1
    asyncio.run(made(HERE, suite="another").show())
    assert "Nothing was measured here yet, and nothing is recorded for this choice." in page[-1]["text/plain"]


def test_a_cell_that_is_interrupted_measures_no_more_and_an_error_is_one_of_the_cell(gpu, nobody):
    called = []

    async def body():
        both = [watched(gpu, name, called.append) for name in NAMES]
        cell = asyncio.ensure_future(made(both).show())
        await until(lambda: 32 in called)
        cell.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cell

    asyncio.run(body())
    assert 64 not in called
    panel = made(pair(gpu), reference_lines=lambda table: {}[0])
    with pytest.raises(KeyError):
        asyncio.run(panel.show())


@in_a_loop
async def test_a_widget_stands_with_its_static_copy_which_follows(gpu, page):
    panel = await shown(pair(gpu), values=(16,))
    widget, copy = page
    assert widget is panel.controls.widget
    assert "<details><summary>" in copy["text/html"] and "nothing measured yet" in copy["text/html"]
    await done(panel)
    assert "labkit is never slower than eager, and 3x at width 16" in page[-1]["text/plain"]
