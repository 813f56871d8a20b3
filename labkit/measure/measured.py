"""A figure that knows where it was measured."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, order=True)
class Measured:
    """A figure and where it comes from: measured now (live), read from a tape, or published by somebody.

    It adds, subtracts, multiplies and divides with plain numbers, and with figures of the same origin. With
    one of another device or kind the result is `MISSING`, as no figure may mix them.
    """

    value: float
    kind: Literal["live", "recorded", "published"]
    device: str
    """Empty for a figure that nobody measured."""

    def _with(self, other: "Measured | float", operation: Callable[[float, float], float]) -> "Measured":
        if not isinstance(other, Measured):
            return Measured(operation(self.value, other), self.kind, self.device)
        if (self.kind, self.device) != (other.kind, other.device):
            return MISSING
        return Measured(operation(self.value, other.value), self.kind, self.device)

    def __add__(self, other: "Measured | float") -> "Measured":
        return self._with(other, operator.add)

    def __sub__(self, other: "Measured | float") -> "Measured":
        return self._with(other, operator.sub)

    def __mul__(self, other: "Measured | float") -> "Measured":
        return self._with(other, operator.mul)

    def __truediv__(self, other: "Measured | float") -> "Measured":
        return self._with(other, operator.truediv)

    def __rtruediv__(self, other: float) -> "Measured":
        return self._with(other, lambda mine, over: over / mine)

    __radd__, __rmul__ = __add__, __mul__


MISSING = Measured(math.nan, "live", "")
"""A figure that nobody measured; what is computed from it is missing, too."""


def number(value: Measured | float | None) -> float | None:
    """The plain number; None for what nobody measured."""
    if isinstance(value, Measured):
        return value.value if value.device else None
    return value
