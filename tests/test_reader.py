"""Whether anybody is there."""

import os

import pytest

from labkit import reader


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """A kernel that no front end opened, without anything said about readers."""
    monkeypatch.delenv(reader.HEADLESS, raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    for name in list(os.environ):
        if name.startswith("VSCODE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(reader, "get_ipython", object)


def test_a_kernel_of_papermill_has_nobody():
    assert not reader.interactive()


@pytest.mark.parametrize("name", ["JPY_SESSION_NAME", "VSCODE_PID"])
def test_a_front_end_names_itself(monkeypatch, name):
    monkeypatch.setenv(name, "something")
    assert reader.interactive()
    monkeypatch.setattr(reader, "get_ipython", lambda: None)
    assert not reader.interactive(), "plain Python, though its terminal belongs to an editor"


@pytest.mark.parametrize(("value", "expected"), [("1", False), ("0", True), ("", True)])
def test_who_runs_the_notebook_may_say_it(monkeypatch, value, expected):
    monkeypatch.setenv("JPY_SESSION_NAME", "a.ipynb")
    monkeypatch.setenv(reader.HEADLESS, value)
    assert reader.interactive() is expected
    monkeypatch.setattr(reader, "get_ipython", lambda: None)
    assert reader.interactive() is (value == "0"), "widgets may be asked for anywhere"
