"""The hints that lesson 7's exercises share: of wrong answers by reason, and of errors."""

from labkit.tasks.slips import Slip

OF_ANY = {
    "writes-input": (
        "The caller still needs the inputs. Which tensor does the kernel store to?",
        "Store to addresses that start from the new tensor, the one that the launcher makes.",
    ),
    "reused-output": (
        "Call it twice with other inputs, then look at the first result again. Is it still right?",
        "Every call has to make its tensors anew, and run the kernel: nothing may be kept between calls.",
    ),
    "no-kernel": (
        "PyTorch gets the numbers right. Who is to compute them here?",
        "Launch the kernel, as the scaffold does, and compute in it.",
    ),
    "strides": (
        "Contiguous inputs come out right, these don't. What did the launcher do about strides?",
        ".contiguous() in the launcher copies such inputs before they reach the kernel.",
    ),
    "not-compiled": (
        "Interpreted it's right, but the compiler for a GPU refuses it. Its message says why.",
        "A compiled kernel knows the operations of tl only, a block's size has to be constexpr, and a name "
        "that a loop sets again keeps its dtype and shape.",
    ),
    "unfinished": (
        "Three dots stand where the kernel should do something. Which line is it?",
        "The comment behind the dots says what is missing; everything above it is complete.",
    ),
}
"""Those of the exercise on RMSNorm too."""

HINTS = OF_ANY | {
    "not-a-tensor": (
        "What does the function that launches the kernel return?",
        "The launcher was right as it was given: its last line is return h.",
    ),
    "shape-or-dtype": (
        "Which line makes h, and with which shape and dtype?",
        "The launcher was right as it was given: h is an empty tensor like a.",
    ),
    "several-launches": (
        "One kernel, one pass: what is left for PyTorch to do?",
        "The loop has a, b and the state at hand at every step. What you do outside of it is one more pass "
        "over memory.",
    ),
    "unmasked-store": (
        "Some programs have more channels than are left. Where do the values of the others go?",
        "Behind channel H - 1 comes channel 0 of the next step, and after the last step another row, or "
        "memory that isn't yours. On a GPU whoever stores last decides what stays.",
        "tl.store takes a mask as its third argument: `inside`.",
    ),
    "unmasked-load": (
        "The numbers are right. But which addresses does the last program load from, at the last step?",
        "On a GPU a load outside its tensor may end the program with an illegal memory access, even if what "
        "it brought is never stored.",
        "Every load of a block of channels needs `inside`, as the store does; one that belongs to a step has "
        "to stay in its row.",
    ),
    "stored-twice": (
        "Two programs wrote to the same places. What tells a program its row, and what its channels?",
        "tl.program_id(0) counts the rows, tl.program_id(1) the blocks of channels, as it was given.",
    ),
    "not-all-written": (
        "Is the grid large enough, and does each step store all of its channels?",
        "The grid was right as it was given: a program for each row and each block of channels, and cdiv "
        "rounds up. Masks compare by <.",
    ),
    "half-precision": (
        "What is rounded at a step is multiplied at the next, and rounded again. Where is the state "
        "anything else than float32?",
        "state begins as float32 and stays it, whatever a and b are: half times float32 is float32. The "
        "store rounds what it stores, and nothing has to be converted before.",
    ),
}

SLIPS = (
    Slip(
        "one-address",
        "cannot be block type if pointer argument is not a block",
        (
            "How many addresses has this line, and how many places has its mask?",
            "A mask of all channels belongs to addresses of all channels, `at` for one. A single address "
            "needs no mask as long as it's inside.",
        ),
    ),
    Slip(
        "pointer-arithmetic",
        r"pointer<|cannot add pointers|cannot cast \[",
        (
            "The tensors are addresses here: they can be added to, loaded from and stored to, no more.",
            "Compute with what tl.load gave you: a number, or one for each channel.",
        ),
    ),
    Slip(
        "unknown-function",
        r"(module '[\w.]+'|'tensor' object) has no attribute|must be \w+, not tensor|only 0-dimensional|"
        r"has no attribute 'scalar'\n.*\btorch\.|cannot convert tensor\(",
        (
            "Functions and methods of torch don't work in a kernel. Which function of tl does it?",
            "Few are needed here: tl.load, tl.store, tl.where, and arithmetic.",
        ),
    ),
    Slip(
        "subscript",
        r"'int' object is not iterable|is not subscriptable|unsupported tensor index",
        (
            "A kernel gets the address of a tensor's first element, and an address can't be indexed.",
            "Row by row, step by step, channel by channel: work out the place as one number, add it to the "
            "address, and load from there.",
        ),
    ),
    Slip(
        "mask-of-numbers",
        "Mask must have boolean",
        (
            "A mask is a block of true and false. What's in the one that you give here?",
            "`inside` is such a mask; a comparison makes another.",
        ),
    ),
    Slip(
        "no-grid",
        r"'grid_(idx|dim)'|type 'int' has no len|'builtin_function_or_method' object has no",
        (
            "How many programs should the kernel start? A launch says so between [ and ], as a tuple.",
            "The launcher was right as it was given.",
        ),
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Compare what is handed over with the first line of the function, one by one.",
            "The scaffold was right in this: tensors first, in the kernel's order, then sizes. tl.load takes "
            "an address and a mask, tl.store an address, a value and a mask.",
        ),
    ),
)
