"""Hints for an answer that raises: from the exception and the learner's line to what it usually means."""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Slip:
    """A mistake that shows as an exception: a short name, how to tell it, hints as a `Wrong` has them.

    ``pattern`` is searched in ``"Type: message\\nline 3: source"``. A hint may name ``{name}`` (the name that
    is missing), ``{seen}`` (names that the line sees) and ``{given}`` (what the lesson has for the cell).
    """

    reason: str
    pattern: str
    hints: tuple[str, ...]


ANYWHERE = (
    Slip(
        "magic",
        "name 'get_ipython' is not defined",
        (
            "The cell is judged outside the notebook, where % and ! lines aren't there.",
            "Take such lines out, or put them into a cell of their own.",
        ),
    ),
    Slip(
        "unset",
        "UnboundLocalError",
        (
            "The line uses `{name}`. Which line sets it, and does that one run before?",
            "Move the line that sets `{name}` up, before its first use.",
        ),
    ),
    Slip(
        "unknown-name",
        "NameError",
        (
            "The line sees {seen}. Is one of these what you call `{name}`?",
            "The cell is judged by itself: names from other cells aren't there. It sees the lesson's "
            "imports and kernels, such as {given}.",
        ),
    ),
    Slip(
        "other-error",
        "",
        (
            'Which value isn\'t what you think? `print("it is", value)` shows one above the verdict, from '
            "inside a kernel too.",
            "Go back to the last version without an error, and change one thing at a time.",
        ),
    ),
)
"""Those of any exercise, to be tried after its own; the last one is for everything else."""

IN_KERNELS = (
    Slip(
        "python-loop",
        r"'int' object is not iterable\n.*\bfor\b",
        (
            "`at` holds all places of the block, and every operation works on all of them at once.",
            "Leave the loop out, and write what should happen to one element with `at` itself.",
        ),
    ),
    Slip(
        "subscript",
        "'int' object is not iterable|is not subscriptable|unsupported tensor index",
        (
            "A kernel gets the address of a tensor's first element, and an address can't be indexed.",
            "What Python writes x[at] is here a load from an address: tl.load(x + at, ...).",
        ),
    ),
    Slip(
        "one-address",
        "cannot be block type if pointer argument is not a block",
        (
            "tl.load and tl.store want an address for each place of the mask. This is the address of one.",
            "Add the places to it: x + at is a block of addresses. The mask is the next argument.",
        ),
    ),
    Slip(
        "arange",
        "arange's (arguments|range)",
        (
            "A block's size is a power of two, and known when the kernel is compiled. Which number is both?",
            "BLOCK, which is a tl.constexpr: tl.arange(0, BLOCK). width and count come at the launch.",
        ),
    ),
    Slip(
        "mask-of-numbers",
        "Mask must have boolean",
        (
            "A mask is a block of true and false. What's in the one that you give to tl.load or tl.store?",
            "A comparison makes it, such as `at < ...`; write mask=... where you give other arguments too.",
        ),
    ),
)
"""Those of any exercise whose answer is a kernel."""


def explain(slips: Iterable[Slip], observed: str, where: str) -> Slip:
    """The first slip, of these or of those found anywhere, that explains an exception at a line."""
    told = f"{observed}\n{where}"
    return next(slip for slip in (*slips, *ANYWHERE) if re.search(slip.pattern, told))
