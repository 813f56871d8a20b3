"""One command at a time for each lesson."""

import click
import pytest

from labkit import paths
from labkit.runs.exclusive import exclusive


def test_a_second_command_on_a_lesson_is_refused_and_one_on_another_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "BUILD", tmp_path)
    with exclusive("run-01"):
        with exclusive("run-02"):
            pass
        with (
            pytest.raises(click.ClickException, match="run-01: another command is at work on it"),
            exclusive("run-01"),
        ):
            pass
    with exclusive("run-01"):
        pass
