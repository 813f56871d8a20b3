"""The recurrent network of the last lesson: inputs, float64 reference, fewest bytes, operations.

Axes: ``batch`` sequences, ``time`` steps, ``width`` features. The features are split into GROUPS heads of D
each; the MLP is EXPANSION times as wide, and there are OUTPUTS outputs. Matrices of the heads have the layout
of grouped_linear in lesson 4, (G, D_in, D_out). Those of the MLP and of the output head have the layout of
nn.Linear, (out, in).

The network: each head multiplies its own features by a matrix; RMSNorm; each head makes the logits of a gate
and a candidate, side by side; a minimal GRU (Feng et al., arXiv:2410.01201) makes states of them; the same
gates lead a recurrence that normalises its state at every step; a GeGLU MLP stands beside a
residual; a linear head.

Bytes are those of the whole network in one pass: input, output and weights once, and their gradients, but
nothing that lies between two layers. Operations are those of the matrix products, two for each multiply and
add. A backward pass has twice as many products as its forward pass.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from labkit.gpu import randn
from labkit.measure.contender import Shape
from labkit.workloads.elementwise import LayerSize, matrix_layer
from labkit.workloads.grouped import grouped_reference as heads
from labkit.workloads.mlp import geglu
from labkit.workloads.recurrent import min_gru, rms_norm, rms_recurrence

Layer = Callable[..., Tensor]
GROUPS, EXPANSION, OUTPUTS = 4, 2, 32
"""Heads, the MLP's hidden features over the width, and outputs."""


def split_gates(gates: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Logits of the gate and candidate, (..., H) each; in gates (..., 2 H) each head has first its logits."""
    logit, candidate = gates.unflatten(-1, (groups, 2, -1)).unbind(-2)
    return logit.flatten(-2), candidate.flatten(-2)


def cell(gates: Tensor, gain: Tensor, groups: int) -> Tensor:
    """Both recurrences with the same gate z: gates (B, T, 2 H) as :func:`split_gates` takes them, gain (H,).

    s_t = (1 - z_t) s_{t-1} + z_t candidate_t, u_t = (1 - z_t) r_{t-1} + s_t, and the result (B, T, H) is
    r_t = gain u_t / sqrt(mean(u_t^2) + eps).
    """
    logit, candidate = split_gates(gates, groups)
    z = logit.sigmoid()
    return rms_recurrence(1 - z, min_gru(z, candidate), gain)


def assemble(
    heads: Layer = heads, norm: Layer = rms_norm, cell: Layer = cell, mlp: Layer = geglu
) -> Callable[..., Tensor]:
    """The whole network, x (B, T, H) to (B, T, OUTPUTS), of these layers; those left out are PyTorch's.

    heads(x, weight, bias), norm(x, gain), cell(gates, gain, groups) and mlp(x, w_gate_up, w_down).
    """

    def network(x: Tensor, *weights: Tensor) -> Tensor:
        w_in, b_in, gain_in, w_gates, b_gates, gain, w_gate_up, w_down, w_out, b_out = weights
        normed = norm(heads(x, w_in, b_in), gain_in)
        states = cell(heads(normed, w_gates, b_gates), gain, len(w_gates))
        return functional.linear(states + mlp(states, w_gate_up, w_down), w_out, b_out)

    return network


network = assemble()
"""The whole network in PyTorch."""


def weights(width: int) -> tuple[Tensor, ...]:
    """Random weights in the network's order; ValueError unless GROUPS divides the width."""
    if width % GROUPS:
        raise ValueError(f"width: {width} features cannot be split into {GROUPS} heads")
    each, hidden = width // GROUPS, EXPANSION * width
    return (
        randn(GROUPS, each, each, scale=each**-0.5), randn(GROUPS, each, scale=0.1),
        1 + randn(width, scale=0.1),
        randn(GROUPS, each, 2 * each, scale=each**-0.5), randn(GROUPS, 2 * each, scale=0.1),
        1 + randn(width, scale=0.1),
        randn(2, hidden, width, scale=width**-0.5), randn(width, hidden, scale=hidden**-0.5),
        randn(OUTPUTS, width, scale=width**-0.5), randn(OUTPUTS, scale=0.1),
    )  # fmt: skip


def _inputs(shape: Shape) -> tuple[Tensor, ...]:
    return randn(shape["batch"], shape["time"], shape["width"]), *weights(shape["width"])


def multiplications(width: int) -> dict[str, int]:
    """Multiplications of each layer for one step of one sequence: the size of its weight."""
    each = width // GROUPS
    return {
        "input heads": width * each,
        "gate heads": 2 * width * each,
        "gate and up": 2 * EXPANSION * width**2,
        "down": EXPANSION * width**2,
        "output head": OUTPUTS * width,
    }


def _size(shape: Shape) -> LayerSize:
    width = shape["width"]
    matrices, vectors = sum(multiplications(width).values()), 5 * width + OUTPUTS  # biases and gains
    return shape["batch"] * shape["time"], width, OUTPUTS, matrices, vectors


NETWORK = matrix_layer(_inputs, network, _size, sample={"batch": 16, "time": 64})
"""x (B, T, H), then the weights in the order of :func:`weights`."""
