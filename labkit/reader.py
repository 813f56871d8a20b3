"""Is somebody there who looks at this kernel's cells? Bottom of the package: it imports nothing of labkit."""

import os

from IPython.core.getipython import get_ipython

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
