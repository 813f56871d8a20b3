"""Is somebody there to press buttons? And the static twin that stands beside every widget.

A widget is only a view of a running kernel: on a saved page, in an untrusted notebook or on GitHub it is
an error message. So each panel also leaves plain HTML, folded beneath the widget where there is one.
"""

from typing import Any

import ipywidgets
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from labkit.reader import HEADLESS, interactive

__all__ = ["HEADLESS", "Twin", "interactive"]


class Twin:
    """What a panel shows, as plain HTML in the saved notebook; ``update`` replaces it wherever it stands."""

    def __init__(self, html: str, text: str) -> None:
        self._handle = DisplayHandle()
        self._stands = False
        self._widget: ipywidgets.Widget | None = None
        self._bundle: dict[str, Any] = {}
        self._keep(html, text)

    def show(self, widget: ipywidgets.Widget | None = None) -> None:
        """Show the widget with the twin folded beneath it, or without a widget the twin alone."""
        self._widget = widget
        if get_ipython() is None:  # plain Python: no page to put HTML on
            print(self._bundle["text/plain"])
            return
        if widget is not None:
            display(widget)
        self._handle.display(self._folded(), raw=True)
        self._stands = True

    def update(self, html: str, text: str) -> None:
        """Put something newer in its place."""
        self._keep(html, text)
        if self._stands:
            self._handle.update(self._folded(), raw=True)

    def _keep(self, html: str, text: str) -> None:
        self._bundle = {"text/html": html, "text/plain": text}

    def _folded(self) -> dict[str, Any]:
        if self._widget is None:
            return self._bundle
        words = "The same as plain text and picture, for a page without a running kernel"
        folded = f"<details><summary>{words}</summary>{self._bundle['text/html']}</details>"
        return self._bundle | {"text/html": folded}
