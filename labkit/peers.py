"""Contenders from other packages, imported when they are called: pip install -e '.[peers]'."""

from importlib import import_module
from types import ModuleType

from torch import Tensor
from torch.nn.functional import linear


class MissingError(RuntimeError):
    """The package behind a contender is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package} is not installed: pip install -e '.[peers]'")


def liger_geglu(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """The GeGLU MLP with Liger's kernel for tanh-GELU and product, and three GEMMs of PyTorch.

    x (batch, width), w_gate and w_up (hidden, width), w_down (width, hidden); the result: (batch, width). Its
    backward pass overwrites gate and up, so it runs once for each forward: time it with forward_backward.

    Raises MissingError without liger-kernel.
    """
    geglu = _module("liger_kernel.ops.geglu", "liger-kernel")
    hidden: Tensor = geglu.LigerGELUMulFunction.apply(linear(x, w_gate), linear(x, w_up))
    return linear(hidden, w_down)


def _module(name: str, package: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.split(".")[0]:  # else it is installed and lacks something of its own
            raise MissingError(package) from error
        raise
