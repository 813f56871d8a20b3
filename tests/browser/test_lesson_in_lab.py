"""A lesson as a reader has it in JupyterLab, without a GPU: guess, run, exercise, sweep, save, reload."""

import re

import fewer
import jupyter_lab
import pandas as pd

from labkit.lessons import notebooks, stamps

LESSON = notebooks.resolve("01_launch_overhead")


def test_a_reader_works_through_the_lesson(page: jupyter_lab.NotebookPage) -> None:
    recorded = stamps.recording_state(LESSON).status == "recorded"
    stamp = stamps.read_stamp(notebooks.read_json(LESSON))
    page.open(LESSON)
    answers = page.page.locator(".jp-Notebook").get_by_text("No guess was sealed")
    assert not any(answer.is_visible() for answer in answers.all()), "a saved answer is in sight"
    page.in_kernel(fewer.CHECKS)
    guess = page.index_of('"pseudo-linear ratio at 160"')
    for cell in range(page.index_of("from dataclasses import replace\n"), guess + 1):
        page.run_cell(cell)
    box = page.output(guess).get_by_role("textbox")
    box.fill("40")
    box.press("Enter")
    page.button("Seal my guess", guess).click()
    page.output(guess).get_by_text("Sealed").first.wait_for()
    page.screenshot("lesson-guess", guess)

    page.run_all(seconds=240)
    answer = page.text(page.index_of("guess_ratio.reveal("))
    assert not recorded or f"You guessed 40×. Recorded on {stamp.device}" in answer
    assert not page.page.locator(".jp-Notebook .jp-OutputArea-error").count(), "a cell failed"

    mask = page.index_of('tasks.check("mask"')
    assert "not attempted" in page.text(mask)
    scaffold = page.sources()[mask]
    missing = next(line for line in scaffold.splitlines(keepends=True) if "..." in line)
    for written, verdict in (("    inside = at <= count\n", "wrong"), ("    inside = at < count\n", "right")):
        page.set_source(mask, scaffold.replace(missing, written))
        page.run_cell(mask)
        assert verdict in page.text(mask)
        assert page.output(mask).get_by_text("Hint 1").count() == (verdict == "wrong")
        page.screenshot(f"lesson-{verdict}", mask)

    page.set_source(mask, 'tasks.reset("mask")\ntasks.progress()')
    page.run_cell(mask)
    assert page.sources()[mask + 1] == scaffold, "the cell as the lesson has it stands below"
    page.screenshot("lesson-reset", mask)

    panel = page.index_of("panel.sweep(")
    figure = page.output(panel).locator(".widget-html img")
    assert not recorded or f"Recorded on {stamp.device}" in str(figure.get_attribute("alt"))
    page.scroll_to(panel)
    page.says(panel, "No GPU here: the times shown are recorded ones.")
    assert page.button("Run", panel).is_disabled()
    page.button("Save CSV", panel).click()
    page.says(panel, re.compile("^Saved"))
    (saved,) = (page.lab.root / page.path).parent.glob("measurements/*.csv")
    assert bool(len(pd.read_csv(saved))) == recorded
    page.screenshot("lesson-panel", panel)

    page.save()
    page.reload()
    page.output(guess).get_by_text("Sealed").first.wait_for()
    assert figure.count() == 1 and "as the lesson has it" in page.text(mask)
    assert page.errors == []
