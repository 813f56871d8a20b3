"""Hints that exercises share, each one leading a step further. Hints of one exercise stand in its file."""

# ---- the result, and what the kernel did to memory ---------------------------------------------------------

FORM = (
    "What does your function return, on every way through it?",
    "The text above the cell says what is asked for: one number, or a tensor of which shape and dtype.",
)
DTYPE = (
    "Which dtype has the result that you make room for, and which one has x?",
    "torch.empty_like(x) has that of x, and the store rounds to it. What PyTorch adds up in float32 needs "
    "`.to(x.dtype)`.",
)
WRITES_INPUT = (
    "Which line stores into something that your function was given, or takes something out of it?",
    "The caller still needs its inputs: make a tensor or a list of your own.",
)
STRIDES = (
    "With contiguous inputs this is right. What do your addresses suppose about the layout in memory?",
    "x.contiguous() gives a tensor whose rows lie one behind the other. Each tensor that is loaded needs it. "
    "The result does, too: torch.empty_like(x) lays it out as x lies, so it comes afterwards.",
)
STORES_OUTSIDE = (
    "Which places does the last program store to, and which of them does the tensor have?",
    "Every store needs a mask that is true inside of the tensor, and nowhere else.",
    "If the mask is right, is the address? Where does the part of this program begin in the tensor?",
    "And the launch: does each number in its brackets count what the kernel reads from that tl.program_id?",
)
NOTHING_STORED = (
    "The result is allocated, and nothing is in it. Which line stores to it, and does it run?",
    "In the kernel it is tl.store(addresses, values, mask). Who launches the kernel?",
    "kernel[(programs,)](...) does, with the tensors and their sizes as arguments.",
)
STORED_OVER = (
    "Some places are stored to more than once, and others never. So there may be stores enough: is their "
    "address right?",
    "Write down where the second program, the second row or the second step begins in memory, and how much "
    "of it the first one has taken.",
    "If the addresses are right: does each number in the brackets of the launch count what the kernel reads "
    "from that tl.program_id?",
)
UNWRITTEN = (
    "Which elements were stored? Which programs, or which stores, should have taken care of the others?",
    "Count: how many programs of one block does it take to cover all of it, the last one partly? "
    "triton.cdiv divides and rounds up.",
    "Does each number in the brackets of a launch count what the kernel reads from that tl.program_id?",
    "And the number in the mask: is it a count of elements, or of rows?",
)
NO_OTHER = (
    "A load leaves the masked places of its block alone. Which number stands there then?",
    "On a GPU whatever the register held before. Yours has to be one that adds nothing to a sum.",
    "tl.load takes it as `other`. (If all loads have it: is something inf / inf, where an exponential is too "
    "large?)",
)
ELEMENT_FOR_COLUMN = (
    "A vector has as many elements as a row. Which one of them belongs to element `at` of x?",
    "Rows lie one behind the other, so the column is what is left of `at` after whole rows.",
)
ROW_FOR_COLUMN = (
    "at // width counts whole rows. Which number says how far inside its row an element is?",
    "The remainder of the same division.",
)
PLACE_FOR_COLUMN = (
    "The first program is right. Which elements has the second one, and in which columns are they?",
    "The column is at % width, where `at` has the program's number in it.",
)
LOADS_OUTSIDE = (
    "The result is right. Which loads have no mask, or one that is true beyond the end?",
    "On a GPU a load beyond the end may end the program with an error. Mask it, for what *it* loads.",
)
NO_KERNEL = (
    "What computes the result: your kernel, or PyTorch?",
    "Launch the kernel with kernel[grid](...), and return the tensor that it stores to.",
)
LAUNCHES = (
    "Each launch moves its tensors across memory once more. What could the kernel do by itself?",
    "Let one kernel load everything, compute, and store once; PyTorch only allocates.",
)
FIXED_LOOP = (
    "Which number ends your loop, and where does it come from? What if there is more to work off than that?",
    "The kernel gets the size as an argument: `for t in range(T)` takes as many turns as there are steps.",
)
STORED_TWICE = (
    "An element is stored more than once: by several programs, which a GPU runs in any order, or by one, "
    "as in a loop?",
    "Count the programs of your grid, and write down by hand which elements each of them stores to, and "
    "how often.",
)
READ_AGAIN = (
    "A kernel is as slow as the bytes that it moves. How often is each one of them needed?",
    "Load an element into a variable once, and use the variable.",
    "Is there a place that you clamp where you could mask it? It is read again and again.",
)
TF32 = (
    "How many bits of a float32 does tl.dot multiply, if you do not say so?",
    "The default is TF32, with 10 bits of mantissa in place of 23.",
    'tl.dot takes input_precision="tf32x3", three products of TF32, or "ieee", without tensor cores.',
)
WIDE_PRODUCTS = (
    "In which dtype do your two blocks arrive at tl.dot? It decides which instruction multiplies them.",
    "Float32 takes three products of TF32 in place of one, from tiles of twice the bytes.",
    "Give tl.dot what was loaded, as it was loaded: it adds up in float32 by itself.",
)
ROUNDED_TWICE = (
    "In which dtype are the values that your kernel computes with?",
    "What was loaded in 16 bits stays in 16 bits until you convert it: .to(tl.float32) after the load.",
    "Only the store rounds. Everything before it is float32, also parts that are added up later.",
)

# ---- how the answer's process ended ------------------------------------------------------------------------

ENDLESS = (
    "Does a loop never end? Or is a tile so large that each of its steps takes long here? The line that was "
    "running, where it could be told, stands above. (If this computer is busy, a right answer can take too "
    "long as well: try it once more.)",
    "Print what the loop's condition depends on, inside the loop: what is printed appears above.",
)
WILD_ADDRESS = (
    "A load or a store went to a wild address. Every place has to be inside its tensor, or masked.",
    "Print the smallest and the largest of your places in the last program, and compare with the size.",
)
TOO_MUCH = (
    "What does a program ask for: how many warps (num_warps), and how many stages of which blocks?",
    "num_warps is 32 at most. Smaller blocks, or a smaller num_stages, take less shared memory.",
)
READS_STORED = (
    "Which tensor do you both load from and store to? Who sees there what another thread has stored?",
    "Load from the inputs only, keep values in variables, and store each result once.",
)
NOT_YOURS = (
    "That works, and somebody else has written it. What would you write?",
    "The cell wants a kernel of your own: a function with @triton.jit, and its launch.",
)
DEVICE = (
    "Which lines of the launch make or move a tensor, and where does it lie then?",
    "torch.empty_like(x) makes one where x lies; so does torch.empty(..., device=x.device, dtype=x.dtype).",
)
REUSED_MEMORY = (
    "What happens to the first result when somebody calls your function again?",
    "Make the result anew in each call: torch.empty_like costs next to nothing.",
)
STALE = (
    "What does your function keep from one call to the next? The second call brings other tensors.",
    "Make anew in each call whatever holds their numbers or their addresses.",
)
AT_SIZE = (
    "It is right at the small sizes of the check. Which number in your kernel was enough for those only?",
    "Look at the grid, at fixed blocks, and at products of sizes beyond 2**31.",
)
LEFT_OUT_AT_SIZE = (
    "At the small sizes of the check nothing is left out. Which number of your launch does not grow with the "
    "size?",
    "The programs together have to cover the whole tensor: look at the grid, and at blocks of a fixed size.",
)
BITS_32 = (
    "It is right where tensors are small. Which product in your kernel grows with their size?",
    "tl.program_id and tl.arange have 32 bits, and so has what is computed of them: from 2**31 on it is "
    "negative.",
    "Turn one factor to 64 bits before it is multiplied: tl.program_id(0).to(tl.int64).",
)
PROGRAMS_ON_AXIS = (
    "Which number of your grid grows with the number of rows or sequences, and on which axis does it stand?",
    "Axis 0 takes 2**31 - 1 programs, axes 1 and 2 only 65,535. What may be many belongs on axis 0.",
)

OVERFLOW = (
    "Which of your exponentials is infinite where its argument is large? And what is inf / inf?",
    "NaN. 2 * tl.sigmoid(2 * z) - 1 is tanh(z), and never overflows.",
)
NOT_A_NUMBER = (
    "Which of your loads has no mask, or one that is still true beyond its tensor, or beyond the part of it "
    "that is wanted? What lies there is in the result.",
    "Each load has bounds of its own, along its rows and along its columns. In a sum or a product the masked "
    "places are 0: other=0.0.",
    "If all loads are masked so: is the address of each right? Or is there a 0 / 0, infinity over infinity, "
    "or the root of a negative number?",
)
UNKNOWN = (
    "Work out the first wrong element by hand, for the case above. Which number that goes into it comes from "
    "another place, or not at all?",
    "In a kernel print(block) shows a block, as kernels are interpreted here. Compare one term after another "
    "with the text.",
)

# ---- exceptions --------------------------------------------------------------------------------------------

EXCEPTIONS = (
    ("no-jit", "'function' object (is not subscriptable|has no attribute 'fn')",
     "A kernel is launched with kernel[grid](...). What makes a function a kernel?",
     "Put the line @triton.jit above it, and hand in the kernel without brackets or parentheses. A function "
     "that a kernel calls, or hands to a scan, needs the line, too."),
    ("one-of-two", r"zip\(\) argument 2 is shorter.*\n.*(scan|reduce)\(",
     "How many blocks go into the scan, and how many does your function return for two steps?",
     "As many as there are blocks: return a and b, separated by a comma."),
    ("no-grid", r"has no attribute '(scalar|is_ptr)'|Cannot call @triton\.jit",
     "A kernel is no function that you call: how many programs should run, and where do you say so?",
     "kernel[(programs,)](...) launches it: the number of programs stands in brackets before the arguments."),
    ("address-for-element", r"operands of type .*pointer<|cannot cast \[\d{6,}\]",
     "In a kernel, the name of a tensor is the address of its first element. What gets you the elements?",
     "tl.load(x + at, mask=...) loads a block of them. Load each tensor, and calculate with that."),
    ("address-lost", r"Unsupported ptr type",
     "tl.load and tl.store want an address first. Is it one on this line, or a block of numbers?",
     "A tensor's name is its address until a line sets that name anew. Call the block something else."),
    ("no-descriptor", "'tensor' object has no attribute '(load|store)'",
     "block.load([...]) is for a tensor descriptor. Does this argument arrive as one, or as an address?",
     "From an address tl.load(x + at, mask=...) loads, as in the lessons before."),
    ("no-such-function", r"module 'triton\.language' has no attribute",
     "Triton's language has no function of this name. Which functions has the lesson given you?",
     "A size is an argument of the kernel. The rest is made of arithmetic, tl.exp, tl.sigmoid, and of the "
     "@triton.jit functions that a lesson gives you."),
    ("break", r"node type: Break",
     "Triton has no break. What bounds your loop, and what may its last turns do?",
     "Put the end into range(), or mask what the turns behind it load and store."),
    ("list", r"'tuple' object has no attribute '?append|'append' is not in list",
     "A kernel has no lists. How many values do you need at a time, and what can hold them?",
     "Each in a name of its own; or a tuple: in a loop of tl.static_range, blocks += (block,) appends."),
    ("print", r"is not string",
     "print shows a block where kernels are interpreted. What does a GPU do with this line?",
     "It cannot print so. Take the line out when you have seen what you wanted to see."),
    ("launch-function", r"Did you forget to add @triton\.jit",
     "A kernel calls Triton's functions, and those with @triton.jit. Which function of yours is neither?",
     "triton.cdiv and triton.next_power_of_2 are for the launch. In a kernel the first one is tl.cdiv."),
    ("torch-in-kernel", r"must be Tensor, not tensor",
     "A kernel has blocks, which are no tensors of PyTorch. Which name on this line belongs to PyTorch?",
     "Inside a kernel only tl's functions can be called, and those that have @triton.jit."),
    ("grid-of-int", r"'int' (has no len|object is not (iterable|subscriptable)).*\n.*\]\(",
     "In the brackets of a launch stands how many programs there are, on one axis or on several.",
     "A tuple, also of one number: kernel[(programs,)](...)."),
    ("loop-number", "'int' object has no attribute 'to'",
     "In the interpreter a loop's number, or an argument that is 1, may be Python's. How to make it 64 bits?",
     "tl.cast(number, tl.int64) does it there and on a GPU."),
    ("shape-of-number", r"'int' object is not iterable.*\n.*tl\.(zeros|full)\(",
     "The first argument is a shape: how many places there are along each axis. What did you give it?",
     "A list, also of one number: tl.zeros([BLOCK], tl.float32)."),
    ("number-of-warps", "num_warps must be a power of 2",
     "How many warps does the launch ask for? Which numbers can that be?",
     "1, 2, 4, 8, 16 or 32."),
    ("power", r"unsupported operand type\(s\) for \*\*",
     "A block has no **. What is the square, written as a product?",
     "x * x. (e to the power of x is tl.exp(x).)"),
    ("missing-argument", r"missing \d+ required (positional|keyword-only) argument",
     "Count the arguments of this call against the names in the first line of what it calls.",
     "In a launch the arguments without a name come in the kernel's order; a tl.constexpr is one of them."),
    ("assigned-at", r"can be converted to Python scalars.*\n.*\w\[.*\] *=",
     "In a kernel nothing is assigned at an index. Which function stores a block at addresses?",
     "tl.store(h + at, values, mask=...)."),
    ("python-list", r"'list' object has no attribute",
     "A list of Python is no block. Which function of Triton makes a block of zeros?",
     "tl.zeros([BLOCK], tl.float32)."),
    ("number-by-block", "must be real number, not tensor",
     "math computes with numbers of Python, before the kernel runs. Which function takes a block?",
     "Triton's own: tl.sqrt, tl.rsqrt, tl.exp, tl.log."),
    ("global", "Cannot access global variable",
     "A kernel sees no names of the notebook. Which values does it need, and how do they get in?",
     "As arguments; or write the number itself; or write NAME = tl.constexpr(1.5) where it is set."),
    ("not-constant", "is not a constexpr",
     "Which of the kernel's arguments has to be known when it is compiled?",
     "The one on which a shape depends: write `: tl.constexpr` behind its name. A loop whose length is a "
     "size of the tensors, as the number of steps, is a range(), and no tl.static_range()."),
    ("first-in-branch", r"NameError\('\w+ is not defined'\)",
     "The name is first set inside of an `if` or a loop. Which value has it where that is not run?",
     "Begin with one before the loop, as with tl.zeros."),
    ("axis-of-number", r"axis \S+ is out of bounds|axis \[\S+\] out of bounds",
     "tl.max and tl.sum take one block, and the axis along which they go. Which function takes two numbers?",
     "tl.maximum(a, b) is the larger of two."),
    ("by-zero", "division or modulo by zero",
     "Which number is 0 here, and for which sizes?",
     "x // y is 0 where y is larger than x. max(1, x // y) is at least 1."),
    ("loop-over-number", r"'int' object is not iterable.*\n *(\S.*)?\bfor \w+ in (?!range|tl\.)",
     "A number is nothing that a loop could go through. Which function makes 0, 1, 2, ... of it?",
     "range(T); in a kernel, too."),
    ("loop-of-part", "'Subscript' object has no attribute 'func'",
     "A kernel's loop goes over range(...) itself. How does its number become the one that you want?",
     "for i in range(T), and t = T - 1 - i in it; or range(T - 1, -1, -1)."),
    ("tuple-in-range", r"CompileError: IndexError",
     "In a loop over range() a tuple keeps its length: the compiler writes that loop down once. Which of "
     "your loops fill one?",
     "tl.static_range(U) is written down U times, and a tuple may grow in it."),
    ("not-on-the-cpu", r"AssertionError.*\n.*is_cuda",
     "Here kernels are interpreted, on tensors on the CPU. Does your function need this line?",
     "No. Take it out: on a machine with a GPU the tensors are there."),
    ("sum-in-16-bits", r"AssertionError:?\s*\n.*tl\.dot\(",
     "tl.dot adds up in float32. Which dtype has the block that you give it as a total?",
     "tl.zeros([BM, BN], tl.float32)."),
    ("libdevice", r"NoneType.*\n(.*libdevice|.*\btanh\()",
     "The interpreter has no libdevice. Which of Triton's own functions give the same?",
     "tl.exp, tl.sigmoid, tl.erf; tanh(z) is 2 * tl.sigmoid(2 * z) - 1."),
    ("load-of-tile", r"multiple values for argument '_semantic'",
     "A descriptor's load takes one argument: where the tile begins. How can two numbers be one argument?",
     "As a list: x.load([row, column])."),
    ("subscript", "'int' object is not iterable|is not subscriptable|unsupported tensor index",
     "A kernel has addresses and blocks of numbers, and no single number can be taken out by an index.",
     "What Python writes x[at] is here a load from an address: tl.load(x + at, ...)."),
    ("one-address", "cannot be block type if pointer argument is not a block",
     "tl.load and tl.store want an address for each place of the mask. This is the address of one.",
     "Add the places to it: x + at is a block of addresses. The mask is the next argument."),
    ("arange", "arange's (arguments|range)",
     "A block's size is a power of two, and known when the kernel is compiled. Which number is both?",
     "A tl.constexpr, made with triton.next_power_of_2 at the launch where it depends on a size.",
     "A block that begins elsewhere is start + tl.arange(0, BLOCK)."),
    ("mask-of-numbers", "Mask must have boolean|mask has unsupported dtype",
     "A mask is a block of true and false. What's in the one that you give to tl.load or tl.store?",
     "A comparison makes it, such as `at < ...`; write mask=... where you give other arguments too."),
    ("chained", "two comparisons in one|simultaneous multiple comparison",
     "The line compares twice at once: as in 0 <= at < count, or in at < a & at < b, as & comes before <.",
     "Put each comparison into parentheses of its own, with one sign in each, and join them by &."),
    ("block-as-truth", "a block has many values",
     "A block has many values, and an `if` goes one way for all of them. Who should decide?",
     "tl.where(condition, this, that) decides for each element."),
    ("half-argument", r"Expected dtype .*fp32.* but got (fp16|bf16)",
     "A function of the line takes float32 only. Which of the values that it gets has 16 bits?",
     "Convert behind each load: tl.load(...).to(tl.float32)."),
    ("shapes", r"[Cc]annot (make_shape_compatible|broadcast)|could not be broadcast|incompatible dimensions"
     r"|Expected pointer argument to have shape",
     "Two blocks on this line have shapes that don't fit. Which shape should come out?",
     "[:, None] makes a column of a block, [None, :] a row. print(block) shows one with its shape."),
    ("not-turned", "equal reduction dimensions",
     "tl.dot takes blocks of (M, K) and (K, N), and adds up along K. Which of yours is the other way round?",
     "block.T turns a block that was loaded; addresses could also bring it turned."),
    ("operand-dtype", "[Bb]oth operands must be same dtype",
     "tl.dot multiplies two blocks of one dtype. Which of yours was converted, and which was not?",
     "Give it both as they were loaded, or convert the one that you computed to the other's dtype."),
    ("small-tile", "K >= 16|shapes? .*at least 16",
     "The side that both blocks of tl.dot share has 16 places at least. How long is yours at the smallest?",
     "Round the block up: max(16, triton.next_power_of_2(size)), and mask what is too many."),
    ("at-size", "exceeds triton maximum tensor numel",
     "Which block of yours grows with the tensor? A block has 2**20 elements at most.",
     "Take a block of a fixed size, and more programs, or a loop: as many as the tensor needs."),
    ("loop-carried", "[Ll]oop-carried variable",
     "The loop sets a name to another dtype or shape than it had before the loop. Which name?",
     "A name that a loop sets again keeps its dtype and shape: begin with tl.zeros of both."),
    ("cuda", "Torch not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver",
     "Answers are judged without a GPU. Where does the tensor that you make have to lie, wherever x lies?",
     "torch.empty_like(x) makes one there; so does torch.empty(..., device=x.device, dtype=x.dtype)."),
    ("unbound", "UnboundLocalError",
     "A function that sets a name anywhere has that name for itself. Which of its lines sets this one first?",
     "In a loop that makes a name anew of itself, it has to begin before the loop, as with tl.zeros.",
     "In a function inside of another one, change what the name stands for, as `place.copy_(new)` does."),
    ("unknown-name", "NameError",
     "The cell is judged by itself, so `{name}` isn't there if it is from another cell that is no kernel of "
     "the lesson's. It sees the lesson's imports and kernels, such as {given}.",
     "Or is `{name}` another name for one of those that the line sees: {seen}?"),
)  # fmt: skip
"""Mistakes that raise an exception: name, regular expression for the message and the line, hints.

The first one that fits counts. A hint may name ``{name}`` (the name that is missing), ``{seen}`` (names that
the line sees) and ``{given}`` (what the lesson has for the cell).
"""
