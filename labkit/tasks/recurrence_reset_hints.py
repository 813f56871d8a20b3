"""The hints of lesson 7's exercise "reset": of wrong answers by reason, and of errors."""

from labkit.tasks import recurrence_hints

HINTS = recurrence_hints.HINTS | {
    "no-reset": (
        "reset reaches the kernel. Does anything in the loop depend on it?",
        "reset is (B, T): one value for each row and step, the same for all channels. Where does it lie?",
        "Load it at row * T + t, and let it decide whether the decayed state counts.",
    ),
    "inverted": (
        "True means that an episode begins. What does your kernel do where it's false?",
        "tl.where(condition, a, b) gives a where the condition is true: there, nothing of the old state.",
    ),
    "always": (
        "h is b at every step. For which steps should the old state be dropped?",
        "Only where reset is true. What is the condition in your kernel? `reset` by itself is an address, "
        "and no address is 0: load from it.",
    ),
    "off-by-one": (
        "Step t is the first of its episode where reset is true at t. At which step does yours begin anew?",
        "One step off. The state has to go before b_t is added, and reset_t decides it.",
        "The value at row * T + t belongs to this step, and the choice stands before the sum.",
    ),
    "drops-b": (
        "What should h be at a reset, zero or b_t?",
        "h_t = b_t: only the part that comes from the step before is dropped. Choose before b is added.",
    ),
    "held": (
        "Your h stays what it was at a reset. What should it be there?",
        "b_t. What is dropped is the old state, not the new number.",
    ),
    "only-output": (
        "h is right at a reset. From which number does the step after it go on?",
        "From `state`, which knows nothing of the reset: you changed what is stored. Change the state.",
    ),
    "first-row": (
        "Row 0 of the batch is right. Where does the reset of row 1 begin?",
        "After the T values of row 0: row * T + t.",
    ),
    "first-step": (
        "Which value of reset does step 3 look at?",
        "That of step 0, and so do all steps. The load belongs into the loop, with t in its address.",
    ),
    "wrong-place": (
        "reset is (B, T). How many values lie between a row and the next, and between two steps?",
        "T between rows, 1 between steps. H and B have no part in it.",
    ),
    "by-channel": (
        "Do the channels of a step have resets of their own?",
        "They share one: reset has no dimension of channels, and its address no `channel` and no `at`.",
        "A single address gives a single value, and tl.where takes it for the whole block.",
    ),
    "multiplied": (
        "Let h be infinite before a reset. What is 0 times infinity?",
        "NaN, and so is 0 times NaN. A factor can't drop a number, whatever it is; a choice can.",
        "tl.where(condition, 0.0, product) drops the whole product.",
    ),
    "zeroed-decay": (
        "You make a zero at a reset. Which product is left then, where h is infinite or NaN?",
        "0 times infinity, which is NaN. Choose between zero and the product, not between zero and a factor.",
    ),
    "zeroed-state": (
        "You make the state zero at a reset. Which product is left then, where a_t is infinite or NaN?",
        "a_t times 0, which is NaN. At a reset a_t belongs to no step before and must not matter either.",
        "Choose after the multiplication: between zero and the product.",
    ),
    "wrong-values": (
        "Work out three steps by hand, with a = 0.5, b = 1 and a reset at step 1: h is 1, 1, 1.5.",
        "Put the loop back as it was given: it needs one load and one tl.where more, and nothing else.",
    ),
}

SLIPS = recurrence_hints.SLIPS
