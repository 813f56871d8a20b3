"""The exercises of lesson 5."""

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
        "557696f320d4",
        rms_original_hints.SLIPS,
    ),
    "recurrence": Task(
        "Complete the loop over time",
        recurrence_loop.check,
        "recurrence",
        "a912e4498e07",
        recurrence_loop_hints.SLIPS,
    ),
    "reset": Task(
        "Begin anew where an episode does",
        recurrence_reset.check,
        "with_reset",
        "b9d1d6106aa9",
        recurrence_reset_hints.SLIPS,
    ),
}
