"""The hints of lesson 4's exercise "museum": of wrong answers by reason, and of errors."""

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
        "Every batch gets the first one's answer. What did the graph read at each replay?",
        "The same numbers each time. It remembers an address: what lies there, and where is the new batch?",
        "The name of the input refers to a new tensor, which the graph has never heard of.",
    ),
    "exhibit-1-e": (
        "Are these results right at first, and do they change later?",
        "They are wrong when they come, all but the first: the graph did the same work again.",
        "Look at the input, not at the output: by which line does the new batch get to the graph?",
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
        "Change the order of the two kernels. Which one is slow then?",
        "Again the one that comes first. What happens at a first call only?",
        "Its time holds what is done once, before the kernel can run at all.",
    ),
    "exhibit-3-a": (
        "With a clock that stops too early, does a time come out too long or too short?",
        "Too short. This one is a thousand times too long: what else was timed?",
        "What happens at a first call, and never again?",
    ),
    "exhibit-3-f": (
        "Does Python waiting in the loop cost one of the kernels more than the other?",
        "Both would have it. Only the kernel that comes first is slow: what happens at a first call?",
    ),
    "exhibit-4": (
        "A product of two 4096 x 4096 matrices has 1.4e11 operations. How many a second would this be?",
        "More than ten times what the largest GPU can do. What takes ten microseconds, if not the product?",
        "A launch does: Python goes on at once. Who waits for the result before the clock is read?",
    ),
    "exhibit-4-d": (
        "Does a faster memory help a product of 4096 x 4096 matrices? By what is it limited?",
        "By arithmetic: a cache makes no product faster than the peak, and this one is.",
        "What takes about ten microseconds, whatever the size of the matrices?",
    ),
    "exhibit-4-b": (
        "Does compiling in the timed region make a time too long or too short?",
        "Too long. This one is too short for any GPU: which part of the work was not timed?",
    ),
    "exhibit-5": (
        "The card's memory gives five TB a second. Did these bytes come from there?",
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
        "No: five TB a second is for all of them. So the bytes came from somewhere else.",
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
