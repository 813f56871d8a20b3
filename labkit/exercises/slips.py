"""What exceptions mean that an answer to any exercise may raise: the first pattern that fits is told.

A hint may name ``{name}`` (the name that is missing), ``{seen}`` (names that the line sees) and ``{given}``
(what the lesson has for the cell).
"""

from labkit.exercises.engine import Mistake

SLIPS = (
    Mistake(
        "python-loop",
        "`at` holds all places of the block, and every operation works on all of them at once.",
        "Leave the loop out, and write what should happen to one element with `at` itself.",
        raises=r"'int' object is not iterable\n.*\bfor\b",
    ),
    Mistake(
        "no-jit",
        "A kernel is launched with kernel[grid](...). What makes a function a kernel?",
        "Put the line @triton.jit above it, and hand in the kernel without brackets or parentheses.",
        raises="'function' object is not subscriptable",
    ),
    Mistake(
        "subscript",
        "A kernel gets the address of a tensor's first element, and an address can't be indexed.",
        "What Python writes x[at] is here a load from an address: tl.load(x + at, ...).",
        raises="'int' object is not iterable|is not subscriptable|unsupported tensor index",
    ),
    Mistake(
        "one-address",
        "tl.load and tl.store want an address for each place of the mask. This is the address of one.",
        "Add the places to it: x + at is a block of addresses. The mask is the next argument.",
        raises="cannot be block type if pointer argument is not a block",
    ),
    Mistake(
        "arange",
        "A block's size is a power of two, and known when the kernel is compiled. Which number is both?",
        "A tl.constexpr, made with triton.next_power_of_2 at the launch where it depends on a size.",
        raises="arange's (arguments|range)",
    ),
    Mistake(
        "mask-of-numbers",
        "A mask is a block of true and false. What's in the one that you give to tl.load or tl.store?",
        "A comparison makes it, such as `at < ...`; write mask=... where you give other arguments too.",
        raises="Mask must have boolean|mask has unsupported dtype",
    ),
    Mistake(
        "chained",
        "How many comparisons has this line, and what stands between them? Python takes & before <.",
        "Put each comparison into parentheses of its own, with one sign in each, and join them by &.",
        raises="two comparisons in one|simultaneous multiple comparison",
    ),
    Mistake(
        "block-as-truth",
        "A block has many values, and an `if` goes one way for all of them. Who should decide?",
        "tl.where(condition, this, that) decides for each element.",
        raises="a block has many values",
    ),
    Mistake(
        "shapes",
        "Two blocks on this line have shapes that don't fit. Which shape should come out?",
        "[:, None] makes a column of a block, [None, :] a row. print(block) shows one with its shape.",
        raises=r"[Cc]annot (make_shape_compatible|broadcast)|could not be broadcast|incompatible dimensions",
    ),
    Mistake(
        "small-tile",
        "tl.dot takes tiles of at least 16 by 16 by 16. How large is yours at the smallest size?",
        "Round the block up: max(16, triton.next_power_of_2(size)), and mask what is too many.",
        raises="K >= 16|shapes? .*at least 16",
    ),
    Mistake(
        "loop-carried",
        "The loop sets a name to another dtype or shape than it had before the loop. Which name?",
        "A name that a loop sets again keeps its dtype and shape: begin with tl.zeros of both.",
        raises="[Ll]oop-carried variable",
    ),
    Mistake(
        "magic",
        "The cell is judged outside the notebook, where % and ! lines aren't there.",
        "Take such lines out, or put them into a cell of their own.",
        raises="name 'get_ipython' is not defined",
    ),
    Mistake(
        "unset",
        "The line uses `{name}`. Which line sets it, and does that one run before?",
        "Move the line that sets `{name}` up, before its first use.",
        raises="UnboundLocalError",
    ),
    Mistake(
        "unknown-name",
        "The line sees {seen}. Is one of these what you call `{name}`?",
        "The cell is judged by itself: names from other cells aren't there. It sees the lesson's "
        "imports and kernels, such as {given}.",
        raises="NameError",
    ),
    Mistake(
        "",
        raises="",
    ),
)
"""The last one is for everything else: the exception speaks for itself."""
