"""Exercises: the learner's cell, judged in a process of its own; verdict, hints, solution, race."""

from typing import Any

FOR_NOTEBOOKS = ("ExerciseSession", "session", "solution_cells", "source_digest")


def __getattr__(name: str) -> Any:
    """What a notebook needs, imported late: the judge's process does without IPython and pandas."""
    if name not in FOR_NOTEBOOKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from labkit.exercises import lesson

    return getattr(lesson, name)
