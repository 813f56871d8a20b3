"""The hints of lesson 9's exercise "cell": of wrong answers by reason, and of errors."""

from labkit.tasks import recurrence_hints
from labkit.tasks.slips import Slip

HINTS = recurrence_hints.OF_ANY | {
    "unfinished": (
        "Replace the three dots. Which values does a step make, from which ones of the step before?",
        "s from s, then u from r and the new s, then r from u: three lines, in this order. gate, value and w "
        "are what was loaded.",
        "tl.sum(u * u) adds up the block's lanes, and H of them are features.",
    ),
    "not-a-tensor": (
        "What does the function that launches the kernel return?",
        "The launcher was right as it was given: its last line is return result.",
    ),
    "shape-or-dtype": (
        "Which line makes result, and with which shape and dtype?",
        "The launcher was right as it was given: result is an empty tensor like z.",
    ),
    "several-launches": (
        "One kernel, one loop: what is left for PyTorch to do?",
        "z, candidate, gain and both states are at hand at every step. What you do outside of the loop is "
        "one more pass over memory.",
    ),
    "unmasked-store": (
        "The block may have more lanes than a row has features. Where do the values of the others go?",
        "Behind the last feature comes the next step, and after the last step another row, or memory that "
        "isn't yours. `inside` belongs to the store.",
    ),
    "unmasked-load": (
        "The numbers are right. But which addresses does the last program load from, at the last step?",
        "Memory that isn't the tensor's, which may end the program on a GPU. Every load needs `inside`.",
    ),
    "stored-twice": (
        "How often does a step store, and to which places?",
        "Once, to those of `at`, which row and t tell. Only r goes out: s stays where it is.",
    ),
    "not-all-written": (
        "Which rows, steps and features did no store reach?",
        "Grid, loop, mask and address were right as given: (B,) programs, range(T), `inside`, `at`.",
    ),
    "only-last": (
        "How often does a program store? The result has T steps.",
        "Once, after the loop. Indent the store so that it belongs to every step.",
    ),
    "half-precision": (
        "It's nearly right. What is rounded at a step goes into the next: what is not float32?",
        "The loads convert what they bring, and s and r begin as float32 and stay it: only what the store "
        "gets is rounded.",
    ),
    "zeros": (
        "What is stored is zero everywhere. Which name does the store take, and which one do you set?",
        "r is stored, and it begins as zeros: give it its new value in the loop, before the store.",
    ),
    "stored-early": (
        "What does your first step store?",
        "Zeros, what r begins with: you store before r is the new one.",
    ),
    "swapped-s": (
        "Let z be nearly 1. Should s follow the candidate then, or stay what it was?",
        "It should follow: z is the candidate's share, and 1 - z what is left of the old s.",
    ),
    "swapped-u": (
        "s is right. Which share of the old r goes into u?",
        "The same as of the old s: 1 - gate, not gate.",
    ),
    "ungated-candidate": (
        "How much of the candidate comes into s at a step?",
        "Its share is z: gate * value.",
    ),
    "undecayed-s": (
        "Try it with z = 1: then s should be the candidate. What is yours?",
        "The old s is still there, as a whole. Only 1 - gate of it is kept.",
    ),
    "no-s": (
        "What comes into u of the candidates of steps before?",
        "Only what r has kept: beside it you have z times this step's candidate. s is more than that.",
        "s is on both sides, (1 - gate) of the old one and gate * value, and u takes all of it.",
    ),
    "undecayed-r": (
        "How much of the old r goes into u?",
        "1 - gate of it, by the same gate as in s.",
    ),
    "no-r": (
        "Every step's result depends on its own s alone. What should u have of the step before?",
        "(1 - gate) * r, where r is still that of the step before: nothing sets it to zero in the loop.",
    ),
    "gated-s": (
        "What stands beside s in the formula of u?",
        "Nothing: u is no mean of two. s is added as it is.",
    ),
    "around-sum": (
        "What does 1 - z multiply in u, r or the sum?",
        "r alone. s is added behind the product.",
    ),
    "candidate-for-s": (
        "The second recurrence is fed by the first. What do you add in u?",
        "The candidate, as it came from memory. It should be s: what the first one makes of all of them.",
    ),
    "old-s": (
        "s_t or s_{t-1}: which one stands in u_t?",
        "s_t. Your u takes s before it has its new value: set s first.",
    ),
    "other-norm": (
        "The mean of which squares do you divide by?",
        "Those of u, which is what becomes r: its own size is what it's divided by.",
    ),
    "s-over-norm": (
        "What do you divide by the root, s or u?",
        "u, the value whose squares you took. Else nothing of the old r comes into the new one.",
    ),
    "over-block": (
        "It's right where H is 32, and wrong where it's 20. Which lanes does your mean count?",
        "All BH of them. The others add zeros to the sum, but the number of features is H.",
    ),
    "sum-for-mean": (
        "Is it a mean that you take the root of?",
        "It's the sum. Divide it by H before eps comes to it.",
    ),
    "no-root": (
        "Let u be twice as large. r should stay the same; what does yours do?",
        "You divide by the mean square, which is four times as large then. Divide by its root.",
    ),
    "times-root": (
        "A large u and a small one should give an r of the same size. Which way does your root work?",
        "It multiplies. Divide by tl.sqrt(...), or multiply by tl.rsqrt(...).",
    ),
    "no-square": (
        "u has values of both signs. What becomes of them in your mean?",
        "They cancel, and the root of a negative mean is NaN. Take the mean of u * u.",
    ),
    "no-norm": (
        "How large can your r become after many steps?",
        "As large as it likes: nothing divides it by its size, the root of mean(u * u) + eps.",
    ),
    "no-eps": (
        "Let all candidates be zero. What is 0 / 0?",
        "NaN. eps is for that: it's added to the mean, and keeps the root from being zero.",
    ),
    "eps-elsewhere": (
        "It's right for large u, and a little off for small ones. Where do you add eps?",
        "To the mean, below the root: tl.sum(u * u) / H + eps.",
    ),
    "no-gain": (
        "w was loaded. Where do you use it?",
        "r is w * u over the root.",
    ),
    "gain-once": (
        "What you store and what the next step takes for r differ by the gain. Which of them is r?",
        "r has the gain in it, for the store and for the next step: multiply where you set r.",
    ),
    "stores-u": (
        "What you store is not normalised. Which name does the store take?",
        "r. The scaffold's store was right.",
    ),
    "stores-s": (
        "You store what the first recurrence makes. Whose result is asked for?",
        "The second one's: r. s is only its input.",
    ),
    "carries-u": (
        "The first step is right, the second isn't. From which value does it go on?",
        "From u, before it was divided. The next step wants what the norm has made of it: r.",
    ),
    "masked-lanes": (
        "It's right where H is a power of two. What do the other lanes hold where it isn't?",
        "They are in the sum too. Where a load has lost its mask or its other=0.0, they hold the next step's "
        "numbers, or anything.",
        "Leave the loads as they were given, with `inside` and other=0.0: then these lanes add nothing.",
    ),
    "no-other": (
        "What does a load bring for a place that its mask shuts out?",
        "Interpreted it's zero; on a GPU it's anything, unless other says what. The sum is over all lanes.",
        "Give all three loads other=0.0, as they had it.",
    ),
    "wrong-values": (
        "Work out one step of one feature by hand: z = 0.5, candidate = 2, gain = 3. s is 1, u is 1, r is 3.",
        "s = (1 - gate) * s + gate * value, then u = (1 - gate) * r + s, then r from u, w, H and eps.",
    ),
}

SLIPS = (
    Slip(
        "power",
        r"for \*\* or pow|\^|invalid operands of type triton\.language\.float",
        (
            "Tensors in a kernel have no powers. How else do you write a square, or a root?",
            "u * u, and tl.sqrt(...).",
        ),
    ),
    Slip(
        "addresses",
        r"pointer<|cannot add pointers|cannot cast \[",
        (
            "z, candidate and gain are addresses in a kernel. Where are the numbers that lie there?",
            "They are loaded already: gate is z's, value the candidate's, w the gain's.",
        ),
    ),
    Slip(
        "python-sum",
        r"'int' object is not iterable\n.*(?<!\.)\b(sum|max|min)\(",
        (
            "Python's sum walks through a list. What adds up the lanes of a block?",
            "tl.sum(u * u): one number for all of them.",
        ),
    ),
    Slip(
        "unknown-function",
        r"(module '[\w.]+'|'tensor' object) has no attribute|must be [\w ]+, not tensor|"
        r"\n.*\b(torch\.(?!empty)|math\.|np\.|numpy\.)",
        (
            "Only functions of tl work in a kernel, and tl has no mean. What is a mean made of?",
            "tl.sum(u * u) / H is the mean of the squares, tl.sqrt(...) the root.",
        ),
    ),
    Slip(
        "axis",
        r"axis .* out of bounds",
        (
            "How many axes has the block? Here a program has one row of features, not a tile.",
            "One: tl.sum(u * u), or tl.sum(u * u, 0).",
        ),
    ),
    Slip(
        "subscript",
        r"'int' object is not iterable|is not subscriptable|unsupported tensor index",
        (
            "Which step's value do you want to look up? A loop needs no index for the one before.",
            "s and r are what the last step left them: read before you set it, s is the old one.",
        ),
    ),
    Slip(
        "arange",
        r"arange's (arguments|range)",
        (
            "A block's size is a power of two, and H may be none. Which of the names is?",
            "BH: the launcher rounds H up for it.",
        ),
    ),
    *(
        slip
        for slip in recurrence_hints.SLIPS
        if slip.reason in ("one-address", "mask-of-numbers", "no-grid")
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Compare what is handed over with the first line of the function, one by one.",
            "The scaffold was right in this: tensors first, then T, eps and the sizes. tl.sum takes a block, "
            "and an axis if you like.",
        ),
    ),
)
