"""Recurrent layers over (B, T, H): inputs, float64 reference, fewest bytes, operations.

Axes: ``batch`` sequences, ``time`` steps, ``width`` features. A state h is (B, H), and the states of all
steps are (B, T, H). The functions take the state before the first step as h0; it is zero if left out.

Bytes count each input, output and gradient once, and a weight (H,) too. A backward pass reads the states that
the forward pass returned, and their gradients. N is one tensor (B, T, H):

- rms_norm 2N forward, 3N backward (x, dy; dx)
- linear_recurrence 3N forward, 5N backward (a, h, dh; da, db)
- min_gru 3N forward, 5N backward (z, h, dh; dz, dcandidate: the change of h over z is candidate - h before)
- rms_recurrence 3N forward, 6N backward (a, b, h, dh; da, db: a weight may be zero, so h does not give u)

Operations are multiplications, additions and subtractions of elements, one each. What is done once for a row
or a state (divisions, square roots, the factor of the mean) does not count. What a backward pass computes
again, because it would have to be read otherwise, counts.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.workloads.base import Shape
from benchmarks.workloads.elementwise import elementwise_layer
from labkit.gpu import randn

EPS = 1e-6
"""What is added to the mean square."""


# ---- references --------------------------------------------------------------------------------------------


def linear_recurrence(a: Tensor, b: Tensor, h0: Tensor | None = None) -> Tensor:
    """h_t = a_t h_{t-1} + b_t, step after step: a and b (B, T, H), h0 (B, H); the states (B, T, H).

    Raises ValueError if a and b differ in length.
    """
    return _steps(lambda h, a, b: a * h + b, _first(b, h0), a, b)


def min_gru(z: Tensor, candidate: Tensor, h0: Tensor | None = None) -> Tensor:
    """h_t = (1 - z_t) h_{t-1} + z_t candidate_t, step after step: z and candidate (B, T, H), h0 (B, H); the
    states (B, T, H).

    Raises ValueError if z and candidate differ in length.
    """
    return _steps(lambda h, z, candidate: (1 - z) * h + z * candidate, _first(candidate, h0), z, candidate)


def rms_recurrence(
    a: Tensor, b: Tensor, weight: Tensor, h0: Tensor | None = None, eps: float = EPS
) -> Tensor:
    """u_t = a_t h_{t-1} + b_t, h_t = weight u_t / sqrt(mean of u_t² over H + eps), step after step.

    a and b (B, T, H), weight (H,), h0 (B, H); the states (B, T, H). Raises ValueError if a and b differ in
    length.
    """
    normed = partial(functional.rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)
    return _steps(lambda h, a, b: normed(a * h + b), _first(b, h0), a, b)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """weight x / sqrt(mean of x² over H + EPS): x (..., H), weight (H,)."""
    return functional.rms_norm(x, weight.shape, weight, EPS)


def _first(like: Tensor, h0: Tensor | None) -> Tensor:
    """h0, or zeros (B, H) for sequences (B, T, H)."""
    return like.new_zeros(like.shape[0], like.shape[2]) if h0 is None else h0


def _steps(step: Callable[..., Tensor], h: Tensor, *inputs: Tensor) -> Tensor:
    """The states after each step, (B, T, H); ``step`` takes a state (B, H) and the inputs of one time."""
    # unbind, since the gradient of each x[:, t] would be as large as x
    states = []
    for now in zip(*(x.unbind(1) for x in inputs), strict=True):
        h = step(h, *now)
        states.append(h)
    # Without steps the result is (B, 0, H), still a function of all inputs.
    return torch.stack(states, 1) if states else step(h.unsqueeze(1), *inputs)


# ---- inputs ------------------------------------------------------------------------------------------------


def _sequences(shape: Shape) -> Tensor:
    return randn(shape["batch"], shape["time"], shape["width"])


def _constant_in_time(shape: Shape) -> Tensor:
    """One value for each sequence and feature, the same at all times."""
    return randn(shape["batch"], 1, shape["width"])


def _weight(shape: Shape) -> Tensor:
    return 1 + randn(shape["width"], scale=0.1)


def _gates(shape: Shape, mean: float) -> Tensor:
    """Sigmoid of a normal value, most of which is the same at all times.

    So some features forget at once, and some keep a state for hundreds of steps. With independent gates at
    each step none would keep it, and a check would not see an error in the early inputs.
    """
    return torch.sigmoid(mean + 2 * _constant_in_time(shape) + _sequences(shape))


def _steady(gates: Tensor) -> Tensor:
    """Normal values b, with which the states h = gates h + b have size one in every feature.

    They are small for features that remember long. Otherwise the states of these would hide the others from a
    check, and overflow in half precision.
    """
    return randn(*gates.shape) * (1 - gates.square()).clamp(min=0).sqrt()


def _norm_inputs(shape: Shape) -> tuple[Tensor, ...]:
    # Rows of different sizes, so that a row without its own norm is seen.
    sizes = randn(shape["batch"], shape["time"], 1).exp()
    return _sequences(shape) * sizes, _weight(shape)


def _linear_inputs(shape: Shape) -> tuple[Tensor, ...]:
    a = _gates(shape, 2.0)
    return a, _steady(a)


def _gru_inputs(shape: Shape) -> tuple[Tensor, ...]:
    # Each feature has a mean of its own: with a small z its state has size one too.
    return _gates(shape, -2.0), _sequences(shape) + _constant_in_time(shape)


def _rms_inputs(shape: Shape) -> tuple[Tensor, ...]:
    weight = _weight(shape)
    # A feature that grows would dominate the norm; with b of one size for all the state would vanish.
    a = _gates(shape, 2.0) / weight.clamp(min=1)
    return a, _steady(a * weight), weight


# ---- bytes and operations ----------------------------------------------------------------------------------

_layer = partial(elementwise_layer, axes=("batch", "time", "width"))
_NORM_FLOPS = 4, 9
"""x², its sum, x̂ = x r, x̂ w; backward x̂, dy w, its product with x̂ and the sum, dy x̂ and the sum for dw, and
(dy w - x̂ mean) r."""
_LINEAR_FLOPS = 2, 3
"""a h + b; backward the gradient that comes from the next step, a times that, and da."""
_GRU_FLOPS = 4, 6
"""1 - z, two products, their sum; backward 1 - z, a product and a sum for the gradient of the state, two for
dz, one for dcandidate."""
_RMS_FLOPS = 6, 14
"""u = a h + b (2) and its norm (4); backward u again (2), the norm's gradient (9), the sum with the gradient
that comes from the next step, da, and what goes to the step before."""

RMS_NORM = _layer(_norm_inputs, rms_norm, (2, 3), _NORM_FLOPS, vectors=1)
"""The norm of each row of H: inputs x (B, T, H), weight (H,)."""

LINEAR_RECURRENCE = _layer(_linear_inputs, linear_recurrence, (3, 5), _LINEAR_FLOPS)
"""h_t = a_t h_{t-1} + b_t: inputs a (B, T, H), between 0 and 1, and b (B, T, H)."""

MIN_GRU = _layer(_gru_inputs, min_gru, (3, 5), _GRU_FLOPS)
"""h_t = (1 - z_t) h_{t-1} + z_t candidate_t: inputs z (B, T, H), between 0 and 1, and candidate (B, T, H)."""

RMS_RECURRENCE = _layer(_rms_inputs, rms_recurrence, (3, 6), _RMS_FLOPS, vectors=1)
"""h_t = rms_norm(a_t h_{t-1} + b_t) weight: inputs a, b (B, T, H), weight (H,)."""
