"""The hints of lesson 9's exercise "wall": of wrong answers by reason, and of errors."""

from labkit.tasks.slips import Slip

HINTS = {
    "unfinished": (
        "What does the function return? Follow two clocks: when the host has launched, when the GPU has run.",
        "The launches follow each other whatever the GPU does: kernel by kernel, when is its launch over?",
        "A kernel begins when its launch is over and the kernel before has ended, so at the later of both.",
    ),
    "several-numbers": (
        "Many moments lie on the way. Which one is asked for?",
        "The end of the last kernel: one number.",
    ),
    "not-a-number": (
        "What does the function return, on every way through it?",
        "One number: the microseconds.",
    ),
    "constant": (
        "Launches and kernels differ, and so do their times. What is the result computed from?",
        "Every case got the same answer: use both lists.",
    ),
    "changes-lists": (
        "The caller still needs its lists. Which line takes something out of them, or sorts them?",
        "Walk through them: for launch, kernel in zip(launches, kernels).",
    ),
    "in-turn": (
        "While the GPU runs the first kernel, what does the host do in your function?",
        "It waits, or the GPU waits until all is launched: nothing of both ever overlaps. But the host "
        "goes on launching, and the GPU begins as soon as its first launch is over.",
        "Keep two times: one to which launches are added, one that says when the last kernel ended.",
    ),
    "launches-alone": (
        "The last launch is over. Is the last kernel?",
        "It only begins then, or later. Where do the kernels' times come into your result?",
    ),
    "kernels-alone": (
        "The host begins at 0. When can the first kernel begin?",
        "When its launch is over, and so can every other. Where do launches come into your result?",
    ),
    "larger-sum": (
        "Try one launch of 5 and one kernel of 3: when does it end?",
        "At 8, not at 5. The host and the GPU overlap, but not at both ends: nothing runs before the first "
        "launch is over, and the last kernel runs after the last launch.",
        "Who waits for whom may change on the way as well: walk through the kernels, one by one.",
    ),
    "larger-sum-and-end": (
        "At one end you're right: nothing overlaps there. But which sum is it added to?",
        "Behind the sum of all launches comes the last kernel; before that of all kernels, the first launch.",
        "Between them the GPU may wait for the host or not, kernel by kernel: no formula of sums knows that.",
    ),
    "host-bound": (
        "It's right where every kernel is over before the next launch. And where kernels take longer?",
        "Then a kernel waits for the one before, and the end comes later than the last launch says.",
        "A kernel begins at the later of two moments. Which ones?",
    ),
    "device-bound": (
        "It's right where a kernel is always waiting already. And where launches take longer?",
        "Then the GPU waits for the host, again and again, not only for the first launch.",
        "When is each launch over, and when did the GPU get free? The later of these counts.",
    ),
    "two-bounds": (
        "Either the host decides, or the GPU. Can that change on the way?",
        "Yes: a launch in the middle may come late, and long kernels may follow it. Both of your bounds "
        "hold, but the end can be later than either.",
        "Decide it anew for each kernel: max(done, ready) + kernel.",
    ),
    "pairs": (
        "You let each kernel overlap its own launch. Which launch can run while a kernel does?",
        "Later ones. Its own has to be over before.",
        "Keep two sums of time instead of one: when launches are over, and when kernels are.",
    ),
    "one-ahead": (
        "In your function the host is never more than one launch ahead. What holds it back?",
        "Nothing: behind a long kernel it launches many short ones, which then follow without a gap.",
        "Add up the launches by themselves, whatever the GPU does.",
    ),
    "before-launched": (
        "When does your first kernel begin?",
        "At 0, when its launch only begins. Add the launch before you look at the time.",
    ),
    "not-added-up": (
        "The third launch takes 5. Is it over 5 us after the host began?",
        "The two before it come first: a launch's length is no moment. Add the launches up as you go.",
    ),
    "kernel-in-max": (
        "Where the GPU waits for a launch, when does the kernel end in your function?",
        "At the moment when its launch is over, as if it took no time. max is about when it begins; add the "
        "kernel behind it.",
    ),
    "at-once": (
        "Two long kernels are launched shortly after each other. Do they run at the same time?",
        "One at a time, so the second one begins when the first one has ended, if it's launched by then.",
        "max(done, ready) is the beginning; the kernel comes on top of it in both cases.",
    ),
    "only-first": (
        "You are right about the first kernel. Does the function get to the others?",
        "A return inside the loop ends it in its first round. Indent it less.",
    ),
    "anew": (
        "You have the last launch and the last kernel only. Where are your times set to 0?",
        "In the loop, at each round. Once, before it.",
    ),
    "waiting": (
        "Is this when the last kernel ends, or how long the GPU has nothing to do?",
        "Wanted is the end, from the moment when the host begins.",
    ),
    "from-first": (
        "From which moment do you count?",
        "From the first kernel's beginning. But the host has begun before, by its first launch.",
    ),
    "swapped": (
        "Which of the lists is the host's?",
        "launches, the first one. Yours are the wrong way round.",
    ),
    "empty": (
        "Nothing is launched: when is it over?",
        "At 0, when the host begins. There is no first launch then, and no last kernel.",
        "A loop that starts from 0 and has no round gives 0 by itself.",
    ),
    "wrong-values": (
        "Work it out by hand for launches of 5, 5 and 5, and kernels of 8, 1 and 2.",
        "Launched at 5, 10 and 15; over at 13, 14 and 17. Which line says something else?",
        "For each kernel: ready += launch, then done = max(done, ready) + kernel.",
    ),
}

SLIPS = (
    Slip(
        "unpacking",
        r"cannot unpack|values to unpack",
        (
            "Two lists side by side: what makes pairs of them?",
            "for launch, kernel in zip(launches, kernels): one of each in every round.",
        ),
    ),
    Slip(
        "a-list",
        r"(unsupported operand type\(s\)|concatenate|not supported between instances).*list|'list' object",
        (
            "launches and kernels are lists. Which of their numbers do you mean?",
            "In a loop it's the one of this round; of a whole list sum() makes a number.",
        ),
    ),
    Slip(
        "a-number",
        r"'(float|int)' object is not (iterable|subscriptable)",
        (
            "One of your names stands for a single number here. Which one did you take for a list?",
            "launches and kernels are the lists; sum() and max() of one number need no call at all.",
        ),
    ),
    Slip(
        "index",
        "IndexError",
        (
            "There may be a single launch. Which place do you ask for?",
            "With n of them the places are 0 to n - 1, and the last one has no next.",
        ),
    ),
    Slip(
        "arguments",
        r"\(\) (takes|missing|got)",
        (
            "Compare the function's first line with the scaffold's.",
            "It gets launches and kernels, in this order.",
        ),
    ),
)
