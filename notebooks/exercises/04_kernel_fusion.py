"""Tasks of lesson 4: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Exercise, Mistake, RaceSpec
from labkit.exercises.properties import (
    KERNEL,
    KERNEL_CASES,
    POINTWISE,
    READ_ONCE,
    column_mistakes,
    place_for_column,
)

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

reference = work.gelu_mul.reference

gelu = partial(functional.gelu, approximate="tanh")

# ---- the chain in one kernel -------------------------------------------------------------------------------


def chain_inputs(rows: int, width: int) -> dict[str, Any]:
    """x (rows, width), bias (width,), other (rows, width)."""
    return {"x": torch.randn(rows, width), "bias": torch.randn(width), "other": torch.randn(rows, width)}


chain = Exercise(
    "the chain in one kernel",
    "chain",
    reference=reference,
    cases=((1, 1), (3, 5), (37, 33)),
    large=((5, 640), (2, 3000)),
    vast=((500_000, 40),),
    inputs=chain_inputs,
    **KERNEL_CASES,
    properties=(KERNEL, *POINTWISE, READ_ONCE),
    right="One launch. x and other are read once, y is written once, and nothing comes between.",
    race=RaceSpec(
        work.gelu_mul,
        {"PyTorch": reference, "torch.compile": reference, "labkit": kernels.gelu_mul},
        ({"batch": 8192, "width": 3072},),
    ),
    mistakes={
        **column_mistakes(reference),
        "place-for-column": place_for_column(reference),
        "column-for-element": Mistake(
            "bias has an element for each column. And other? What is its shape?",
            "other has the shape of x, so it is loaded at the same place as x: other + at.",
            gives=lambda x, bias, other: reference(x, bias, other[:1].expand_as(other)),
        ),
        "bias-after": Mistake(
            "Take an element with x = -1, bias = 1, other = 1. What does the formula give, and what do you?",
            "The bias is added before GELU, inside its argument.",
            gives=(
                lambda x, bias, other: (gelu(x) + bias) * other,
                lambda x, bias, other: gelu(x) * other + bias,
            ),
        ),
        "product-inside": Mistake(
            "Which of the three tensors goes through GELU, and which one only scales the result?",
            "GELU takes x + bias, and nothing else. Multiply by other afterwards.",
            gives=(
                lambda x, bias, other: gelu((x + bias) * other),
                lambda x, bias, other: gelu(x + bias) * gelu(other),
            ),
        ),
    },
)

# ---- one more GELU -----------------------------------------------------------------------------------------


def floor_of(cycles: float) -> Callable[..., float]:
    """The time of so many cycles of a multiprocessor for each element."""
    return lambda elements, multiprocessors, cycles_per_us: (
        cycles * elements / (multiprocessors * cycles_per_us)
    )


def machine(elements: int, multiprocessors: int, cycles_per_us: float) -> dict[str, Any]:
    """The arguments."""
    return {"elements": elements, "multiprocessors": multiprocessors, "cycles_per_us": cycles_per_us}


further = Exercise(
    "one more GELU",
    "further_gelu_us",
    reference=floor_of(2 / 16),
    cases=((8192 * 3072, 132, 1980.0), (1000, 1, 1000.0), (10**9, 108, 1410.0)),
    inputs=machine,
    tolerance=0.01,
    right="All multiprocessors work at the same time, and each makes 16 of these results in a cycle.",
    mistakes={
        "one-function": Mistake(
            "1 / (1 + exp(-u)): how many results of the special function units are in it?",
            "Two: the exponential, and the reciprocal.",
            gives=floor_of(1 / 16),
        ),
        "lanes": Mistake(
            "128 lanes add and multiply. Who computes exponentials and reciprocals, and how many in a cycle?",
            "The special function units, 16 in a cycle.",
            gives=(floor_of(2 / 128), floor_of(1 / 128)),
        ),
        "one-at-a-time": Mistake(
            "How many results do the special function units of a multiprocessor make in one cycle?",
            "16 of them: divide by that.",
            gives=(floor_of(2), floor_of(1)),
        ),
        "lanes-too": Mistake(
            "While the special function units compute, what do the lanes do? Does a GELU need both times?",
            "Both work at the same time, and the special functions take longer: theirs is the floor.",
            when=lambda calls: all(
                isinstance(call.got, float | int) and 1.1 < call.got / call.want < 2 for call in calls
            ),
        ),
        "upside-down": Mistake(
            "With twice as many elements, does it take longer or shorter? And what does your function say?",
            "A time is work divided by a rate: results divided by results in a microsecond.",
            gives=lambda elements, multiprocessors, cycles_per_us: (
                16 * multiprocessors * cycles_per_us / (2 * elements)
            ),
        ),
        "one-part": Mistake(
            "How many special function units has a whole multiprocessor? (The picture shows four groups.)",
            "16 of them, 4 beside each group of 32 lanes.",
            gives=(floor_of(2 / 4), floor_of(1 / 4)),
        ),
        "one-multiprocessor": Mistake(
            "How many multiprocessors share the elements?",
            "All of them work at the same time: divide by their number.",
            gives=lambda elements, multiprocessors, cycles_per_us: 2 * elements / 16 / cycles_per_us,
        ),
        "cycles": Mistake(
            "Is your result a number of cycles, or of microseconds?",
            "Divide the cycles by cycles_per_us.",
            gives=lambda elements, multiprocessors, cycles_per_us: 2 * elements / 16 / multiprocessors,
        ),
        "multiplied": Mistake(
            "With more cycles in a microsecond, does it take longer or shorter?",
            "Divide by cycles_per_us.",
            gives=lambda elements, multiprocessors, cycles_per_us: (
                2 * elements / 16 / multiprocessors * cycles_per_us
            ),
        ),
        "sixteen-times": Mistake(
            "16 results come out of one cycle. How many cycles does one result take?",
            "A sixteenth of a cycle: divide by 16.",
            gives=(floor_of(32), floor_of(16)),
        ),
    },
)
