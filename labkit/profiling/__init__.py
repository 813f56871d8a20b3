"""What was launched and compiled: profiles, launches counted without a GPU, PTX.

``lab.profiling.codegen`` and the others are imported when a lesson first uses them.
"""

import importlib
from types import ModuleType

MODULES = ("codegen", "kernel_names", "launch_counts", "profiles")


def __getattr__(name: str) -> ModuleType:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
