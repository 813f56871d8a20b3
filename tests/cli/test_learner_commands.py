"""The learner's commands: where they work, and what they say."""

import os
import sys

import pytest
from click.testing import CliRunner

from labkit.cli import learner_commands
from labkit.cli.main import cli
from labkit.lessons import learner_folder, notebooks


@pytest.fixture
def labkit(tmp_path, monkeypatch):
    """Runs a command in an empty folder; of `lab` it returns what would be started, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(learner_folder.FOLDER_VARIABLE, "")
    monkeypatch.setattr(learner_folder, "edited", lambda: [])
    started = []
    monkeypatch.setattr(os, "execv", lambda python, arguments: started.append(arguments))

    def run(*arguments, status=0):
        ran = CliRunner().invoke(cli, arguments)
        monkeypatch.setenv(learner_folder.FOLDER_VARIABLE, "")
        assert ran.exit_code == status, ran.output
        return ran.output, started

    return run


def test_lab_opens_a_folder_with_the_lessons_and_passes_on_jupyters_options(labkit, tmp_path):
    said, started = labkit("lab", "--no-browser")
    assert said.startswith("Copied into work: 01_launch_overhead, ")
    said, started = labkit("lab", "mine", "--ServerApp.port=0", "--no-browser")
    assert (tmp_path / "mine" / "01_launch_overhead.ipynb").exists()
    for arguments, folder, options in zip(
        started, ("work", "mine"), ([], ["--ServerApp.port=0"]), strict=True
    ):
        assert arguments[:3] == [sys.executable, "-m", "labkit.cli.lab_server"]
        assert {"--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={tmp_path / folder}"} <= {*arguments}
        assert arguments[-1 - len(options) :] == [*options, "--no-browser"]
    said, _ = labkit("lab", str(notebooks.paths.NOTEBOOKS), status=2)
    assert "name a folder of your own" in said


def test_lab_offers_to_move_edits_of_published_lessons(labkit, tmp_path, monkeypatch):
    monkeypatch.setattr(learner_folder, "edited", lambda: [tmp_path / "01_launch_overhead.ipynb"])
    said, _ = labkit("lab")  # nobody is there to be asked
    assert said.startswith("You have edited published lessons") and "01_launch_overhead.ipynb." in said
    monkeypatch.setattr(learner_commands, "is_somebody_there", lambda: True)
    monkeypatch.setattr(learner_folder, "move_edits", lambda folder, lessons: [f"moved into {folder}"])
    for answer, moved in ((True, True), (False, False)):
        monkeypatch.setattr(learner_commands.click, "confirm", lambda question, answer=answer: answer)
        said, _ = labkit("lab")
        assert ("moved into work" in said) == moved


def test_progress_and_reset_are_about_the_learners_folder(labkit, tmp_path, monkeypatch):
    for command in (["progress"], ["reset", "01"], ["progress", "--folder", "mine"]):
        said, _ = labkit(*command, status=2)
        assert "`labkit lab` makes one" in said
    labkit("lab")
    verdicts = tmp_path / "work" / ".labkit" / "attempts" / "launch_overhead" / "verdicts.json"
    verdicts.parent.mkdir(parents=True)
    verdicts.write_text('{"mask": {"status": "right"}, "graph": {"status": "wrong"}}')
    said, _ = labkit("progress")
    assert "01_launch_overhead       mask ✓ solved      0" in said and "graph  ✗ tried" in said
    assert said.splitlines()[-1].startswith("1 of ")
    monkeypatch.chdir(tmp_path / "work")
    said, _ = labkit("reset", "01")
    assert said.startswith("01_launch_overhead.ipynb is as published. Yours is 01_launch_overhead.before-")
    assert "Reload Notebook from Disk" in said and not verdicts.exists()
    assert labkit("progress")[0].splitlines()[-1].startswith("0 of ")
