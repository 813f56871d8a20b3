"""Helpers of the course: measure, check, inspect and draw GPU kernels.

``import labkit as lab`` gives a lesson the names in `FACE`, each imported when it is first used.
"""

import importlib
from typing import Any

from labkit import backend

__version__ = "0.1.0"

backend.decide()

FACE = {
    "captured": "exercises.simulated_layers.captured",
    "check": "measure.correctness.check",
    "claim": "display.say.claim",
    "compile": "measure.codegen.compile",
    "cuda": "exercises.simulated_layers.cuda",
    "guess": "display.say.guess",
    "kernels": "kernels",
    "lesson": "exercises.tasks.lesson",
    "measured": "display.numbers.measured",
    "profile": "display.numbers.profile",
    "published": "display.numbers.published",
    "race": "display.table.race",
    "roofs": "display.numbers.roofs",
    "sweep": "display.sweep.sweep",
    "work": "work",
}
"""Where each name of the face is defined, below this package."""


def __getattr__(name: str) -> Any:
    if name not in FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, member = FACE[name].rpartition(".")
    found = importlib.import_module(f"labkit.{module or member}")
    return getattr(found, member) if module else found


def __dir__() -> list[str]:
    return sorted({*globals(), *FACE})
