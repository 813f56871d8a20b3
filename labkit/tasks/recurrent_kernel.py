"""The exercises of lesson 7."""

from labkit.tasks import (
    Task,
    recurrence_loop,
    recurrence_loop_hints,
    recurrence_reset,
    recurrence_reset_hints,
    rms_original,
    rms_original_hints,
)

TASKS = {
    "original": Task(
        "Mend the published backward",
        rms_original.check,
        "rms_norm_grad",
        "779766a3842e",
        rms_original_hints.SLIPS,
    ),
    "recurrence": Task(
        "Complete the loop over time",
        recurrence_loop.check,
        "recurrence",
        "a672ea31f7e4",
        recurrence_loop_hints.SLIPS,
    ),
    "reset": Task(
        "Begin anew where an episode does",
        recurrence_reset.check,
        "with_reset",
        "dc6ee6833d95",
        recurrence_reset_hints.SLIPS,
    ),
}
