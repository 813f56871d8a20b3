"""(gelu(x @ Wg.T) * (x @ Wu.T)) @ Wd.T, x (batch, width), with ``hidden`` features inside.

Its backward is timed together with its forward: Liger's backward overwrites what its forward saved.
"""

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import gelu, linear

from benchmarks.run import Operation, Ranges
from labkit import gpu, kernels
from labkit.work import Shape, Work, gate_up

ALIGNED: Ranges = {"batch": (64, 8192, 1), "width": (64, 8192, 8), "hidden": (64, 8192, 8)}


def inputs(shape: Shape) -> tuple[Tensor, ...]:
    """x (batch, width), w_gate_up (2, hidden, width), w_down (width, hidden)."""
    width, hidden = shape["width"], shape["hidden"]
    return *gate_up.inputs({**shape, "out": hidden}), gpu.randn(width, hidden, scale=hidden**-0.5)


def reference(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The MLP in plain PyTorch."""
    return linear(gate_up.reference(x, w_gate_up), w_down)


def moved(shape: Shape, direction: str) -> int:
    """x and the weights in, y out; backward dy, x and the weights in, all gradients out."""
    tensor, weights = shape["batch"] * shape["width"], 3 * shape["hidden"] * shape["width"]
    return {"forward": 2 * tensor + weights, "backward": 3 * tensor + 2 * weights}[direction]


def flops(shape: Shape, direction: str) -> int:
    """Those of three products; backward of two for each."""
    return {"forward": 6, "backward": 12}[direction] * shape["batch"] * shape["hidden"] * shape["width"]


WORK = Work("geglu_mlp", inputs, reference, moved, flops)


def inputs_apart(shape: Shape) -> tuple[Tensor, ...]:
    """A weight for the gate and one for up, each in memory of its own: so nobody pays for splitting one."""
    x, w_gate_up, w_down = inputs(shape)
    return x, w_gate_up[0].clone(), w_gate_up[1].clone(), w_down


def eager(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """Plain PyTorch, three Linears."""
    return linear(gelu(linear(x, w_gate), approximate="tanh") * linear(x, w_up), w_down)


APART = replace(WORK, name="geglu_mlp of three weights", inputs=inputs_apart, reference=eager)


def stacked(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Plain PyTorch, with gate and up as one product."""
    gate, up = linear(x, w_gate_up.flatten(0, 1)).chunk(2, 1)
    return linear(gelu(gate, approximate="tanh") * up, w_down)


def liger(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """Liger's kernel for GELU and product, between three Linears."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction  # type: ignore[import-not-found]

    hidden: Tensor = LigerGELUMulFunction.apply(linear(x, w_gate), linear(x, w_up))
    return linear(hidden, w_down)


OPERATION = Operation(
    "geglu_mlp",
    WORK,
    {"labkit": kernels.geglu_mlp, "eager": eager, "torch.compile": stacked, "Liger": liger},
    {"": ALIGNED},
    directions=("forward", "forward_backward"),
    works={"eager": APART, "Liger": APART},
    bound="product",
)
