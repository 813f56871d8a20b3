"""The sweep panel under a reader's hands: a simulated GPU measures; without one nothing runs."""

import os
import re
import time
from pathlib import Path

import jupyter_lab

TESTS = Path(__file__).resolve().parents[1]
GPU = f"""
import sys, time
sys.path.insert(0, {str(TESTS)!r})
import simulated
gpu = simulated.install(setattr)
"""
PANEL = """
from dataclasses import replace
from labkit import widgets

def slow_inputs(shape):
    time.sleep(0.5)
    return simulated.DOUBLING.inputs(shape)

work = replace(simulated.DOUBLING, inputs=slow_inputs)
both = [simulated.doubling(gpu, "labkit", 1.0, work), simulated.doubling(gpu, "eager", 3.0, work)]
panel = widgets.sweep("suite/panel", both, (16, 32, 64, 128, 256, 512), others=dict(batch=(2, 4)),
                     dtypes=("float32", "bfloat16"), of="labkit", over="eager", title="Doubling a tensor")
await panel.show()
"""
KERNEL = "import ipykernel; print(ipykernel.__version__)"
TABLE = "table = panel.table(); print(len(table), sorted(set(table.kind)))"
WITHOUT = """
import torch
from labkit import widgets
from labkit.measure.contender import Contender
from labkit.workloads import AFFINE
both = [Contender("x*w+b eager", lambda x, w, b: x * w + b, AFFINE),
        Contender("addcmul", lambda x, w, b: torch.addcmul(b, x, w), AFFINE)]
panel = widgets.sweep("a suite without a tape", both, (32, 128, 512), others=dict(batch=(32768,)),
                     of="addcmul", over="x*w+b eager", title="One layer",
                     reference_lines=lambda table: {"a floor": lambda width: width / 10})
await panel.show()
"""


def figure(page: jupyter_lab.NotebookPage, cell: int, attribute: str) -> str:
    return str(page.output(cell).locator(".widget-html img").get_attribute(attribute))


def test_points_appear_stop_is_quick_and_other_cells_run(page: jupyter_lab.NotebookPage) -> None:
    page.open([GPU, PANEL, TABLE, "6 * 7", KERNEL], height=1100)
    page.run_all()
    assert page.text(4).startswith(os.environ.get("IPYKERNEL", "")), "make test IPYKERNEL=..."
    page.button("Run", 1).click()
    page.says(1, re.compile(r"of 12, .* left"))
    pictures = {figure(page, 1, "src")}
    page.run_cell(3)
    assert page.text(3) == "42"
    end = time.monotonic() + 15
    while len(pictures) < 4 and time.monotonic() < end:
        pictures.add(figure(page, 1, "src"))
        page.page.wait_for_timeout(50)
    assert len(pictures) >= 4, "the figure gains a point at each measurement"
    page.screenshot("panel-running")
    page.button("Stop", 1).click()
    pressed = time.monotonic()
    page.says(1, re.compile(r"^Stopped\. What was measured is kept\."))
    busy = "PYTEST_XDIST_WORKER" in os.environ  # other tests beside this one, on two cores
    assert time.monotonic() - pressed < (3.0 if busy else 1.0)
    page.button("Run", 1, disabled=False).wait_for()
    page.button("Stop", 1, disabled=True).wait_for()
    page.run_cell(2)
    measured, kinds = page.text(2).split(" ", 1)
    assert 6 <= int(measured) < 12 and kinds == "['live']"

    page.button("Run", 1).click()
    page.says(1, "Done.")
    page.run_cell(2)
    assert page.text(2) == "12 ['live']" and page.errors == []


def test_without_a_gpu_nothing_runs_and_every_control_has_a_name(page: jupyter_lab.NotebookPage) -> None:
    page.open([WITHOUT], width=1536, height=1120)
    page.run_all()
    page.says(0, "No GPU here: the times shown are recorded ones.")
    assert page.button("Run", 0).is_disabled() and page.button("Run all", 0).is_disabled()
    panel = page.output(0).first
    names = re.findall(r'^\s*- (radio|checkbox|combobox|button) "(.+?)"', panel.aria_snapshot(), re.MULTILINE)
    found = [name for _, name in names]
    assert found[:2] == ["Time", "Times faster than x*w+b eager"]
    assert found[-8:-4] == ["width from", "to", "x*w+b eager", "addcmul"]
    assert found[-4:] == ["Run", "Run all", "Stop", "Save CSV"]
    assert panel.locator(":is(input, select, button, [tabindex]):visible").count() == len(found)
    assert page.errors == []
