"""The hints that lesson 4's exercises on kernels share: of wrong answers by reason, and of errors."""

from labkit.tasks import tiles_hints
from labkit.tasks.slips import Slip

HINTS = tiles_hints.HINTS | {
    "shape-or-dtype": (
        "Which line makes y, and with which sizes and dtype?",
        "The launcher was right as it was given: y is an empty tensor like x.",
    ),
    "stored-twice": (
        "Two programs wrote to the same places. What tells a program which group and which rows are its own?",
        "Both come from tl.program_id(0): its remainder by G is the group, the quotient the tile of rows.",
    ),
    "not-all-written": (
        "Is the grid large enough, and does the store's mask let through every place of the group?",
        "There are G programs for each tile of rows, and cdiv rounds up. Masks compare by <.",
    ),
    "small-tile": (
        "A matrix unit works on tiles of a fixed smallest size. How wide is yours where D is small?",
        "tl.dot needs sides of 16 or more: the launcher's max(16, ...) sees to it, and a mask to the rest.",
    ),
    "chained": (
        "Python takes & before <, so it reads a < R & b < D as a < (R & b) < D. Where is a pair of "
        "parentheses missing, or which comparison has two signs?",
        "One comparison at a time, each in parentheses: (a < R) & (b < D).",
    ),
}

_OWN = (
    Slip(
        "unknown-function",
        r"(module '[\w.]+'|'tensor' object) has no attribute|must be \w+, not tensor|only 0-dimensional|"
        r"cannot convert tensor\(|has no attribute 'scalar'\n.*\btorch\.",
        (
            "Functions and tensors of torch don't work in a kernel. Which function of tl does it?",
            "Few are needed here: tl.arange, tl.load, tl.dot, tl.store, and comparisons for the masks.",
        ),
    ),
    Slip(
        "pointer-arithmetic",
        r"pointer<|cannot add pointers|cannot cast \[\[",
        (
            "The tensors are addresses here: they can be added to, loaded from and stored to, no more.",
            "Compute with what tl.load gave you, and compare places (row, d) with sizes.",
        ),
    ),
    Slip(
        "other-without-mask",
        "`other` cannot be provided without `mask`",
        (
            "`other` is what masked places hold. Where is this load's mask?",
            "The mask is the second argument of tl.load, before `other`.",
        ),
    ),
    Slip(
        "mask-of-numbers",
        "Mask must have boolean",
        (
            "A mask is a block of true and false. Which mask is a number here?",
            "A comparison makes it; two are joined by &, each in parentheses.",
        ),
    ),
    Slip(
        "arange",
        r"arange's (arguments|range)",
        (
            "How many places has this block? A power of two, known when the kernel is compiled, is allowed.",
            "BM and BD are such, as they were given; D is known, but any number. G and R come at the launch.",
        ),
    ),
    Slip(
        "no-grid",
        r"'grid_(idx|dim)'|type 'int' has no len|'builtin_function_or_method' object has no",
        (
            "How many programs should the kernel start? A launch says so between [ and ], as a tuple.",
            "The launcher was right as it was given: (a number,) with its comma is a tuple of one.",
        ),
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Compare what is handed over with the first line of the function, one by one.",
            "The scaffold was right in this: the launcher hands over the tensors, then R, G and D, then the "
            "tile's two sizes. tl.load takes an address, a mask, and other=.",
        ),
    ),
)
SLIPS = (
    *_OWN,
    *(slip for slip in tiles_hints.SLIPS if slip.reason not in {own.reason for own in _OWN}),
)
