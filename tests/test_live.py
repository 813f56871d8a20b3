"""The plain twin of a widget."""

import ipywidgets
import pytest

from labkit import live


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    monkeypatch.setattr(live, "get_ipython", object)


@pytest.fixture
def page(monkeypatch):
    """Displays and updates in order: (display id, whether it is an update, what)."""
    shown = []

    def display(what, raw=False, display_id=None, update=False, **_):
        shown.append((display_id, update, what))

    monkeypatch.setattr(live, "display", display)
    monkeypatch.setattr("IPython.core.display_functions.display", display)
    return shown


def test_without_a_widget_the_twin_is_the_page(page):
    live.Twin("<b>1</b>", "one").show()
    ((_, update, bundle),) = page
    assert bundle == {"text/html": "<b>1</b>", "text/plain": "one"} and not update


def test_beneath_a_widget_the_twin_is_folded(page):
    widget = ipywidgets.HTML("x")
    live.Twin("<b>1</b>", "one").show(widget)
    (_, _, first), (_, _, bundle) = page
    assert first is widget
    assert bundle["text/html"].startswith("<details><summary>") and "<b>1</b>" in bundle["text/html"]
    assert bundle["text/plain"] == "one"


def test_an_update_takes_the_place_of_what_stands_there(page):
    twin = live.Twin("<b>1</b>", "one")
    twin.update("<b>2</b>", "two")
    assert page == [], "nothing stands there yet"
    twin.show()
    twin.update("<b>3</b>", "three")
    (name, _, before), (updated, update, after) = page
    assert before["text/plain"] == "two" and after["text/plain"] == "three"
    assert update and name == updated is not None


def test_shown_twice_both_places_follow(page):
    twin = live.Twin("<b>1</b>", "one")
    twin.show()
    twin.show()
    assert page[0][0] == page[1][0], "one display id"


def test_plain_python_gets_the_words(monkeypatch, capsys, page):
    monkeypatch.setattr(live, "get_ipython", lambda: None)
    live.Twin("<b>1</b>", "one").show()
    assert capsys.readouterr().out == "one\n" and page == []
