"""Tasks of lesson 1: what is right, what people write instead, and what helps them on."""

from labkit import kernels, work
from labkit.exercises.engine import Call, Exercise, Mistake, Property, RaceSpec
from labkit.exercises.properties import (
    KERNEL,
    KERNEL_CASES,
    LOADS_INSIDE,
    POINTWISE,
    READ_ONCE,
    READS_STORED,
    column_mistakes,
    vectors_at,
)

from functools import partial
from typing import Any

import torch
from torch import Tensor

layer = work.affine.reference

# ---- the mask ----------------------------------------------------------------------------------------------

BEYOND = 64
"""Elements that both tensors have beyond `count`: nobody may read or write them."""


def values_at(at: Tensor) -> Tensor:
    """x at these places: numbers from 1.3 to 64.3, none of them twice in a row of 64."""
    return (7.0 * at) % 64 + 1.3


def doubling_inputs(count: int, block: int, programs: int) -> dict[str, Any]:
    """x (count + BEYOND), and how the kernel is launched."""
    return {
        "x": values_at(torch.arange(count + BEYOND)),
        "count": count,
        "BLOCK": block,
        "programs": programs,
    }


def launch_doubling(kernel: Any, x: Tensor, count: int, block: int, programs: int) -> dict[str, Any]:
    """What is in y afterwards, where -1 stands for nothing."""
    y = torch.full_like(x, -1.0)
    kernel[(programs,)](x, y, count, BLOCK=block)
    return {"y, which held -1 before": y}


def doubled_where(*masks: Any) -> tuple[Any, ...]:
    """What y holds when exactly the places for which ``mask(at, count, block)`` is true are stored."""

    def gives(x: Tensor, count: int, block: int, programs: int, mask: Any) -> dict[str, Any]:
        at = torch.arange(len(x))
        stored = mask(at, count, block) & (at < block * programs)
        return {"y, which held -1 before": torch.where(stored, 2 * x, -1.0)}

    return tuple(partial(gives, mask=each) for each in masks)


def loads_beyond(call: Call) -> str:
    """What was loaded of x beyond `count`."""
    beyond = int((call.launches.loaded(call.passed["x"]) >= call.passed["count"]).sum())
    return f"{beyond} places from `count` on were loaded, though y is right." if beyond else ""


mask = Exercise(
    "the mask of a kernel",
    "double_kernel",
    reference=doubled_where(lambda at, count, block: at < count)[0],
    cases=((1, 4, 1), (10, 4, 3), (8, 4, 2), (7, 16, 1), (100, 32, 4), (5, 4, 8), (40000, 1024, 40)),
    inputs=doubling_inputs,
    call=launch_doubling,
    properties=(KERNEL, Property("loads-outside", loads_beyond, *LOADS_INSIDE.hints), READS_STORED),
    dtypes=(torch.float32,),
    right="Each element is stored once, and nothing beyond the end is touched.",
    mistakes={
        "no-mask": Mistake(
            "The last block reaches beyond the tensor. Which of its places may be stored?",
            "A mask has true or false for each place in `at`: make it with a comparison.",
            gives=doubled_where(lambda at, count, block: at >= 0),
        ),
        "reversed": Mistake(
            "Where the mask is True, something is loaded and stored. For which places is yours True?",
            "For those of the tensor it has to be: turn the comparison round.",
            gives=doubled_where(lambda at, count, block: at >= count, lambda at, count, block: at > count),
        ),
        "off-by-one": Mistake(
            "Python counts from 0. What is the number of the last element of a tensor of 10?",
            "It is 9. Place 10, equal to `count`, is already outside.",
            gives=doubled_where(lambda at, count, block: at <= count),
        ),
        "last-left-out": Mistake(
            "Take a tensor of one element: `count` is 1. For which places is your mask True?",
            "Place 0 belongs to it. The last place is count - 1, and it has to be inside, too.",
            gives=doubled_where(lambda at, count, block: at < count - 1),
        ),
        "one-block": Mistake(
            "BLOCK and tl.arange(0, BLOCK) are the same in each program. What differs between two of them?",
            "`at` counts through the whole tensor: compare that with `count`.",
            gives=doubled_where(lambda at, n, block: at < block, lambda at, n, block: at % block < n),
        ),
        "whole-blocks": Mistake(
            "The last block is partly inside. What does your mask say about it?",
            "You need an answer for each place, not one for each program: start from `at`.",
            gives=doubled_where(
                lambda at, n, block: at < n // block * block,
                lambda at, n, block: at // block * block < n,
                lambda at, n, block: at // block < n,
                lambda at, n, block: torch.full_like(at, block < n, dtype=torch.bool),
            ),
        ),
        "values": Mistake(
            "x holds values such as 7.5. What does a value say about the place that it was loaded from?",
            "Nothing. Compare the numbers of the places, `at`, with `count`.",
            gives=doubled_where(
                lambda at, n, block: values_at(at) < n, lambda at, n, block: values_at(at) <= n
            ),
        ),
        "size-of-address": Mistake(
            "x and y are addresses, which don't know how many elements there are. Which argument does?",
            "Compare `at`, the numbers of the places, with `count`.",
            raises=r"no len\(\)|\.(shape|numel|size|dim)\b|pointer<|cannot add pointers",
        ),
    },
)

# ---- the layer as one kernel -------------------------------------------------------------------------------


POWERS_OF_TWO = (64, 128, 256, 512, 1024, 2048, 4096)
"""Blocks that people choose; with wider ones each case has one program only."""


def layer_inputs(rows: int, width: int) -> dict[str, Any]:
    """x (rows, width), w and b (width,)."""
    return {"x": torch.randn(rows, width), "w": torch.randn(width), "b": torch.randn(width)}


affine = Exercise(
    "x*w + b in one kernel",
    "affine",
    reference=layer,
    cases=((1, 1), (3, 5), (37, 33)),
    large=((5, 640), (21, 5000)),
    vast=((3000, 20_000),),
    inputs=layer_inputs,
    **KERNEL_CASES,
    properties=(KERNEL, *POINTWISE, READ_ONCE),
    right="One launch, one pass: x is read once and y is written once.",
    race=RaceSpec(
        work.affine,
        {"x*w + b": layer, "torch.compile": layer, "labkit": kernels.affine},
        ({"batch": 256, "width": 160},),
        dtype="float32",
        clocks=("host", "graph"),
        cache="warm",
    ),
    mistakes={
        **column_mistakes(layer),
        "lane-for-column": Mistake(
            "tl.arange(0, BLOCK) is the same in each program. In which column does the second program begin?",
            "Take the remainder of the place in the whole tensor, `at`, and not of the place in the block.",
            gives=tuple(
                vectors_at(layer, lambda at, width, n=block: at % n % width) for block in POWERS_OF_TWO
            ),
        ),
        "rows-for-width": Mistake(
            "Rows lie one behind the other. How long is one of them: which entry of x.shape says so?",
            "The last one. x.shape[0] is how many rows there are.",
            gives=vectors_at(layer, lambda at, width: at % (len(at) // width)),
        ),
        "no-bias": Mistake(
            "Subtract your result from the right one for two rows: what is missing, in both of them alike?",
            "Load b as you load w, and add it.",
            gives=lambda x, w, b: x * w,
        ),
        "bias-first": Mistake(
            "What is multiplied by w in the formula: x, or x + b?",
            "Multiply first, then add.",
            gives=lambda x, w, b: (x + b) * w,
        ),
    },
)
