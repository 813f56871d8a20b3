"""A number that knows where it comes from."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal


def _arithmetic(
    operation: Callable[[float, float], float],
) -> Callable[["Measured", "Measured | float"], "Measured"]:
    """A method that applies an operation to a figure and another one, or a plain number."""

    def method(self: "Measured", other: "Measured | float") -> "Measured":
        if not isinstance(other, Measured):
            return replace(self, value=operation(self.value, other))
        if (self.kind, self.device) != (other.kind, other.device):
            return MISSING
        return replace(self, value=operation(self.value, other.value))

    return method


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

    __add__ = __radd__ = _arithmetic(operator.add)
    __mul__ = __rmul__ = _arithmetic(operator.mul)
    __sub__ = _arithmetic(operator.sub)
    __rsub__ = _arithmetic(lambda value, other: other - value)
    __truediv__ = _arithmetic(operator.truediv)
    __rtruediv__ = _arithmetic(lambda value, other: other / value)

    def __getitem__(self, name: str) -> "Measured":
        """Of a table that nobody measured every entry is missing, too."""
        if self.device:
            raise TypeError("a figure is no table")
        return self

    def __float__(self) -> float:
        """The number; nan where nobody measured it."""
        return self.value

    def __format__(self, spec: str) -> str:
        """The number as ``f"{time:.1f}"`` writes it; nan where nobody measured it."""
        return format(self.value, spec) if spec else str(self)


MISSING = Measured(math.nan, "live", "")
"""A figure that nobody measured; what is computed from it is missing, too."""
