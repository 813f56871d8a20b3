"""What `labkit bench` measures: for each suite the contenders and shapes of a lesson, a module a lesson."""

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module

from labkit.bench_plan import Part

MODULES = {
    "affine": "launch_overhead",
    "linear": "kernel_fusion",
    "geglu": "kernel_fusion",
    "grouped": "grouped_matmul",
    "graphs": "cuda_graphs",
    "rms_norm": "recurrent_kernel",
    "linear_recurrence": "recurrent_kernel",
    "rms_recurrence": "recurrent_kernel",
    "ledger": "microsecond_ledger",
}
"""The module that has a suite's parts: a function of the suite's name gives them."""
NAMES = tuple(MODULES)
"""All suites, in the order of the lessons."""


def chosen(names: Iterable[str]) -> list[str]:
    """The named suites, each once, in the order of the lessons; all of them when none is named.

    ValueError for a name that is no suite.
    """
    wanted = set(names) or set(NAMES)
    unknown = sorted(wanted - set(NAMES))
    if unknown:
        raise ValueError(f"no suite is called {unknown[0]!r}; there are: {', '.join(NAMES)}")
    return [name for name in NAMES if name in wanted]


def parts(name: str, *, peers: bool) -> list[Part]:
    """The parts of a suite; with ``peers`` also the contenders from other packages.

    The lesson's kernels are loaded, nothing is measured.
    """
    made: list[Part] = getattr(import_module(f"{__name__}.{MODULES[name]}"), name)()
    named = [replace(part, suite="/".join(filter(None, ("bench", name, part.suite)))) for part in made]
    return named if peers else [part.without_peers() for part in named]
