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
    place_for_column,
)

from typing import Any

import torch
from torch import Tensor

layer = work.affine.reference

# ---- the mask ----------------------------------------------------------------------------------------------

BEYOND = 64
"""Elements that both tensors have beyond `count`: nobody may read or write them."""


def doubling_inputs(count: int, block: int, programs: int) -> dict[str, Any]:
    """x (count + BEYOND), and how the kernel is launched."""
    return {
        "x": (7.0 * torch.arange(count + BEYOND)) % 64 + 1.3,  # none of them twice in a row of 64
        "count": count,
        "BLOCK": block,
        "programs": programs,
    }


def launch_doubling(kernel: Any, x: Tensor, count: int, block: int, programs: int) -> dict[str, Any]:
    """What is in y afterwards, where -1 stands for nothing."""
    y = torch.full_like(x, -1.0)
    kernel[(programs,)](x, y, count, BLOCK=block)
    return {"y, which held -1 before": y}


def doubled_where(mask: Any) -> Any:
    """What y holds when exactly the places for which ``mask(at, count, block)`` is true are stored."""

    def gives(x: Tensor, count: int, block: int, programs: int) -> dict[str, Any]:
        at = torch.arange(len(x))
        stored = mask(at, count, block) & (at < block * programs)
        return {"y, which held -1 before": torch.where(stored, 2 * x, -1.0)}

    return gives


def loads_beyond(call: Call) -> str:
    """What was loaded of x beyond `count`."""
    beyond = int((call.launches.loaded(call.passed["x"]) >= call.passed["count"]).sum())
    return f"{beyond} places from `count` on were loaded, though y is right." if beyond else ""


mask = Exercise(
    "the mask of a kernel",
    "double_kernel",
    reference=doubled_where(lambda at, count, block: at < count),
    cases=((1, 4, 1), (10, 4, 3), (8, 4, 2), (7, 16, 1), (100, 32, 4), (5, 4, 8), (70_000, 1024, 69)),
    inputs=doubling_inputs,
    call=launch_doubling,
    properties=(KERNEL, Property("loads-outside", loads_beyond, *LOADS_INSIDE.hints), READS_STORED),
    dtypes=(torch.float32,),
    right="Each element is stored once, and nothing beyond the end is touched.",
    mistakes={
        "reversed": Mistake(
            "Where the mask is True, something is loaded and stored. For which places is yours True?",
            gives=doubled_where(lambda at, count, block: at >= count),
        ),
        "off-by-one": Mistake(
            "Python counts from 0. What is the number of the last element of a tensor of 10?",
            gives=doubled_where(lambda at, count, block: at <= count),
        ),
        "one-block": Mistake(
            "`at` counts through the whole tensor: compare that with `count`.",
            gives=(
                doubled_where(lambda at, count, block: at < block),
                doubled_where(lambda at, count, block: at % block < count),
            ),
        ),
        "size-of-address": Mistake(
            "x and y are addresses, which don't know how many elements there are. Which argument does?",
            raises=r"no len\(\)|\.(shape|numel|size|dim)\b|pointer<|cannot add pointers",
        ),
    },
)

# ---- the layer as one kernel -------------------------------------------------------------------------------


def layer_inputs(rows: int, width: int) -> dict[str, Any]:
    """x (rows, width), w and b (width,)."""
    return {"x": torch.randn(rows, width), "w": torch.randn(width), "b": torch.randn(width)}


affine = Exercise(
    "x*w + b in one kernel",
    "affine",
    reference=layer,
    cases=((1, 1), (3, 5), (37, 33)),
    large=((5, 640), (21, 5000), (1, 33_000)),
    vast=((32_768, 24_576), (3000, 20_000), (70_000, 20_000)),
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
        "place-for-column": place_for_column(layer),
    },
)
