"""Claims under the name that lessons 2 to 9 were recorded with; new code uses `labkit.widgets`."""

from labkit.widgets.claims import claim, summary

__all__ = ["claim", "summary"]
