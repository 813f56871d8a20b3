"""Many small Linears side by side: inputs, float64 reference, fewest bytes, operations.

Axes: ``batch`` rows, ``groups`` (100 if left out), and ``width``, the features of a group, in and out. A row
holds its groups one after the other: x is (batch, groups * width), and so is the result. The works differ in
the layout of the weight, so that each strategy gets the layout that it wants. The works CHANNELS and
CHANNELS_CONV take x of (B, C, T): ``batch`` is then the number of all rows, and ``time`` the positions of a
sequence, 512 if left out and never more than the rows.

Bytes and operations are those of the Linears alone: each input and each output once, two operations for each
multiply and add, twice as many products backward. The bias does not
count.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from labkit.gpu import randn
from labkit.measure.contender import Shape, Work
from labkit.workloads.elementwise import SAMPLE, LayerSize, matrix_layer

Reference = Callable[[Tensor, Tensor, Tensor], Tensor]


def groups_of(shape: Shape) -> int:
    """The number of Linears: 100 if the shape does not say."""
    return shape.get("groups", 100)


def time_of(shape: Shape) -> int:
    """Positions of a sequence: 512 if the shape does not say, and at most the number of rows.

    Raises ValueError if the rows are not a whole number of sequences.
    """
    batch = shape["batch"]
    time = min(shape.get("time", 512), batch)
    if batch % time:
        raise ValueError(f"batch: {batch} rows are not a whole number of sequences of {time}")
    return time


def grouped_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each group times its weight: x (..., G * D_in), weight (G, D_in, D_out), bias (G, D_out)."""
    groups = x.unflatten(-1, weight.shape[:2])
    return (torch.einsum("...gi,gio->...go", groups, weight) + bias).flatten(-2)


def linears_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A Linear for each group: x (..., G * D_in), weight (G, D_out, D_in), bias (G, D_out)."""
    groups = x.unflatten(-1, (len(weight), weight.shape[2])).unbind(-2)
    return torch.cat([linear(*group) for group in zip(groups, weight, bias, strict=True)], -1)


def conv_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A grouped convolution of length 1 over rows: x (..., G * D_in), weight (G * D_out, D_in, 1), bias
    (G * D_out,)."""
    groups = x.shape[-1] // weight.shape[1], -1
    return linears_reference(x, weight.squeeze(2).unflatten(0, groups), bias.unflatten(0, groups))


def _features(shape: Shape) -> int:
    return groups_of(shape) * shape["width"]


def _rows(shape: Shape) -> Tensor:
    return randn(shape["batch"], _features(shape))


def _channels(shape: Shape) -> Tensor:
    time = time_of(shape)
    return randn(shape["batch"] // time, _features(shape), time)


def _squares(shape: Shape) -> tuple[Tensor, Tensor]:
    groups, width = groups_of(shape), shape["width"]
    return randn(groups, width, width, scale=width**-0.5), randn(groups, width)


def _filters(shape: Shape) -> tuple[Tensor, Tensor]:
    weight, bias = _squares(shape)
    return weight.flatten(0, 1).unsqueeze(2), bias.flatten()


def _size(shape: Shape) -> LayerSize:
    features = _features(shape)
    return shape["batch"], features, features, features * shape["width"], 0


def _over_rows(weights: Callable[[Shape], tuple[Tensor, Tensor]], reference: Reference) -> Work:
    return matrix_layer(lambda shape: (_rows(shape), *weights(shape)), reference, _size)


SAMPLE_OVER_TIME = SAMPLE | {"time": 16}
"""Whole sequences: four of 16 positions if the shape names ``time``, else one of 64."""


def _over_time(weights: Callable[[Shape], tuple[Tensor, Tensor]], reference: Reference) -> Work:
    """The same for x (B, C, T); ``reference`` takes x as (B, T, C)."""
    return matrix_layer(
        lambda shape: (_channels(shape), *weights(shape)),
        lambda x, weight, bias: reference(x.mT, weight, bias).mT,
        _size,
        sample=SAMPLE_OVER_TIME,
    )


GROUPED = _over_rows(_squares, grouped_reference)
"""As a batched product wants it: x (batch, groups * width), weight (groups, width in, width out), bias
(groups, width)."""

GROUPED_LINEARS = _over_rows(_squares, linears_reference)
"""As a list of nn.Linear keeps it, stacked: weight (groups, width out, width in), bias (groups, width)."""

GROUPED_CONV = _over_rows(_filters, conv_reference)
"""As nn.Conv1d with ``groups`` keeps it: weight (groups * width, width, 1), bias (groups * width,)."""

CHANNELS = _over_time(_squares, grouped_reference)
"""GROUPED for x (batch / time, groups * width, time)."""

CHANNELS_CONV = _over_time(_filters, conv_reference)
"""GROUPED_CONV for x (batch / time, groups * width, time), as the convolution wants it."""


# ---- a block of two layers, as the thread's modules are ----------------------------------------------------


def block(layer: Reference) -> Callable[..., Tensor]:
    """x + down(gelu(up(x))) of a ``layer(x, weight, bias)``: groups of D features, of 2D, and of D again."""
    return lambda x, up, b, down, c: x + layer(gelu(layer(x, up, b)), down, c)


def _block_inputs(shape: Shape) -> tuple[Tensor, ...]:
    x, (weight, bias) = _channels(shape), _squares(shape)
    up = torch.cat([weight, -weight], 2)
    return x, up, torch.cat([bias, bias], 1), up.mT.contiguous(), bias


def _block_size(shape: Shape) -> LayerSize:
    features = _features(shape)
    return shape["batch"], features, features, 4 * features * shape["width"], 0


BLOCK = matrix_layer(
    _block_inputs,
    block(lambda x, weight, bias: grouped_reference(x.mT, weight, bias).mT),
    _block_size,
    sample=SAMPLE_OVER_TIME,
)
"""A block over x (batch / time, groups * width, time): inputs x, the weight and bias that expand, those that
compress."""
