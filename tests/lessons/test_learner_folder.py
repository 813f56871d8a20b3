"""A learner's folder: what is copied, what is never written over, what is carried over."""

import json
import shutil
import subprocess

import pytest

from labkit import paths
from labkit.lessons import learner_folder, notebooks

LESSON = "01_launch_overhead"


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A published course of two lessons, outside the clone, and a cache of its own."""
    published = tmp_path / "course" / "notebooks"
    published.mkdir(parents=True)
    (published / "images").mkdir()
    (published / "images" / "picture.svg").write_text("<svg/>")
    for name in (LESSON, "05_cuda_graphs"):
        shutil.copy(paths.NOTEBOOKS / f"{name}.ipynb", published)
    monkeypatch.setattr(paths, "NOTEBOOKS", published)
    monkeypatch.setattr(paths, "CHECKOUT", published.parent)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(learner_folder.FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    return published


def edit(path, line="# mine"):
    """Save a notebook with one more line in its last cell, as JupyterLab would."""
    notebook = json.loads(path.read_text())
    cell = notebook["cells"][-1]
    cell["source"] = "".join(cell["source"]) + f"\n{line}\n"
    path.write_text(json.dumps(notebook, indent=1))


def names(folder):
    return sorted(path.name for path in folder.glob("*.ipynb"))


def test_a_folder_gets_every_lesson_without_outputs_and_a_second_time_nothing(course, tmp_path):
    folder = tmp_path / "work"
    assert learner_folder.open_folder(folder) == [f"Copied into work: {LESSON}, 05_cuda_graphs."]
    assert learner_folder.open_folder(folder) == []
    assert names(folder) == [f"{LESSON}.ipynb", "05_cuda_graphs.ipynb"]
    assert (folder / "images" / "picture.svg").exists()
    cells = notebooks.read(folder / f"{LESSON}.ipynb").cells
    published = notebooks.read(course / f"{LESSON}.ipynb").cells
    wanted = [cell.source for cell in published if notebooks.COLAB not in notebooks.tags(cell)]
    assert [cell.source for cell in cells] == wanted and len(wanted) == len(published) - 1
    assert not any(cell.get("outputs") for cell in cells)


def test_a_lesson_that_changed_replaces_an_untouched_one_and_stands_beside_an_edited_one(course, tmp_path):
    folder = tmp_path / "work"
    learner_folder.open_folder(folder)
    mine = folder / f"{LESSON}.ipynb"
    edit(mine)
    before = mine.read_bytes()
    for name in (LESSON, "05_cuda_graphs"):
        edit(course / f"{name}.ipynb", "# of the next version")
    first, second = learner_folder.open_folder(folder)
    (beside,) = set(names(folder)) - {f"{LESSON}.ipynb", "05_cuda_graphs.ipynb"}
    assert first == f"{LESSON} has changed: the new version is {beside}, yours is as it was."
    assert second == "05_cuda_graphs was brought up to date; you had not changed it."
    assert mine.read_bytes() == before
    assert "of the next version" in (folder / beside).read_text()
    assert "of the next version" in (folder / "05_cuda_graphs.ipynb").read_text()
    assert learner_folder.open_folder(folder) == [], "it is said once"
    edit(course / f"{LESSON}.ipynb", "# of the version after")
    learner_folder.open_folder(folder)
    assert len(names(folder)) == 4, "and a version of the same day has a name of its own"


def test_a_fresh_copy_keeps_the_old_file_and_forgets_the_verdicts(course, tmp_path):
    folder = tmp_path / "work"
    learner_folder.open_folder(folder)
    edit(folder / f"{LESSON}.ipynb")
    verdicts = folder / ".labkit" / "attempts" / "launch_overhead" / "verdicts.json"
    verdicts.parent.mkdir(parents=True)
    verdicts.write_text("{}")
    fresh, aside = learner_folder.reset(folder, "01")
    assert fresh.read_text() == learner_folder.handed_out(course / f"{LESSON}.ipynb")
    assert "# mine" in aside.read_text() and not verdicts.exists()
    fresh.unlink()
    assert learner_folder.reset(folder, "01") == (fresh, None)
    with pytest.raises(ValueError, match="no lesson is called '99'"):
        learner_folder.reset(folder, "99")


def test_answers_and_guesses_of_the_cache_are_carried_over_once(course, tmp_path):
    for name in ("attempts/launch_overhead", "predictions"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    (tmp_path / "cache" / "predictions" / "a.json").write_text("{}")
    said = learner_folder.open_folder(tmp_path / "work")
    assert [sentence.split(" were moved")[0] for sentence in said[1:]] == [
        "Your answers from before", "Your guesses from before",
    ]  # fmt: skip
    assert (tmp_path / "work" / ".labkit" / "predictions" / "a.json").exists()
    assert learner_folder.open_folder(tmp_path / "other") == [said[0].replace("work", "other")]


def test_the_learners_folder_is_the_named_one_or_the_nearest_above(course, tmp_path, monkeypatch):
    assert learner_folder.current() is None and learner_folder.state_folder() == tmp_path / "cache"
    learner_folder.open_folder(tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work" / "images")
    assert learner_folder.state_folder() == tmp_path / "work" / ".labkit"
    monkeypatch.setenv(learner_folder.FOLDER_VARIABLE, str(tmp_path / "named"))
    assert learner_folder.state_folder() == tmp_path / "named" / ".labkit"


def test_published_lessons_are_nobodys_folder(course):
    for folder in (course, course.parent):
        with pytest.raises(ValueError, match="name a folder of your own"):
            learner_folder.open_folder(folder)


def test_edits_of_published_lessons_move_into_the_folder_and_git_is_clean(course, tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(course.parent)]
    assert learner_folder.edited() == [], "outside a clone"
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "lessons"]):
        subprocess.run([*git, *command], check=True)
    lesson = course / f"{LESSON}.ipynb"
    lesson.write_text(lesson.read_text() + "\n")
    assert learner_folder.edited() == [], "the cells are the same"
    edit(lesson)
    assert learner_folder.edited() == [lesson]
    folder = tmp_path / "work"
    (sentence,) = learner_folder.move_edits(folder, [lesson])
    assert sentence == f"Your edits of {LESSON}.ipynb are in work/{LESSON}.ipynb now."
    status = subprocess.run([*git, "status", "--short"], check=True, capture_output=True, text=True)
    assert status.stdout == "" and "# mine" in (folder / f"{LESSON}.ipynb").read_text()
    assert learner_folder.open_folder(folder) == ["Copied into work: 05_cuda_graphs."]
    edit(lesson, "# again")
    learner_folder.move_edits(folder, [lesson])
    assert len(names(folder)) == 3 and "# again" not in (folder / f"{LESSON}.ipynb").read_text()
