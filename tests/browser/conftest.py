"""A JupyterLab and a Chromium for the tests of this folder, which are skipped where one is missing."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import jupyter_lab
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LAB = pytest.StashKey[jupyter_lab.Lab]()


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium; skips where these tests cannot run."""
    for module in ("jupyterlab", "ipywidgets", "playwright"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"the browser tests need {module}, which is not installed in this environment")
    found = jupyter_lab.chromium()
    if found is None:
        names = ", ".join(jupyter_lab.CHROMIUM)
        pytest.skip(f"the browser tests need Chromium, and none of {names} runs here")
    return found


@pytest.fixture(scope="session")
def lab(
    chromium: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[jupyter_lab.Lab]:
    """One server for the session: `lab.add(...)` gives it notebooks."""
    server = jupyter_lab.Lab(tmp_path_factory.mktemp("lab"))
    request.config.stash[LAB] = server
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """A browser for one file: while it runs, this thread has an event loop, which other tests trip over."""
    with jupyter_lab.running_chromium(chromium) as running:
        yield running


@pytest.fixture
def page(
    lab: jupyter_lab.Lab, browser: Browser, request: pytest.FixtureRequest
) -> Iterator[jupyter_lab.NotebookPage]:
    """A page that `page.open(notebook)` opens, in a folder of the test's; the kernel ends with the test."""
    opened = jupyter_lab.NotebookPage(lab, browser, folder=slug(request.node))
    try:
        yield opened
    finally:
        opened.close()


def slug(item: pytest.Item) -> str:
    """A test's name, as a file may be called."""
    return re.sub(r"\W+", "-", item.name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """A failure comes with what the server and the page had to say, and with a picture."""
    report = yield
    server = item.config.stash.get(LAB, None)
    if report.failed and server is not None:
        report.sections.append(("JupyterLab's log", server.log_tail()))
        opened = getattr(item, "funcargs", {}).get("page")
        if opened is not None and report.when == "call":
            report.sections.append(("The page's errors", "\n".join(opened.errors)))
            report.sections.append(("The page", opened.last_sight(f"failed-{slug(item)}")))
    return report
