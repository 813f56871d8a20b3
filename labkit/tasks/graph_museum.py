"""Lesson 5, exercise "museum": which mistake each exhibit of a wrong measurement shows."""

from collections.abc import Mapping
from typing import Any

from labkit.tasks import Evidence, Wrong, some
from labkit.tasks.graph_museum_hints import HINTS

CAUSES = {
    "a": "the clock stops before the GPU does",
    "b": "the first call compiles, or tries configurations, inside the timed region",
    "c": "the input's tensor was replaced, the graph still reads the old one",
    "d": "the data lies in the cache, and the time is divided into the bytes as if it came from memory",
    "e": "the next replay writes into the result of the last",
    "f": "the GPU was asked to wait for Python inside the loop",
    "g": "two kernels ran at the same time",
}
EXHIBITS = {1: "c", 2: "e", 3: "b", 4: "a", 5: "d"}
VALUES = "ce"
"""Causes of wrong results; the others are of wrong times."""


def check(diagnosis: Mapping[int, str]) -> Evidence:
    """Compare ``diagnosis``, a letter for each exhibit, with the causes; `Wrong` for the first wrong one."""
    letters = _letters(diagnosis)
    missed = [number for number, right in EXHIBITS.items() if letters[number] != right]
    if not any(letters.values()):
        raise _wrong("unfinished", "No exhibit has a letter yet.")
    if missed:
        number = missed[0]
        right = f"{len(EXHIBITS) - len(missed)} of {len(EXHIBITS)} are right"
        said = f"exhibit {number} is not {letters[number]}" if letters[number] else f"{number} has no letter"
        raise _wrong(_reason(number, letters[number]), f"{right}. The first that is not: {said}.")
    return Evidence(_evidence(), len(EXHIBITS))


def _letters(diagnosis: Mapping[int, str]) -> dict[int, str]:
    """The letter of each exhibit, "" for none yet; `Wrong` for a diagnosis of another form."""
    if not isinstance(diagnosis, Mapping):
        raise _wrong("not-a-dict", f"diagnosis is a {type(diagnosis).__name__}, not a dict.")
    unknown: list[Any] = [number for number in diagnosis if number not in EXHIBITS]
    if unknown:
        raise _wrong("unknown-number", f"There is no exhibit {unknown[0]!r}.")
    absent = [number for number in EXHIBITS if number not in diagnosis]
    if absent:
        missing = ", ".join(f"{number}" for number in absent)
        raise _wrong("missing-number", f"{some(len(absent), 'exhibit')} not in diagnosis: {missing}.")
    for number in EXHIBITS:
        if not isinstance(diagnosis[number], str):
            raise _wrong("not-a-letter", f"Exhibit {number} has {diagnosis[number]!r}.")
    letters = {number: diagnosis[number].strip().lower() for number in EXHIBITS}
    for number, letter in letters.items():
        if letter and letter not in CAUSES:
            raise _wrong("no-such-letter", f"Exhibit {number} has {diagnosis[number]!r}.")
    return letters


def _reason(number: int, letter: str) -> str:
    """The most particular hints for a wrong letter."""
    about_values = EXHIBITS[number] in VALUES
    if f"exhibit-{number}-{letter}" in HINTS:
        return f"exhibit-{number}-{letter}"
    if letter and about_values != (letter in VALUES):
        return "not-a-time" if about_values else "not-a-value"
    return f"exhibit-{number}"


def _wrong(reason: str, observed: str) -> Wrong:
    return Wrong(reason, observed, HINTS[reason])


def _evidence() -> str:
    """The finding: of what kinds the mistakes are."""
    values = [f"{number}" for number, letter in EXHIBITS.items() if letter in VALUES]
    times = [f"{number}" for number, letter in EXHIBITS.items() if letter not in VALUES]
    return (
        f"All {len(EXHIBITS)} are right. {' and '.join(values)} give wrong results, and any comparison with "
        f"an eager call on new inputs shows it. {', '.join(times[:-1])} and {times[-1]} give right results "
        "and wrong times: a comparison of results passes these. A second measurement, and the device's peak "
        "beside each number, don't."
    )
