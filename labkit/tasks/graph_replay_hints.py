"""The hints of lesson 5's exercise "replay": of wrong answers by reason, and of errors."""

from labkit.tasks.slips import Slip

HINTS = {
    "unfinished": (
        "What does the function return? Its result is what the whole graph takes, in microseconds.",
        "Each kernel takes its length in a graph, too, and after all but the last one comes gap_us.",
    ),
    "eager-span": (
        "What lies between the first start and the last end: only kernels?",
        "The waits for Python too, and these are gone in a graph. What is left of the timeline?",
        "The kernels' lengths, and between two of them gap_us.",
    ),
    "n-gaps": (
        "How many gaps do two kernels have between them, and how many does one have?",
        "One gap, and none: nothing follows the last kernel.",
        "There is one gap less than there are kernels.",
    ),
    "gap-too-few": (
        "How many gaps do two kernels have between them?",
        "One. n kernels have n - 1 gaps.",
    ),
    "one-gap": (
        "Draw three kernels side by side. How many gaps are there?",
        "Two: there is one gap between each two neighbours, not one for all.",
        "gap_us * (n - 1), where n is how many kernels there are.",
    ),
    "no-gaps": (
        "One kernel after the other: does the second one start at the moment when the first one ends?",
        "Not even in a graph. What is gap_us?",
        "Each two neighbours have gap_us between them: n - 1 times.",
    ),
    "eager-gaps": (
        "You added gap_us. What stood between the kernels before that, and is it still there?",
        "The span from the first start to the last end holds the eager gaps. A graph's stand in their place.",
        "Begin with the sum of the lengths, not with the span.",
    ),
    "larger-gap": (
        "Where Python was late the eager gap is the larger one. Who waits for Python in a graph?",
        "Nobody: however large the eager gap was, the graph's is gap_us.",
    ),
    "smaller-gap": (
        "Some eager kernels follow each other without any gap. Does a graph have none there either?",
        "The graph's gap is gap_us between any two kernels, also where the eager one was smaller.",
    ),
    "starts": (
        "A kernel is (start, length). Which of the two is a time that the device works?",
        "The second one. A start is only a place on the clock.",
    ),
    "ends": (
        "What is start + length of a kernel? Is a sum of these anything?",
        "It's where the kernel ends on the clock, and places can't be added up. Lengths can.",
    ),
    "longest": (
        "Do the kernels run at the same time?",
        "One after the other, as the docstring says: their lengths add up.",
    ),
    "from-zero": (
        "Where does the clock stand when the first kernel starts?",
        "Anywhere: starts count from some moment before it. Do you need them at all?",
        "The lengths are enough, with gap_us between two.",
    ),
    "saved": (
        "Is this what the graph takes, or what it saves?",
        "Wanted is the time of the graph itself, in microseconds.",
    ),
    "constant": (
        "The kernels differ, and so do their times. What is the result computed from?",
        "Every case got the same answer: use both arguments.",
    ),
    "several-numbers": (
        "There is one graph. How many times does it take?",
        "One: return the sum of the kernels and the gaps.",
    ),
    "not-a-number": (
        "What does the function return, on every way through it?",
        "One number: the microseconds.",
    ),
    "empty": (
        "A graph without a kernel: how long does it take, and how many gaps has it?",
        "0 microseconds. n - 1 is -1 there, and there is no first kernel either.",
        "max(0, len(kernels) - 1) is never below 0, and len(kernels[1:]) is the same.",
    ),
    "wrong-values": (
        "Work it out by hand for two kernels of 5 and 3 microseconds, with gap_us = 1.",
        "5 + 1 + 3 = 9, whenever they started. Which line says something else?",
    ),
}

SLIPS = (
    Slip(
        "pairs",
        r"(concatenate tuple|unsupported operand type\(s\).*'tuple'|must be real number, not tuple|"
        r"'tuple' object has no attribute|'>' not supported.*tuple)",
        (
            "Each kernel is a pair. Which of its two numbers do you want?",
            "`for start, length in kernels` takes the pairs apart.",
        ),
    ),
    Slip(
        "unpacking",
        r"cannot unpack|values to unpack",
        (
            "kernels is a list of pairs. How many names stand on the left, and for what?",
            "`for start, length in kernels`: one pair each time.",
        ),
    ),
    Slip(
        "index",
        "IndexError",
        (
            "The list may hold one kernel only. Which place do you ask for?",
            "With n kernels the places are 0 to n - 1, and a next one has only the kernel before it.",
        ),
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Compare the function's first line with the scaffold's.",
            "It gets kernels and gap_us, in this order.",
        ),
    ),
)
