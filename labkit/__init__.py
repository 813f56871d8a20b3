"""Helpers of the course: measure, check, inspect and draw GPU kernels.

``import labkit as lab`` gives a lesson the names in `FACE`, each imported when it is first used.
"""

import importlib
import sys
from typing import Any

from labkit import backend

__version__ = "0.1.0"

backend.decide()

# nbformat imports jsonschema, and that a grammar of IRIs, which takes a second in every process and which no
# notebook is checked with. jsonschema does without a module that cannot be imported.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

FACE = {
    "Contender": "measure.contender.Contender",
    "captured": "exercises.stand_in.captured",
    "check": "measure.correctness.check",
    "claim": "widgets.claims.claim",
    "compile": "profiling.codegen.compile",
    "cuda": "exercises.stand_in.cuda",
    "custom_bytes": "measure.sweeps.custom_bytes",
    "custom_times": "measure.sweeps.custom_times",
    "gpu": "gpu",
    "graphed_step": "exercises.stand_in.graphed_step",
    "guess": "widgets.guesses.guess",
    "kernels": "kernels",
    "lesson": "exercises.lesson.lesson",
    "measured": "measure.results.measured",
    "no_gradient": "kernels.common.no_gradient",
    "panel": "widgets",
    "plot": "plots",
    "pool_bytes": "measure.memory.pool_bytes",
    "profile": "profiling.profiles.profile",
    "profiling": "profiling",
    "published": "workloads.published.published",
    "relative_error": "measure.correctness.relative_error",
    "roofs": "measure.roofline.roofs",
    "sweep": "measure.sweeps.sweep",
    "workloads": "workloads",
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
