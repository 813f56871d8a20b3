"""JupyterLab as `make lab` starts it: cells run, buttons work, a kernel may die."""

import os
from importlib.metadata import version

import jupyter_lab
import pytest

BUTTON = """
import os, ipywidgets
from IPython.display import display
button = ipywidgets.Button(description="Count")
seen = ipywidgets.HTML("never pressed")
presses = 0
def count(_):
    global presses
    presses += 1
    seen.value = f"pressed {presses}"
button.on_click(count)
display(button, seen)
"""
KERNEL = "import ipykernel; print(ipykernel.__version__)"
SLOW = ["import time; time.sleep(0.7); kept = 41", "time.sleep(0.7); print('done')", "kept"]


def test_a_button_works(page: jupyter_lab.NotebookPage) -> None:
    page.open([BUTTON, "presses", "os.environ['TRITON_INTERPRET'], os.environ['LABKIT_CACHE']", KERNEL])
    page.run_all()
    page.output(0).get_by_text("never pressed").wait_for()
    page.button("Count").click()
    page.output(0).get_by_text("pressed 1", exact=True).wait_for()
    page.run_cell(1)
    assert page.text(1) == "1"
    assert page.text(2) == str(("1", str(page.lab.cache)))
    assert page.text(3) == version("ipykernel")
    assert page.text(3).startswith(os.environ.get("IPYKERNEL", "")), "make test IPYKERNEL=..."
    assert page.screenshot("lab").stat().st_size > 10_000
    assert page.errors == []
    page.page.evaluate("console.error('heard')")
    assert len(page.errors) == 1 and page.errors[0].startswith("heard")


def test_a_kernel_is_interrupted_and_killed_while_it_works(page: jupyter_lab.NotebookPage) -> None:
    page.open([SLOW[0], "kept", "print('working', flush=True); time.sleep(60)"])
    page.run_all(wait=False)
    page.output(2).get_by_text("working").first.wait_for()
    page.interrupt()
    page.wait_idle(10)
    assert "KeyboardInterrupt" in page.text(2)
    page.set_source(2, "print('on it', flush=True); time.sleep(60)")
    page.run_cell(2, wait=False)
    page.output(2).get_by_text("on it").first.wait_for()
    page.kill_kernel()
    page.wait_idle(10)
    page.run_cell(1)
    assert "NameError" in page.text(1)
    page.run_cell(0)
    page.run_cell(1)
    assert page.text(1) == "41"
    page.restart_kernel()
    page.run_cell(1)
    assert "NameError" in page.text(1)


def test_cells_are_waited_for_and_a_reload_keeps_the_kernel(page: jupyter_lab.NotebookPage) -> None:
    page.open(SLOW, width=1920, zoom=1.25)
    assert page.page.evaluate("[innerWidth, devicePixelRatio]") == [1536, 1.25]
    page.run_all()
    assert page.text(1) == "done" and page.text(2) == "41"
    page.set_source(2, "kept + 1")
    assert page.save().cells[2].source == "kept + 1"
    page.reload()
    assert page.text(1) == "done"
    assert page.index_of("kept + 1") == 2
    with pytest.raises(ValueError, match="kept"):
        page.index_of("kept")
    page.run_cell(2)
    assert page.text(2) == "42"
