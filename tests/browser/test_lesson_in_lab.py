"""A lesson as a reader has it in JupyterLab, without a GPU: guess, run, write, sweep, save, reload."""

import json
import re
import time
from collections.abc import Callable

import jupyter_lab

from labkit import notebooks
from labkit.measure import tape

LESSON = notebooks.resolve("01_launch_overhead")
SOLUTIONS = notebooks.solution_cells(LESSON)
SIMULATED = notebooks.resolve("10_cuda_graphs")
"""Its tasks run on a simulated GPU. That all lessons run, and that all solutions are right, is told without a
browser: test_lesson_notebooks, test_judge."""


def draws_another_figure(
    page: jupyter_lab.NotebookPage, panel: int, change: Callable[[], object], recorded: bool
) -> None:
    """What a reader does draws the sweep's figure anew within 15 s; without a tape there is none."""
    figure = page.output(panel).locator(".widget-html img").first
    before = figure.get_attribute("alt")
    change()
    end = time.monotonic() + 15
    while recorded and figure.get_attribute("alt") == before:
        assert time.monotonic() < end, before
        page.page.wait_for_timeout(100)


def test_a_reader_works_through_the_lesson(page: jupyter_lab.NotebookPage) -> None:
    recorded = bool(tape.tapes(notebooks.key_of(LESSON)))
    page.open(LESSON)
    kinds = [cell.cell_type for cell in notebooks.read(LESSON).cells]
    guess = page.index_of("idle = lab.guess(")
    for cell in (number for number in range(guess + 1) if kinds[number] == "code"):
        page.run_cell(cell)
    handle = page.output(guess).get_by_role("slider").first
    handle.focus()
    for _ in range(5):
        page.press("ArrowRight")
    page.button("Seal", guess).click()
    page.button("Sealed", guess, disabled=True).wait_for()
    page.screenshot("lesson-guess", guess)
    folder = (page.lab.root / page.path).parent
    (kept,) = (folder / ".labkit" / "guesses" / "launch_overhead").glob("*.json")
    assert json.loads(kept.read_text())["guess"] > 10, "the middle of 1 and 100, and some steps"

    page.run_all(seconds=240)
    assert not page.page.locator(".jp-Notebook .jp-OutputArea-error").count(), "a cell failed"
    answer = page.text(page.index_of("idle.answer("))
    assert not recorded or re.search(r"The answer is .*recorded on.* You guessed ", answer)

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

    affine = page.index_of('tasks.check("affine"')
    page.set_source(affine, f'{SOLUTIONS["affine"]}\n\n\nraced = tasks.check("affine", affine)')
    page.run_cell(affine)
    assert "right" in page.text(affine) and "launches" in page.text(affine), (
        "judged, and counted without a GPU"
    )
    page.screenshot("lesson-race", affine)
    page.run_cell(len(kinds) - 1)
    assert page.text(len(kinds) - 1).count("solved") == 2

    panel = page.index_of("lab.sweep(")
    page.scroll_to(panel)
    page.says(panel, "No GPU here: you explore the recorded sweep.")
    figure = page.output(panel).locator(".widget-html img").first
    for change in (
        lambda: page.output(panel).get_by_label("clock").select_option("graph clock"),
        lambda: page.output(panel).get_by_text("speedup").first.click(),
    ):
        draws_another_figure(page, panel, change, recorded)
    assert page.button("Run", panel).count() == 0, "there is nothing to run"
    page.screenshot("lesson-panel", panel)

    page.save()
    page.reload()
    page.output(guess).get_by_role("button", name=re.compile("Seal"), disabled=True).wait_for()
    assert figure.count() == 1 and "right" in page.text(mask)
    assert page.errors == []


def test_a_lesson_on_a_simulated_gpu_runs_and_its_solutions_are_right_in_its_own_cells(
    page: jupyter_lab.NotebookPage,
) -> None:
    page.open(SIMULATED)
    page.run_all(seconds=240)
    assert not page.page.locator(".jp-Notebook .jp-OutputArea-error").count(), "a cell failed"
    solutions = notebooks.solution_cells(SIMULATED)
    for name, solution in solutions.items():
        cell = page.index_of(f'tasks.check("{name}"')
        last = next(line for line in page.sources()[cell].splitlines() if "tasks.check(" in line)
        page.set_source(cell, f"{solution}\n\n\n{last}")
        page.run_cell(cell)
        assert "right" in page.text(cell)
        page.screenshot(f"{SIMULATED.stem}-{name}", cell)
    panel = page.index_of("swept = lab.sweep(")
    page.scroll_to(panel)
    recorded = bool(tape.tapes(notebooks.key_of(SIMULATED)))
    draws_another_figure(page, panel, page.output(panel).get_by_text("speedup").first.click, recorded)
    page.screenshot(f"{SIMULATED.stem}-panel", panel)
    last_cell = len(page.sources()) - 1
    page.run_cell(last_cell)
    assert page.text(last_cell).count("solved") == len(solutions)
    assert page.errors == []
