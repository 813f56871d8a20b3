"""GELU after GELU, in its tanh form: y = gelu(... gelu(x)), as many of them as the size ``gelus`` says.

x and y are (batch, width). Fewest bytes, however many there are: x in and y out, 2N for N = batch * width
elements. Forward only. Operations: about 10 for each GELU of an element.
"""

from typing import Any

import torch

from labkit.gpu import randn
from labkit.work.base import Shape, Work


def _inputs(shape: Shape) -> tuple[Any, ...]:
    return randn(shape["batch"], shape["width"]), shape["gelus"]


def reference(x: torch.Tensor, gelus: int) -> torch.Tensor:
    """The GELUs one after the other."""
    for _ in range(gelus):
        x = torch.nn.functional.gelu(x, approximate="tanh")
    return x


def _min_bytes(shape: Shape, itemsize: int, direction: str) -> int:
    return 2 * shape["batch"] * shape["width"] * itemsize


def _flops(shape: Shape, direction: str) -> int:
    return 10 * shape["gelus"] * shape["batch"] * shape["width"]


gelus = Work("gelus", _inputs, reference, _min_bytes, _flops)
