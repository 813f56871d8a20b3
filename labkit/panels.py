"""The widgets under the names that lessons 2 to 9 were recorded with; new code uses `labkit.widgets`."""

from labkit.widgets import guess as predict
from labkit.widgets import sweep, timeline

__all__ = ["predict", "sweep", "timeline"]
