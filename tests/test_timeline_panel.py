"""The timeline with its slider: real widgets, both with and without somebody to move them."""

import asyncio
import time

import pytest
from drawn import event, profile_of

from labkit import counts, live, plots, profiles, timeline_panel
from labkit.timeline_panel import TimelinePanel


def two_kernels(kind="live"):
    """Kernels at 100 to 120 and 160 to 170 us after the launch."""
    kernels = [event("first", 105, 20), event("second", 165, 10)]
    return profile_of([event("launch", 5, 10)], kernels, kind=kind)


@pytest.fixture
def shown(monkeypatch):
    found = []
    monkeypatch.setenv(live.HEADLESS, "0")
    monkeypatch.setattr(live, "get_ipython", object)
    for where in (f"{live.__name__}.display", "IPython.core.display_functions.display"):
        monkeypatch.setattr(where, lambda what, **_: found.append(what))
    return found


@pytest.fixture
def drawn(monkeypatch):
    """The windows that were drawn."""
    windows, draw = [], plots.timeline

    def recording(*args, **options):
        windows.append(options.get("window"))
        return draw(*args, **options)

    monkeypatch.setattr(plots, "timeline", recording)
    return windows


def panel(profile=None):
    profile = profile or two_kernels()
    return TimelinePanel(profile, plots.timeline(profile, title="t"), "t")


@pytest.mark.parametrize(
    ("profile", "headless"),
    [(two_kernels(), "1"), (profiles.Profile(counted=counts.Counts()), "0"), (profile_of([], []), "0")],
    ids=["nobody there", "counted", "nothing"],
)
def test_without_somebody_or_without_times_the_figure_stands_alone(shown, monkeypatch, profile, headless):
    monkeypatch.setenv(live.HEADLESS, headless)
    timeline_panel.timeline(profile, title="a title", note="a note")
    figure = plots.timeline(profile, title="a title", note="a note")
    assert shown == [{"text/html": figure._repr_html_(), "text/plain": figure.alt}]


@pytest.mark.parametrize("kind", ["live", "recorded"])
def test_the_widget_comes_first_the_whole_figure_folded_and_the_slider_zooms(kind, shown):
    timeline_panel.timeline(two_kernels(kind), title="t")
    widget, twin = shown
    slider, _, picture = widget.children
    whole, origin = (
        plots.timeline(two_kernels(kind), title="t")._repr_html_(),
        f"{kind.capitalize()} on NVIDIA",
    )
    assert picture.value == whole and whole in twin["text/html"] and "<details>" in twin["text/html"]
    assert (slider.min, slider.max, slider.value, slider.description) == (0, 170, (0, 170), "Show µs")
    slider.value = (90, 130)
    assert "90 to 130 µs of 170 µs" in picture.value and origin in whole and origin in picture.value
    assert 'alt="t. Timeline of host and device, zoomed in' in picture.value


def test_the_buttons():
    made = panel()
    whole = made.picture.value
    made.gap.click()
    assert made.range.value == (100, 170), "the gap, 120 to 160, and half as much on either side, to the end"
    assert "zoomed in" in made.picture.value
    made.whole.click()
    assert made.range.value == (0, 170) and made.picture.value == whole
    without = panel(profile_of([event("launch", 0, 10)], [event("only", 5, 20)]))
    without.gap.click()
    assert without.gap.disabled and without.range.value == (0, 25)


@pytest.mark.parametrize("place", [0.0, 85.0, 170.0])
def test_both_ends_on_one_place_still_show_something(place, drawn):
    made = panel()
    made.range.value = (place, place)
    start, end = drawn[-1]
    assert 0 <= start < end <= 170 and end - start == pytest.approx(made.range.step)


def test_a_drag_is_drawn_at_most_ten_times_a_second_and_its_end_always(monkeypatch):
    windows, draw, still = [], plots.timeline, plots.timeline(two_kernels(), title="t")
    made = panel()

    def quick(*args, window=None, **options):
        """Only the last one is drawn: all of them would take a slow machine as long as the drag may."""
        windows.append(window)
        return draw(*args, window=window, **options) if window == (50, 61) else still

    async def drag():
        started = time.monotonic()
        for end in range(160, 60, -1):
            made.range.value = (50, end)
            await asyncio.sleep(0.004)
        await asyncio.sleep(0.3)
        return time.monotonic() - started

    monkeypatch.setattr(plots, "timeline", quick)
    took = asyncio.run(drag())
    assert took < 8, "100 moves took so long that nothing had to be left out"
    assert 2 <= len(windows) <= took / 0.1 + 1 and windows[-1] == (50, 61)
    assert "50 to 61 µs" in made.picture.value
