"""Tasks of lesson 4: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises import common_hints
from labkit.exercises.engine import Exercise, Mistake, RaceSpec
from labkit.exercises.properties import (
    KERNEL,
    KERNEL_CASES,
    POINTWISE,
    READ_ONCE,
    column_mistakes,
    nan_where_large,
    place_for_column,
)

from collections.abc import Callable
from typing import Any

import torch

reference = work.gelu_mul.reference

# ---- the chain in one kernel -------------------------------------------------------------------------------


def chain_inputs(rows: int, width: int) -> dict[str, Any]:
    """x (rows, width), bias (width,), other (rows, width)."""
    x = torch.randn(rows, width)
    x[:, 2::3] *= 10  # where an exponential of the other sign overflows
    return {"x": x, "bias": torch.randn(width), "other": torch.randn(rows, width)}


chain = Exercise(
    "the chain in one kernel",
    "chain",
    reference=reference,
    cases=((1, 1), (3, 5), (37, 33)),
    large=((5, 640), (2, 3000), (1, 33_000)),
    vast=((8192, 16_384), (500_000, 40)),
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
        "overflow": Mistake(
            *common_hints.OVERFLOW, when=nan_where_large(lambda call: call.originals["x"].double())
        ),
        "column-for-element": Mistake(
            "other has the shape of x, so it is loaded at the same place as x: other + at.",
            gives=lambda x, bias, other: reference(x, bias, other[:1].expand_as(other)),
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
    cases=((8192 * 3072, 132, 1980.0), (1000, 1, 1000.0), (1000, 132, 1980.0), (10**9, 108, 1410.0)),
    inputs=machine,
    tolerance=0.01,
    right="All multiprocessors work at the same time, and each makes 16 of these results in a cycle.",
    mistakes={
        "one-function": Mistake(
            "1 / (1 + exp(-u)): how many results of the special function units are in it?",
            gives=floor_of(1 / 16),
        ),
        "lanes": Mistake(
            "128 lanes add and multiply. Who computes exponentials and reciprocals, and how many in a cycle?",
            gives=floor_of(2 / 128),
        ),
        "upside-down": Mistake(
            "With more multiprocessors, and with more cycles in a microsecond, it takes less time: divide by "
            "both.",
            gives=(
                lambda elements, multiprocessors, cycles: elements / 8 * cycles / multiprocessors,
                lambda elements, multiprocessors, cycles: elements / 8 * multiprocessors / cycles,
                lambda elements, multiprocessors, cycles: elements / 8 * multiprocessors * cycles,
            ),
        ),
    },
)
