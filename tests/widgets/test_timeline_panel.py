"""The timeline with its slider: real widgets, both with and without somebody to move them."""

import pytest
from drawn import event, profile_of

from labkit import plots
from labkit.profiling import launch_counts, profiles
from labkit.widgets import static, timeline
from labkit.widgets.timeline_panel import timeline_widget


def two_kernels(kind="live"):
    """Kernels at 100 to 120 and 160 to 170 us after the launch."""
    kernels = [event("first", 105, 20), event("second", 165, 10)]
    return profile_of([event("launch", 5, 10)], kernels, kind=kind)


@pytest.fixture
def shown(monkeypatch):
    found = []
    monkeypatch.setenv(static.HEADLESS, "0")
    monkeypatch.setattr(static, "get_ipython", object)
    for where in (f"{static.__name__}.display", "IPython.core.display_functions.display"):
        monkeypatch.setattr(where, lambda what, **_: found.append(what))
    return found


@pytest.mark.parametrize(
    ("profile", "headless"),
    [
        (two_kernels(), "1"),
        (profiles.Profile(counted=launch_counts.Counts()), "0"),
        (profile_of([], []), "0"),
    ],
    ids=["nobody there", "counted", "nothing"],
)
def test_without_somebody_or_without_times_the_figure_stands_alone(shown, monkeypatch, profile, headless):
    monkeypatch.setenv(static.HEADLESS, headless)
    timeline(profile, title="a title")
    figure = plots.timeline(profile, title="a title")
    assert shown == [{"text/html": figure._repr_html_(), "text/plain": figure.alt}]


@pytest.mark.parametrize("kind", ["live", "recorded"])
def test_the_widget_comes_first_the_whole_figure_folded_and_the_slider_zooms(kind, shown):
    timeline(two_kernels(kind), title="t")
    widget, copy = shown
    slider, _, picture = widget.children
    whole = plots.timeline(two_kernels(kind), title="t")._repr_html_()
    origin = f"{kind.capitalize()} on NVIDIA"
    assert picture.value == whole and whole in copy["text/html"] and "<details>" in copy["text/html"]
    assert (slider.min, slider.max, slider.value, slider.description) == (0, 170, (0, 170), "Show µs")
    slider.value = (90, 130)
    assert "90 to 130 µs of 170 µs" in picture.value and origin in whole and origin in picture.value
    assert 'alt="t. Timeline of host and device, zoomed in' in picture.value


def test_the_buttons():
    seen, buttons, picture = timeline_widget(two_kernels(), "t").children
    (whole, gap), before = buttons.children, picture.value
    gap.click()
    assert seen.value == (100, 170), "the gap, 120 to 160, and half as much on either side, to the end"
    assert "zoomed in" in picture.value
    whole.click()
    assert seen.value == (0, 170) and picture.value == before
    _, buttons, _ = timeline_widget(
        profile_of([event("launch", 0, 10)], [event("only", 5, 20)]), "t"
    ).children
    assert [button.disabled for button in buttons.children] == [False, True], "there is no gap"


@pytest.mark.parametrize("place", [0.0, 85.0, 170.0])
def test_both_ends_on_one_place_still_show_something(place, monkeypatch):
    windows, draw, (seen, *_) = [], plots.timeline, timeline_widget(two_kernels(), "t").children

    def heard(*given, window, **how):
        windows.append(window)
        return draw(*given, window=window, **how)

    monkeypatch.setattr(plots, "timeline", heard)
    seen.value = (place, place)
    start, end = windows[-1]
    assert 0 <= start < end <= 170 and end - start == pytest.approx(seen.step)
