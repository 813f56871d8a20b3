"""The sweep panel with its real widgets, in virtual time: run, stop, keep, count; and with nobody there."""

import asyncio
import base64
import html
import logging
import re
import threading
import time
from dataclasses import replace

import ipywidgets
import pandas as pd
import pytest
import queueing
from simulated import DOUBLING, doubling, install, out_of_memory
from taped import recorded

from labkit import device, drawing, live, noise, panels, places, rows, sweep_panel, sweeps, traffic
from labkit.measure import lock
from labkit.sweep_plan import SPEEDUP, TRAFFIC
from labkit.sweeps import Contender

WIDTHS = (16, 32, 64)


@pytest.fixture(autouse=True)
def somebody(tmp_path, monkeypatch):
    """Folders of their own, and a reader who could press a button."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(rows.TAPE, raising=False)
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    monkeypatch.setenv(live.HEADLESS, "0")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def fingerprints(monkeypatch):
    """In the place of every picture the points of its lines: drawing the pixels costs more than all else."""

    def points(shown, kind, **options):
        lines = [line.get_xydata().tolist() for axes in shown.figure.axes for line in axes.lines]
        return repr(lines).encode()

    with monkeypatch.context() as patch:
        patch.setattr(drawing.Shown, "_encoded", points)
        yield patch


@pytest.fixture
def pictures(fingerprints):
    """Real ones, nevertheless."""
    fingerprints.undo()


@pytest.fixture
def nobody(monkeypatch):
    monkeypatch.setenv(live.HEADLESS, "1")


@pytest.fixture
def gpu(monkeypatch):
    return install(monkeypatch.setattr)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    monkeypatch.setattr(device, "name", lambda: "cpu")


@pytest.fixture
def tape(somebody):
    """An H200 that measured both contenders at every width."""
    path = somebody / "recorded" / "h200" / "lesson.jsonl"
    for name in ("labkit", "eager"):
        for width in WIDTHS:
            rows.append(path, recorded(name, width, us=float(width)))


class Gate:
    """Where a call waits, at one width, until a test lets it go on."""

    def __init__(self, at):
        self.at, self.reached, self.open = at, threading.Event(), threading.Event()

    def __call__(self, x):
        if x.shape[1] == self.at:
            self.reached.set()
            assert self.open.wait(20), "the test never opened the gate"


def gated(gpu, gate, name="labkit"):
    """A right contender, and the widths that it was called with."""
    seen = []

    def call(x):
        seen.append(x.shape[1])
        gate(x)
        gpu.launch(4.0, 50.0)
        return 2 * x

    return Contender(name, call, DOUBLING), seen


def made(contenders, values=WIDTHS, suite="suite", **options):
    chosen = {"others": {"batch": (2,)}, "of": "labkit", "over": "eager", "title": "Doubling"}
    return panels.sweep(suite, contenders, values, **(chosen | options))


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


def widgets(panel):
    found, todo = [], [panel.controls.widget]
    while todo:
        each = todo.pop()
        found.append(each)
        todo += getattr(each, "children", ())
    return found


def control(panel, name):
    (found,) = [each for each in widgets(panel) if getattr(each, "description", None) == name]
    return found


def click(panel, name):
    button = control(panel, name)
    assert not button.disabled, f"{name} can't be pressed"
    button.click()


def status(panel):
    (found,) = [e for e in widgets(panel) if isinstance(e, ipywidgets.HTML) and 'role="status"' in e.value]
    return html.unescape(re.sub("<.*?>", "", found.value))


def alt(panel):
    return html.unescape(re.search('alt="(.*?)"', panel.controls.figure.value)[1])


def choose_range(panel, low, high):
    control(panel, "width from").value, control(panel, "to").value = low, high


def choose_view(panel, view):
    (views,) = [each for each in widgets(panel) if isinstance(each, ipywidgets.RadioButtons)]
    views.value = view


def heard(widget, name="value"):
    seen = []
    widget.observe(lambda change: seen.append(change["new"]), name)
    return seen


def on_disk(suite="suite"):
    return rows.read(places.cache() / "panels" / f"{suite}.jsonl")


# --- run ----------------------------------------------------------------------------------------------


def test_run_measures_what_is_chosen_and_the_figure_gains_a_point_at_each_measurement(gpu):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        assert "nothing measured yet" in alt(panel)
        assert status(panel) == "Nothing runs. Press Run to measure on this machine."
        drawn = heard(panel.controls.figure)
        click(panel, "Run")
        await settled(panel)
        assert len(set(drawn)) == 3

    asyncio.run(body())
    table = panel.table()
    assert sorted(zip(table["contender"], table["width"], strict=True)) == sorted(
        (name, width) for name in ("labkit", "eager") for width in WIDTHS
    )
    assert set(table["kind"]) == {"live"} and set(table["batch"]) == {2}
    assert table.loc[table["contender"] == "eager", "median_us"].tolist() == pytest.approx([48, 96, 192])
    assert status(panel) == "Done."
    assert "live on Simulated" in alt(panel).replace("Live", "live")


def test_the_line_says_how_far_it_is_and_the_bar_follows(gpu):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        (line,) = [w for w in widgets(panel) if isinstance(w, ipywidgets.HTML) and "status" in w.value]
        (bar,) = [w for w in widgets(panel) if isinstance(w, ipywidgets.IntProgress)]
        said, filled = heard(line), heard(bar)
        click(panel, "Run")
        await until(lambda: control(panel, "Run").disabled)
        assert control(panel, "Run all").disabled and not control(panel, "Stop").disabled
        await settled(panel)
        words = [re.sub("<.*?>", "", each) for each in said]
        assert words[0] == "Starting." and words[-1] == "Done."
        # A busy machine may show two points at once.
        between = [re.fullmatch(r"([1-6]) of 6, \d+ s left", each) for each in words[1:-1]]
        assert between and all(between), words
        assert filled == sorted({*filled}) and {*filled} <= {1, 2, 3, 4, 5, 6} and len(filled) > 1
        assert filled[-1] == bar.max == 6 and bar.bar_style == "success"
        assert control(panel, "Stop").disabled and not control(panel, "Run all").disabled
        panel.start()
        assert bar.value == 0 and bar.bar_style == ""
        await settled(panel)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("seconds", "words"), [(8.2, "8 s left"), (99.0, "99 s left"), (240.0, "4 min left")]
)
def test_the_time_left_is_what_the_rest_will_take_at_this_pace(gpu, monkeypatch, seconds, words):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        run = sweep_panel._Run(panel.controls, 12)
        run.done, run.began = 4, time.monotonic() - seconds / 2
        run.tell()
        assert status(panel) == f"4 of 12, {words}"

    asyncio.run(body())


def test_after_stop_the_line_counts_no_more(gpu):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        run = sweep_panel._Run(panel.controls, 6)
        run.done = 3
        run.stop.set()
        run.tell()
        assert status(panel).startswith("Nothing runs.")

    asyncio.run(body())


def test_the_axis_stands_still_while_points_appear_and_the_budget_is_the_panels(gpu, monkeypatch):
    panel, reached, budgets = made(pair(gpu), budget_s=0.01), [], []
    picture, run = sweep_panel.picture, sweeps.run
    monkeypatch.setattr(sweep_panel, "picture", lambda *a: reached.append(a[3].values) or picture(*a))
    monkeypatch.setattr(sweeps, "run", lambda *a, **o: budgets.append(o["budget_s"]) or run(*a, **o))

    async def body():
        await panel.show()
        click(panel, "Run")
        await settled(panel)

    asyncio.run(body())
    assert set(reached) == {WIDTHS} and len(reached) == 4, "once empty, and once for each point"
    assert budgets == [0.01]


def test_a_second_click_on_run_starts_nothing(gpu):
    gate = Gate(16)
    panel = made([gated(gpu, gate)[0], doubling(gpu, "eager")], values=(16,))

    async def body():
        await panel.show()
        click(panel, "Run")
        await until(gate.reached.is_set)
        first = panel.running
        control(panel, "Run").click()
        control(panel, "Run all").click()
        await asyncio.sleep(0.05)
        assert panel.running is first
        gate.open.set()
        await settled(panel)

    asyncio.run(body())
    assert len(panel.table()) == 2 and len(on_disk()) == 2


def test_without_a_contender_nothing_starts_and_the_line_says_why(gpu):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        for name in ("labkit", "eager"):
            control(panel, name).value = False
        click(panel, "Run")
        await settled(panel)
        assert panel.running is None
        assert status(panel) == "Choose at least one contender."
        assert not control(panel, "Run").disabled

    asyncio.run(body())


def test_progress_counts_a_contender_only_where_it_is_one(gpu):
    panel = made([*pair(gpu), doubling(gpu, "slow", sizes={"width": (32,)})])

    async def body():
        await panel.show()
        choose_range(panel, 16, 64)
        click(panel, "Run")
        await settled(panel)
        assert status(panel) == "Done."

    asyncio.run(body())
    assert [r.shape["width"] for r in panel.own if r.contender == "slow"] == [32]
    assert len(panel.own) == 7


def test_only_what_is_ticked_in_range_and_for_this_dtype_is_measured(gpu):
    third = doubling(gpu, "tf32", dtypes=("float32",))
    panel = made([*pair(gpu), third], others={"batch": (2, 4)}, dtypes=("float32", "bfloat16"))

    async def body():
        await panel.show()
        control(panel, "eager").value = False
        control(panel, "dtype").value = "bfloat16"
        control(panel, "batch").value = 2
        control(panel, "clock").value = "events"
        choose_range(panel, 64, 32)  # whichever way round
        assert control(panel, "tf32").disabled
        click(panel, "Run")
        await settled(panel)

    asyncio.run(body())
    assert [(r.contender, r.dtype, r.shape, r.clock) for r in panel.own] == [
        ("labkit", "bfloat16", {"batch": 2, "width": width}, "events") for width in (32, 64)
    ]
    assert panel.table().empty, "the table is by the first clock"


def test_the_host_clock_runs_warm_and_the_others_cold(gpu):
    panel = made(pair(gpu), values=(16,))

    async def body():
        await panel.show()
        for clock in ("host", "graph"):
            control(panel, "clock").value = clock
            click(panel, "Run")
            await settled(panel)

    asyncio.run(body())
    assert {(row.clock, row.cache) for row in panel.own} == {("host", "warm"), ("graph", "cold")}


def test_a_gap_is_a_note_and_the_others_go_on(gpu):
    def call(x):
        gpu.launch(4.0, 9.0)
        return out_of_memory() if x.shape[1] == 32 else 2 * x

    panel = made([Contender("labkit", call, DOUBLING), doubling(gpu, "eager")])

    async def body():
        await panel.show()
        click(panel, "Run")
        await settled(panel)
        assert status(panel) == "Done."
        assert "out of memory: labkit at width 32" in alt(panel)

    asyncio.run(body())
    assert panel.table()["median_us"].notna().sum() == 5


# --- stop ---------------------------------------------------------------------------------------------


def test_stop_between_two_points_keeps_what_was_measured_and_run_goes_on_from_there(gpu):
    gate = Gate(64)
    contender, seen = gated(gpu, gate)
    panel = made([contender, doubling(gpu, "eager")])

    async def body():
        await panel.show()
        click(panel, "Run")
        await until(gate.reached.is_set)
        asyncio.get_running_loop().call_later(0.05, gate.open.set)
        click(panel, "Stop")
        await settled(panel)
        assert status(panel) == "Stopped. What was measured is kept."
        assert len(panel.table()) == len(on_disk()) == 4
        assert not control(panel, "Run").disabled and control(panel, "Stop").disabled
        seen.clear()
        click(panel, "Run")
        await settled(panel)
        assert set(seen) == {64}, "the rest, and nothing twice"
        assert len(panel.table()) == len(on_disk()) == 6

    asyncio.run(body())


def test_stop_does_not_wait_for_a_slow_call_and_the_sweep_behind_it_does_not_go_on(gpu):
    """The next Run waits for the call that Stop left behind, which then measures nothing more."""
    gate = Gate(32)
    contender, seen = gated(gpu, gate)
    panel = made([contender, doubling(gpu, "eager")])

    async def body():
        await panel.show()
        click(panel, "Run")
        await until(gate.reached.is_set)
        pressed = time.monotonic()
        click(panel, "Stop")
        await settled(panel)
        # The call ends only below; that it is within a second is seen in the browser, on a machine less busy.
        assert time.monotonic() - pressed < 10
        assert status(panel) == "Stopped. What was measured is kept. One call still ends in the background."
        assert len(panel.table()) == 2
        choose_range(panel, 16, 16)
        seen.clear()
        click(panel, "Run")
        await asyncio.sleep(0.1)
        assert status(panel) == "Waiting for the call that was stopped."
        assert not seen
        gate.open.set()
        await settled(panel)
        assert status(panel) == "Done."
        assert not seen, "16 was measured already, and the first sweep ended where it was stopped"

    asyncio.run(body())


def test_the_line_says_when_the_call_in_the_background_has_ended(gpu):
    gate = Gate(16)
    panel = made([gated(gpu, gate)[0], doubling(gpu, "eager")])

    async def body():
        await panel.show()
        click(panel, "Run")
        await until(gate.reached.is_set)
        click(panel, "Stop")
        await settled(panel)
        gate.open.set()
        await until(lambda: status(panel) == "Stopped. What was measured is kept.")

    asyncio.run(body())
    assert panel.table().empty


def test_a_run_that_waits_can_be_stopped(gpu):
    gate = Gate(16)
    contender, seen = gated(gpu, gate)
    panel = made([contender, doubling(gpu, "eager")])

    async def body():
        await panel.show()
        for _ in range(2):
            click(panel, "Run")
            await until(lambda: gate.reached.is_set() and not control(panel, "Stop").disabled)
            click(panel, "Stop")
            await settled(panel)
            assert status(panel).startswith("Stopped.")
        assert len(seen) == 1, "the second never began"
        gate.open.set()

    asyncio.run(body())


def test_a_sweep_that_ends_early_by_itself_is_not_called_done(gpu, monkeypatch):
    panel = made(pair(gpu))

    def interrupted(*_, progress, **__):
        """As when a cell that served a sample is interrupted after the first of them."""
        progress(1, 6, recorded())

    async def body():
        await panel.show()
        monkeypatch.setattr(sweeps, "run", interrupted)
        click(panel, "Run")
        await settled(panel)
        assert status(panel) == sweep_panel.STOPPED
        assert not control(panel, "Run").disabled

    asyncio.run(body())


def test_stop_right_after_run_is_not_lost(gpu):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        panel.start()
        panel.stop()
        await settled(panel)
        assert status(panel).startswith("Stopped.")

    asyncio.run(body())
    assert not on_disk()


def test_buttons_may_be_heard_in_another_thread_while_a_cell_keeps_the_loop_busy(gpu):
    """As with the subshells of ipykernel 7."""
    gate = Gate(32)
    contender, seen = gated(gpu, gate)
    panel = made([contender, doubling(gpu, "eager")])

    async def body():
        await panel.show()
        await asyncio.to_thread(control(panel, "Run").click)
        await until(gate.reached.is_set)
        threading.Thread(target=control(panel, "Stop").click).start()
        time.sleep(0.05)  # no turn of the loop
        gate.open.set()
        time.sleep(0.2)
        await settled(panel)

    asyncio.run(body())
    assert 64 not in seen and len(on_disk()) == 2


# --- the queue for the GPU ------------------------------------------------------------------------------


@pytest.fixture
def queue(gpu, tmp_path, monkeypatch):
    """A GPU that other processes want, too, and the folder where they meet."""
    monkeypatch.setenv(lock.FOLDER, str(tmp_path / "turns"))
    monkeypatch.setattr(device, "uuid", lambda: "GPU-simulated")
    monkeypatch.setattr(noise, "library", lambda: None)
    return tmp_path / "turns"


def test_the_line_says_how_long_the_queue_is_and_then_how_far_the_sweep_is(gpu, queue):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        said = heard_words(panel)
        with queueing.other(queue, "GPU-simulated") as process:
            click(panel, "Run")
            first = f"1st in the queue for the GPU. Process {process.pid} of "
            await until(lambda: status(panel).startswith(first))
            assert not panel.own
        await settled(panel)
        assert status(panel) == "Done." and len(panel.own) == 6
        waited = next(n for n, words in enumerate(said) if words.startswith("1st"))
        assert said[waited + 1] == "Measuring." and "left" in said[waited + 2]

    asyncio.run(body())


def heard_words(panel):
    (line,) = [w for w in widgets(panel) if isinstance(w, ipywidgets.HTML) and 'role="status"' in w.value]
    said = []
    line.observe(lambda change: said.append(re.sub("<.*?>", "", change["new"])), "value")
    return said


def test_stop_leaves_the_queue(gpu, queue):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        with queueing.other(queue, "GPU-simulated"):
            click(panel, "Run")
            await until(lambda: status(panel).startswith("1st"))
            click(panel, "Stop")
            await settled(panel)
            assert status(panel) == "Stopped. What was measured is kept."
            assert len(list((queue / "GPU-simulated").iterdir())) == 1, "the other's ticket"
        await asyncio.sleep(0.1)
        assert status(panel) == "Stopped. What was measured is kept.", "nothing that comes late is said"

    asyncio.run(body())
    assert not panel.own


# --- noise ------------------------------------------------------------------------------------------------


AGAIN = "Measure the noisy points again"
WORKED = "another process worked on the GPU"


@pytest.fixture
def disturbances(monkeypatch):
    """What disturbs the points, one after another; then nothing does."""
    found = []

    class Gauge:
        def look(self):
            pass

        def finding(self):
            return found.pop(0) if found else ""

    monkeypatch.setattr(noise, "Gauge", Gauge)
    return found


def listed(panel):
    """What is said of noise; None where nothing is to be seen of it."""
    (box,) = [w for w in widgets(panel) if control(panel, AGAIN) in getattr(w, "children", ())]
    text = html.unescape(re.sub("<.*?>", " ", box.children[1].value)).split()
    return None if box.layout.display == "none" else " ".join(text)


def test_noisy_points_are_listed_and_the_button_measures_them_and_no_others(gpu, disturbances):
    measured = []

    def seen(name):
        def call(x):
            measured.append((name, x.shape[1]))
            gpu.launch(4.0, 2.0 * x.shape[1])
            return 2 * x

        return Contender(name, call, DOUBLING)

    panel = made([seen("labkit"), seen("eager")], dtypes=("float32", "bfloat16"))

    async def body():
        await panel.show()
        assert listed(panel) is None
        disturbances.extend(["", WORKED, WORKED])
        click(panel, "Run")
        await settled(panel)
        assert listed(panel) == f"Ringed points were disturbed: {WORKED}: labkit and eager at width 32, 64"
        assert f"Disturbed: {WORKED}" in alt(panel)
        control(panel, "eager").value = False
        await until(lambda: "eager" not in listed(panel))
        measured.clear()
        disturbances.extend(["", WORKED])
        click(panel, AGAIN)
        await settled(panel)
        assert {*measured} == {("labkit", 32), ("labkit", 64)}
        assert control(panel, "width from").value == 16 and control(panel, "to").value == 64, "choices stay"
        assert listed(panel) == f"Ringed points were disturbed: {WORKED}: labkit at width 64"
        control(panel, "eager").value = True
        await until(lambda: "eager" in listed(panel))
        measured.clear()
        click(panel, AGAIN)
        await settled(panel)
        assert {*measured} == {("eager", 32), ("labkit", 64), ("eager", 64)}
        assert listed(panel) is None and "isturbed" not in alt(panel)
        assert status(panel) == "Done." and control(panel, "eager").value

    asyncio.run(body())
    table = panel.table()
    assert len(table[table["dtype"] == "float32"]) == 6 and set(table["noise"]) == {""}


def test_noise_is_kept_with_the_rows_and_the_next_panel_lists_it(gpu, disturbances):
    async def body(panel):
        await panel.show()
        if not panel.own:
            disturbances.append(WORKED)
            click(panel, "Run")
            await settled(panel)
        assert listed(panel) == f"Ringed points were disturbed: {WORKED}: labkit and eager at width 16"

    for _ in range(2):
        asyncio.run(body(made(pair(gpu))))
    assert [row.noise for row in on_disk() if row.noise] == [WORKED, WORKED]


def test_while_it_measures_nothing_is_measured_again(gpu, disturbances):
    gate = Gate(64)
    panel = made([gated(gpu, gate)[0], doubling(gpu, "eager")])

    async def body():
        await panel.show()
        disturbances.append(WORKED)
        click(panel, "Run")
        await until(lambda: gate.reached.is_set() and listed(panel))
        assert control(panel, AGAIN).disabled
        gate.open.set()
        await settled(panel)
        assert not control(panel, AGAIN).disabled

    asyncio.run(body())


def test_where_nothing_is_noisy_the_button_would_measure_nothing(gpu):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        panel.measure_noisy_again()
        assert panel.running is None

    asyncio.run(body())


# --- what goes wrong in the panel itself --------------------------------------------------------------


def test_an_error_in_the_measuring_thread_reaches_the_line_and_the_next_run_works(gpu, caplog):
    def floor(table):
        if broken and len(table):
            raise KeyError("no such column <b>")
        return {}

    broken = [True]
    panel = made(pair(gpu), floor=floor)

    async def body():
        await panel.show()
        click(panel, "Run")
        await settled(panel)
        assert status(panel) == "It ended with an error. KeyError: 'no such column <b>'"
        assert not control(panel, "Run").disabled
        assert "no such column" in caplog.text, "with its traceback, for whoever wrote the lesson"
        broken.clear()
        click(panel, "Run")
        await settled(panel)
        assert status(panel) == "Done." and len(panel.table()) == 6

    asyncio.run(body())


def test_an_error_of_a_callback_reaches_the_line(gpu, somebody):
    (somebody / "measurements").write_text("in the way")
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        click(panel, "Save CSV")
        await asyncio.sleep(0.02)
        assert status(panel).startswith("It ended with an error. FileExistsError")

    asyncio.run(body())


def test_a_figure_that_cannot_be_drawn_at_the_end_is_said(gpu, monkeypatch):
    panel = made(pair(gpu), values=(16,))

    def page(*_):
        raise ValueError("no page")

    async def body():
        await panel.show()
        monkeypatch.setattr(sweep_panel, "page", page)
        click(panel, "Run")
        await settled(panel)
        assert status(panel) == "It ended with an error. ValueError: no page"
        assert not control(panel, "Run").disabled

    asyncio.run(body())


def test_an_error_of_a_call_left_behind_is_said_too(gpu, monkeypatch):
    gate = Gate(16)
    panel = made([gated(gpu, gate)[0], doubling(gpu, "eager")])
    run = sweeps.run

    def breaking(*args, **options):
        run(*args, **options)
        raise OSError("disk full")

    monkeypatch.setattr(sweeps, "run", breaking)

    async def body():
        await panel.show()
        click(panel, "Run")
        await until(gate.reached.is_set)
        click(panel, "Stop")
        await settled(panel)
        gate.open.set()
        await until(lambda: status(panel) == "It ended with an error. OSError: disk full")

    asyncio.run(body())


# --- kept ---------------------------------------------------------------------------------------------


def test_rows_are_on_the_disk_while_the_sweep_runs_and_another_kernel_goes_on(gpu):
    """The second panel stands for one in the kernel that comes after a killed one."""
    gate = Gate(64)
    contenders = [gated(gpu, gate)[0], doubling(gpu, "eager")]
    panel, heirs = made(contenders), []

    async def body():
        await panel.show()
        click(panel, "Run")
        await until(gate.reached.is_set)
        assert [row.shape["width"] for row in on_disk()] == [16, 16, 32, 32]
        heirs.append(made(contenders))
        assert heirs[0].own == on_disk()
        click(panel, "Stop")
        gate.open.set()
        await settled(panel)
        await heirs[0].show()
        known = "4 of 6 points are measured already"
        assert (
            status(heirs[0])
            == f"{known}. Run goes on where this sweep was interrupted, else it starts again."
        )
        assert "nothing measured" not in alt(heirs[0])
        click(heirs[0], "Run")
        await settled(heirs[0])

    asyncio.run(body())
    assert len(heirs[0].table()) == 6 and len(on_disk()) == 6, "no row twice"


def test_the_line_offers_to_go_on_only_with_part_of_a_recent_sweep(gpu):
    contenders = pair(gpu)
    panel = made(contenders)

    async def greeting(known):
        heir = made(contenders)
        heir.own = known
        await heir.show()
        return status(heir)

    async def body():
        await panel.show()
        click(panel, "Run")
        await settled(panel)
        plain = "Nothing runs. Press Run to measure on this machine."
        assert await greeting(panel.own) == plain, "all is measured"
        assert await greeting([replace(row, kind="recorded") for row in panel.own[:3]]) == plain, "too old"
        assert (await greeting(panel.own[:3])).startswith("3 of 6 points are measured already.")

    asyncio.run(body())


def test_a_fallback_gives_way_when_the_graph_holds_the_call(gpu):
    waits = [True]

    def call(x):
        gpu.launch(0.0, 50.0)
        if waits:
            gpu.wait()
        return 2 * x

    panel = made([Contender("labkit", call, DOUBLING), doubling(gpu, "eager")], values=(16,))

    async def body():
        await panel.show()
        click(panel, "Run")
        await settled(panel)
        assert [row.clock for row in panel.own] == ["events", "graph"]
        waits.clear()
        click(panel, "Run")
        await settled(panel)
        assert status(panel) == "Done."

    asyncio.run(body())
    assert [row.clock for row in panel.own] == ["graph", "graph"]
    assert len(panel.table()) == 2 and made(list(panel.plan.contenders), values=(16,)).own == panel.own


def test_the_tape_stands_there_first_and_a_live_point_joins_it(gpu, tape):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        assert "Recorded on NVIDIA H200" in alt(panel)
        click(panel, "Run")
        await settled(panel)
        assert "Live on Simulated" in alt(panel) and "Recorded on NVIDIA H200" in alt(panel)
        control(panel, "recorded").value = False
        await until(lambda: "H200" not in alt(panel))

    asyncio.run(body())
    assert set(panel.table()["kind"]) == {"live"}


# --- run all, and choices while it runs ---------------------------------------------------------------


def test_run_all_measures_every_dtype_direction_and_size_by_the_first_clock(gpu):
    panel = made(
        pair(gpu),
        values=(16, 32),
        others={"batch": (2, 4)},
        dtypes=("float32", "float16"),
        directions=("forward", "backward"),
    )

    async def body():
        await panel.show()
        control(panel, "clock").value = "host"
        choose_range(panel, 32, 32)
        control(panel, "eager").value = False
        click(panel, "Run all")
        await until(lambda: re.match(r"\d+ of 32, ", status(panel)))
        await settled(panel)
        assert status(panel) == "Done."
        assert control(panel, "eager").value and panel.controls.selection().values == (16, 32)

    asyncio.run(body())
    table = panel.table()
    assert len(table) == 32 and set(table["clock"]) == {"graph"}
    assert len(table.groupby(["dtype", "direction", "batch"])) == 8


def test_stop_ends_run_all_as_a_whole(gpu):
    gate = Gate(32)
    panel = made([gated(gpu, gate)[0], doubling(gpu, "eager")], dtypes=("float32", "float16"))

    async def body():
        await panel.show()
        click(panel, "Run all")
        await until(gate.reached.is_set)
        click(panel, "Stop")
        gate.open.set()
        await settled(panel)
        assert status(panel).startswith("Stopped.")
        assert control(panel, "dtype").value == "float32"

    asyncio.run(body())
    assert {row.dtype for row in on_disk()} == {"float32"} and len(on_disk()) == 2


def test_a_choice_made_while_it_runs_is_drawn_and_the_sweep_goes_on_as_it_began(gpu):
    gate = Gate(32)
    panel = made([gated(gpu, gate)[0], doubling(gpu, "eager")], others={"batch": (2, 4)})

    async def body():
        await panel.show()
        click(panel, "Run")
        await until(gate.reached.is_set)
        control(panel, "batch").value = 2
        await until(lambda: "nothing measured yet" in alt(panel))
        gate.open.set()
        await settled(panel)
        assert "nothing measured yet" in alt(panel), "batch 2 is looked at"
        control(panel, "batch").value = 4
        await until(lambda: "labkit" in alt(panel))

    asyncio.run(body())
    assert {row.shape["batch"] for row in panel.own} == {4} and len(panel.own) == 6


def test_a_figure_of_an_earlier_choice_comes_too_late(gpu):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        before = panel.controls.selection(), panel.controls.look()
        shown = panel.controls.figure.value
        choose_view(panel, SPEEDUP)
        panel._advance(sweep_panel._Run(panel.controls, 6), "<p>time</p>", before)
        assert panel.controls.figure.value == shown

    asyncio.run(body())


def test_several_choices_at_once_are_drawn_once(gpu, monkeypatch):
    panel, drawn = made(pair(gpu), dtypes=("float32", "float16")), []
    picture = sweep_panel.picture
    monkeypatch.setattr(sweep_panel, "picture", lambda *a, **o: drawn.append(1) or picture(*a, **o))

    async def body():
        await panel.show()
        drawn.clear()
        control(panel, "dtype").value = "float16"
        control(panel, "clock").value = "host"
        control(panel, "floor").value = False
        choose_view(panel, SPEEDUP)
        await asyncio.sleep(0.3)
        assert len(drawn) == 1 and "times faster than eager" in alt(panel)
        choose_view(panel, "time")
        await until(lambda: len(drawn) == 2)

    asyncio.run(body())


# --- several panels, shown again ----------------------------------------------------------------------


def test_two_panels_at_once_take_turns(gpu):
    inside, most = [], []

    def inputs(shape):
        inside.append(shape)
        most.append(len(inside))
        time.sleep(0.01)
        inside.remove(shape)
        return DOUBLING.inputs(shape)

    work = replace(DOUBLING, inputs=inputs)
    both = [doubling(gpu, work=work), doubling(gpu, "eager", work=work)]
    first, second = made(both, suite="first"), made(both, suite="second")

    async def body():
        for panel in (first, second):
            await panel.show()
            click(panel, "Run")
        await settled(first)
        await settled(second)

    asyncio.run(body())
    assert max(most) == 1
    for panel, suite in ((first, "first"), (second, "second")):
        assert len(panel.table()) == 6 and {row.suite for row in on_disk(suite)} == {suite}


def test_a_cell_that_is_run_again_stops_what_it_had_started(gpu):
    gate = Gate(32)
    contenders = [gated(gpu, gate)[0], doubling(gpu, "eager")]
    old, new = made(contenders), made(contenders)

    async def body():
        await old.show()
        click(old, "Run")
        await until(gate.reached.is_set)
        await new.show()
        gate.open.set()
        await settled(old)
        assert status(old).startswith("Stopped.")
        click(new, "Run")
        await settled(new)

    asyncio.run(body())
    assert len(new.table()) == 6


def test_a_panel_that_is_shown_twice_is_one_panel_and_goes_on(gpu):
    gate = Gate(32)
    panel = made([gated(gpu, gate)[0], doubling(gpu, "eager")])

    async def body():
        await panel.show()
        widget = panel.controls.widget
        click(panel, "Run")
        await until(gate.reached.is_set)
        await panel.show()
        gate.open.set()
        await settled(panel)
        assert panel.controls.widget is widget and status(panel) == "Done."

    asyncio.run(body())
    assert len(panel.own) == 6


# --- save ---------------------------------------------------------------------------------------------


def test_save_writes_the_rows_that_are_shown_with_where_they_come_from(gpu, tape, somebody):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        click(panel, "Run")
        await settled(panel)
        click(panel, "Save CSV")
        await until(lambda: status(panel).startswith("Saved 12 rows: measurements/suite-"))

    asyncio.run(body())
    (path,) = (somebody / "measurements").glob("*.csv")
    table = pd.read_csv(path)
    assert table["kind"].value_counts().to_dict() == {"live": 6, "recorded": 6}
    assert set(table["device"]) == {"Simulated", "NVIDIA H200"}
    assert "shape" not in table and set(table["width"]) == set(WIDTHS)


# --- without a GPU ------------------------------------------------------------------------------------


def fused(x):
    return x.mul(2)


def eager(x):
    return x + x * 1.0


def counters():
    return [Contender("labkit", fused, DOUBLING), Contender("eager", eager, DOUBLING)]


def test_without_a_gpu_the_tape_is_shown_and_run_counts(no_gpu, tape, monkeypatch):
    threads = set()
    row = traffic.row
    monkeypatch.setattr(traffic, "row", lambda *a: threads.add(threading.get_ident()) or row(*a))
    panel = made(counters())

    async def body():
        await panel.show()
        assert status(panel).startswith("No GPU here: Run counts launches and bytes.")
        assert "Recorded on NVIDIA H200" in alt(panel)
        assert not [each for each in widgets(panel) if getattr(each, "description", "") == "clock"]
        drawn = heard(panel.controls.figure)
        click(panel, "Run")
        await settled(panel)
        assert status(panel) == "Done."
        assert len({re.search('alt="(.*?)"', page)[1] for page in drawn}) >= 3, "a point at each measurement"
        assert "labkit 1.00" in alt(panel).replace("labkit 1×", "labkit 1.00")
        click(panel, "Save CSV")
        await until(lambda: status(panel).startswith("Saved 6 rows"))
        choose_range(panel, 16, 32)
        click(panel, "Save CSV")
        await until(lambda: status(panel).startswith("Saved 4 rows"))
        choose_view(panel, "time")
        await until(lambda: "Recorded on NVIDIA H200" in alt(panel))

    asyncio.run(body())
    assert threads == {threading.get_ident()}, "the interpreter is one for the process"
    assert not (places.cache() / "panels").exists(), "counts are no measurements"
    assert set(panel.table()["kind"]) == {"recorded"}


def test_counting_can_be_stopped_and_counts_again(no_gpu, monkeypatch):
    calls = []
    row = traffic.row
    panel = made(counters())

    def counted(*given):
        calls.append(given)
        if len(calls) == 3:  # the loop hears of it when it has its turn
            asyncio.get_running_loop().call_soon(control(panel, "Stop").click)
        return row(*given)

    monkeypatch.setattr(traffic, "row", counted)

    async def body():
        await panel.show()
        click(panel, "Run")
        await settled(panel)
        assert status(panel).startswith("Stopped.") and len(calls) == 3
        click(panel, "Run")
        await settled(panel)
        assert status(panel) == "Done." and len(calls) == 9

    asyncio.run(body())


def test_counts_of_other_sizes_are_not_drawn_with_these(no_gpu):
    panel = made(counters(), others={"batch": (2, 4)})

    async def body():
        await panel.show()
        click(panel, "Run all")
        await settled(panel)
        assert panel.controls.look().view == TRAFFIC
        for batch in (2, 4):
            control(panel, "batch").value = batch
            table, _ = panel._visible()
            assert set(table["batch"]) == {batch} and len(table) == 6
        control(panel, "eager").value = False
        assert set(panel._visible()[0]["contender"]) == {"labkit"}

    asyncio.run(body())


# --- with nobody there --------------------------------------------------------------------------------


@pytest.fixture
def page(monkeypatch):
    """What a notebook would show: the MIME bundles of each display."""
    shown = []

    def display(*objects, raw=False, display_id=None, **_):
        shown.extend(objects)

    monkeypatch.setattr(live, "get_ipython", lambda: object())
    monkeypatch.setattr(live, "display", display)
    monkeypatch.setattr("IPython.core.display_functions.display", display)
    return shown


def test_with_nobody_there_the_cell_awaits_the_sweep_and_leaves_a_page(gpu, nobody, page, pictures):
    panel = made(pair(gpu), dtypes=("float32", "float16"))
    asyncio.run(panel.show())
    assert len(panel.table()) == 12 and len(on_disk()) == 12
    assert panel.controls is None
    (bundle,) = page
    assert set(bundle) == {"text/html", "text/plain"}
    assert re.search(
        '<img alt="Doubling.*live on Simulated', bundle["text/html"].replace("Live", "live"), re.S
    )
    data = re.search('src="data:image/webp;base64,(.*?)"', bundle["text/html"])[1]
    assert base64.b64decode(data).startswith(b"RIFF"), "a picture, not its fingerprint"
    assert "<table" in bundle["text/html"] and "float16" in bundle["text/html"]
    for dtype in ("float32", "float16"):
        assert f"{dtype}, batch 2: labkit is never slower than eager, and 3x at width" in bundle["text/plain"]
    assert "<details" in bundle["text/html"] and "without a running kernel" not in bundle["text/html"]


def test_with_nobody_there_and_no_gpu_the_page_is_the_tapes(no_gpu, nobody, tape, page):
    panel = made(counters())
    asyncio.run(panel.show())
    (bundle,) = page
    assert "recorded on NVIDIA H200" in bundle["text/plain"]
    assert set(panel.table()["kind"]) == {"recorded"}


def test_with_nothing_measured_and_nothing_recorded_the_page_says_so(no_gpu, nobody, page):
    asyncio.run(made(counters()).show())
    (bundle,) = page
    assert "Nothing was measured here yet, and nothing is recorded for this choice." in bundle["text/plain"]


def test_plain_python_prints_the_sentence_and_may_show_it_again(gpu, nobody, capsys):
    panel = made(pair(gpu), values=(16,))
    for _ in range(2):  # each asyncio.run is a loop of its own
        asyncio.run(panel.show())
        printed = capsys.readouterr().out
        assert "labkit is never slower than eager" in printed and "<img" not in printed


def test_with_nobody_there_an_error_of_the_panel_is_an_error_of_the_cell(gpu, nobody, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(rows, "append", full)
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(made(pair(gpu)).show())


def test_a_cell_that_is_interrupted_leaves_nothing_measuring(gpu, nobody):
    gate = Gate(32)
    contender, seen = gated(gpu, gate)
    panel = made([contender, doubling(gpu, "eager")])

    async def body():
        cell = asyncio.ensure_future(panel.show())
        await until(gate.reached.is_set)
        cell.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cell
        gate.open.set()

    asyncio.run(body())  # waits for the thread
    assert 64 not in seen and len(on_disk()) == 2


def test_a_widget_stands_with_its_twin_which_follows(gpu, page):
    panel = made(pair(gpu), values=(16,))

    async def body():
        await panel.show()
        widget, twin = page
        assert widget is panel.controls.widget
        assert "<details><summary>" in twin["text/html"] and "nothing measured yet" in twin["text/html"]
        click(panel, "Run")
        await settled(panel)

    asyncio.run(body())
    assert "labkit is never slower than eager, and 3x at width 16" in page[-1]["text/plain"]


def test_no_log_line_without_an_error(gpu, caplog):
    panel = made(pair(gpu))

    async def body():
        await panel.show()
        click(panel, "Run")
        await settled(panel)

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    assert not caplog.records
