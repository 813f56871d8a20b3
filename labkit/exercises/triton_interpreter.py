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
from triton.runtime import autotuner, interpreter

from labkit.exercises.engine import Launches
from labkit.profiling import launch_counts

TF32_BITS = 13
"""Bits of a float32's mantissa that TF32 drops."""


@contextmanager
def record_launches() -> Iterator[Launches]:
    """Record what is launched inside."""
    seen = Launches()
    builder, run = interpreter.InterpreterBuilder, interpreter.InterpretedFunction.run
    load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot

    def lanes(pointers: Any, mask: Any) -> np.ndarray:
        allowed = np.asarray(mask.data).astype(bool)  # of a block pointer it is an array already
        used: np.ndarray = pointers.data[np.broadcast_to(allowed, pointers.data.shape)].ravel()
        return used

    def loading(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        seen.loads.append(lanes(pointers, mask))
        return load(self, pointers, mask, *rest, **named)

    def storing(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        seen.stores.append(lanes(pointers, mask))
        return store(self, pointers, value, mask, *rest, **named)

    def multiplying(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        seen.half_sums |= d.dtype.scalar == tl.float16
        seen.tf32 |= a.dtype.scalar == tl.float32 and precision == interpreter._ir.INPUT_PRECISION.TF32
        return dot(self, a, b, d, precision, *rest)

    def launched(kernel: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        seen.kernels.append((kernel, {k: v for k, v in given.items() if k not in ("grid", "warmup")}))
        return run(kernel, *args, **options)

    with ExitStack() as stack, np.errstate(all="ignore"):
        stack.enter_context(patch.object(interpreter.InterpretedFunction, "run", launched))
        stack.enter_context(patch.object(builder, "create_masked_load", loading))
        stack.enter_context(patch.object(builder, "create_masked_store", storing))
        stack.enter_context(patch.object(builder, "create_dot", multiplying))
        found = stack.enter_context(launch_counts.recording())
        yield seen
    seen.names = [one.name for one in found.launches]


# ---- interpreted as compiled -------------------------------------------------------------------------------


@cache
def match_compiled_code() -> None:
    """Change the interpreter of this process, once, where it differs from compiled code."""
    interpreter._patch_lang_tensor = _refuse_truth_of_blocks(interpreter._patch_lang_tensor)
    interpreter.FunctionRewriter._compile_and_exec = _add_helpers(
        interpreter.FunctionRewriter._compile_and_exec
    )
    autotuner.Autotuner._bench = lambda self, *args, **options: [0.0, 0.0, 0.0]
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = _load_nan_where_masked(builder.create_masked_load)
    builder.create_dot = _round_dot_inputs(builder.create_dot)
    builder.cast_impl = _cast_by_float32(builder.cast_impl)
    builder.binary_op = _compute_bfloat16_by_value(builder.binary_op)


_HELPERS = {
    "_labkit_and": lambda a, b: a.logical_and(b) if isinstance(a, tl.tensor) else a and b,
    "_labkit_or": lambda a, b: a.logical_or(b) if isinstance(a, tl.tensor) else a or b,
    "_labkit_max": lambda *args: _extreme("maximum", max, args),
    "_labkit_min": lambda *args: _extreme("minimum", min, args),
    "_labkit_chained": lambda: _chained(),
}
"""What compiled code has for ``and``, ``or``, ``max`` and ``min``: they work on each element of a block."""


def _refuse_truth_of_blocks(patch_tensor: Callable[..., Any]) -> Callable[..., Any]:
    """A block of several elements is neither true nor false; the interpreter takes it for true."""

    def truth(self: Any) -> bool:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if asking == "triton.language.semantic":
            return True  # it asks whether there is one: `other.handle if other else None`
        if self.handle.data.size == 1 or asking.startswith("triton."):
            return bool(self.handle.data.ravel()[0])
        raise TypeError("a block has many values, and `if` needs one: tl.where chooses for each element")

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__bool__", truth)

    return patched


def _extreme(name: str, builtin: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if len(args) == 2 and any(isinstance(each, tl.tensor) for each in args):
        return getattr(tl, name)(*args)
    return builtin(*args)


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


def _add_helpers(compile_and_exec: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(self: Any, tree: Any) -> Any:
        self.fn.__globals__.update(_HELPERS)
        return compile_and_exec(self, ast.fix_missing_locations(_ElementwiseOperators().visit(tree)))

    return compiled


def _load_nan_where_masked(load: Callable[..., Any]) -> Callable[..., Any]:
    """A lane that a mask shuts out holds anything on a GPU; here NaN, where the interpreter has zero."""

    def loaded(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        kind = pointers.get_element_ty()
        if other is None and kind.is_floating():
            nan = np.full(pointers.data.shape, np.nan, np.float32)
            other = self.cast_impl(interpreter.TensorHandle(nan, tl.float32), kind)
        return load(self, pointers, mask, other, *rest, **named)

    return loaded


def _round_dot_inputs(dot: Callable[..., Any]) -> Callable[..., Any]:
    """TF32 drops bits of float32; bfloat16 is multiplied by its value, not by the bits it is kept in."""

    def multiplied(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(side, tl.float32) for side in (a, b))
        elif a.dtype.scalar == tl.float32 and precision == interpreter._ir.INPUT_PRECISION.TF32:
            a, b = (interpreter.TensorHandle(_tf32(side.data), tl.float32) for side in (a, b))
        return dot(self, a, b, d, precision, *rest)

    return multiplied


def _tf32(values: np.ndarray) -> np.ndarray:
    """Float32 values rounded to TF32's 10 bits of mantissa."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half = np.uint32(1 << (TF32_BITS - 1))
    return ((bits + half) & np.uint32(~((1 << TF32_BITS) - 1) & 0xFFFFFFFF)).view(np.float32)


def _cast_by_float32(cast: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter keeps bfloat16 as integers, and converts it from and to float32 only."""

    def casted(self: Any, source: Any, target: Any) -> Any:
        kinds = {source.dtype.scalar, target.scalar}
        if tl.bfloat16 in kinds and not kinds <= {tl.bfloat16, tl.float32}:
            source = cast(self, source, tl.float32)
        return cast(self, source, target)

    return casted


def _compute_bfloat16_by_value(binary_op: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter would add and multiply the integers that it keeps bfloat16 as."""

    def computed(self: Any, a: Any, b: Any, op: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return binary_op(self, a, b, op)
        made = binary_op(self, *(self.cast_impl(side, tl.float32) for side in (a, b)), op)
        return made if made.data.dtype == bool else self.cast_impl(made, tl.bfloat16)

    return computed
