"""The hints of lesson 5's exercise "safe": of wrong answers by reason, and of errors."""

from labkit.tasks.slips import IN_KERNELS, Slip

HINTS = {
    "host-read": (
        "factor lies on the GPU. What has Python to wait for, to know its value?",
        "For all that the GPU has to do before. A capture doesn't allow that: nothing runs during it.",
        "Hand over factor itself. In the kernel it's an address, and tl.load(factor) is its number.",
    ),
    "stale": (
        "A graph keeps the arguments of a launch. Which of them still is the old factor?",
        "A number among the arguments stays as it was at the capture. An address stays too, but what lies "
        "there may change.",
        "Hand over factor itself, and load from it in the kernel.",
    ),
    "block-of-factors": (
        "How many numbers has factor, and how many places does your load name?",
        "One number, at the address factor itself. factor + at goes on into memory that isn't its own.",
        "tl.load(factor), without offsets and without a mask: one number, for the whole block.",
    ),
    "address": (
        "What is factor in the kernel: a number, or the place where it lies?",
        "The place. You multiplied by the address.",
        "tl.load(factor) is the number that lies there.",
    ),
    "multiplied-before": (
        "How many kernels run, and which of them multiplies?",
        "x * factor in Python is a kernel of PyTorch's. A graph can replay it, but it's a launch and a pass "
        "over memory more.",
        "Hand over x and factor as they are, and multiply in the kernel.",
    ),
    "factor-copied": (
        "A copy or a conversion of factor is a launch too. What needs it?",
        "A graph would replay the copy as well, so y would be right: but by two kernels in place of one.",
        "Hand over factor itself. A load in the kernel brings the number as it is, in its own dtype.",
    ),
    "several-launches": (
        "One launch is enough. Which line of the launcher starts another one?",
        "Only an empty y is needed beside the kernel: torch.empty_like launches nothing.",
    ),
    "no-kernel": (
        "PyTorch gets the numbers right. Who is to compute them here?",
        "Launch the kernel, as the scaffold does, and do the arithmetic in it.",
    ),
    "no-factor": (
        "y is x. Does what you loaded reach the product?",
        "tl.load(x + at, inside) * tl.load(factor) is what gets stored.",
    ),
    "added": (
        "Try it with a factor of 0: what should come out?",
        "Zeros: x times factor, not plus.",
    ),
    "low-precision": (
        "Where does factor lose digits, or its size, on the way to the product?",
        "float16 has three digits, and ends at 65504: a loss scale in float32, for one, may be larger.",
        "Leave factor as it is loaded. With a float32 the product is float32, and the store rounds once.",
    ),
    "writes-input": (
        "The caller still needs x and factor. Which tensor does the kernel store to?",
        "Store to addresses that start from y, the new tensor.",
    ),
    "not-a-tensor": (
        "What does the function that launches the kernel return?",
        "The launcher's last line was right as it was given: return y.",
    ),
    "shape-or-dtype": (
        "Which line makes y, and with which shape and dtype?",
        "That line was right as it was given: y is an empty tensor like x.",
    ),
    "reused-output": (
        "Call it twice with other inputs, then look at the first result again. Is it still right?",
        "Every call has to make its y anew: nothing may be kept between calls.",
    ),
    "unmasked-store": (
        "The last program reaches beyond the end of y. What keeps its store inside?",
        "The store was right as it was given, with `inside` as its mask.",
    ),
    "reads-outside": (
        "The last program reaches beyond the end of x. What keeps its load inside?",
        "The load of x was right as it was given: tl.load(x + at, inside).",
    ),
    "stored-twice": (
        "Two programs wrote to the same places. What tells a program which block is its own?",
        "tl.program_id(0) * BLOCK is where its block begins, as it was given.",
    ),
    "not-all-written": (
        "Is the grid large enough, and does the store's mask let through every place inside y?",
        "Both were right as they were given: cdiv rounds up, and `inside` is at < N.",
    ),
    "strides": (
        "Contiguous inputs come out right, these don't. What did the launcher do about strides?",
        "x = x.contiguous() in the launcher copied such an input before it reached the kernel.",
    ),
    "not-compiled": (
        "Interpreted it's right, but the compiler for a GPU refuses it. Its message says why.",
        "A compiled kernel knows the operations of tl only: tl.load, a product and tl.store are enough here.",
    ),
    "wrong-values": (
        "One element: which number of x, and which of factor belongs to it?",
        "The one at its own place, and factor's only one, at the address factor itself.",
        "tl.store(y + at, tl.load(x + at, inside) * tl.load(factor), inside)",
    ),
}

SLIPS = (
    Slip(
        "load-of-a-number",
        r"'(float|int)' object has no attribute 'type'",
        (
            "The kernel loads from an address. What does the launcher hand over?",
            "A number, as .item() makes it. Hand over factor itself.",
        ),
    ),
    Slip(
        "pointer-arithmetic",
        r"pointer<|cannot add pointers|cannot cast \[\[",
        (
            "In the kernel factor is an address now, like x. How does a number come from an address?",
            "tl.load(factor) is the number, and that can be multiplied.",
        ),
    ),
    Slip(
        "mask-for-one",
        "cannot be block type if pointer argument is not a block",
        (
            "How many numbers does this load bring, and how many has its mask?",
            "One address needs no mask, since it's never outside: tl.load(factor).",
        ),
    ),
    Slip(
        "outside-a-kernel",
        # the second where a kernel was interpreted before
        r"Did you forget to add @triton\.jit|has no attribute 'is_ptr'",
        (
            "Which function does this line stand in, the kernel or the one that launches it?",
            "tl.load works in kernels only. The launcher hands over the address.",
        ),
    ),
    Slip(
        "no-dimension",
        "0-dim tensor",
        (
            "factor may have the shape (): it has no first element then, it is one number.",
            "Leave brackets away: as an address the tensor is good in any shape.",
        ),
    ),
    Slip(
        "unknown-function",
        r"(module '[\w.]+'|'tensor' object) has no attribute|must be \w+, not tensor|only 0-dimensional",
        (
            "Functions and methods of torch don't work in a kernel. Which function of tl does it?",
            "tl.load brings a number from an address. Nothing else is missing.",
        ),
    ),
    Slip(
        "no-grid",
        r"'grid_(idx|dim)'|type 'int' has no len|'builtin_function_or_method' object has no",
        (
            "How many programs should the kernel start? A launch says so between [ and ], as a tuple.",
            "The launcher was right in this: (triton.cdiv(x.numel(), 1024),) with its comma.",
        ),
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Compare what is handed over with the first line of the function, one by one.",
            "The kernel gets x, y, factor and N, then BLOCK by its name; tl.load an address and a mask.",
        ),
    ),
    *(slip for slip in IN_KERNELS if slip.reason == "subscript"),
)
