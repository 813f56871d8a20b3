"""Is somebody there to press buttons? And the static twin that stands beside every widget.

A widget is only a view of a running kernel: on a saved page, in an untrusted notebook or on GitHub it is
an error message. So each panel also leaves plain HTML, folded beneath the widget where there is one.
"""

import os
from typing import Any

import ipywidgets
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

HEADLESS = "LABKIT_HEADLESS"
"""Set to 1 where notebooks are executed without a reader, to 0 to have widgets whatever the environment."""


def interactive() -> bool:
    """Whether a person may be looking at this kernel's cells: in JupyterLab, Notebook 7 or VS Code.

    papermill, nbconvert, nbval and plain Python have nobody who could press a button.
    """
    chosen = os.environ.get(HEADLESS)
    if chosen:
        return chosen == "0"
    if get_ipython() is None:
        return False
    # Jupyter's server names the session of every kernel that a front end opens; VS Code starts its own.
    return "JPY_SESSION_NAME" in os.environ or any(name.startswith("VSCODE_") for name in os.environ)


class Twin:
    """What a panel shows, as plain HTML in the saved notebook; ``update`` replaces it wherever it stands."""

    def __init__(self, html: str = "", text: str = "") -> None:
        self._handle, self._stands, self._folded = DisplayHandle(), False, False
        self.html, self.text = html, text

    def show(self, widget: ipywidgets.Widget | None = None) -> None:
        """Show the widget with the twin folded beneath it, or without a widget the twin alone."""
        if get_ipython() is None:  # plain Python: no page to put HTML on
            print(self.text)
            return
        self._stands, self._folded = True, widget is not None
        if widget is not None:
            display(widget)
        self._handle.display(self._bundle(), raw=True)

    def update(self, html: str, text: str) -> None:
        """Put something newer in its place."""
        self.html, self.text = html, text
        if self._stands:
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, Any]:
        words = "The same as plain text and picture, for a page without a running kernel"
        folded = f"<details><summary>{words}</summary>{self.html}</details>"
        return {"text/html": folded if self._folded else self.html, "text/plain": self.text}
