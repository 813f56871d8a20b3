"""The site as a browser shows it: built without a warning, opened from its folder, with nothing fetched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from labkit import paths

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PICTURES = paths.BUILD / "browser"
WIDE = """() => document.documentElement.scrollWidth - window.innerWidth"""
GROUNDS = """() => [...document.querySelectorAll(".bd-content img")].map(
    (image) => getComputedStyle(image).backgroundColor)"""


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make site` makes."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(folder)]
    built = subprocess.run(command, cwd=paths.CHECKOUT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def opened(browser: Browser, page: Path, width: int, scheme: str) -> tuple[Page, list[str]]:
    """A page of the site in a window, and what it asked of a network."""
    shown = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    fetched: list[str] = []
    shown.on("request", lambda sent: fetched.append(sent.url) if sent.url.startswith("http") else None)
    shown.goto(page.as_uri())
    shown.wait_for_load_state("load")
    return shown, fetched


def picture(shown: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    shown.screenshot(path=PICTURES / f"site-{name}.png")


def test_a_search_finds_and_leads_to_a_page(browser: Browser, site: Path) -> None:
    shown, fetched = opened(browser, site / "search.html", 1280, "light")
    shown.goto((site / "search.html").as_uri() + "?q=warp")
    found = shown.locator("#search-results li a")
    found.first.wait_for()
    assert found.count() > 1 and fetched == []
    picture(shown, "search")
    found.first.click()
    shown.wait_for_load_state("load")
    assert "warp" in shown.locator(".bd-content").inner_text().lower()
    shown.close()


def test_the_cheat_sheet_prints_on_one_sheet(browser: Browser, site: Path) -> None:
    shown, fetched = opened(browser, site / "docs" / "cheat_sheet.html", 1280, "light")
    printed = shown.pdf(format="A4", prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1 and fetched == []
    shown.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_a_lesson_is_readable(browser: Browser, site: Path, width: int, scheme: str) -> None:
    shown, fetched = opened(browser, site / "notebooks" / "01_launch_overhead.html", width, scheme)
    assert shown.evaluate(WIDE) <= 0, "the page runs over the edge"
    assert shown.locator("html").get_attribute("data-theme") == scheme
    grounds = set(shown.evaluate(GROUNDS))
    assert scheme == "light" or grounds == {"rgb(255, 255, 255)"}, "figures need a light ground of their own"
    solution = shown.locator("details", has_text="Solution").first
    assert not solution.locator("pre").first.is_visible()
    picture(shown, f"{scheme}-{width}")
    solution.locator("summary").click()
    assert solution.locator("pre").first.is_visible()
    assert shown.locator(".prev-next-footer a").count() and fetched == []
    shown.close()
