"""The line above a lesson: how kernels run here, and how figures are labelled."""

import html

from IPython.display import HTML

from labkit import backend


def banner() -> HTML:
    """One line for a lesson's first cell."""
    how = f"{html.escape(backend.sentence())} " if backend.reason else ""
    kinds = "Every figure says whether it is live (this machine, now), recorded, or published."
    return HTML(f"<p><small>{how}{kinds}</small></p>")
