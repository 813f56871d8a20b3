"""The hints of lesson 9's exercise "floor": of wrong answers by reason, and of errors."""

from labkit.tasks import pays_hints
from labkit.tasks.slips import Slip

HINTS = {
    "unfinished": (
        "What does the function return? Two times have to be compared: that of memory, that of arithmetic.",
        "How many numbers cross memory at the least, and how many bytes are they? How many multiplications "
        "are there, and how many additions?",
        "bytes / bytes_per_us and operations / flops_per_us are microseconds. Return the one that decides.",
    ),
    "several-numbers": (
        "A network can't be faster than memory, nor faster than arithmetic. Which one number follows?",
        "The larger of both times.",
    ),
    "not-a-number": (
        "What does the function return, on every way through it?",
        "One number: the microseconds.",
    ),
    "constant": (
        "Networks and devices differ, and so do their times. What is the result computed from?",
        "Every case got the same answer: use all of the seven arguments.",
    ),
    "sum-of-floors": (
        "While the matrix units compute, does memory stand still?",
        "In the best kernel both work at the same time, and a floor is about the best one.",
        "So the slower of both decides: max, not the sum.",
    ),
    "smaller-floor": (
        "A floor is what nothing can be faster than. With two of them, which one counts?",
        "The larger one: whoever is above it is above the other too.",
    ),
    "bytes-only": (
        "Which line counts operations? With many rows they take longer than the bytes.",
        "done / flops_per_us is the other time, and the larger one counts.",
    ),
    "arithmetic-only": (
        "What takes the time of a single row, for which all the weights have to come from memory?",
        "The bytes. moved / bytes_per_us is a time as well, and the larger one counts.",
    ),
    "multiply-adds": (
        "What happens to the products of a row? `flops_per_us` counts that as well.",
        "They are added up: with each multiplication comes an addition.",
    ),
    "one-layer": (
        "Which layers have to be done before the network's result is there?",
        "All of them. `multiplications` is a list, and each layer has a part in the time.",
        "sum(multiplications) is what one row needs.",
    ),
    "cut-by-layer": (
        "You have a floor for each layer. Must a kernel end where a layer does?",
        "No: while one layer computes, the weights of the next one may come. Only the totals can't be "
        "avoided.",
        "Add up all bytes, add up all operations, and compare once.",
    ),
    "per-row": (
        "All rows use the same weights. How often do these have to come from memory, at the least?",
        "Once, as the docstring says: rows multiplies in_and_out, not weights.",
    ),
    "no-weights": (
        "One row on a wide network: what is most of its bytes?",
        "The weights, which are read once. They come on top of what a row brings and takes.",
    ),
    "weights-only": (
        "The weights are read. What else comes from memory, and what goes there?",
        "For each row in_and_out numbers.",
    ),
    "own-weights": (
        "You counted a weight for each multiplication. Which weights multiply nothing by a matrix?",
        "Biases and gains. `weights` counts them all: you have the number already.",
    ),
    "twice": (
        "What does in_and_out count: numbers that come, numbers that go, or both?",
        "Both. Nothing has to be doubled for them.",
    ),
    "one-row": (
        "in_and_out and multiplications are those of one row. How many are there?",
        "`rows` of them: both bytes and operations grow with it, the weights don't.",
    ),
    "no-itemsize": (
        "`bytes_per_us` is about bytes. What did you count, in both parts of what is moved?",
        "Numbers. Each of them, weights too, has `itemsize` bytes.",
    ),
    "times-rate": (
        "Twice as many bytes_per_us: does it take twice as long, or half?",
        "Half: a rate is what one divides by. Bytes / (bytes / us) are us.",
    ),
    "swapped-rates": (
        "Which unit has operations / bytes_per_us?",
        "Operations go with flops_per_us, bytes with bytes_per_us.",
    ),
    "other-unit": (
        "The number's digits are right. In which unit are your rates, and in which is your result?",
        "Both are about microseconds already: nothing has to be converted.",
    ),
    "whole-numbers": (
        "Many of these times are less than a microsecond. What becomes of them in your function?",
        "They are rounded to whole numbers. // drops what follows the point, / doesn't.",
    ),
    "bytes": (
        "Where arithmetic rules you are right. Where memory does: which numbers cross it?",
        "in_and_out for each row, and the weights once. All of that times itemsize.",
    ),
    "arithmetic": (
        "Where memory rules you are right. Where arithmetic does: how many operations are there?",
        "Those of all layers, for all rows; a multiplication and an addition each.",
    ),
    "wrong-values": (
        "Work one case out by hand: 3 rows, layers of 4 and 2 multiplications, in_and_out 5, weights 6, "
        "1 byte a number, both rates 1.",
        "21 bytes and 36 operations: 36 us. Which line says something else?",
    ),
}

SLIPS = (
    Slip(
        "a-list",
        r"'list'|instances of 'list'|by non-int of type",
        (
            "`multiplications` is a list, with a number for each layer. Which one number do you need of it?",
            "All layers have to be done: sum(multiplications).",
        ),
    ),
    Slip(
        "max-of-one",
        r"'(float|int)' object is not iterable|max\(\) takes|max expected",
        (
            "How many numbers stand between the parentheses, with a comma between them? max wants two here.",
            "max(moved / bytes_per_us, done / flops_per_us)",
        ),
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Compare the function's first line with the scaffold's.",
            "It gets rows, multiplications, in_and_out, weights, itemsize and both rates, in this order.",
        ),
    ),
    *(slip for slip in pays_hints.SLIPS if slip.reason == "a-tensor"),
)
