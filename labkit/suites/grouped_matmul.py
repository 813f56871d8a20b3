"""The suite of lesson 4: many small Linears side by side."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from labkit import grouped_works as work
from labkit import lessons
from labkit.bench_plan import Part
from labkit.kernels import grouped_linear
from labkit.sweeps import Contender, Shape

RIVALS = ("Conv1d", "Conv1d, length 1", "einsum", "bmm, out=", "grouped_mm", "einsum, compiled")
"""The library's strategies that are near the front; at one shape all of them are measured."""
FORUM: Shape = {"batch": 4096, "groups": 100, "width": 100}
SHAPES = tuple(
    {"batch": batch, "groups": groups, "width": width}
    for batch, groups, width in (
        *((4096, 100, width) for width in (16, 32, 64, 128)),
        (16384, 64, 64),
        (16384, 16, 256),
    )
)
TRAINED = tuple({**FORUM, "width": width} for width in (32, 64, 100, 128))


def grouped() -> list[Part]:
    """Every strategy at the forum's shape, the best ones elsewhere; gradients; data (B, C, T)."""
    lesson = lessons.load("04_grouped_matmul")
    ours = Contender("labkit", grouped_linear, work.GROUPED)
    everyone = (*lesson.BOTH_WAYS, *lesson.FORWARD_ONLY, ours)
    rivals = (*(one for one in everyone if one.name in RIVALS), ours)
    without_gradient = {one.name for one in lesson.FORWARD_ONLY}
    trained = tuple(one for one in rivals if one.name not in without_gradient)
    channels = (
        Contender("Conv1d", _channels_conv, work.CHANNELS_CONV),
        Contender("einsum", _channels_einsum, work.CHANNELS),
        Contender("einsum, compiled", _channels_einsum, work.CHANNELS, compiled=True),
        Contender("labkit", _channels_last(grouped_linear), work.CHANNELS),
    )
    return [
        Part(everyone, (FORUM,)),
        Part(rivals, SHAPES),
        Part(rivals, SHAPES[:3], dtypes=("float32",)),
        Part(trained, TRAINED, directions=("backward", "forward_backward")),
        Part(channels, TRAINED[1:3], "channels"),
    ]


def _channels_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.conv1d(x, weight, bias, groups=x.shape[1] // weight.shape[1])


def _channels_einsum(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups, d_in, _ = weight.shape
    y = torch.einsum("bgit,gio->bgot", x.view(len(x), groups, d_in, -1), weight) + bias[..., None]
    return y.flatten(1, 2)


def _channels_last(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The call over (B, T, C) for data (B, C, T)."""

    def turned(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return call(x.transpose(1, 2), weight, bias).transpose(1, 2)

    return turned
