"""The suite of lesson 1: an elementwise layer, x*w+b."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit import machine, works
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
    same = (
        Contender("x*w+b eager", works.affine, AFFINE),
        Contender("addcmul", _addcmul, AFFINE),
        Contender("torch.compile", works.affine, AFFINE, compiled=True),
        Contender("labkit", finished, AFFINE),
    )
    tf32 = Contender("Linear TF32", machine.with_tf32(linear), LINEAR, dtypes=("float32",))
    product = Contender("nn.Linear", linear, LINEAR)
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
        Part((product, tf32, *same), large, "against_linear", dtypes=("float32", "bfloat16")),
    ]


def _addcmul(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addcmul(bias, x, weight)
