"""The exercises of lesson 2."""

from labkit.tasks import Task, pays, pays_hints, ragged, ragged_hints, swiglu, swiglu_hints

TASKS = {
    "ragged": Task("Find the missing mask", ragged.check, "ragged", "781e87c9a1e1", ragged_hints.SLIPS),
    "swiglu": Task("Write the SwiGLU epilogue", swiglu.check, "swiglu", "30c86e87f157", swiglu_hints.SLIPS),
    "pays": Task("Predict whether fusing pays", pays.check, "speedup", "73d0f8598d28", pays_hints.SLIPS),
}
