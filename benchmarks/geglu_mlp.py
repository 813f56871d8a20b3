"""(gelu(x @ Wg.T) * (x @ Wu.T)) @ Wd.T, x (batch, width), with ``hidden`` features inside.

Its backward is timed together with its forward: Liger's backward overwrites what its forward saved.
"""

from torch import Tensor
from torch.nn.functional import linear

from benchmarks.run import Operation, Ranges
from benchmarks.workloads.mlp import GEGLU, geglu_apart, gelu
from labkit import kernels

ALIGNED: Ranges = {"batch": (64, 8192, 1), "width": (64, 8192, 8), "hidden": (64, 8192, 8)}


def stacked(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Plain PyTorch, with gate and up as one product."""
    gate, up = linear(x, w_gate_up.flatten(0, 1)).chunk(2, 1)
    return linear(gelu(gate) * up, w_down)


def liger(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """Liger's kernel for GELU and product, between three Linears."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction  # type: ignore[import-not-found]

    hidden: Tensor = LigerGELUMulFunction.apply(linear(x, w_gate), linear(x, w_up))
    return linear(hidden, w_down)


def three_weights(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> tuple[Tensor, ...]:
    """A weight for the gate and one for up, so that nobody pays for splitting one."""
    return x, w_gate_up[0].clone(), w_gate_up[1].clone(), w_down


OPERATION = Operation(
    "geglu_mlp",
    GEGLU,
    {"labkit": kernels.geglu_mlp, "eager": geglu_apart, "torch.compile": stacked, "Liger": liger},
    {"": ALIGNED},
    directions=("forward", "forward_backward"),
    layouts={"eager": three_weights, "Liger": three_weights},
    bound="product",
)
