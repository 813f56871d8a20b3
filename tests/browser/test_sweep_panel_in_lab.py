"""The sweep panel under a reader's hands, where a simulated GPU measures."""

import os
import re
import time
from pathlib import Path

import jupyter_lab

TESTS = Path(__file__).resolve().parents[1]
GPU = f"""
import sys, time
from dataclasses import replace
sys.path.insert(0, {str(TESTS)!r})
import simulated
import labkit as lab
from labkit.measure import copies, session
gpu = simulated.install(setattr)
copies.COPIES = {{"Tensor.copy_": copies.COPIES["fast"]}}
"""
PANEL = """
def slow_inputs(shape):
    time.sleep(0.5)
    return lab.work.affine.inputs(shape)

def one(x, w, b):
    gpu.launch(4.0, 1.0 * x.shape[1])
    return x * w + b

def two(x, w, b):
    gpu.launch(4.0, 3.0 * x.shape[1])
    return x * w + b

swept = lab.sweep("A sweep", {"one": one, "two": two}, replace(lab.work.affine, inputs=slow_inputs),
                  width=[16, 32, 64, 128, 256, 512], batch=2, dtype=["float32", "bfloat16"])
swept
"""
KERNEL = "import ipykernel; print(ipykernel.__version__)"
TABLE = "print(len(swept.live_rows), swept.live, swept.speedup('one', 'two', width=64).value)"


def figure(page: jupyter_lab.NotebookPage, cell: int, attribute: str) -> str:
    return str(page.output(cell).locator(".widget-html img").get_attribute(attribute))


def test_points_appear_stop_is_quick_and_other_cells_run(page: jupyter_lab.NotebookPage) -> None:
    page.open([GPU, PANEL, TABLE, "6 * 7", KERNEL], height=1100)
    for cell in (0, 1, 4):
        page.run_cell(cell)
    assert page.text(4).startswith(os.environ.get("IPYKERNEL", "")), "make test IPYKERNEL=..."
    page.says(1, "Press Run to measure this on your GPU.")
    page.button("Run", 1).click()
    page.says(1, re.compile(r"^Measuring width 32, 2 of 6"))
    pictures = {figure(page, 1, "src")}
    page.run_cell(3)
    assert page.text(3) == "42"
    end = time.monotonic() + 15
    while len(pictures) < 3 and time.monotonic() < end:
        pictures.add(figure(page, 1, "src"))
        page.page.wait_for_timeout(50)
    assert len(pictures) >= 3, "the figure gains a point at each measurement"
    page.screenshot("panel-running")
    page.button("Stop", 1).click()
    pressed = time.monotonic()
    page.says(1, re.compile(r"^Stopped\. What was measured is kept\."))
    busy = "PYTEST_XDIST_WORKER" in os.environ  # other tests beside this one, on two cores
    assert time.monotonic() - pressed < (3.0 if busy else 1.5)
    page.button("Run", 1, disabled=False).wait_for()
    page.button("Stop", 1, disabled=True).wait_for()

    page.button("Run", 1).click()
    page.says(1, "Done.")
    page.run_cell(2)
    assert page.text(2) == "6 True 3.0" and page.errors == []
