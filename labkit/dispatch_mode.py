"""A dispatch mode that sees every operation of PyTorch, and that starts without torch's compiler."""

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LightDispatchMode(TorchDispatchMode):
    """A TorchDispatchMode whose first operation does not import torch's compiler, which takes a second.

    PyTorch disables the compiler inside every mode, and imports it for that. If nobody else has imported it,
    there is nothing to disable.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        plain = cls.__torch_dispatch__
        without_compiler = torch._disable_dynamo(plain)

        def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            chosen = without_compiler if "torch._dynamo" in sys.modules else plain
            return chosen(self, func, types, args, kwargs)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Turn off PyTorch's own way of disabling the compiler; the method above does it."""
        return False
