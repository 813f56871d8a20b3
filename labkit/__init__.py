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
    "Contender": "sweeps.Contender",
    "check": "checks.check",
    "claim": "claims.claim",
    "compile": "codegen.compile",
    "guess": "panels.predict",
    "has_gpu": "device.has_gpu",
    "kernels": "kernels",
    "lesson": "exercises.lesson.lesson",
    "no_gradient": "kernels.common.no_gradient",
    "panel": "panels",
    "plot": "plots",
    "profile": "profiles.profile",
    "published": "published",
    "roofs": "machine.roofs",
    "sweep": "results.sweep",
    "works": "works",
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
