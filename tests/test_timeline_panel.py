"""The timeline with its slider: real widgets, both with and without somebody to move them."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from labkit import counts, figures, live, profiles, timeline_panel
from labkit.timeline_panel import TimelinePanel


def event(name: str, start: float, took: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, start_us=start, duration_us=took)


def profile_of(host: list[Any], kernels: list[Any], kind: str = "live") -> SimpleNamespace:
    return SimpleNamespace(host=host, kernels=kernels, kind=kind, device="NVIDIA H200", date="2026-01-02")


def two_kernels(kind: str = "live") -> SimpleNamespace:
    """Kernels at 100 to 120 and 160 to 170 us after the launch."""
    return profile_of(
        [event("launch", 5, 10)], [event("first", 105, 20), event("second", 165, 10)], kind=kind
    )


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def display(what: Any, **_: Any) -> None:
        found.append(what)

    monkeypatch.setattr(live, "get_ipython", object)
    monkeypatch.setattr(live, "display", display)
    monkeypatch.setattr("IPython.core.display_functions.display", display)
    return found


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float] | None]:
    """The windows that were drawn."""
    windows: list[tuple[float, float] | None] = []
    draw = figures.timeline

    def recording(*args: Any, **options: Any) -> figures.Shown:
        windows.append(options.get("window"))
        return draw(*args, **options)

    monkeypatch.setattr(figures, "timeline", recording)
    return windows


def panel(profile: Any = None, title: str = "t") -> TimelinePanel:
    profile = profile or two_kernels()
    return TimelinePanel(profile, figures.timeline(profile, title=title), title)


def test_headless_shows_the_figure_alone(shown: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(live.HEADLESS, "1")
    timeline_panel.timeline(two_kernels(), title="a title", note="a note")
    figure = figures.timeline(two_kernels(), title="a title", note="a note")
    assert shown == [{"text/html": figure._repr_html_(), "text/plain": figure.alt}]


@pytest.mark.parametrize(
    "profile", [profiles.Profile(counted=counts.Counts()), profile_of(host=[], kernels=[])]
)
def test_without_times_there_is_nothing_to_zoom_into(
    shown: list[Any], monkeypatch: pytest.MonkeyPatch, profile: Any
) -> None:
    monkeypatch.setenv(live.HEADLESS, "0")
    timeline_panel.timeline(profile, title="t")
    assert shown == [
        {
            "text/html": figures.timeline(profile, title="t")._repr_html_(),
            "text/plain": figures.timeline(profile, title="t").alt,
        }
    ]


def test_with_somebody_there_the_widget_comes_first_and_the_whole_figure_folded(
    shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(live.HEADLESS, "0")
    timeline_panel.timeline(two_kernels(), title="t")
    widget, twin = shown
    whole = figures.timeline(two_kernels(), title="t")._repr_html_()
    assert widget.children[-1].value == whole
    assert whole in twin["text/html"] and "<details>" in twin["text/html"]


def test_the_slider_spans_the_call_in_microseconds() -> None:
    made = panel()
    assert (made.range.min, made.range.max, made.range.value) == (0, 170, (0, 170))
    assert made.range.description == "Show µs"


def test_moving_the_slider_zooms() -> None:
    made = panel()
    made.range.value = (90, 130)
    assert "90 to 130 µs of 170 µs" in made.picture.value
    assert 'alt="t. Timeline of host and device, zoomed in' in made.picture.value


@pytest.mark.parametrize("kind", ["live", "recorded"])
def test_a_recorded_profile_is_zoomed_as_a_live_one_and_says_so(
    kind: str, shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(live.HEADLESS, "0")
    timeline_panel.timeline(two_kernels(kind), title="t")
    slider, _, picture = shown[0].children
    origin = f"{kind.capitalize()} on NVIDIA H200, 2026-01-02."
    assert origin in picture.value and origin in shown[1]["text/html"]
    slider.value = (90, 130)
    assert "zoomed in" in picture.value and origin in picture.value


def test_the_buttons() -> None:
    made = panel()
    whole = made.picture.value
    made.gap.click()
    assert made.range.value == (100, 170), "the gap, 120 to 160, and half as much on either side, to the end"
    assert "zoomed in" in made.picture.value
    made.whole.click()
    assert made.range.value == (0, 170)
    assert made.picture.value == whole


def test_without_a_gap_its_button_is_off() -> None:
    made = panel(profile_of(host=[event("launch", 0, 10)], kernels=[event("only", 5, 20)]))
    assert made.gap.disabled
    made.gap.click()
    assert made.range.value == (0, 25)


@pytest.mark.parametrize("place", [0.0, 85.0, 170.0])
def test_both_ends_on_one_place_still_show_something(
    place: float, drawn: list[tuple[float, float] | None]
) -> None:
    made = panel()
    made.range.value = (place, place)
    window = drawn[-1]
    assert window is not None
    assert 0 <= window[0] < window[1] <= 170
    assert window[1] - window[0] == pytest.approx(made.range.step)


@pytest.mark.parametrize("span", [0.5, 9.0, 170.0, 25000.0])
def test_the_readout_tells_steps_apart(span: float) -> None:
    made = panel(profile_of(host=[], kernels=[event("k", 0, span)]))
    steps = {format(i * made.range.step, made.range.readout_format) for i in range(40)}
    assert len(steps) == 40


def test_a_drag_is_drawn_at_most_ten_times_a_second_and_its_end_always(
    drawn: list[tuple[float, float] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = panel()
    draw, still = figures.timeline, figures.timeline(two_kernels(), title="t")

    def quick(*args: Any, window: tuple[float, float] | None = None, **options: Any) -> figures.Shown:
        """Only the last one is drawn: all of them would take a slow machine as long as the drag may."""
        if window == (50, 61):
            return draw(*args, window=window, **options)
        drawn.append(window)
        return still

    monkeypatch.setattr(figures, "timeline", quick)
    drawn.clear()

    async def drag() -> float:
        started = time.monotonic()
        for end in range(160, 60, -1):
            made.range.value = (50, end)
            await asyncio.sleep(0.004)
        await asyncio.sleep(0.3)
        return time.monotonic() - started

    took = asyncio.run(drag())
    assert 2 <= len(drawn) <= took / 0.1 + 1
    assert took < 8, "100 moves took so long that nothing had to be left out"
    assert drawn[-1] == (50, 61)
    assert "50 to 61 µs" in made.picture.value
