"""The suite of lesson 1: an elementwise layer, x*w+b."""

import torch
from torch import Tensor

from labkit import lessons, machine
from labkit.bench_plan import Part
from labkit.kernels import affine as finished
from labkit.sweeps import Contender, Shape
from labkit.works import AFFINE, LINEAR

WIDTHS = (160, 161, 1024, 4096)
BYTES = 96 * 2**20
"""Size of x where memory is measured: more than the L2, the last cache."""


def _beyond_cache(width: int, dtype: str) -> Shape:
    itemsize: int = getattr(torch, dtype).itemsize
    return {"batch": BYTES // (width * itemsize) + 1, "width": width}


def affine() -> list[Part]:
    """At 96 MiB forward and backward; at 32768 rows beside nn.Linear, which does more work."""
    lesson = lessons.load("01_launch_overhead")
    same = (lesson.eager_, lesson.addcmul_, lesson.compiled_, Contender("labkit", finished, AFFINE))
    tf32 = Contender("Linear TF32", machine.with_tf32(_linear), LINEAR, dtypes=("float32",))
    large = tuple({"batch": 32768, "width": width} for width in (160, 1024, 4096, 16384))
    return [
        *(
            Part(
                same,
                tuple(_beyond_cache(width, dtype) for width in WIDTHS),
                dtypes=(dtype,),
                directions=("forward", "backward"),
            )
            for dtype in ("float32", "bfloat16")
        ),
        Part((lesson.linear_, tf32, *same), large, "against_linear", dtypes=("float32", "bfloat16")),
    ]


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)
