"""The hints of lesson 7's exercise "original": of wrong answers by reason, and of errors."""

from labkit.tasks import recurrence_hints
from labkit.tasks.slips import Slip

HINTS = recurrence_hints.OF_ANY | {
    "unfinished": (
        "The kernel came without three dots. Which line did you mean to come back to?",
        "Every line of it has its counterpart in the mended one: two of them are wrong, none is missing.",
    ),
    "not-a-pair": (
        "What does the launcher return, and how many gradients are there?",
        "Two tensors, dx and the weight's gradient, with a comma between them.",
    ),
    "shape-or-dtype": (
        "A gradient has the shape and dtype of what it belongs to. Which of the two isn't so?",
        "dx is like x. The weight's gradient is (H,) like weight: one number for each column, from all rows, "
        "so it's dimension 0 of (N // H, H) that goes.",
        ".to(weight.dtype) stood at the end: keep it there.",
    ),
    "nothing-mended": (
        "dx is right in column 0 of row 0. Over which elements does column 1 of the same row sum?",
        "The sum of an element is over its own row: where does that begin in the flat tensor, and does it "
        "depend on the column? With a random dy such sums are small, and the error nearly hides: with rows "
        "of hundreds of numbers it's a tenth of dx or less. With dy = 2y it shows.",
        "For the weight: y = weight * (x / rms), in every row. What stands beside the weight, and how many "
        "rows used it?",
    ),
    "only-first": (
        "dx is right now. If weight[3] grows a little, by how much does each y in column 3 grow?",
        "By x / rms times as much, in every row: an element's term is dy * x / rms.",
        "Store that in dw, and let the launcher add up all rows instead of taking one.",
    ),
    "only-second": (
        "The weight's gradient is right now. Compare dx for dy = 2y with autograd's: where is it right?",
        "In row 0, column 0. With a random dy you'd hardly see it: the sum is small then, and so is what it "
        "changes.",
        "Every element of a row has the same sum, from the row's first element to its last. Where does that "
        "row begin?",
    ),
    "half-start": (
        "The sum has two factors of a row, dy and x. Do both come from the same place?",
        "One of them still begins at the column. Both begin where the row does.",
    ),
    "from-element": (
        "Your sum begins at the element itself. How far does it reach?",
        "H elements from there on: into the next row. All elements of a row share one sum.",
        "It begins at the row's first element: leave the column out of it.",
    ),
    "row-for-start": (
        "row counts rows. How many elements lie before row 2?",
        "Twice H: an address counts elements.",
    ),
    "first-row": (
        "Row 0 is right. Which row do the elements of row 1 sum over?",
        "Row 0 too: `at` has k in it, but no row.",
    ),
    "rotated": (
        "You stay in the row and go round. Which weight meets which element of it?",
        "weight[k] belongs to column k, and yours meets another one. Start at column 0 of the row, then all "
        "three factors go along together.",
    ),
    "no-sum": (
        "Which part of dx comes from the rms, which depends on every x of the row?",
        "value * dot / (H * r * r * r): it was right as it was given, and belongs back. Only what dot sums "
        "over was wrong.",
    ),
    "not-reduced": (
        "The term of an element is right. From how many rows does your result come?",
        "From one. Each row used the weight, so the gradient is the sum over dimension 0.",
    ),
    "part-of-rows": (
        "How many rows are B times T steps, and how many of them are in your sum?",
        "All of them belong to it: dw has N // H rows, and dimension 0 goes away as a whole.",
    ),
    "mean": (
        "Is a gradient the sum or the mean over those who used the weight?",
        "The sum. If a loss is a mean, its dy is divided already.",
    ),
    "no-factor": (
        "All rows are added up now. What is each of them multiplied by?",
        "By nothing: it's the gradient of a bias. By the weight y multiplies x / rms, so that's the factor.",
    ),
    "no-rms": (
        "The weight multiplies the normed x. Which number is that in the kernel?",
        "value / r, not value.",
    ),
    "times-rms": (
        "Is x multiplied or divided by its rms in the forward?",
        "Divided: what stands beside the weight is value / r.",
    ),
    "with-weight": (
        "y = weight * x / rms is linear in the weight. Is there any weight left in its derivative?",
        "No: dy * x / rms. The weight belongs to dx.",
    ),
    "no-x": (
        "dy / rms: which part of the derivative is missing?",
        "x: the derivative of weight * x / rms by the weight is x / rms.",
    ),
    "unmasked-store": (
        "The last program has more lanes than elements. What keeps its stores inside?",
        "Both stores had `inside` as they were given: put it back.",
    ),
    "unmasked-load": (
        "The gradients are right. But what do the lanes beyond N load?",
        "On a GPU a load outside its tensor may end the program with an illegal memory access.",
        "The loads in the loop had at < N, the others `inside`: a new address needs its own mask.",
    ),
    "stored-twice": (
        "Two lanes wrote the same element of dx. Which line tells a lane its element?",
        "idx was right as it was given: program_id times BLOCK, plus the lane.",
    ),
    "not-all-written": (
        "Is there a lane for each element of dx?",
        "The grid was right as it was given, cdiv(N, 1024) programs, and so was the mask of the store.",
    ),
    "half-precision": (
        "Which of your factors or sums is in the inputs' dtype?",
        "dw is float32 as it was given, and so are r, dot, gy and value. Sum dw first, convert after.",
    ),
    "wrong-values": (
        "Two things were wrong: what dot sums over, and what dw is made of. What else is different now?",
        "Put the rest back. dx = gy * weight / r - value * dot / (H r^3), with dot over the element's row; "
        "the weight's gradient is the sum of dy * x / rms over all rows.",
    ),
}

_OWN = (
    Slip(
        "pointer-arithmetic",
        r"pointer<|cannot add pointers|cannot cast \[",
        (
            "dy, x, weight and rms are addresses in the kernel: they are added to and loaded from, no more.",
            "Compute with what tl.load gave you: gy, value and r are loaded already.",
        ),
    ),
    Slip(
        "one-address",
        "cannot be block type if pointer argument is not a block",
        (
            "Does each lane have an address of its own here? Its mask says so.",
            "weight + k is one address for all lanes, row * H + k one for each. The mask has to be the same.",
        ),
    ),
    Slip(
        "unknown-function",
        r"(module '[\w.]+'|'tensor' object) has no attribute|must be \w+, not tensor|only 0-dimensional|"
        r"has no attribute 'scalar'\n.*\btorch\.|cannot convert tensor\(",
        (
            "Functions of torch work in the launcher, those of tl in the kernel. Where does this line stand?",
            "The kernel needs no new function. The sum over rows is the launcher's: dw is a tensor there.",
        ),
    ),
    Slip(
        "subscript",
        r"'int' object is not iterable|is not subscriptable|unsupported tensor index",
        (
            "A kernel gets the address of a tensor's first element, and an address can't be indexed.",
            "Rows lie one behind the other: work out the place of an element as one number, add it to the "
            "address, and load from there.",
        ),
    ),
    Slip(
        "shapes",
        r"size of tensor|[Cc]annot (make_shape_compatible|broadcast)|not be broadcast|[Dd]imension out of",
        (
            "Which shapes has this line? In the launcher dw is (N // H, H).",
            "A sum over rows leaves (H,), like weight.",
        ),
    ),
)
SLIPS = (
    *_OWN,
    *(slip for slip in recurrence_hints.SLIPS if slip.reason not in {own.reason for own in _OWN}),
)
