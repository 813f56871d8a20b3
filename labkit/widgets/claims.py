"""Sentences with a number in them, checked where they are read: held, not held, or needs a GPU.

A lesson states a finding with `claim(sentence, value, holds)`. The number is either plain (bytes, launches:
the same on every device, so it holds or not anywhere) or a `Measured`, which knows where it was measured.
Only a live measurement can hold *here*; a recorded or published one is shown as what it is.
"""

import html
import math
import os
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
from IPython.core.getipython import get_ipython
from IPython.display import display

from labkit.measure.results import Measured, number
from labkit.widgets.static import table_html

MIME = "application/vnd.labkit.claim+json"
RECORDING = "LABKIT_RECORDING"
"""Set to 1 while outputs are recorded: there, a claim that does not hold is an error."""

Status = Literal["held", "not held", "needs a GPU"]
Holds = Callable[[float], bool] | bool | None
HELD: Status = "held"
NOT_HELD: Status = "not held"
NEEDS_GPU: Status = "needs a GPU"

# Okabe-Ito colours: told apart by colour-blind readers; the symbol and the word say the same.
SYMBOLS: dict[Status, tuple[str, str]] = {
    HELD: ("✓", "#009E73"),
    NOT_HELD: ("✗", "#D55E00"),
    NEEDS_GPU: ("○", "#0072B2"),
}


class _NotMeasured:
    """A number that nobody measured: a dash, whatever the format asks for."""

    def __format__(self, spec: str) -> str:
        return "—"


@dataclass(frozen=True)
class Claim:
    """A sentence about a number, and whether it held on this device."""

    template: str
    value: float | None
    status: Status
    note: str = ""
    """Where the number comes from, and what became of the claim there; may be empty."""

    @property
    def sentence(self) -> str:
        """The sentence with its number filled in, "—" where there is none."""
        return self.template.format(value=_NotMeasured() if self.value is None else self.value)

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{SYMBOLS[self.status][0]} {self.status}: {self.sentence}{note}"

    def mimebundle(self) -> dict[str, Any]:
        """The claim as HTML, as text, and as data for whoever counts claims."""
        finite = self.value is not None and math.isfinite(self.value)  # JSON has no nan
        return {
            "text/plain": str(self),
            "text/html": self._html(),
            MIME: dict(sentence=self.sentence, value=self.value if finite else None, status=self.status),
        }

    def _html(self) -> str:
        symbol, colour = SYMBOLS[self.status]
        note = f' <small style="opacity:0.8">({html.escape(self.note)})</small>' if self.note else ""
        return (
            f'<div style="border-left:4px solid {colour};padding:0.2em 0.8em;margin:0.2em 0">'
            f'<span style="color:{colour}" aria-hidden="true">{symbol}</span> '
            f"<strong>{self.status}</strong>: {html.escape(self.sentence)}{note}</div>"
        )

    def _ipython_display_(self) -> None:
        """Nothing: claim() has shown it, and is often the last line of its cell."""


_session: dict[str, Claim] = {}


def claim(sentence: str, value: Measured | float | None, holds: Holds = None) -> Claim:
    """Show a sentence with its number, and whether it holds on this device.

    ``sentence`` has one or more ``{value}`` fields (``{value:.1f}`` and the like). ``value`` is a plain
    number when it is the same on every device, a `Measured` when it was timed, None when it could not be
    measured here. ``holds`` is the answer, or a function from the number to the answer; it may be left out
    only when there is no number. A number that is not finite never holds.

    Raises ValueError for a sentence without ``{value}`` or a number without ``holds``, and AssertionError
    for a claim that does not hold here while outputs are recorded.
    """
    if {name for _, name, _, _ in string.Formatter().parse(sentence)} - {None} != {"value"}:
        raise ValueError(f"claim {sentence!r}: needs the field {{value}}, and no other")
    plain = number(value)
    if plain is not None and holds is None:
        raise ValueError(f"claim {sentence!r}: holds is missing, and there is a number to judge")
    status, note = _evaluate(value, plain, holds)
    made = _session[sentence] = Claim(sentence, plain, status, note)
    if get_ipython() is None:
        print(made)
    else:
        display(made.mimebundle(), raw=True)
    if os.environ.get(RECORDING) == "1" and status != HELD:
        raise AssertionError(f"a recorded claim has to hold: {made}")
    return made


def _evaluate(value: Measured | float | None, plain: float | None, holds: Holds) -> tuple[Status, str]:
    if plain is None:
        return NEEDS_GPU, "nothing measured here"
    held = math.isfinite(plain) and bool(holds(plain) if callable(holds) else holds)
    if not isinstance(value, Measured) or value.kind == "live":
        here = f"measured on {value.device}" if isinstance(value, Measured) else ""
        return (HELD if held else NOT_HELD), here
    outcome = "held there" if held else "did not hold there"
    return NEEDS_GPU, f"{value.kind} on {value.device}, {outcome}"


@dataclass(repr=False)
class Summary:
    """All claims of a session as one table."""

    claims: list[Claim]

    def __str__(self) -> str:
        statuses = [claim.status for claim in self.claims]
        held, failed, undecided = (statuses.count(status) for status in (HELD, NOT_HELD, NEEDS_GPU))
        counts = f"{held} held, {failed} not held, {undecided} need a GPU"
        return "\n".join([counts, *map(str, self.claims)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(f"{SYMBOLS[c.status][0]} {c.status}", c.sentence, c.note) for c in self.claims]
        table = pd.DataFrame(rows, columns=["here", "claim", "where the number is from"])
        counts = html.escape(str(self).split("\n", 1)[0])
        return f"<p>{counts}</p>{table_html(table)}"


def summary() -> Summary:
    """The claims made so far in this kernel, in order; a claim made again replaces the one before."""
    return Summary(list(_session.values()))
