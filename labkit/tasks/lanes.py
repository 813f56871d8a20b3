"""Which addresses the lanes of interpreted Triton kernels load and store, and which kernels were launched."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from labkit import counts
from labkit.checks import FENCE


@dataclass
class Lanes:
    """What a call did: launches in order, and an address for each lane that a mask let through."""

    launches: list[counts.Launch] = field(default_factory=list)
    kernels: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    """Each kernel that was launched, with its arguments by name; what else the launch gave is left out."""
    load_addresses: list[np.ndarray] = field(default_factory=list)
    store_addresses: list[np.ndarray] = field(default_factory=list)

    def loaded(self, tensor: Tensor) -> np.ndarray:
        """Elements of a contiguous tensor that were loaded, once for each lane; see ``stored``."""
        return _elements(self.load_addresses, tensor)

    def stored(self, tensor: Tensor) -> np.ndarray:
        """Elements of a contiguous tensor that were stored, one entry a lane, in ascending order.

        An element in the fence around the tensor counts as the tensor's: its number is negative, or beyond
        the last.
        """
        return _elements(self.store_addresses, tensor)

    def each_store(self, tensor: Tensor) -> list[np.ndarray]:
        """The same for each time that a program stored something."""
        return [_elements([addresses], tensor) for addresses in self.store_addresses]


def outside(elements: np.ndarray, tensor: Tensor) -> int:
    """How many different elements lie before the tensor's first or beyond its last."""
    return len(np.unique(elements[(elements < 0) | (elements >= tensor.numel())]))


def _elements(addresses: list[np.ndarray], tensor: Tensor) -> np.ndarray:
    if not addresses:
        return np.zeros(0, np.int64)
    first = (np.concatenate(addresses).astype(np.int64) - tensor.data_ptr()) // tensor.element_size()
    return np.sort(first[(first >= -FENCE) & (first < tensor.numel() + FENCE)])


def unfinished(kernel: Any) -> bool:
    """Whether a kernel still says ``...`` where the learner's part goes."""
    return any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(_tree(kernel)))


def decided_at_once(kernel: Any) -> str:
    """What in a kernel decides once for a whole block when it's interpreted: "max", "min", "if" or ""."""
    for node in ast.walk(_tree(kernel)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
            return node.func.id
        if isinstance(node, (ast.If, ast.IfExp)):
            return "if"
    return ""


def _tree(kernel: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))


def watch(call: Callable[[], Any], look: Callable[[Any], None] | None = None) -> tuple[Any, Lanes]:
    """What ``call`` returns, and what its kernels touched. Only where kernels are interpreted.

    ``look`` is shown each kernel before it runs.
    """
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    lanes = Lanes()
    result = None

    def kept(method: str, addresses: list[np.ndarray], mask_at: int) -> Any:
        original = getattr(InterpreterBuilder, method)

        def access(builder: Any, *args: Any, **kwargs: Any) -> Any:
            pointers, mask = np.asarray(args[0].data), np.asarray(args[mask_at].data, dtype=bool)
            addresses.append(pointers[np.broadcast_to(mask, pointers.shape)].ravel())
            return original(builder, *args, **kwargs)

        return patch.object(InterpreterBuilder, method, access)

    run = InterpretedFunction.run

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if look is not None:
            look(kernel)
        given = dict(zip(kernel.arg_names, args, strict=False))
        lanes.kernels.append((kernel, given | {k: v for k, v in kwargs.items() if k in kernel.arg_names}))
        return run(kernel, *args, **kwargs)

    def called() -> None:
        nonlocal result
        result = call()

    with ExitStack() as stack:
        stack.enter_context(patch.object(InterpretedFunction, "run", launched))
        stack.enter_context(kept("create_masked_load", lanes.load_addresses, mask_at=1))
        stack.enter_context(kept("create_masked_store", lanes.store_addresses, mask_at=2))
        lanes.launches = counts.count(called).launches
    return result, lanes
