"""Whether somebody is there to press buttons, and the static copy that stands beside every widget.

A widget is only a view of a running kernel: on a saved page, in an untrusted notebook or on GitHub it is
an error message. So each panel also leaves plain HTML, folded beneath the widget where there is one.
"""

import os
from typing import Any

import ipywidgets
import pandas as pd
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

HEADLESS = "LABKIT_HEADLESS"
"""Set to 1 where notebooks are executed without a reader, to 0 to have widgets whatever the environment."""


def interactive() -> bool:
    """Whether a person may be looking at this kernel's cells: in JupyterLab, Notebook 7, VS Code or Colab.

    papermill, nbconvert, nbval and plain Python have nobody who could press a button.
    """
    chosen = os.environ.get(HEADLESS)
    if chosen:
        return chosen == "0"
    if get_ipython() is None:
        return False
    # Jupyter's server names the session of every kernel that a front end opens; VS Code starts its own;
    # Kaggle also runs whole notebooks, as a batch.
    if "COLAB_RELEASE_TAG" in os.environ or os.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Interactive":
        return True
    return "JPY_SESSION_NAME" in os.environ or any(name.startswith("VSCODE_") for name in os.environ)


def table_html(table: pd.DataFrame) -> str:
    """A table of texts as HTML: whole sentences, on the left of their columns, nothing in them markup."""
    left = {"selector": "th, td", "props": "text-align: left"}
    return table.style.hide(axis="index").format(escape="html").set_table_styles([left]).to_html()


class StaticCopy:
    """What a widget shows, as plain HTML in the saved notebook."""

    def __init__(self, html: str = "", text: str = "") -> None:
        self.html, self.text = html, text
        self._handle, self._shown, self._folded = DisplayHandle(), False, False

    def show(self, widget: ipywidgets.Widget | None = None) -> None:
        """Show the widget with the copy folded beneath it, or without a widget the copy alone."""
        if get_ipython() is None:  # plain Python: no page to put HTML on
            print(self.text)
            return
        self._shown, self._folded = True, widget is not None
        if widget is not None:
            display(widget)
        self._handle.display(self._bundle(), raw=True)

    def update(self, html: str, text: str) -> None:
        """Replace what is shown, wherever it stands in the notebook."""
        self.html, self.text = html, text
        if self._shown:
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, Any]:
        summary = "The same as plain text and picture, for a page without a running kernel"
        folded = f"<details><summary>{summary}</summary>{self.html}</details>"
        return {"text/html": folded if self._folded else self.html, "text/plain": self.text}
