"""The hints of lesson 2's exercise "pays": of wrong answers by reason, and of errors."""

from labkit.tasks.slips import Slip

HINTS = {
    "unfinished": (
        "Replace all three dots, and return the ratio. A time is operations / rate, or bytes / bandwidth.",
        "How many operations is one product of (rows, d) by (d, h)? And which tensors cross memory?",
        "gemm and fused are each the larger of two floors; pointwise has only bytes.",
    ),
    "not-a-number": (
        "What does the function return, on every way through it?",
        "It returns (gemm + pointwise) / fused, one number.",
    ),
    "several-numbers": (
        "Three times lie on the way. Which one number follows from them?",
        "How many times faster the fused way is: the time of the other way over that of fused.",
    ),
    "yes-or-no": (
        "Whether it pays is one question. How much it pays is this one.",
        "Return the ratio of the two times, not a comparison.",
    ),
    "constant": (
        "Devices and shapes differ, and so do their speedups. What is the result computed from?",
        "Every case got the same answer: use all of the five arguments.",
    ),
    "one-product": (
        "gate and up: how many products of (rows, d) by (d, h) are that?",
        "Two, with a weight each: twice the operations of one, two weights read, two results written.",
    ),
    "half-operations": (
        "Against the bytes, your operations count half of what they should. How many has a sum of d "
        "products, and how many such sums are there?",
        "d multiplications and d additions, for each of the rows * 2 * h results: 4 * rows * d * h. (Or are "
        "the bytes twice what they are? An element of bfloat16 has two.)",
    ),
    "half-bytes": (
        "Against the operations, your bytes count half. `bandwidth` is in bytes: what did you count?",
        "An element in bfloat16 has two bytes: twice the number of elements.",
    ),
    "sum-of-floors": (
        "While the matrix units compute, does memory stand still?",
        "They work at the same time, so the time is that of the slower one: max, not the sum.",
    ),
    "smaller-floor": (
        "A floor is what something can't be faster than. With two of them, which one counts?",
        "The larger: max.",
    ),
    "arithmetic-only": (
        "What takes the time where d is small, and each loaded element is used a few times only?",
        "The bytes: gemm and fused are each max(operations / rate, bytes / bandwidth).",
    ),
    "bytes-only": (
        "What takes the time where d is large, and each loaded element is used thousands of times?",
        "The operations: gemm and fused are each max(operations / rate, bytes / bandwidth).",
    ),
    "both-written": (
        "Which tensors does the fused kernel write?",
        "Only the hidden one: gate and up stay in registers. That's rows * h elements, not 2 * rows * h.",
    ),
    "nothing-written": (
        "Something has to leave the fused kernel. What does the down projection get?",
        "The hidden tensor, rows * h elements, is written by the fused kernel too.",
    ),
    "hidden-once": (
        "Without fusing, what has to be in memory when the first kernel ends?",
        "gate and up, each rows * h elements: 2 * rows * h are written.",
    ),
    "no-output": (
        "A matmul reads its inputs. What else crosses memory?",
        "Its output: gate and up for gemm, the hidden tensor for fused.",
    ),
    "no-weights": (
        "Look at the case of 16 rows: which tensors are the largest there?",
        "The weights: 2 * h * d elements, which are read too.",
    ),
    "one-weight": (
        "gate and up come from a weight each. How many elements are both together?",
        "2 * h * d elements are read, fused or not.",
    ),
    "no-x": (
        "Which tensor do both products read, beside the weights?",
        "x, with rows * d elements.",
    ),
    "x-twice": (
        "gate and up come from the same x, in one kernel. How often does it have to cross memory?",
        "Once, at the least: rows * d elements.",
    ),
    "one-pass": (
        "Where does the second kernel find gate and up, and where does it leave its result?",
        "All three are in memory: two tensors in, one out.",
    ),
    "two-passes": (
        "gelu(gate) * up: how many tensors does the second kernel read, and how many does it write?",
        "Two in and one out: 3 * rows * h elements cross memory.",
    ),
    "too-many-passes": (
        "How many kernels run after the products, and does GELU's result go to memory in between?",
        "It's one kernel: gate and up in, their result out. 3 * rows * h elements.",
    ),
    "swapped-rates": (
        "Which unit has operations / bandwidth?",
        "Operations go with `rate`, bytes with `bandwidth`.",
    ),
    "inverse": (
        "Faster means more than 1. Which of the times goes below the line?",
        "The time with fusing: (gemm + pointwise) / fused.",
    ),
    "seconds": (
        "A speedup has no unit. Which unit has your result?",
        "Divide the time without fusing by the time with it.",
    ),
    "gain": (
        "Twice as fast is 2, and as fast as before is 1. What do you return for these?",
        "Return the ratio itself, neither less 1 nor in percent.",
    ),
    "gemm-left-out": (
        "What runs before the second kernel?",
        "The products: the time without fusing is gemm + pointwise.",
    ),
    "pointwise-left-out": (
        "Without fusing, which kernel runs after the products?",
        "The one that computes gelu(gate) * up: the time without fusing is gemm + pointwise.",
    ),
    "bytes": (
        "Where arithmetic rules you are right. Where memory does: which tensors cross it, "
        "and how large are they?",
        "x and both weights are read either way; gemm writes gate and up, fused the hidden tensor.",
        "gemm: 2 * (rows * d + 2 * h * d + 2 * rows * h) bytes, fused: one rows * h less.",
    ),
    "arithmetic": (
        "Where memory rules you are right. Where arithmetic does: how many operations are there?",
        "Two products, each of rows * h sums of d multiplications and d additions.",
        "4 * rows * d * h / rate, for gemm and for fused.",
    ),
    "wrong-values": (
        "Begin with what both regimes share, the second kernel: how many bytes does it read and write?",
        "Two tensors in, one out, each of rows * h elements of two bytes. And for the products, is each of "
        "the two floors there?",
        "gemm = max(4 * rows * d * h / rate, 2 * (rows * d + 2 * h * d + 2 * rows * h) / bandwidth); "
        "in fused one rows * h less is written.",
    ),
}

SLIPS = (
    Slip(
        "max-of-one",
        r"'(float|int)' object is not iterable|max\(\) takes|max expected",
        (
            "max compares what stands between its parentheses. Are there two, with a comma between them?",
            "max(operations / rate, bytes / bandwidth)",
        ),
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Compare the function's first line with the scaffold's.",
            "It gets rows, d, h, rate and bandwidth, in this order.",
        ),
    ),
    Slip(
        "a-tensor",
        r"must be Tensor, not|invalid combination of arguments",
        (
            "There are no tensors here, only their sizes. What do you need torch for?",
            "Plain numbers do: *, /, + and max.",
        ),
    ),
)
