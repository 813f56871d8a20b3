"""JupyterLab as `make lab` starts it, and a notebook open in it in headless Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import processes
from nbformat.sign import NotebookNotary
from processes import wait_for

from labkit import paths
from labkit.exercises import learner

if TYPE_CHECKING:  # the tests are also collected where playwright is missing, to say so
    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page

TOKEN = "test"
SCREENSHOTS = paths.BUILD / "browser"
START_S = 60.0
"""How long the server, the page and a kernel may take to come up on a busy machine."""
ORPHAN_S = 1800
ENDS_WHEN_IDLE = ("ServerApp.shutdown_no_activity_timeout", "MappingKernelManager.cull_idle_timeout")
DIRECT_OUTPUT = ".jp-Cell-outputArea > .jp-OutputArea-child > .jp-OutputArea-output"
"""Not those that an Output widget has within."""
CHROMIUM = ("chromium", "google-chrome", "chromium-browser")
FLAGS = (
    "--no-sandbox",  # Chromium does not start as root with its sandbox, and containers forbid it
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
OVERRIDES = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    # A cell out of view has to have a size, a picture and buttons, as the ones in view have.
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}


def chromium() -> str | None:
    """The first Chromium on the PATH that runs; Ubuntu's may be a script that only speaks of snap."""
    for name in CHROMIUM:
        found = shutil.which(name)
        if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    return None


class Lab:
    """A running JupyterLab with its own folders for notebooks, settings, runtime files and labkit's cache."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "notebooks"
        self.cache = folder / "cache"
        self.log = folder / "jupyterlab.log"
        self._data, self._runtime, config = folder / "data", folder / "runtime", folder / "config"
        for each in (self.root, self.cache, self._data, self._runtime, config / "labconfig"):
            each.mkdir(parents=True)
        (config / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(OVERRIDES))
        # Like make lab without a GPU, but for the folders.
        environment = os.environ | {
            "PYTHONPATH": paths.python_path(),
            "TRITON_INTERPRET": "1",
            "LABKIT_CACHE": str(self.cache),
            "IPYTHONDIR": str(folder / "ipython"),
            "JUPYTER_CONFIG_DIR": str(config),
            "JUPYTER_DATA_DIR": str(self._data),
            "JUPYTER_RUNTIME_DIR": str(self._runtime),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        }
        environment.pop("LABKIT_HEADLESS", None)
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1"]
        command += ["--ServerApp.port=0", f"--ServerApp.root_dir={self.root}"]
        command += [f"--IdentityProvider.token={TOKEN}", "--expose-app-in-browser"]
        # Where the tests are killed before they can end it, it ends by itself.
        command += [f"--{name}={ORPHAN_S}" for name in ENDS_WHEN_IDLE]
        if os.getuid() == 0:
            command.append("--allow-root")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    @cached_property
    def url(self) -> str:
        """Where the server listens, ending in a slash; waits until it does."""
        return str(wait_for(self._answering, "JupyterLab listens", START_S))

    def _answering(self) -> str | None:
        """The server's address, once something answers there: it is written down a moment before."""
        if self.process.poll() is not None:
            raise RuntimeError(f"JupyterLab ended:\n{self.log_tail()}")
        try:
            (written,) = self._runtime.glob("jpserver-*.json")
            url = json.loads(written.read_text())["url"]
            urllib.request.urlopen(f"{url}api", timeout=20).close()
        except (ValueError, OSError):  # no file, half a file, nobody there
            return None
        return str(url)

    def add(self, notebook: Path | list[str], folder: str) -> str:
        """Put a copy of a notebook, or one made of these code cells, under the server; trusted.

        Returns its path as the server knows it.
        """
        if isinstance(notebook, Path):  # as labkit lab hands it out
            name, made = notebook.name, nbformat.reads(learner.handed_out(notebook), as_version=4)
        else:
            cells = [nbformat.v4.new_code_cell(cell) for cell in notebook]
            name, made = "notebook.ipynb", nbformat.v4.new_notebook(cells=cells)
        # Every notebook of ours runs on the kernel that make lab registers, the Python of these tests.
        made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = self.root / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(notebook, Path):
            shutil.copytree(notebook.parent / "images", path.parent / "images", dirs_exist_ok=True)
        nbformat.write(made, path)
        # What `jupyter trust` does: without it, JupyterLab shows saved widgets and HTML as text.
        NotebookNotary(data_dir=str(self._data)).sign(nbformat.read(path, as_version=4))
        return path.relative_to(self.root).as_posix()

    def end_kernels(self) -> None:
        """Shut down every kernel."""
        with urllib.request.urlopen(f"{self.url}api/kernels?token={TOKEN}", timeout=20) as answer:
            kernels = [kernel["id"] for kernel in json.load(answer)]
        for kernel in kernels:
            url = f"{self.url}api/kernels/{kernel}?token={TOKEN}"
            urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=20).close()

    def log_tail(self) -> str:
        """The end of what the server, and with it the kernels, have written."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def stop(self) -> None:
        """End the server; its kernels go with it."""
        processes.end(self.process, patience_s=10)


class NotebookPage:
    """A notebook in JupyterLab, as a reader has it: what they do is a method, what they see a locator.

    Cells are counted from 0, markdown ones too; ``index_of(text)`` finds one. Everything that starts cells
    waits for them unless told ``wait=False``.
    """

    def __init__(self, lab: Lab, browser: Browser, folder: str) -> None:
        self.lab, self._browser, self._folder = lab, browser, folder
        self.errors: list[str] = []
        """Errors of the page: uncaught exceptions and what was written to the console as an error."""

    def open(self, notebook: Path | list[str], *, width: int = 1280, height: int = 900) -> None:
        """Open a copy of a notebook, or one of these code cells, and wait until its kernel can be used."""
        self.path = self.lab.add(notebook, self._folder)
        size = {"width": width, "height": height}
        self.page: Page = self._browser.new_context(viewport=size, accept_downloads=True).new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._heard)
        self.page.goto(f"{self.lab.url}lab/tree/{self.path}?token={TOKEN}&reset")
        self._wait_ready()
        # The file browser takes a quarter of the width.
        self.page.evaluate("() => jupyterapp.commands.execute('application:toggle-left-area')")

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def _wait_ready(self) -> None:
        self.page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=START_S * 1000)
        self._wait_for_kernel()

    def _wait_for_kernel(self) -> None:
        """Wait until the kernel has answered a question and is idle."""
        # A cell that is run on a cold kernel is dropped without a word, and one that was started in the place
        # of a dead one may miss the first question and look unknown until it is asked again.
        wait_for(
            lambda: self.page.evaluate(
                """async () => {
                    const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
                    await session?.ready;
                    const kernel = session?.session?.kernel;
                    if (kernel?.connectionStatus !== 'connected') return false;
                    const late = new Promise(resolve => setTimeout(resolve, 2000, null));
                    const answer = await Promise.race([kernel.requestKernelInfo().catch(() => null), late]);
                    return answer && kernel.status === 'idle';
                }"""
            ),
            "the kernel answers",
            START_S,
        )
        self.page.wait_for_timeout(500)

    # ---- what a reader does -------------------------------------------------------------------------------

    def run_all(self, *, wait: bool = True, seconds: float = 120.0) -> None:
        """Run every cell, from the first."""
        self._command("notebook:run-all-cells")
        if wait:
            self.wait_idle(seconds)

    def run_cell(self, index: int, *, wait: bool = True, seconds: float = 60.0) -> None:
        """Run one cell."""
        self.page.evaluate("index => jupyterapp.shell.currentWidget.content.activeCellIndex = index", index)
        self._command("notebook:run-cell")
        if wait:
            self.wait_idle(seconds)

    def _command(self, name: str) -> None:
        """Start a command of JupyterLab's, and have the page count it until it is done."""
        self.page.evaluate(
            """name => {
                window.pending = (window.pending ?? 0) + 1;
                void jupyterapp.commands.execute(name).finally(() => { window.pending -= 1; });
            }""",
            name,
        )

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Wait until no cell runs or is queued and the kernel is idle."""
        self.page.wait_for_function(
            """() => {
                const kernel = jupyterapp.shell.currentWidget.sessionContext.session?.kernel;
                const idle = kernel?.connectionStatus === 'connected' && kernel.status === 'idle';
                return idle && !window.pending;
            }""",
            timeout=seconds * 1000,
            polling=100,
        )

    def save(self) -> None:
        """Save the notebook."""
        self.page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")

    def reload(self) -> None:
        """Reload the page; the kernel lives on."""
        self.page.reload()
        self._wait_ready()

    def set_source(self, index: int, source: str) -> None:
        """Write a cell's source anew."""
        self.page.evaluate(
            """([index, source]) =>
                jupyterapp.shell.currentWidget.content.widgets[index].model.sharedModel.setSource(source)""",
            [index, source],
        )

    def press(self, key: str) -> None:
        """Press a key where the focus is: "Tab", "Enter", "Space", "ArrowRight"."""
        self.page.keyboard.press(key)

    # ---- what a reader sees -------------------------------------------------------------------------------

    def sources(self) -> list[str]:
        """The source of each cell."""
        return list(
            self.page.evaluate(
                """() => jupyterapp.shell.currentWidget.content.widgets.map(
                    cell => cell.model.sharedModel.getSource())"""
            )
        )

    def index_of(self, text: str) -> int:
        """The index of the only cell with this text in its source; ValueError for none or several."""
        found = [index for index, source in enumerate(self.sources()) if text in source]
        if len(found) != 1:
            raise ValueError(f"cells with {text!r}: {found}")
        return found[0]

    def cell(self, index: int) -> Locator:
        """A cell, input and output."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> Locator:
        """What a cell shows, without the numbers in brackets."""
        return self.cell(index).locator(DIRECT_OUTPUT)

    def text(self, index: int) -> str:
        """The text of what a cell shows."""
        return "\n".join(self.output(index).all_inner_texts()).strip()

    def button(self, name: str, cell: int | None = None, disabled: bool | None = None) -> Locator:
        """The button with this label, in the notebook or in one cell's output; not JupyterLab's own.

        With ``disabled`` it is there only while it can, or cannot, be pressed.
        """
        within = self.page.locator(".jp-Notebook") if cell is None else self.output(cell)
        return within.get_by_role("button", name=name, exact=True, disabled=disabled)

    def says(self, cell: int, words: str | re.Pattern[str], seconds: float = 20.0) -> None:
        """Wait until the line of the panel in this cell's output says so."""
        line = self.output(cell).get_by_role("status").get_by_text(words)
        line.wait_for(timeout=1000 * seconds)

    def scroll_to(self, index: int) -> None:
        """Bring the top of a cell into view."""
        self.cell(index).evaluate("cell => cell.scrollIntoView({block: 'start'})")
        self.page.wait_for_timeout(200)

    def screenshot(self, name: str, cell: int | None = None) -> Path:
        """A picture for people to look at, of the window or of one whole cell: build/browser/<name>.png."""
        path = SCREENSHOTS / f"{name}.png"  # playwright makes the folder
        (self.page if cell is None else self.cell(cell)).screenshot(path=path)
        return path

    def last_sight(self, name: str) -> str:
        """Where a screenshot of a failed test is, or why there is none."""
        try:
            return str(self.screenshot(name))
        except Exception as error:  # never opened, or crashed: the failure itself is what has to be reported
            return f"no screenshot: {error}"

    def close(self) -> None:
        """Leave, and end the notebook's kernel."""
        if hasattr(self, "page"):
            self.page.context.close()
        self.lab.end_kernels()


@contextmanager
def running_chromium(path: str) -> Iterator[Browser]:
    """A headless browser."""
    from playwright.sync_api import sync_playwright  # not above: see TYPE_CHECKING

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
