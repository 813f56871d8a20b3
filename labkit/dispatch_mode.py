"""A mode that sees every operation of PyTorch, ready at once."""

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A TorchDispatchMode for which the first operation does not import torch's compiler, a second's work.

    PyTorch has the compiler step aside in every mode, and so imports it; where nobody else has imported it
    there is nothing to step aside.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        alone = cls.__torch_dispatch__
        beside_a_compiler = torch._disable_dynamo(alone)

        def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            chosen = beside_a_compiler if "torch._dynamo" in sys.modules else alone
            return chosen(self, func, types, args, kwargs)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch's own switch; what it does is done above."""
        return False
