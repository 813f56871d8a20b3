"""The decks as a browser shows them: readable, nothing runs over the edge, nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from labkit.cli import slides
from labkit.lessons import notebooks

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SCREENS = [(1280, 720), (1920, 1080)]
SMALLEST = 15
"""Pixels, on a slide 720 high, that letters have at least: so many as 30 lines of code leave."""
SIZES = """() => {
    const texts = document.createTreeWalker(Reveal.getCurrentSlide(), NodeFilter.SHOW_TEXT);
    const sizes = {};
    while (texts.nextNode()) {
        const {data, parentElement: box} = texts.currentNode;
        if (!data.trim() || !box.checkVisibility()) continue;
        const size = parseFloat(getComputedStyle(box).fontSize) * (box.currentCSSZoom ?? 1);
        sizes[data.trim()] = Math.min(size, sizes[data.trim()] ?? size);
    }
    return sizes;
}"""
OVERFLOW = """() => {
    const slide = Reveal.getCurrentSlide();
    const problems = [];
    if (slide.scrollHeight > 722) problems.push(`${slide.scrollHeight} pixels high`);
    for (const box of slide.querySelectorAll("pre, table, img, .jp-InputArea-editor")) {
        if (box.closest("details") || !box.checkVisibility()) continue;
        const edge = slide.getBoundingClientRect(), scale = edge.width / 1280;
        const {right, bottom, height} = box.getBoundingClientRect();
        if (right > edge.right - 40 * scale) problems.push(`${box.tagName} is too wide`);
        if (bottom > edge.bottom - 4 * scale) problems.push(`${box.tagName} is too high`);
        const strip = box.naturalWidth > 4 * box.naturalHeight;  // the axis of a guess
        if (box.tagName === "IMG" && !strip && height < 230 * scale) problems.push("a figure is tiny");
        if (box.tagName === "PRE" && box.scrollWidth > box.clientWidth + 2) problems.push("code is cut off");
    }
    return problems;
}"""
WALK = """() => {{
    const overflow = {overflow}, sizes = {sizes};
    const problems = {{}};
    for (let number = 1; number <= Reveal.getTotalSlides(); number++) {{
        const found = overflow();
        for (const [text, size] of Object.entries(sizes())) {{
            if (size < {smallest}) found.push(`${{size}} pixels: ${{text}}`);
        }}
        if (found.length) problems[number] = found;
        Reveal.next();
    }}
    return problems;
}}"""


@pytest.mark.parametrize("path", notebooks.find(), ids=lambda path: path.stem)
def test_every_slide_fits_and_can_be_read(browser: Browser, path: Path, tmp_path: Path) -> None:
    (deck,) = slides.write([path], tmp_path)
    width, height = SCREENS[0]  # reveal.js scales: what fits one screen fits all of its shape
    page, fetched = browser.new_page(viewport={"width": width, "height": height}), []
    page.on("request", lambda sent: fetched.append(sent.url) if sent.url.startswith("http") else None)
    page.goto(deck.as_uri())
    page.wait_for_function("window.Reveal && Reveal.isReady()")
    assert page.evaluate(WALK.format(overflow=OVERFLOW, sizes=SIZES, smallest=SMALLEST)) == {}
    assert page.evaluate("Reveal.isLastSlide()"), "the way through by one key ends at the end"
    assert fetched == []
    page.close()
