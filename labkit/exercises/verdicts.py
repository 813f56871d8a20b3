"""What a learner sees after running an exercise: a sentence, hints to unfold, the solution."""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

CHECK_MIME = "application/vnd.labkit.check+json"

Status = Literal["not attempted", "right", "wrong", "error", "stopped", "crashed", "interrupted"]

# Okabe-Ito colours, as claims have them; the symbol and the word say the same.
LOOK: dict[Status, tuple[str, str]] = {
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
    """The outcome of running an exercise's cell."""

    exercise: str
    title: str
    status: Status
    sentence: str
    where: str = ""
    """The learner's line that was running, where an exception or so came from one."""
    hints: tuple[str, ...] = ()
    """Those that are unlocked."""
    hints_left: int = 0
    solution: str = ""
    """The solution's source; empty where it is not offered."""
    checks: int = 0
    """How many calls were compared."""

    def __str__(self) -> str:
        lines = [f"{LOOK[self.status][0]} {self.title}: {self.status}. {self.sentence}"]
        lines += [self.where] if self.where else []
        lines += [f"Hint {number}: {hint}" for number, hint in enumerate(self.hints, start=1)]
        return "\n".join([*lines, *self._advice()])

    def mimebundle(self) -> dict[str, Any]:
        """The verdict as HTML and text; a right one also as data, for whoever counts checks."""
        bundle: dict[str, Any] = {"text/plain": str(self), "text/html": self._html()}
        if self.status == "right":
            bundle[CHECK_MIME] = {"name": self.exercise, "passed": self.checks}
        return bundle

    def _advice(self) -> list[str]:
        if self.status in ("right", "not attempted"):
            return []
        left = ["Another wrong answer of this kind brings another hint."] if self.hints_left else []
        return [*left, f'`tasks.solution("{self.exercise}")` shows a solution at any time.']

    def _html(self) -> str:
        symbol, colour = LOOK[self.status]
        return (
            f'<div style="border-left:4px solid {colour};padding:0.2em 0.8em;margin:0.4em 0">'
            f'<div><span style="color:{colour}" aria-hidden="true">{symbol}</span> '
            f"{html.escape(self.title)}: <strong>{self.status}</strong></div>"
            f'<div style="margin:0.3em 0;white-space:pre-line">{_marked(self.sentence)}</div>'
            f"{''.join(self._parts())}</div>"
        )

    def _parts(self) -> Iterator[str]:
        if self.where:
            yield f'<pre style="margin:0.3em 0">{html.escape(self.where)}</pre>'
        for number, hint in enumerate(self.hints, start=1):
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
