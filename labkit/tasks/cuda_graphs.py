"""The exercises of lesson 5."""

from labkit.tasks import (
    Task,
    graph_capture,
    graph_capture_hints,
    graph_museum,
    graph_museum_hints,
    graph_replay,
    graph_replay_hints,
    graph_safe,
    graph_safe_hints,
)

TASKS = {
    "capture": Task(
        "Capture it by hand", graph_capture.check, "graphed", "b55776f2394a", graph_capture_hints.SLIPS
    ),
    "replay": Task(
        "Predict the replay from the timeline",
        graph_replay.check,
        "replay_us",
        "7815b070b73a",
        graph_replay_hints.SLIPS,
    ),
    "safe": Task(
        "Write a kernel that a graph can replay",
        graph_safe.check,
        "scaled",
        "c8aeb6787b10",
        graph_safe_hints.SLIPS,
    ),
    "museum": Task(
        "Diagnose the exhibits", graph_museum.check, "diagnosis", "98ccf47b20de", graph_museum_hints.SLIPS
    ),
}
