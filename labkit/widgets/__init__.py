"""The widgets of a lesson: guess, claim, sweep over an axis.

Where nobody can press a button (papermill, CI) each of them does its work by itself and leaves plain HTML.
"""

import importlib
from typing import Any

FACE = dict(claim="claims", summary="claims", guess="guesses", sweep="sweep_panel")
"""The module of each name, imported when it is first used: who counts claims needs no torch."""


def __getattr__(name: str) -> Any:
    if name not in FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{FACE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *FACE})
