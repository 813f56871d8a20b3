"""A verdict, as a learner sees it after running an exercise: a sentence, hints to unfold, the solution."""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from labkit.exercises.engine import Exercise, Finding, JudgeStatus
from labkit.measure.correctness import CHECK_MIME

# Okabe-Ito colours, as claims have them; the symbol and the word say the same.
LOOK: dict[JudgeStatus, tuple[str, str]] = {
    "not attempted": ("○", "#0072B2"),
    "right": ("✓", "#009E73"),
    "wrong": ("✗", "#D55E00"),
    "error": ("✗", "#D55E00"),
    "stopped": ("■", "#D55E00"),
    "crashed": ("■", "#D55E00"),
    "interrupted": ("■", "#767676"),
}


@dataclass(frozen=True)
class Verdict:
    """A finding as the learner sees it."""

    exercise: Exercise
    finding: Finding
    solution: str = ""
    """The solution's source; empty where it is not offered."""

    def __str__(self) -> str:
        found = self.finding
        lines = [f"{LOOK[found.status][0]} {self.exercise.title}: {found.status}. {found.observed}"]
        lines += [found.where] if found.where else []
        lines += [f"Hint {number}: {hint}" for number, hint in enumerate(found.hints, start=1)]
        return "\n".join([*lines, *self._advice()])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The verdict as HTML and text; a right one also as data, for whoever counts checks."""
        bundle: dict[str, Any] = {"text/plain": str(self), "text/html": self._html()}
        if self.finding.status == "right":
            bundle[CHECK_MIME] = {"name": self.exercise.name, "passed": self.finding.checks}
        return bundle

    def _advice(self) -> list[str]:
        if self.finding.status in ("right", "not attempted"):
            return []
        return [f'`tasks.solution("{self.exercise.name}")` shows a solution at any time.']

    def _html(self) -> str:
        symbol, colour = LOOK[self.finding.status]
        return (
            f'<div style="border-left:4px solid {colour};padding:0.2em 0.8em;margin:0.4em 0">'
            f'<div><span style="color:{colour}" aria-hidden="true">{symbol}</span> '
            f"{html.escape(self.exercise.title)}: <strong>{self.finding.status}</strong></div>"
            f'<div style="margin:0.3em 0;white-space:pre-line">{_marked(self.finding.observed)}</div>'
            f"{''.join(self._parts())}</div>"
        )

    def _parts(self) -> Iterator[str]:
        if self.finding.where:
            yield f'<pre style="margin:0.3em 0">{html.escape(self.finding.where)}</pre>'
        for number, hint in enumerate(self.finding.hints, start=1):
            yield _folded(f"Hint {number}", f'<div style="padding:0.2em 1.2em">{_marked(hint)}</div>')
        for line in self._advice():
            yield f'<div style="margin:0.2em 0"><small>{_marked(line)}</small></div>'
        if self.solution:
            yield solution_html(self.solution)


def solution_html(source: str) -> str:
    """A solution's source, folded: a click, or Enter on the focused line, opens it."""
    # A long line scrolls, and what scrolls has to be reachable with the keyboard.
    style = "padding:0.2em 1.2em;overflow-x:auto"
    return _folded("Solution", f'<div tabindex="0" style="{style}"><pre>{html.escape(source)}</pre></div>')


def _marked(text: str) -> str:
    """Text as HTML, what stands between backticks as code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(text))


def _folded(summary: str, inside: str) -> str:
    label = f'<summary style="cursor:pointer">{summary}</summary>'
    return f'<details style="margin:0.2em 0">{label}{inside}</details>'
