"""The hints that lesson 2's exercises on tiles share: of wrong answers by reason, and of errors."""

from labkit.tasks.slips import Slip

HINTS = {
    "not-a-tensor": (
        "What does the function that launches the kernel return?",
        "The launcher was right as it was given: its last line is return y.",
    ),
    "shape-or-dtype": (
        "Which line makes y, and with which sizes and dtype?",
        "The launcher was right as it was given: y is x.new_empty with the sizes of the output.",
    ),
    "writes-input": (
        "The caller still needs the inputs. Which tensor does the kernel store to?",
        "Store to addresses that start from y, the new tensor.",
    ),
    "reused-output": (
        "Call it twice with other inputs, then look at the first result again. Is it still right?",
        "Every call has to make its y anew, and run the kernel: nothing may be kept between calls.",
    ),
    "no-kernel": (
        "PyTorch gets the numbers right. Who is to compute them here?",
        "Launch the kernel, as the scaffold does, and do all the arithmetic in it.",
    ),
    "unmasked-store": (
        "The last tiles reach beyond y. What keeps the store inside?",
        "The store was right as it was given, with a mask of rows and columns: put it back.",
    ),
    "stored-twice": (
        "Two programs wrote to the same places. What tells a program which tile is its own?",
        "tl.program_id(0) counts the tiles down the rows, tl.program_id(1) those along the columns.",
    ),
    "not-all-written": (
        "Is the grid large enough, and does the store's mask let through every place inside y?",
        "The grid and the store were right as they were given: cdiv rounds up, and masks compare by <.",
    ),
    "strides": (
        "Contiguous inputs come out right, these don't. What did the launcher do about strides?",
        "x = x.contiguous() copies such an input before it reaches the kernel; each of the inputs needs it.",
    ),
    "not-compiled": (
        "Interpreted it's right, but the compiler for a GPU refuses it. Its message says why.",
        "A compiled kernel knows the operations of tl only, and the sizes of its tiles have to be constexpr.",
    ),
    "small-tile": (
        "A matrix unit works on tiles of a fixed smallest size. How deep is yours, on this launch?",
        "tl.dot needs a depth of 16 or more, so BK can't be a divisor of just any size. Leave BK at 32, and "
        "let a mask take care of the rest.",
    ),
    "python-and": (
        "`and`, `or` and `not` are Python's: interpreted, they decide once for the whole tile.",
        "Masks are combined place by place, by & (and), | (or) and ~ (not), each comparison in parentheses.",
    ),
    "chained": (
        "Python takes & before <, so it reads a < M & b < K as a < (M & b) < K. Where is a pair of "
        "parentheses missing, or which comparison has two signs?",
        "One comparison at a time, each in parentheses: (a < M) & (b < K).",
    ),
    "python-if": (
        "An `if` in a kernel decides once, for the whole tile.",
        "tl.where(condition, a, b) chooses place by place; a load chooses by its mask.",
    ),
}

SLIPS = (
    Slip(
        "pointer-arithmetic",
        r"pointer<|cannot add pointers|cannot cast \[\[",
        (
            "x, the weights and y are addresses: they can be added to, loaded from and stored to, no more.",
            "Compute with what tl.load gave you, and compare places (row, col, k) with sizes.",
        ),
    ),
    Slip(
        "unknown-function",
        r"(module '[\w.]+'|'tensor' object) has no attribute|must be \w+, not tensor|only 0-dimensional",
        (
            "Functions and methods of torch don't work in a kernel. Which function of tl does it?",
            "Few are needed here: tl.arange, tl.load, tl.dot, tl.exp, tl.sigmoid, tl.where, tl.store.",
        ),
    ),
    Slip(
        "shapes",
        r"[Cc]annot (make_shape_compatible|broadcast)|could not be broadcast|must match",
        (
            "Two blocks on this line have shapes that don't fit. Which ones, and which shape is wanted?",
            "A block of one dimension becomes a column by [:, None] and a row by [None, :]. print shows a "
            "block and its shape from inside the kernel, above the verdict.",
        ),
    ),
    Slip(
        "subscript",
        r"'int' object is not iterable|is not subscriptable|unsupported tensor index",
        (
            "In a kernel, brackets only add dimensions: [:, None] and [None, :]. They pick nothing.",
            "An address is loaded from with tl.load(address, mask); a block is used as a whole.",
        ),
    ),
    Slip(
        "arange",
        r"arange's (arguments|range)",
        (
            "How many places has this block? A power of two, known when the kernel is compiled, is allowed.",
            "BM, BN and BK are such: tl.constexpr, and 32 as they were given. M, N and K come at the launch.",
        ),
    ),
    Slip(
        "no-grid",
        r"'grid_(idx|dim)'|type 'int' has no len|'builtin_function_or_method' object has no",
        (
            "How many programs should the kernel start? A launch says so between [ and ], as a tuple.",
            "The launcher was right as it was given: grid counts the tiles along y's rows and its columns.",
        ),
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Compare what is handed over with the first line of the function, one by one.",
            "The scaffold was right in this: the launcher hands over three tensors, three sizes and three "
            "constants. tl.load takes an address, a mask, and other=.",
        ),
    ),
)
