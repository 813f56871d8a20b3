"""One line about a wait: beneath the cell that waits, or on the terminal."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle

from labkit import places, reader

FILE = "LABKIT_QUEUE_LINE"
"""Names the file that has the line where nobody looks at the notebook: who executes it may tell."""
_shown: DisplayHandle | None = None
"""What stands beneath the waiting cell now; only one thread of a process waits at a time."""


def tell(words: str) -> None:
    """Show the line, or what it says now; with "" the wait is over.

    In a notebook that nobody looks at nothing is shown: the line would stay in what is saved.
    """
    global _shown
    if get_ipython() is None:
        if words:
            print(words, file=sys.stderr, flush=True)
        return
    if not reader.interactive():
        if file := os.environ.get(FILE):
            with suppress(OSError):
                places.write_text(Path(file), words)
        return
    bundle = {"text/plain": words}
    if _shown is not None:
        _shown.update(bundle, raw=True)
    elif words:
        _shown = DisplayHandle()
        _shown.display(bundle, raw=True)
    if not words:
        _shown = None
