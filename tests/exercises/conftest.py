"""One process for the answers to all lessons."""

import os

import pytest

from labkit import child_process, notebooks
from labkit.exercises import judge


@pytest.fixture(scope="session")
def process_of_all_lessons():
    lessons = [notebooks.name_of(path) for path in notebooks.find()]
    environment = os.environ | judge.ENVIRONMENT
    process = child_process.PreloadedProcess(judge.prepare, *lessons, environment=environment)
    yield process
    process.close()


@pytest.fixture
def one_process(process_of_all_lessons, monkeypatch):
    """One process judges the answers to all lessons: to start one for each takes three seconds."""
    monkeypatch.setattr(judge, "process", lambda lesson: process_of_all_lessons)
