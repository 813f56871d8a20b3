"""The hints of lesson 4's exercise "bias": of wrong answers by reason, and of errors."""

from labkit.tasks import grouped_hints

HINTS = grouped_hints.HINTS | {
    "unfinished": (
        "Replace the three dots. total is a block of BM x BD sums: what has to be added to each column?",
        "bias is (G, D), row by row: where does this group's row begin, and how long is it?",
        "Load its D numbers with a mask, and add them to total as a row.",
    ),
    "no-bias": (
        "The output is the product alone. Does what you loaded reach total?",
        "A sum that is given no name is gone: total has to become total plus the group's row of bias.",
    ),
    "first-group": (
        "Group 0 is right. Where in bias does the row of group 1 begin?",
        "After the D numbers of group 0. Without the group in the address everybody loads row 0.",
    ),
    "tile-width": (
        "Where D is a power of two it's right. How long is a row of bias, D or BD?",
        "BD is the tile's width, and bias has no gaps: before a group's row stand group times D numbers.",
    ),
    "one-number": (
        "How many numbers does a group add, one or one for each of its columns?",
        "bias + group is the address of one number. This group's row begins further on; d counts its D.",
    ),
    "other-way-round": (
        "bias is (G, D): which numbers lie beside each other, a group's or a column's?",
        "A group's: d counts single numbers, and group counts rows of D.",
    ),
    "by-rows": (
        "Does the bias of a column change from one row of x to the next?",
        "It's the same for all rows. row, and `at` with row in it, are places in x and y.",
        "The address is made of group and d only.",
    ),
    "wrong-axis": (
        "One number for each column of the tile. Along which dimension does your block run?",
        "[:, None] makes a column of it, which gives each row one number. That this fits at all is because "
        "the tile happens to be as wide as high.",
        "A row, [None, :], is what each row of total needs.",
    ),
    "before-product": (
        "x W + b, or (x + b) W: which of them is yours?",
        "The bias belongs to y's columns, so it comes after the product: add it to total.",
    ),
    "multiplied": (
        "Try it with a bias of zeros: what should come out?",
        "The product as it was. A bias is added.",
    ),
    "half-precision": (
        "In which precision is total when it comes out of tl.dot, and where does it lose it?",
        "total is float32. Add to it as it is, and let the store round: it converts to y's dtype, once.",
    ),
    "unmasked-load": (
        "The last columns of the tile are no columns of the group. What does the load bring for them?",
        "What lies after this group's row, and after the last group's what lies after the tensor. On a GPU "
        "that may end the program with an illegal memory access, even if it's never stored.",
        "Every load needs its mask as the second argument. For a row of bias it's about d alone.",
    ),
    "unmasked-store": (
        "The last tiles reach beyond y. What keeps the store inside?",
        "The store was right as it was given: `inside` is its mask.",
    ),
    "several-launches": (
        "One launch, one pass: what is left for PyTorch to do?",
        "The bias belongs into the kernel, where the sums already are.",
    ),
    "wrong-values": (
        "Work out one element by hand: row 0, group 1, column 0. Which number of bias belongs to it?",
        "The one at place D, the first of the second row. All else in the kernel was right as it was given.",
    ),
}

SLIPS = grouped_hints.SLIPS
