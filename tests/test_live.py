"""The plain twin of a widget."""

import ipywidgets
import pytest

from labkit import live


@pytest.fixture
def page(monkeypatch):
    """Displays and updates in order: (display id, whether it is an update, what)."""
    shown = []

    def display(what, raw=False, display_id=None, update=False, **_):
        shown.append((display_id, update, what))

    monkeypatch.setattr(live, "get_ipython", object)
    monkeypatch.setattr(live, "display", display)
    monkeypatch.setattr("IPython.core.display_functions.display", display)
    return shown


def test_a_twin_stands_alone_or_folded_beneath_a_widget_and_can_be_updated(page):
    twin, widget = live.Twin("<b>1</b>", "one"), ipywidgets.HTML("x")
    twin.update("<b>2</b>", "two")
    assert page == [], "nothing stands there yet"
    twin.show()
    twin.show(widget)
    twin.update("<b>3</b>", "three")
    (first, *alone), (_, _, above), (second, _, beneath), (third, update, after) = page
    assert alone == [False, {"text/html": "<b>2</b>", "text/plain": "two"}] and above is widget
    assert beneath["text/html"].startswith("<details><summary>") and "<b>2</b>" in beneath["text/html"]
    assert update and "<b>3</b>" in after["text/html"] and after["text/plain"] == "three"
    assert first == second == third is not None, "both places follow"


def test_plain_python_gets_the_words(monkeypatch, capsys, page):
    monkeypatch.setattr(live, "get_ipython", lambda: None)
    live.Twin("<b>1</b>", "one").show()
    assert capsys.readouterr().out == "one\n" and page == []
