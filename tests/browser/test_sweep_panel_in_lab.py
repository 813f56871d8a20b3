"""The sweep panel under a reader's hands: a simulated GPU measures, Triton's interpreter counts."""

import os
import re
import time
from pathlib import Path

import jupyter_lab
import pandas as pd
import pytest
import queueing
from processes import wait_for

from labkit import lessons
from labkit.runs import record

TESTS = Path(__file__).resolve().parents[1]

GPU = f"""
import sys, time
sys.path.insert(0, {str(TESTS)!r})
import simulated
gpu = simulated.install(setattr)
"""
PANEL = """
from dataclasses import replace
from labkit import panels

def slow_inputs(shape):
    time.sleep({seconds})
    return simulated.DOUBLING.inputs(shape)

work = replace(simulated.DOUBLING, inputs=slow_inputs)
both = [simulated.doubling(gpu, "labkit", 1.0, work), simulated.doubling(gpu, "eager", 3.0, work)]
{name} = panels.sweep("{suite}", both, {widths}, others=dict(batch=(2, 4)),
                     dtypes=("float32", "bfloat16"), of="labkit", over="eager", title="Doubling a tensor")
await {name}.show()
"""
TABLE = "table = panel.table(); print(len(table), sorted(set(table.kind)))"


WIDTHS = (16, 32, 64, 128, 256, 512)


def measuring(seconds: float, name: str = "panel", widths: tuple[int, ...] = WIDTHS) -> str:
    return PANEL.format(seconds=seconds, name=name, suite=f"suite/{name}", widths=widths)


def picture(page: jupyter_lab.NotebookPage, cell: int) -> str:
    """The source of the panel's figure."""
    return str(page.output(cell).locator(".widget-html img").get_attribute("src"))


def description(page: jupyter_lab.NotebookPage, cell: int) -> str:
    """The alt text of the panel's figure."""
    return str(page.output(cell).locator(".widget-html img").get_attribute("alt"))


def says(page: jupyter_lab.NotebookPage, cell: int, words: str | re.Pattern[str]) -> None:
    """Wait until the panel's line says this."""
    page.output(cell).get_by_role("status").get_by_text(words).wait_for()


def follows(page: jupyter_lab.NotebookPage, cell: int, words: str, *, gone: bool = False) -> None:
    """Wait until the figure's alt text has these words, or has them no more."""
    wait_for(
        lambda: (words.lower() in description(page, cell).lower()) != gone, f"the figure of {words}", 5.0
    )


def test_points_appear_stop_is_quick_other_cells_run_and_a_killed_kernel_loses_no_row(
    page: jupyter_lab.NotebookPage,
) -> None:
    page.open([GPU, measuring(0.5), TABLE, "6 * 7"], height=1100)
    page.run_all()
    page.button("Run", 1).click()
    says(page, 1, re.compile(r"of 12, .* left"))
    pictures = {picture(page, 1)}
    page.run_cell(3)
    assert page.text(3) == "42"
    end = time.monotonic() + 15
    while len(pictures) < 4 and time.monotonic() < end:
        pictures.add(picture(page, 1))
        page.page.wait_for_timeout(50)
    assert len(pictures) >= 4, "the figure gains a point at each measurement"
    page.scroll_to(1)
    page.screenshot("panel-running")
    page.button("Stop", 1).click()
    pressed = time.monotonic()
    says(page, 1, re.compile(r"^Stopped\. What was measured is kept\."))
    busy = "CI" in os.environ  # other tests beside this one, on two cores
    assert time.monotonic() - pressed < (3.0 if busy else 1.0)
    assert page.button("Run", 1).is_enabled() and page.button("Stop", 1).is_disabled()
    page.run_cell(2)
    measured, kinds = page.text(2).split(" ", 1)
    assert 6 <= int(measured) < 12 and kinds == "['live']"

    page.button("Run", 1).click()
    says(page, 1, re.compile(r"of 12, .* left"))
    page.kill_kernel()
    page.run_all()
    page.run_cell(2)
    before = int(page.text(2).split()[0])
    assert before >= int(measured), "the rows are on the disk"
    says(page, 1, re.compile(f"^{before} of 12 points are measured already. Run goes on where"))
    follows(page, 1, "live on Simulated")
    page.button("Run", 1).click()
    says(page, 1, "Done.")
    page.run_cell(2)
    assert page.text(2) == "12 ['live']"
    assert page.errors == []


def test_two_panels_keyboard_choices_file_and_reload(page: jupyter_lab.NotebookPage) -> None:
    page.open([GPU, measuring(0.03), measuring(0.03, "other", WIDTHS[:2]), TABLE])
    page.run_all()
    page.button("Run", 1).focus()
    page.press("Enter")
    page.button("Run all", 2).click()
    says(page, 1, "Done.")
    says(page, 2, "Done.")
    page.run_cell(3)
    assert page.text(3) == "12 ['live']", "the other panel's rows are its own"
    assert picture(page, 1) != picture(page, 2)

    page.output(1).get_by_label("Times faster than eager", exact=True).check()
    follows(page, 1, "speedup against width")
    page.output(2).get_by_label("eager", exact=True).uncheck()
    follows(page, 2, "eager", gone=True)
    page.output(1).get_by_label("to", exact=True).focus()
    for key in ("Space", "ArrowUp", "Enter"):  # closed, JupyterLab takes the arrow for the next cell
        page.press(key)
    follows(page, 1, "width 16 to 256")
    page.output(1).get_by_label("dtype", exact=True).select_option("bfloat16")
    follows(page, 1, "nothing measured yet")
    page.output(1).get_by_label("dtype", exact=True).select_option("float32")

    page.button("Save CSV", 1).click()
    says(page, 1, re.compile(r"Saved 10 rows: measurements/suite-panel-.*\.csv"))
    (saved,) = (page.lab.root / page.path).parent.glob("measurements/*.csv")
    table = pd.read_csv(saved)
    assert len(table) == 10 and set(table.kind) == {"live"} and table.median_us.notna().all()

    follows(page, 1, "width 16 to 256")
    seen = picture(page, 1)
    page.save()
    page.reload()
    page.output(1).locator(".widget-html img").wait_for()
    assert picture(page, 1) == seen, "the panel is in its place, and so is its figure"
    page.button("Run", 1).click()
    says(page, 1, "Done.")
    assert page.errors == []


COUNTED = """
import torch
from labkit import panels, published
from labkit.sweeps import Contender
from labkit.works import AFFINE
both = [Contender("x*w+b eager", lambda x, w, b: x * w + b, AFFINE),
        Contender("addcmul", lambda x, w, b: torch.addcmul(b, x, w), AFFINE)]
panel = panels.sweep("launch_overhead/width", both, (32, 128, 512, 1024, 4096), others=dict(batch=(32768,)),
                     of="addcmul", over="x*w+b eager", title="One layer", published=published.pseudo_linear(),
                     floor=lambda table: {"a floor": lambda width: width / 10})
await panel.show()
"""


@pytest.mark.skipif(
    record.state(lessons.resolve("01")).status != "recorded",
    reason="it shows the tape of lesson 1: record it",
)
def test_without_a_gpu_the_tape_stands_there_and_run_counts(page: jupyter_lab.NotebookPage) -> None:
    page.open([COUNTED], width=1536, height=1120)
    page.run_all()
    says(page, 0, "No GPU here: Run counts launches and bytes. The times shown are recorded ones.")
    follows(page, 0, "Recorded on NVIDIA H200")
    follows(page, 0, "a floor")
    page.output(0).get_by_label("floor", exact=True).uncheck()
    follows(page, 0, "a floor", gone=True)
    page.output(0).get_by_label("Times faster than x*w+b eager", exact=True).check()
    follows(page, 0, "published")
    page.screenshot("panel-recorded")
    page.output(0).get_by_label("published", exact=True).press("Space")
    follows(page, 0, "published", gone=True)
    page.button("Run", 0).click()
    says(page, 0, "Done.")
    follows(page, 0, "bytes moved over the fewest possible")
    follows(page, 0, "x*w+b eager 2.02")
    follows(page, 0, "too large for the interpreter")
    page.screenshot("panel-counted")
    # Every control has a name, and Tab reaches them in the order of reading.
    panel = page.output(0).first
    names = re.findall(r'^\s*- (radio|checkbox|combobox|button) "(.+?)"', panel.aria_snapshot(), re.MULTILINE)
    assert [name for _, name in names] == [
        *("Time", "Times faster than x*w+b eager", "Bytes moved, counted here"),
        *("recorded", "published", "floor", "width from", "to", "x*w+b eager", "addcmul"),
        *("Run", "Run all", "Stop", "Save CSV"),
    ]
    assert panel.locator(":is(input, select, button, [tabindex]):visible").count() == len(names)
    page.output(0).get_by_role("radio").first.focus()
    for _ in range(7):
        page.press("Tab")
    assert page.output(0).get_by_label("to", exact=True).evaluate("each => each === document.activeElement")
    assert page.errors == []


SHARED = """
import os
import queueing
from labkit import device, noise
from labkit.measure import lock
os.environ[lock.FOLDER] = {folder!r}
device.uuid = lambda: "GPU-simulated"
found = ["another process worked on the GPU"] * 2

class Gauge:
    look = staticmethod(lambda: None)
    finding = staticmethod(lambda: found.pop() if found else "")

noise.Gauge = Gauge
"""


def test_the_queue_is_in_the_line_and_noisy_points_are_measured_again(
    page: jupyter_lab.NotebookPage, tmp_path: Path
) -> None:
    page.open([GPU + SHARED.format(folder=str(tmp_path)), measuring(0.0, widths=WIDTHS[:3])], height=1300)
    page.run_all()
    again = page.output(1).get_by_role("button", name="Measure the noisy points again", exact=True)
    page.output(1).get_by_role("button", name="Run", exact=True).wait_for()
    assert not again.is_visible()
    with queueing.other(tmp_path, "GPU-simulated"):
        page.button("Run", 1).click()
        says(page, 1, re.compile(r"1st in the queue for the GPU\. Process \d+ of "))
        page.screenshot("panel-queue")
    says(page, 1, "Done.")
    again.wait_for()
    page.output(1).get_by_text(
        "another process worked on the GPU: labkit and eager at width 16, 32"
    ).wait_for()
    follows(page, 1, "Disturbed: another process")
    page.screenshot("panel-noisy")
    again.click()
    follows(page, 1, "Disturbed", gone=True)
    again.wait_for(state="hidden")
    says(page, 1, "Done.")
