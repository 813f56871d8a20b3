"""The hints of lesson 5's exercise "museum": of wrong answers by reason, and of errors."""

from labkit.tasks.slips import Slip

HINTS = {
    "unfinished": (
        "Look at the first exhibit: is a result wrong in it, or a time?",
        'The letters of the causes stand above the exhibits. One goes between the quotes: 1: "...".',
    ),
    "not-a-dict": (
        "What did the cell assign to diagnosis, as it was given?",
        "A dict from exhibit to letter, in braces: {1: ..., 2: ...}. Only the letters are yours.",
    ),
    "unknown-number": (
        "How many exhibits are there, and how are they numbered?",
        "1 to 5, as numbers without quotes. One letter each.",
    ),
    "missing-number": (
        "Which of the exhibits has no entry?",
        'All five stay in the dict. Leave "" where you don\'t know yet.',
    ),
    "not-a-letter": (
        "What goes between the quotes of an exhibit?",
        "One letter, as text, in quotes.",
    ),
    "no-such-letter": (
        "Which letters do the causes have?",
        "a to g, and one of them for each exhibit.",
    ),
    "not-a-time": (
        "What is wrong in this exhibit: how long something took, or what came out?",
        "What came out. Of the causes only a few change a result, and this letter's is about times.",
        "Whose memory does a graph read, and whose does it write to? One of these two letters it is.",
    ),
    "not-a-value": (
        "What is wrong in this exhibit: what came out, or how long something took?",
        "The time. This letter's cause changes results, and leaves times as they are.",
        "What was timed besides the work, and which part of the work wasn't?",
    ),
    "exhibit-1": (
        "Two batches went in, one after the other. Whose answer came out?",
        "The first one's. The graph remembers an address: what lies there, and where is the second batch?",
        "The name of the input refers to a new tensor, which the graph has never heard of.",
    ),
    "exhibit-1-e": (
        "Was this result right at first, and did it change later?",
        "It was wrong when it came: the graph did the same work again.",
        "Look at the input, not at the output: by which line does the second batch get to the graph?",
    ),
    "exhibit-2": (
        "The result was right when it came. Who wrote to its memory afterwards?",
        "The list keeps the tensor itself, and that is the memory which the graph writes to.",
        "Every result in the list is the same tensor: what did the last replay leave there?",
    ),
    "exhibit-2-c": (
        "Was the result wrong when it came, or did it become so?",
        "It was right, so the graph read the right input. What happened to it in the list?",
        "Look at the output, not at the input: how many tensors are there in the list?",
    ),
    "exhibit-3": (
        "Call the compiled stack a second time. How long does it take then?",
        "No longer than the eager one. What happens at a first call only?",
        "Its time holds what is done once, before anything can run at all.",
    ),
    "exhibit-3-a": (
        "With a clock that stops too early, does a time come out too long or too short?",
        "Too short. This one is a hundred times too long: what else was timed?",
        "What happens at a first call, and never again?",
    ),
    "exhibit-3-f": (
        "The eager stack is timed by the same loop. Does anything wait in it, before its end?",
        "Nothing does. The two differ in one thing only: what happens at a first call?",
    ),
    "exhibit-4": (
        "A product of two 8192 x 8192 matrices has 1.1e12 operations. How many a second would this be?",
        "Many times what the largest GPU can do. What takes so short a time, if not the product?",
        "A launch does: Python goes on at once. Who waits for the result before the clock is read?",
    ),
    "exhibit-4-d": (
        "Does a faster memory help a product of 8192 x 8192 matrices? By what is it limited?",
        "By arithmetic: a cache makes no product faster than the peak, and this one is.",
        "What takes some microseconds, whatever the size of the matrices?",
    ),
    "exhibit-4-b": (
        "Does compiling in the timed region make a time too long or too short?",
        "Too long. This one is too short for any GPU: which part of the work was not timed?",
    ),
    "exhibit-5": (
        "The figure marks what a large copy reaches. Did these bytes come from memory?",
        "How large is the tensor, and how often was it read? What keeps the bytes that were just used?",
        "A tensor of a few MB stays on the chip from one call to the next.",
    ),
    "exhibit-5-a": (
        "A clock that stops early could explain any rate. Does this one wait for the GPU?",
        "It does. The time is right, and so is the number of bytes. Where did they come from?",
        "How large is the tensor, next to what the chip itself keeps?",
    ),
    "exhibit-5-g": (
        "Two kernels at the same time share one memory. Can they be faster than it is?",
        "No: what the memory can give is for all of them. So the bytes came from somewhere else.",
    ),
}
"""``exhibit-3-a``: for exhibit 3 with the letter a; ``exhibit-3``: with one that has no hints elsewhere."""

SLIPS = (
    Slip(
        "no-quotes",
        r"NameError: name '[a-gA-G]' is not defined",
        (
            "Python takes a letter without quotes for a name. What makes a text of it?",
            'A letter stands in quotes: "x".',
        ),
    ),
)
