"""The decks and the site as a browser shows them: nothing overflows, nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jupyter_lab
import pytest

from labkit import lessons, slides, website

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCREENS = [(1280, 720), (1920, 1080)]
OVERFLOW = """() => {
    const slide = Reveal.getCurrentSlide();
    const problems = [];
    if (slide.scrollHeight > 722) problems.push(`${slide.scrollHeight} pixels high`);
    for (const box of slide.querySelectorAll("pre, table, img, .jp-InputArea-editor")) {
        if (box.closest("details")) continue;
        const edge = slide.getBoundingClientRect(), scale = edge.width / 1280;
        const {right, bottom, height} = box.getBoundingClientRect();
        if (right > edge.right - 40 * scale) problems.push(`${box.tagName} is too wide`);
        if (bottom > edge.bottom - 4 * scale) problems.push(`${box.tagName} is too high`);
        if (box.tagName === "IMG" && height < 230 * scale) problems.push("a figure is tiny");
        if (box.tagName === "PRE" && box.scrollWidth > box.clientWidth + 2) problems.push("code is cut off");
    }
    return problems;
}"""
WALK = """() => {{
    const overflow = {overflow};
    const problems = {{}};
    for (let number = 1; number <= Reveal.getTotalSlides(); number++) {{
        const found = overflow();
        if (found.length) problems[number] = found;
        Reveal.next();
    }}
    return problems;
}}"""


def opened(browser: Browser, path: Path, width: int, height: int) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height})
    page.on(
        "request", lambda request: fetched.append(request.url) if request.url.startswith("http") else None
    )
    fetched: list[str] = []
    page.goto(path.as_uri())
    assert not fetched
    return page


@pytest.mark.parametrize("path", lessons.find(), ids=lambda path: path.stem)
def test_every_slide_fits(browser: Browser, path: Path, tmp_path: Path) -> None:
    (deck,) = slides.write([path], tmp_path)
    width, height = SCREENS[0]  # reveal.js scales: what fits one screen fits all of its shape
    page = opened(browser, deck, width, height)
    page.wait_for_function("window.Reveal && Reveal.isReady()")
    assert page.evaluate(WALK.format(overflow=OVERFLOW)) == {}
    assert page.evaluate("Reveal.isLastSlide()"), "the way through by one key ends at the end"
    page.close()


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of the site."""
    _, made = website.write([lessons.resolve("02")], tmp_path_factory.mktemp("site"))
    return made


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_a_page_of_the_site_is_no_wider_than_the_screen(
    browser: Browser, lesson: Path, width: int, height: int
) -> None:
    page = opened(browser, lesson, width, height)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    exercise = page.locator("main > details", has_text="Exercise:").first
    solution = exercise.get_by_text("Solution", exact=True)
    assert not solution.is_visible()
    exercise.locator("summary").first.click()
    solution.click()
    assert exercise.locator("pre").last.is_visible()
    page.screenshot(path=jupyter_lab.SCREENSHOTS / f"site-{width}.png")
    page.close()
