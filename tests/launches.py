"""Launches that are recorded instead of made: meta tensors go through the host's part of the work."""

import inspect
import math
from typing import Any, NamedTuple

ROOM = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
"""KiB of shared memory that one block may use; a multiprocessor has 1 KiB more."""
FAMILIES = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""Targets that differ in what a product is made of: sm_89 has the unit, copies and memory of sm_86."""
POINTWISE = ("sm_80", "sm_90", "sm_120")
"""The oldest, that of an H200, and the newest with the least memory: enough where there is no product."""


class Launch(NamedTuple):
    """A launch that was recorded; its arguments are attributes too."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        given = {**self.arguments, **self.options}
        if name not in given:
            raise AttributeError(f"{self.title} has no argument {name}")
        return given[name]

    @property
    def title(self) -> str:
        return str(self.kernel.fn.__name__)


class Recorder:
    """Stands in the place of a kernel."""

    def __init__(self, kernel: Any, made: list[Launch]) -> None:
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            assert math.prod(grid) > 0, "an empty grid writes nothing"
            names = [name for name in inspect.signature(self.kernel.fn).parameters if name not in options]
            self.made.append(Launch(self.kernel, grid, dict(zip(names, args, strict=True)), options))

        return launch
