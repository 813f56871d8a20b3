"""The static copy that stands beside every widget.

A widget is only a view of a running kernel: on a saved page, in an untrusted notebook or on GitHub it is
an error message. So each panel also leaves plain HTML, folded beneath the widget where there is one.
"""

from typing import Any

import ipywidgets
import pandas as pd
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display


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
