"""Triton's interpreter as the judge needs it: closer to compiled code, and with a record of each launch.

``match_compiled_code`` changes, for good, what is right when compiled and wrong when interpreted, or the
other way round. ``record_launches`` records launches, and the addresses that lanes load and store.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, reduce
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import FunctionRewriter, InterpretedFunction, InterpreterBuilder, TensorHandle

from labkit.exercises.engine import RecordedLaunches
from labkit.profiling import launch_counts


def _before(note: Callable[..., None], method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that first notes what it is called with."""

    def noted(*args: Any, **named: Any) -> Any:
        note(*args, **named)
        return method(*args, **named)

    return noted


@contextmanager
def record_launches() -> Iterator[RecordedLaunches]:
    """Record what is launched inside."""
    seen = RecordedLaunches()

    def lanes(pointers: Any, mask: Any) -> np.ndarray:
        allowed = np.asarray(mask.data).astype(bool)  # of a block pointer it is an array already
        used: np.ndarray = pointers.data[np.broadcast_to(allowed, pointers.data.shape)].ravel()
        return used

    def create_masked_load(
        builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any
    ) -> None:
        seen.loads.append(lanes(pointers, mask))
        seen.unfilled |= other is None and not np.all(mask.data)
        seen.stores_before.append(len(seen.stores))

    def create_masked_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        seen.stores.append(lanes(pointers, mask))

    def create_dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> None:
        seen.half_sums |= d.dtype.scalar == tl.float16
        of_float32 = a.dtype.scalar == tl.float32
        seen.float32_products |= of_float32
        seen.tf32 |= of_float32 and precision == interpreter._ir.INPUT_PRECISION.TF32

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        seen.kernels.append((kernel, {k: v for k, v in given.items() if k not in ("grid", "warmup")}))

    with ExitStack() as stack, np.errstate(all="ignore"):
        for note in (create_masked_load, create_masked_store, create_dot, run):
            owner = InterpretedFunction if note is run else InterpreterBuilder
            noted = _before(note, getattr(owner, note.__name__))
            stack.enter_context(patch.object(owner, note.__name__, noted))
        found = stack.enter_context(launch_counts.recording())
        yield seen
    seen.names = [one.name for one in found.launches]


# ---- interpreted as compiled -------------------------------------------------------------------------------

_replacements: list[tuple[Any, str, Callable[..., Any]]] = []


def _replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Marks what takes the place of a function of Triton's, which it gets as its first argument."""
    return lambda new: _replacements.append((owner, name, new))


@cache
def match_compiled_code() -> None:
    """Change the interpreter of this process, once, where it differs from compiled code."""
    for owner, name, new in _replacements:
        old = getattr(owner, name)
        setattr(owner, name, lambda *args, new=new, old=old, **named: new(old, *args, **named))


@_replaces(Autotuner, "_bench")
def _skip_autotuning(bench: Any, *args: Any, **named: Any) -> list[float]:
    return [0.0, 0.0, 0.0]


@_replaces(interpreter, "_patch_lang_tensor")
def _refuse_truth_of_blocks(patch_tensor: Any, tensor: Any, scope: Any) -> None:
    """A block of several elements is neither true nor false; the interpreter takes it for true."""

    def truth(self: Any) -> bool:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if asking == "triton.language.semantic":
            return True  # it asks whether there is one: `other.handle if other else None`
        if self.handle.data.size == 1 or asking.startswith("triton."):
            return bool(self.handle.data.ravel()[0])
        raise TypeError("a block has many values, and `if` needs one: tl.where chooses for each element")

    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__bool__", truth)


@_replaces(FunctionRewriter, "_compile_and_exec")
def _work_on_each_element(compile_and_exec: Any, rewriter: Any, tree: ast.AST) -> Any:
    """Compiled, ``and``, ``or``, ``max`` and ``min`` work on each element of a block."""
    rewriter.fn.__globals__.update(
        _labkit_and=lambda a, b: a.logical_and(b) if isinstance(a, tl.tensor) else a and b,
        _labkit_or=lambda a, b: a.logical_or(b) if isinstance(a, tl.tensor) else a or b,
        _labkit_max=lambda *args: _extreme(tl.maximum, max, args),
        _labkit_min=lambda *args: _extreme(tl.minimum, min, args),
        _labkit_chained=_chained,
    )
    return compile_and_exec(rewriter, ast.fix_missing_locations(_ElementwiseOperators().visit(tree)))


def _extreme(elementwise: Callable[..., Any], builtin: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    blocks = len(args) == 2 and any(isinstance(each, tl.tensor) for each in args)
    return (elementwise if blocks else builtin)(*args)


def _chained() -> None:
    raise TypeError("two comparisons in one: Python takes & before <, so a < b & c < d is a < (b & c) < d")


class _ElementwiseOperators(ast.NodeTransformer):
    """Puts calls of the helpers in place of ``and``, ``or``, ``max``, ``min`` and chained comparisons."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        name = "_labkit_and" if isinstance(node.op, ast.And) else "_labkit_or"
        return reduce(lambda left, right: self._called(name, node, [left, right]), node.values)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("max", "min") and not node.keywords:
            return self._called(f"_labkit_{node.func.id}", node, node.args)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        return node if len(node.ops) == 1 else self._called("_labkit_chained", node, [])

    def _called(self, name: str, node: ast.AST, args: list[ast.expr]) -> ast.expr:
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), args, []), node)


@_replaces(InterpreterBuilder, "create_masked_load")
def _load_nan_where_masked(
    load: Any, builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any
) -> Any:
    """A lane that a mask shuts out holds anything on a GPU; here NaN, where the interpreter has zero."""
    kind = pointers.get_element_ty()
    if other is None and kind.is_floating():
        nan = np.full(pointers.data.shape, np.nan, np.float32)
        other = builder.cast_impl(TensorHandle(nan, tl.float32), kind)
    return load(builder, pointers, mask, other, *rest, **named)


@_replaces(InterpreterBuilder, "cast_impl")
def _cast_by_float32(cast: Any, builder: Any, source: Any, target: Any) -> Any:
    """The interpreter keeps bfloat16 as integers, and converts it from and to float32 only."""
    kinds = {source.dtype.scalar, target.scalar}
    if tl.bfloat16 in kinds and not kinds <= {tl.bfloat16, tl.float32}:
        source = cast(builder, source, tl.float32)
    return cast(builder, source, target)


@_replaces(InterpreterBuilder, "binary_op")
def _compute_bfloat16_by_value(binary_op: Any, builder: Any, a: Any, b: Any, op: Any) -> Any:
    """The interpreter would add and multiply the integers that it keeps bfloat16 as."""
    if a.dtype.scalar != tl.bfloat16:
        return binary_op(builder, a, b, op)
    made = binary_op(builder, *(builder.cast_impl(side, tl.float32) for side in (a, b)), op)
    return made if made.data.dtype == bool else builder.cast_impl(made, tl.bfloat16)
