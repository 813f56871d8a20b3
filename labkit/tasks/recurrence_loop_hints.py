"""The hints of lesson 7's exercise "recurrence": of wrong answers by reason, and of errors."""

from labkit.tasks import recurrence_hints
from labkit.tasks.slips import Slip

HINTS = recurrence_hints.HINTS | {
    "unfinished": (
        "Replace the three dots. What does one step load, what does it compute, what does it store?",
        "a and b of this step, then the new state from the old one, then h: all of them at `at`, masked by "
        "`inside`.",
        "At the end of a step `at` has to move on to the next one: how many numbers lie between them?",
    ),
    "through-memory": (
        "Where was the last h a moment ago, before you stored it?",
        "In state, in registers and in float32. Loading it back from h waits for memory at every step, and "
        "in half precision brings a rounded number.",
        "Leave out the load from h: the next step reads `state`.",
    ),
    "not-advanced": (
        "Where does the second step store?",
        "Where the first one did: `at` is step 0 and stays there. h is (B, T, H): a step is H numbers long.",
    ),
    "wrong-stride": (
        "h is (B, T, H), row by row. How many numbers lie between a channel and the same one a step later?",
        "All channels of a step, in this tensor. How many a program has, or how many steps there are, has "
        "nothing to do with it.",
        "H, not BH and not T.",
    ),
    "one-ahead": (
        "Which step does `at` stand for when the loop begins, and which one when it first stores?",
        "Step 0 comes first: move `at` on after the store, not before the loads.",
    ),
    "from-one": (
        "Which h was never written?",
        "The first of each row. It has no h before it, but h_(-1) = 0 is what state begins with: the formula "
        "holds for step 0 as well.",
    ),
    "one-short": (
        "Which h was never written, and how many steps does range(T - 1) have?",
        "The last of each row. range(T) ends before T, so nothing has to be taken off.",
    ),
    "one-more": (
        "How many steps does your loop have, and where does the last one store?",
        "Behind the row's last step comes the next row's first one. T steps are 0 to T - 1.",
    ),
    "only-last": (
        "How often does a program store? h has T steps in each row.",
        "Once, after the loop. The store belongs into the loop, behind the new state.",
    ),
    "no-carry": (
        "Try it with a = 1 and b = 1: h should be 1, 2, 3. What is yours?",
        "1 at every step: the state that the next step reads is still zero.",
        "Give the sum back to the name `state`, in the loop; set it to zero only before it.",
    ),
    "no-decay": (
        "Try it with a = 0: what should h be, and what is yours?",
        "It should be b alone. Yours is the sum of all b so far: before b is added, a multiplies the state.",
    ),
    "no-b": (
        "The state begins with zero. What could ever make it another number?",
        "b, which is added at each step.",
    ),
    "swapped": (
        "Which of the two multiplies the state, a or b?",
        "a does, and b is added. Which address does each of your loads start from?",
    ),
    "before-product": (
        "a h + b, or a (h + b): which of them is yours?",
        "At step 0, where h is 0 before, h_0 has to be b_0: b comes after the product.",
    ),
    "wrong-factor": (
        "What does a multiply in your line, the state or b?",
        "The old state. b is added as it is.",
    ),
    "complement": (
        "Does the formula say by what b is multiplied?",
        "By nothing. The moving average with 1 - a is another recurrence, where it's part of b already.",
    ),
    "stored-early": (
        "What is h at step 0 in your output, and what should it be?",
        "It should be b_0, and is 0: the state is stored before it's the new one. Store after the sum.",
    ),
    "shifted": (
        "Step t uses a_t and b_t. Do both of your loads stand at the same step as the store?",
        "One is a step off. All three use `at`, and `at` moves on once, at the end of the step.",
    ),
    "backwards": (
        "Where does your loop begin, at the first step or at the last?",
        "h_t needs h_(t-1): from step 0 on. The other way round is the backward pass's business.",
    ),
    "same-step": (
        "h moves on, step by step. Do the loads?",
        "They bring a_0 and b_0 each time. Use the same `at` for loads and store, inside the loop.",
    ),
    "wrong-values": (
        "Work out two steps by hand for a = 0.5 and b = 1: h is 1, then 1.5. What is yours?",
        "state = (what is loaded from a) * state + (what is loaded from b), then store state, then at += H.",
    ),
}

SLIPS = (
    Slip(
        "arange",
        r"arange's (arguments|range)",
        (
            "A block's size is a power of two, and known when the kernel is compiled. Which number is both?",
            "BH. H and T come at the launch; steps are a loop's business, not a block's.",
        ),
    ),
    *recurrence_hints.SLIPS,
)
