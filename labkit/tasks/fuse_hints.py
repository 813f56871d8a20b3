"""The hints of lesson 1's exercise "fuse": of wrong answers by reason, and of errors."""

from labkit.tasks.slips import IN_KERNELS, Slip

HINTS = {
    "unfinished": (
        "Replace the three dots: load what you need, then compute `value`.",
        "The residual is one more tensor of x's shape. x: tl.load(x + at, inside).to(tl.float32).",
        "weight and bias repeat with every row: tl.load(weight + at % width, inside).",
    ),
    "not-a-tensor": (
        "Look at the last line of `fused`.",
        "The launcher was right as it was given: it returns y.",
    ),
    "shape-or-dtype": (
        "y comes from the launcher, which was right as it was given.",
        "y, block = torch.empty_like(x), 2048 // x.element_size()",
    ),
    "no-residual": (
        "Which of the four inputs doesn't reach the output?",
        "Load the residual like x, at residual + at, and add it to the result of the ReLU.",
    ),
    "relu-last": (
        "Which of the two comes first, the ReLU or the residual?",
        "The ReLU is applied to x*w + b only: a negative residual has to stay negative.",
    ),
    "no-relu": (
        "What should become of a negative x*w + b?",
        "tl.maximum(value, 0.0) is the ReLU. The residual is added after it.",
    ),
    "python-max": (
        "Python's max does not compare element by element when a kernel is interpreted; "
        "write tl.maximum(value, 0.0).",
        "Python's max asks once for the whole block which of its two arguments is larger, "
        "and hands back that one. min has tl.minimum.",
    ),
    "python-if": (
        "An `if` in a kernel decides once, for all elements of the block.",
        "tl.where(condition, a, b) chooses element by element, and so does tl.maximum(a, b).",
    ),
    "wrong-index": (
        "Look at the first row, then at the second: which element of weight does each column need?",
        "weight has as many elements as x has columns. Column of element `at`: its remainder by the width.",
        "tl.load(weight + at % width, inside), and the same for bias.",
    ),
    "row-is-not-column": (
        "at // width is a number too: what does it count?",
        "It is the row of element `at`. The column is the remainder: at % width.",
    ),
    "not-all-read": (
        "x and the residual have an element for each one of y. Which addresses do you load them from?",
        "x + at and residual + at; only weight and bias repeat with every row.",
    ),
    "block-is-not-width": (
        "A block may hold many rows, or part of one. Which number says how long a row is?",
        "weight repeats every `width` elements, not every BLOCK: at % width.",
    ),
    "no-program": (
        "All programs did the same elements. What tells a program which part is its own?",
        "at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
    ),
    "small-grid": (
        "How many programs of BLOCK elements does a tensor need if its size isn't a multiple of BLOCK?",
        "Round up: grid = (triton.cdiv(x.numel(), block),).",
    ),
    "unmasked-load": (
        "Every load of the kernel needs to stay inside its tensor. Which one doesn't?",
        "tl.load takes the mask as its second argument: tl.load(residual + at, inside).",
    ),
    "unmasked-store": (
        "The last block reaches beyond the end of y. What keeps the store inside?",
        "tl.store(y + at, value, inside)",
    ),
    "writes-input": (
        "The caller still needs x and the residual. Where should the result go?",
        "Store to y + at, and return y, the new tensor.",
    ),
    "reused-output": (
        "Call `fused` twice with other inputs, then look at the first result again. Is it still right?",
        "Every call has to make its y anew, and run the kernel: nothing may be kept between calls.",
    ),
    "no-kernel": (
        "Every operation of PyTorch is a kernel and a pass over memory of its own. The lesson wants one.",
        "Launch fused_kernel from `fused`, as the scaffold does, and do all the arithmetic in it.",
    ),
    "several-launches": (
        "One launch, one pass: which of the launches could the kernel do on the way?",
        "What PyTorch did before or after the kernel belongs into the kernel, where the values already are. "
        "torch.empty_like launches nothing; zeros_like does.",
    ),
    "half-precision": (
        "In which precision does the kernel add and multiply? The lesson's kernels all use the same.",
        "Loading a half-precision tensor gives half-precision values: .to(tl.float32) behind every load.",
    ),
    "read-again": (
        "One pass: each element of x and of the residual is loaded once. Is one loaded twice?",
        "Keep what was loaded in a variable and use that.",
    ),
    "strides": (
        "Contiguous inputs come out right, these don't. What did the launcher do about strides?",
        "The kernel counts on rows that follow one another: .contiguous() copies an input where they do not.",
    ),
    "not-compiled": (
        "Interpreted it's right, but the compiler for a GPU refuses it. Its message says why.",
        "Only the operations of tl work in a compiled kernel, and sizes of blocks have to be tl.constexpr.",
    ),
    "wrong-values": (
        "Work out one element by hand: x * weight + bias, then zero if negative, then plus the residual.",
        "value = tl.maximum(x * scale + shift, 0.0) + residual, with each of the four loaded as float32.",
    ),
}

SLIPS = (
    Slip(
        "pointer-arithmetic",
        r"pointer<|cannot add pointers",
        (
            "x, weight, bias and residual are addresses. Load them first: tl.load(x + at, inside).",
            "Element `at` takes the weight of its column: tl.load(weight + at % width, inside), "
            "and the same for bias. Then compute with what you loaded.",
        ),
    ),
    Slip(
        "largest-of-all",
        r"\btl\.max\(",
        (
            "tl.max(block, axis) is the largest element of a block, one number. Which one compares two?",
            "tl.maximum(a, b), element by element.",
        ),
    ),
    Slip(
        "conversion",
        r"'torch\.dtype' object|has no attribute '(float|half|float32|type)'|keyword argument 'dtype'",
        (
            "Inside a kernel a dtype is one of Triton's, and what was loaded is converted by `.to(...)`.",
            "tl.load(x + at, inside).to(tl.float32)",
        ),
    ),
    Slip(
        "unknown-function",
        r"(module '[\w.]+'|'tensor' object) has no attribute|must be Tensor, not tensor|clamp\(\)",
        (
            "Triton has tl.maximum(a, b) for element by element; functions and methods of torch don't work "
            "inside a kernel.",
            "The ReLU of a block: tl.maximum(block, 0.0).",
        ),
    ),
    Slip(
        "arguments",
        r"fused(_kernel)?\(\) (takes|missing|got)",
        (
            "Compare what is handed over with the first line of the function, one by one.",
            "The scaffold was right in this: `fused` takes four tensors, and hands fused_kernel five, two "
            "sizes and BLOCK.",
        ),
    ),
    Slip(
        "no-grid",
        r"'grid_(idx|dim)'|type 'int' has no len|'builtin_function_or_method' object has no",
        (
            "How many programs should the kernel start? A launch says so between [ and ], as a tuple.",
            "grid = (triton.cdiv(x.numel(), block),), then fused_kernel[grid](...).",
        ),
    ),
    *IN_KERNELS,
)
