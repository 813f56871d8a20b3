"""Whether anybody is there, and the plain copy of a widget."""

import os

import ipywidgets
import pytest

from labkit.display import style
from labkit.widgets import static


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """A kernel that no front end opened, without anything said about readers."""
    monkeypatch.delenv("LABKIT_HEADLESS", raising=False)
    for name in ("JPY_SESSION_NAME", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    for name in list(os.environ):
        if name.startswith("VSCODE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(static, "get_ipython", object)
    monkeypatch.setattr(style, "get_ipython", object)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JPY_SESSION_NAME", "01.ipynb"), ("VSCODE_PID", "7"), ("COLAB_RELEASE_TAG", "release"),
        ("KAGGLE_KERNEL_RUN_TYPE", "Interactive"),
    ],
)  # fmt: skip
def test_a_front_end_names_itself_and_a_kernel_of_papermill_has_nobody(monkeypatch, name, value):
    assert not style.interactive()
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert not style.interactive()
    monkeypatch.setenv(name, value)
    assert style.interactive()
    monkeypatch.setattr(style, "get_ipython", lambda: None)
    assert not style.interactive(), "plain Python, though its terminal belongs to an editor"


@pytest.mark.parametrize(("value", "expected"), [("1", False), ("0", True), ("", True)])
def test_who_runs_the_notebook_may_say_it(monkeypatch, value, expected):
    monkeypatch.setenv("JPY_SESSION_NAME", "a.ipynb")
    monkeypatch.setenv("LABKIT_HEADLESS", value)
    assert style.interactive() is expected
    monkeypatch.setattr(style, "get_ipython", lambda: None)
    assert style.interactive() is (value == "0"), "widgets may be asked for anywhere"


def test_a_static_copy_stands_alone_or_folded_beneath_a_widget_and_can_be_updated(monkeypatch):
    page = []

    def display(what, display_id=None, update=False, **_):
        page.append((display_id, update, what))

    monkeypatch.setattr(static, "display", display)
    monkeypatch.setattr("IPython.core.display_functions.display", display)
    copy, widget = static.StaticCopy("<b>1</b>", "one"), ipywidgets.HTML("x")
    copy.update("<b>2</b>", "two")
    assert page == [], "nothing stands there yet"
    copy.show()
    copy.show(widget)
    copy.update("<b>3</b>", "three")
    (first, *alone), (_, _, above), (second, _, beneath), (third, update, after) = page
    assert alone == [False, {"text/html": "<b>2</b>", "text/plain": "two"}] and above is widget
    assert beneath["text/html"].startswith("<details><summary>") and "<b>2</b>" in beneath["text/html"]
    assert update and "<b>3</b>" in after["text/html"] and after["text/plain"] == "three"
    assert first == second == third is not None, "both places follow"


def test_plain_python_gets_the_words(monkeypatch, capsys):
    monkeypatch.setattr(static, "get_ipython", lambda: None)
    static.StaticCopy("<b>1</b>", "one").show()
    assert capsys.readouterr().out == "one\n"
