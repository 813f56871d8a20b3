"""A learner's folder: what `lab` copies and starts, what is never written over, progress and reset."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import stage

from labkit import notebooks, paths
from labkit.exercises import learner

LESSONS = ("01_launch_overhead", "asides/wrong_measurements")
COURSE = paths.NOTEBOOKS


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A published course of two lessons, outside the clone; commands are given beside it."""
    published = tmp_path / "course" / "notebooks"
    for name in LESSONS:
        lesson = published / f"{name}.ipynb"
        (lesson.parent / "images").mkdir(parents=True)
        (lesson.parent / "images" / "picture.svg").write_text("<svg/>")
        shutil.copy(COURSE / f"{name}.ipynb", lesson)
    monkeypatch.setattr(paths, "NOTEBOOKS", published)
    monkeypatch.setattr(paths, "CHECKOUT", published.parent)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return published


@pytest.fixture
def labkit(monkeypatch):
    """Runs a command; what JupyterLab would be started with is in ``labkit.started``."""

    def run(*arguments, status=0):
        ran = stage.labkit(*arguments)
        assert ran.exit_code == status, ran.output
        return ran.output

    run.started = []
    monkeypatch.setattr(os, "execve", lambda python, arguments, _: run.started.append(arguments))
    return run


def edit(path, line="# mine"):
    """Save a notebook with one more line in its last cell, as JupyterLab would."""
    notebook = json.loads(path.read_text())
    cell = notebook["cells"][-1]
    cell["source"] = "".join(cell["source"]) + f"\n{line}\n"
    path.write_text(json.dumps(notebook, indent=1))


def answer(folder, **statuses):
    """Leave verdicts on the first lesson's exercises in a learner's folder."""
    verdicts = Path(folder) / ".labkit" / "attempts" / "launch_overhead" / "verdicts.json"
    paths.write_text(verdicts, json.dumps(statuses))
    return verdicts


def test_lab_copies_every_lesson_without_outputs_and_starts_jupyterlab_there(course, labkit, tmp_path):
    assert labkit("lab", "--no-browser") == f"Copied into work: {', '.join(LESSONS)}.\n"
    assert labkit("lab", "--no-browser") == "", "a second time nothing is copied"
    labkit("lab", "mine", "--ServerApp.port=0", "--no-browser")
    for folder, options in (("work", ["--no-browser"]), ("mine", ["--ServerApp.port=0", "--no-browser"])):
        (arguments, *_) = [a for a in labkit.started if f"--ServerApp.root_dir={tmp_path / folder}" in a]
        assert arguments[:3] == [sys.executable, "-m", "jupyterlab"]
        assert "--ServerApp.ip=127.0.0.1" in arguments and arguments[-len(options) :] == options
        assert ("--allow-root" in arguments) == (os.getuid() == 0)
        first = [a for a in arguments if "01_launch_overhead" in a]
        again = [a for a in labkit.started if f"--ServerApp.root_dir={tmp_path / folder}" in a][1:]
        assert len(first) == 1 and not [a for each in again for a in each if "01_launch_overhead" in a]
        assert not [a for a in arguments if "token" in a or "password" in a], "Jupyter's own token stays"
        for name in LESSONS:
            mine, published = (notebooks.read(at / f"{name}.ipynb") for at in (tmp_path / folder, course))
            assert [cell.source for cell in mine.cells] == [cell.source for cell in published.cells]
            assert not any(cell.get("outputs") for cell in mine.cells)
            assert (tmp_path / folder / name).with_name("images").joinpath("picture.svg").exists()


def test_lab_wants_a_folder_of_the_learners_own(course, labkit):
    for folder in (course, course.parent):
        assert "name a folder of your own" in labkit("lab", str(folder), status=2)
    assert not labkit.started


def test_a_lesson_that_changed_replaces_an_untouched_copy_and_never_an_edited_one(course, labkit, tmp_path):
    labkit("lab")
    mine, untouched = (tmp_path / "work" / f"{name}.ipynb" for name in LESSONS)
    edit(mine)
    before = mine.read_bytes()
    assert labkit("lab") == ""
    for name in LESSONS:
        edit(course / f"{name}.ipynb", "# of the next version")
    said = labkit("lab")
    assert (
        said
        == f"{LESSONS[0]} has changed since you got it: `labkit reset {LESSONS[0]}` gives you the new one.\n"
    )
    assert mine.read_bytes() == before and "of the next version" in untouched.read_text()
    mine.with_name("notes.ipynb").write_text("mine, too")
    labkit("reset", LESSONS[0])
    assert labkit("lab") == "" and "of the next version" in mine.read_text()
    assert mine.with_name("notes.ipynb").read_text() == "mine, too"


def test_reset_keeps_the_old_file_and_forgets_the_verdicts(course, labkit, tmp_path, monkeypatch):
    labkit("lab")
    mine = tmp_path / "work" / f"{LESSONS[0]}.ipynb"
    published = mine.read_text()
    edit(mine)
    verdicts = answer("work", mask="right")
    for folder in (tmp_path, tmp_path / "work"):
        monkeypatch.chdir(folder)
        said = labkit("reset", "01")
        assert said.startswith("01_launch_overhead.ipynb is as published.")
        assert "Reload Notebook from Disk" in said and mine.read_text() == published and not verdicts.exists()
        for aside in mine.parent.glob("*.before-*.ipynb"):
            aside.unlink()
    mine.unlink()
    assert "Yours is" not in labkit("reset", "launch_overhead") and mine.exists()
    assert "no lesson is called '99'" in labkit("reset", "99", status=2)


def test_reset_twice_in_a_second_loses_neither_file(course, labkit, tmp_path):
    labkit("lab")
    mine = tmp_path / "work" / f"{LESSONS[0]}.ipynb"
    for line in ("# first", "# second"):
        edit(mine, line)
        labkit("reset", "01")
    kept = "".join(path.read_text() for path in mine.parent.glob("*.before-*.ipynb"))
    assert "# first" in kept and "# second" in kept


def test_progress_of_a_folder_and_a_line_a_learner_for_several(course, labkit, tmp_path, monkeypatch):
    labkit("lab")
    count = len(learner.table())
    answer("work", mask="right", affine="wrong")
    said = labkit("progress")
    assert said.splitlines()[-1] == f"1 of {count} solved"
    assert "mask ✓ solved" in said and "affine  ✗ tried" in said
    monkeypatch.chdir(tmp_path / "work" / "images")
    assert labkit("progress") == said
    monkeypatch.chdir(tmp_path)
    labkit("lab", "ada")
    answer("ada", mask="right", affine="right")
    assert labkit("progress", "work", "ada").splitlines() == [
        f"work: 1 of {count} solved, 1 tried", f"ada: 2 of {count} solved, 0 tried",
    ]  # fmt: skip
    assert "cache: this is no learner's folder" in labkit("progress", "work", "cache", status=2)


def test_in_a_fresh_clone_nothing_is_solved_whatever_the_cache_has(course, labkit, tmp_path):
    attempts = tmp_path / "cache" / "attempts" / "launch_overhead" / "verdicts.json"
    paths.write_text(attempts, json.dumps({"mask": "right"}))
    assert set(learner.table()["state"]) == {"○ open"}
    labkit("lab")
    assert labkit("progress").splitlines()[-1].startswith("0 of ")
    answer("work", mask="right")
    assert set(learner.table()["state"]) == {"○ open"}, "and the answers of a folder stay in it"
