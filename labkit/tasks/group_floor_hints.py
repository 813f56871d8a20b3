"""The hints of lesson 4's exercise "floor": of wrong answers by reason, and of errors."""

from labkit.tasks import pays_hints
from labkit.tasks.slips import Slip

HINTS = {
    "unfinished": (
        "Replace all three dots. A time is bytes / bandwidth, or operations / rate.",
        "Which tensors cross memory, and how many numbers has each? How many numbers has y, and of how many "
        "products is each the sum?",
        "Memory and arithmetic work at the same time: the slower one decides. The result is in microseconds.",
    ),
    "two-numbers": (
        "Two floors: a device can't be faster than either. Which one number follows from them?",
        "The larger of the two, in microseconds.",
    ),
    "not-a-number": (
        "What does the function return, on every way through it?",
        "One number: the microseconds.",
    ),
    "constant": (
        "Shapes and devices differ, and so do their times. What is the result computed from?",
        "Every case got the same answer: use all of the seven arguments.",
    ),
    "no-weights": (
        "Look at the case of 16 rows: which tensor is the largest there?",
        "The weight: a matrix of d_in by d_out numbers for each group, read once.",
    ),
    "no-x": (
        "Which tensor is multiplied by the weights, and where does it come from?",
        "x has rows * groups * d_in numbers, and they are read.",
    ),
    "no-result": (
        "A kernel reads its inputs. What else crosses memory?",
        "Its result: y has a row for each row of x, with d_out numbers for each group.",
    ),
    "dense": (
        "In how many groups does one number of x have a part?",
        "In its own only. A group has one matrix of d_in by d_out: `groups` of them, not its square.",
        "One large weight with zeros outside the groups would have groups * d_in by groups * d_out numbers: "
        "that is the work which grouping saves.",
    ),
    "one-group": (
        "How many matrices are there, and how many columns has x altogether?",
        "Everything is there once for each group: x, weights, y and the operations.",
    ),
    "per-row": (
        "Rows share the weights of their group. How often do these have to cross memory, at the least?",
        "Once, however many rows there are: the least time is that of a kernel which keeps them.",
    ),
    "one-width": (
        "d_in and d_out may differ. Which of them has x, which has y, and which has the weight?",
        "x has d_in numbers a group and y d_out; the weight and the operations have their product.",
    ),
    "multiply-adds": (
        "A sum of d_in products: how many multiplications, and how many additions?",
        "As many of one as of the other, and `rate` counts both.",
    ),
    "no-itemsize": (
        "`bandwidth` is in bytes. What did you count?",
        "Numbers. Each of them has `itemsize` bytes.",
    ),
    "sum-of-floors": (
        "While the matrix units compute, does memory stand still?",
        "They work at the same time, so the time is that of the slower one, not the sum.",
    ),
    "smaller-floor": (
        "A floor is what something can't be faster than. With two of them, which one counts?",
        "The larger one: the smaller is no obstacle by then.",
    ),
    "bytes-only": (
        "What takes the time where groups are wide, and each number that is loaded is used a thousand times?",
        "The operations: the larger of both times counts.",
    ),
    "arithmetic-only": (
        "What takes the time where groups are narrow, and each number that is loaded is hardly used?",
        "The bytes: the larger of both times counts.",
    ),
    "other-unit": (
        "The number's digits are right. In which unit did you return it?",
        "bytes / bandwidth and operations / rate are seconds, and a second has a million microseconds.",
    ),
    "swapped-rates": (
        "Which unit has operations / bandwidth?",
        "Operations go with `rate`, bytes with `bandwidth`.",
    ),
    "bytes": (
        "Where arithmetic rules you are right. Where memory does: which tensors cross it, and how large?",
        "A row of x has d_in numbers a group, a row of y d_out, and the weight has a matrix a group. All of "
        "that times `itemsize`.",
    ),
    "arithmetic": (
        "Where memory rules you are right. Where arithmetic does: how many operations are there?",
        "y has rows * groups * d_out numbers, and each is a sum of d_in products.",
        "So d_in multiplications and as many additions for each number of y.",
    ),
    "wrong-values": (
        "Work one case out by hand: 1 row, 1 group, d_in = d_out = 2. How many numbers, and operations?",
        "2 + 4 + 2 numbers; 4 multiplications and 4 additions. Which line says something else?",
    ),
}

SLIPS = (
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Compare the function's first line with the scaffold's.",
            "It gets rows, groups, d_in, d_out, itemsize, bandwidth and rate, in this order.",
        ),
    ),
    *(slip for slip in pays_hints.SLIPS if slip.reason != "arguments"),
)
