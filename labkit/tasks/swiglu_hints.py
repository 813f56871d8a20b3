"""The hints of lesson 2's exercise "swiglu": of wrong answers by reason, and of errors."""

from labkit.tasks import tiles_hints
from labkit.tasks.slips import Slip

HINTS = tiles_hints.HINTS | {
    "unfinished": (
        "Replace the three dots. gate and up are blocks of BM x BN sums, in float32: what becomes of them?",
        "silu(gate) is gate * sigmoid(gate), and sigmoid(gate) is 1 / (1 + exp(-gate)): tl.exp has it.",
        "Then multiply by up.",
    ),
    "swapped": (
        "Which of the two goes through the activation?",
        "The gate does; up is only multiplied in. gate comes first out of split().",
    ),
    "no-factor": (
        "Try z = 10: silu(10) is nearly 10. What is yours?",
        "silu(z) is z * sigmoid(z): the sigmoid is only the share of z that passes.",
    ),
    "no-up": (
        "gate and up are two results of the matmul. Does up reach the output?",
        "value = silu(gate) * up",
    ),
    "no-activation": (
        "What should become of a gate of -10?",
        "Next to nothing: silu(-10) is -0.0005. Multiply gate * up by sigmoid(gate).",
    ),
    "other-activation": (
        "Compare at z = 1: silu(1) is 0.731. What is yours?",
        "GELU is 0.841 there, ReLU 1, tanh 0.762. SiLU: z / (1 + exp(-z)).",
    ),
    "activation-last": (
        "Which of the two comes first, the activation or the product?",
        "Only gate goes through the activation: silu(gate) * up, not silu(gate * up).",
    ),
    "wrong-sign": (
        "Try a large gate, 10 say: should it pass, or vanish?",
        "It should pass: sigmoid(z) = 1 / (1 + exp(-z)), with a minus in the exponent.",
    ),
    "sum": (
        "By what is the activated gate joined to up: a sum, or a product?",
        "A gate lets through a share of up: silu(gate) * up.",
    ),
    "both-activated": (
        "How many of the two go through the activation?",
        "up is multiplied in as it is.",
    ),
    "no-one": (
        "Work out sigmoid(0) by hand: it's a half. What do you divide by there?",
        "By 1 + exp(-z), which is 2.",
    ),
    "precedence": (
        "Division comes before addition. What is a / 1 + b?",
        "Put the whole denominator in parentheses: gate / (1 + tl.exp(-gate)).",
    ),
    "overflows": (
        "float32 ends at 3e38, which exp reaches at 89. What is infinity / infinity, and 0 * infinity?",
        "NaN. Write it so that the infinity stands alone below the line: a number / infinity is 0.",
        "gate / (1 + tl.exp(-gate)), or gate * tl.sigmoid(gate).",
    ),
    "half-precision": (
        "In which precision are gate and up when they come out of split(), and where do they lose it?",
        "The accumulator is float32. Compute in it, and let the store round: it converts to y's dtype.",
    ),
    "several-launches": (
        "One launch, one pass: what is left for PyTorch to do?",
        "Activation and product belong into the kernel, where gate and up already are.",
    ),
    "unmasked-load": (
        "The loads of the scaffold were complete. Which mask is missing now?",
        "Each load gets its mask as the second argument, a_mask and b_mask.",
    ),
    "wrong-values": (
        "Work out one element by hand: gate = 1, up = 2. It should be 1.462.",
        "value = gate / (1 + tl.exp(-gate)) * up, with everything else as it was given.",
    ),
}

SLIPS = (
    Slip(
        "half-exp",
        r"[Ee]xpected dtype",
        (
            "tl.exp and tl.sigmoid take float32. What did you hand over?",
            "gate and up are float32 as they come out of split(): leave them so, the store converts.",
        ),
    ),
    Slip(
        "whole-tile",
        r"incompatible dimensions at index 1: (32 and 64|64 and 32)",
        (
            "acc has two columns for each hidden one, and y has one. Which of the blocks fit the store?",
            "gate and up, BM x BN each, which the line above takes apart.",
        ),
    ),
    *tiles_hints.SLIPS,
)
