"""Triton's interpreter, patched and watched: no other module changes it.

``patch()`` makes it quicker, right where it is wrong, and as strict as compiled code. Lessons, the judge of
exercises and the tests call it; an import never does. ``watching(observer)`` tells an observer what
interpreted kernels do: launches, addresses that are loaded and stored, products.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial, reduce
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import (
    FunctionRewriter,
    GridExecutor,
    InterpretedFunction,
    InterpreterBuilder,
    TensorHandle,
)

from labkit import backend

_replacements: list[tuple[Any, str, Callable[..., Any]]] = []


def _replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks what ``patch`` puts in the place of a function of Triton's, which it gets as first argument."""

    def mark(new: Callable[..., Any]) -> Callable[..., Any]:
        _replacements.append((owner, name, new))
        return new

    return mark


@cache
def patch() -> None:
    """Patch the interpreter for the rest of this process; nothing happens where kernels are compiled.

    Quicker: kernels take about half of the time. Right: bfloat16 is computed by value, a loop goes up to a
    number that the kernel was given, and masks stay boolean. As strict as compiled code: a masked lane
    without ``other`` holds NaN; ``and``, ``or``, ``max`` and ``min`` work on each element; a loop's
    number has 32 bits, or 64 if it needs them; the truth of a block and chained comparisons are refused; an
    autotuner takes its configurations in turn.
    """
    if not backend.interpreting():
        return
    for owner, name, new in _replacements:
        setattr(owner, name, _with_first(new, getattr(owner, name)))
    options = interpreter.interpreter_builder.options
    # Without ``debug`` its check of integers for overflow asserts nothing, but computes all in 64 bits, too:
    # with it kernels take a fifth longer.
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    InterpretedFunction.rewritten_fn.clear()  # kernels that ran before are rewritten again


def _with_first(new: Callable[..., Any], old: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **named: new(old, *args, **named)  # a partial would not become a method


# ---- quicker: tests/kernels/test_affine.py takes 37 s of a CPU, and 64 s where nothing is patched ----------


@_replaces(interpreter, "_patch_lang")
def _patch_language_once(patch_language: Any, function: Any) -> Any:
    """Replace the functions of triton.language once a launch; else kernels take half as long again.

    The interpreter does it again at each call of a helper from a kernel, such as ``tl.zeros`` and
    ``tl.cdiv``, when nothing is left to replace.
    """
    languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    if languages and not any(tl.core.is_builtin(language.load) for language in languages):
        return interpreter._LangPatchScope()  # a scope that has nothing to restore
    return patch_language(function)


_numpy_types: dict[str, Any] = {}


@_replaces(interpreter, "_get_np_dtype")
def _look_numpy_type_up(numpy_type: Any, of: Any) -> Any:
    """Keep numpy's type for one of Triton's, which builds a table at each call: 8% of a kernel's time."""
    name = of.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = numpy_type(of.scalar)
    return _numpy_types[name]


@_replaces(interpreter.ScanOps, "generic_scan")
def _scan_by_a_tree(_: Any, scan: Any, inputs: list[Any]) -> list[Any]:
    """Combine whole blocks, as a tree: 24 times as fast as one element after the other, for 128 steps of 8.

    And it finds a function that is not associative, which one element after the other would not: there the
    first half of what is combined is all that came before, and the second half a single element.
    """
    blocks, by = list(inputs), 1
    steps = inputs[0].handle.data.shape[scan.axis]
    for observer in _observers:
        observer.scan(steps)
    place = np.arange(steps).reshape([-1 if axis == scan.axis else 1 for axis in range(len(inputs[0].shape))])
    while by < steps:
        earlier = [scan.to_tensor(np.roll(b.handle.data, by, scan.axis), b.dtype) for b in blocks]
        both = scan.combine_fn.fn(*earlier, *blocks)
        both = both if isinstance(both, tuple) else (both,)
        blocks = [
            scan.to_tensor(
                np.where(place < by, b.handle.data, new.handle.data).astype(b.handle.data.dtype), b.dtype
            )
            for b, new in zip(blocks, both, strict=True)
        ]
        by *= 2
    return blocks


# ---- right: bfloat16, which the interpreter keeps as integers, and computes with those ---------------------


def _is_bfloat16(kind: Any) -> bool:
    return bool(kind.scalar.name == "bf16")


@_replaces(InterpreterBuilder, "cast_impl")
def _cast_bfloat16(cast: Any, builder: Any, source: Any, target: Any) -> Any:
    """bfloat16 is the upper half of float32; to it one rounds to the nearest, and to even in the middle."""
    if _is_bfloat16(source.dtype):
        if _is_bfloat16(target):
            return source
        bits = np.asarray(source.data.astype(np.uint32) << 16)
        source = TensorHandle(bits.view(np.float32), tl.float32)
    if not _is_bfloat16(target):
        return cast(builder, source, target)
    values = np.asarray(source.data.astype(np.float32))
    bits = values.view(np.uint32)
    rounded = np.where(np.isnan(values), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    return TensorHandle(rounded.astype(np.uint16), tl.bfloat16)


@_replaces(InterpreterBuilder, "binary_op")
@_replaces(InterpreterBuilder, "unary_op")
@_replaces(InterpreterBuilder, "create_fma")
def _compute_bfloat16_by_value(compute: Any, builder: Any, first: Any, *rest: Any) -> Any:
    if not _is_bfloat16(first.dtype):
        return compute(builder, first, *rest)
    sides = [builder.cast_impl(s, tl.float32) if isinstance(s, TensorHandle) else s for s in (first, *rest)]
    made = compute(builder, *sides)
    return made if made.data.dtype == bool else builder.cast_impl(made, tl.bfloat16)


@_replaces(InterpreterBuilder, "create_maxnumf")
def _larger_number(larger: Any, builder: Any, left: Any, right: Any) -> Any:
    """Of a NaN and a number a GPU takes the number, unless tl.maximum is told to propagate NaN."""
    return builder.binary_op(left, right, np.fmax)


@_replaces(InterpreterBuilder, "create_minnumf")
def _smaller_number(smaller: Any, builder: Any, left: Any, right: Any) -> Any:
    return builder.binary_op(left, right, np.fmin)


@_replaces(InterpreterBuilder, "create_dot")
def _multiply_bfloat16_by_value(multiply: Any, builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    if _is_bfloat16(a.dtype):
        a, b = (builder.cast_impl(side, tl.float32) for side in (a, b))
    return multiply(builder, a, b, *rest)


@_replaces(interpreter.ReduceOps, "sum")
def _sum_bfloat16_by_value(total: Any, reduction: Any, block: Any) -> Any:
    if not _is_bfloat16(block.type):
        return total(reduction, block)
    values = interpreter.interpreter_builder.cast_impl(block.handle, tl.float32)
    made = total(reduction, tl.tensor(values, tl.block_type(tl.float32, list(values.data.shape))))
    return made.to(tl.bfloat16)


@_replaces(InterpreterBuilder, "create_splat")
def _keep_splats_boolean(splat: Any, builder: Any, *arguments: Any) -> Any:
    """A condition on a scalar becomes integers when it gets a shape, and Triton 3.9 loads by no such mask."""
    made = splat(builder, *arguments)
    if arguments[-1].data.dtype == bool:
        made.data = made.data.astype(bool)
    return made


# ---- as strict as compiled code ----------------------------------------------------------------------------


@_replaces(interpreter, "_patch_lang_tensor")
def _make_tensors_numbers(patch_tensor: Any, tensor: Any, scope: Any) -> None:
    """Say when a block is a number, for ``range``, and when it is true, for ``if``."""

    def index(self: Any) -> int:
        if self.dtype.is_floating():
            raise TypeError("must be real number, not tensor")  # as compiled: math.sqrt(block), say
        return int(self.handle.data.squeeze())  # numpy 2.4 refuses the array of one element of Triton 3.6

    def truth(self: Any) -> bool:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if asking == "triton.language.semantic":
            return True  # it asks whether there is one: `other.handle if other else None`
        if self.handle.data.size == 1 or asking.startswith("triton."):
            return bool(self.handle.data.ravel()[0])
        raise TypeError("a block has many values, and `if` needs one: tl.where chooses for each element")

    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", index)
    scope.set_attr(tensor, "__bool__", truth)


@_replaces(InterpreterBuilder, "create_masked_load")
def _load_nan_where_masked(
    load: Any, builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any
) -> Any:
    """A lane that a mask shuts out holds anything on a GPU; here NaN, where the interpreter has zero."""
    kind = pointers.get_element_ty()
    if other is None and kind.is_floating() and not np.all(mask.data):
        nan = np.full(pointers.data.shape, np.nan, np.float32)
        other = builder.cast_impl(TensorHandle(nan, tl.float32), kind)
    return load(builder, pointers, mask, other, *rest, **named)


@_replaces(InterpretedFunction, "run")
def _launch_without_warnings(run: Any, *args: Any, **options: Any) -> Any:
    """A GPU does not warn of an overflow, nor of a division by zero."""
    with np.errstate(all="ignore"):
        return run(*args, **options)


@_replaces(Autotuner, "run")
def _forget_the_fastest(run: Any, tuner: Any, *args: Any, **options: Any) -> Any:
    """On a GPU any configuration may be the fastest, so all have to be right: each launch takes the next."""
    tuner.cache.clear()
    tuner.labkit_launches = getattr(tuner, "labkit_launches", -1) + 1
    return run(tuner, *args, **options)


@_replaces(Autotuner, "_bench")
def _take_turns(bench: Any, tuner: Any, *args: Any, config: Any, **named: Any) -> list[float]:
    turn = tuner.configs[tuner.labkit_launches % len(tuner.configs)]
    return [0.0 if config is turn else 1.0] * 3


@_replaces(FunctionRewriter, "_compile_and_exec")
def _work_on_each_element(compile_and_exec: Any, rewriter: Any, tree: ast.AST) -> Any:
    """Compiled, ``and``, ``or``, ``max`` and ``min`` work on each element of a block."""
    names = rewriter.fn.__globals__
    own = {name for name in ("max", "min") if name in names}  # such as tl.max, imported by its name
    names.update(
        _labkit_and=lambda a, b: a.logical_and(b()) if isinstance(a, tl.tensor) else a and b(),
        _labkit_or=lambda a, b: a.logical_or(b()) if isinstance(a, tl.tensor) else a or b(),
        _labkit_max=lambda *args: (tl.maximum if _are_blocks(args) else max)(*args),
        _labkit_min=lambda *args: (tl.minimum if _are_blocks(args) else min)(*args),
        _labkit_chained=_chained,
        _labkit_numbers=_numbers,
    )
    return compile_and_exec(rewriter, ast.fix_missing_locations(_ElementwiseOperators(own).visit(tree)))


def _are_blocks(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and any(isinstance(each, tl.tensor) for each in args)


def _numbers(make: Callable[..., range], *bounds: Any, **options: Any) -> Iterator[Any]:
    """What a loop counts, as the blocks of one number that it counts in a compiled kernel."""
    counted = make(*bounds, **options)
    wide = not counted or max(abs(counted[0]), abs(counted.stop)) >= 2**31
    wide |= any(isinstance(each, tl.tensor) and each.dtype.primitive_bitwidth == 64 for each in bounds)
    kind, numpy_type = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for observer in _observers:
        observer.loop(len(counted))
    for number in counted:
        yield tl.tensor(TensorHandle(np.array([number], numpy_type), kind), kind)


def _chained() -> None:
    raise TypeError("two comparisons in one: Python takes & before <, so a < b & c < d is a < (b & c) < d")


class _ElementwiseOperators(ast.NodeTransformer):
    """Puts calls of helpers in place of `and`, `or`, `max`, `min`, `range` and chained comparisons."""

    def __init__(self, own: set[str]) -> None:
        self._own = own

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        name = "_labkit_and" if isinstance(node.op, ast.And) else "_labkit_or"
        nothing = ast.arguments([], [], None, [], [], None, [])  # the right side waits until it is needed
        return reduce(lambda a, b: self._called(name, node, [a, ast.Lambda(nothing, b)]), node.values)

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        called = node.iter.func if isinstance(node.iter, ast.Call) else None
        if "range" in (
            getattr(called, "id", ""),
            getattr(called, "attr", ""),
        ):  # static_range counts in Python
            assert isinstance(node.iter, ast.Call)
            node.iter.args.insert(0, node.iter.func)
            node.iter.func = ast.copy_location(ast.Name("_labkit_numbers", ast.Load()), node.iter)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) and not node.keywords else ""
        if name in {"max", "min"} - self._own:
            return self._called(f"_labkit_{name}", node, node.args)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        return node if len(node.ops) == 1 else self._called("_labkit_chained", node, [])

    def _called(self, name: str, node: ast.AST, args: list[ast.expr]) -> ast.expr:
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), args, []), node)


# ---- what interpreted kernels do ---------------------------------------------------------------------------


class Observer:
    """What ``watching`` tells, before it happens; a subclass overrides what it wants to know.

    ``addresses`` are those that the lanes let through by the mask use, one entry a lane, and ``size`` is the
    bytes of an element.
    """

    def launch(self, run: Callable[..., Any], kernel: Any, args: Any, options: dict[str, Any]) -> None:
        """A kernel is launched: ``run(*args, **options)`` does it. The options hold the grid, too."""
        run(*args, **options)

    def grid(self, *sizes: int) -> None:
        """The launch that runs has a grid of x, y, z programs."""

    def load(self, addresses: np.ndarray, size: int, unfilled: bool) -> None:
        """A load; ``unfilled``: some lanes are masked, and no number is given for them."""

    def store(self, addresses: np.ndarray, size: int) -> None:
        """A store."""

    def atomic(self, addresses: np.ndarray, size: int) -> None:
        """An atomic operation, which loads and stores."""

    def dot(self, inputs: Any, total: Any, tf32: bool) -> None:
        """A product: types of the inputs and of the sum, and whether its precision is TF32."""

    def scan(self, steps: int) -> None:
        """An associative scan over so many steps; told where ``patch`` was called."""

    def loop(self, turns: int) -> None:
        """A loop over ``range``, of so many turns; told where ``patch`` was called."""


_observers: list[Observer] = []


@contextmanager
def watching(observer: Observer) -> Iterator[None]:
    """Tell an observer what the kernels do that are interpreted inside, whether patched or not."""

    def run(launch: Any, kernel: Any, *args: Any, **options: Any) -> None:
        if not options["warmup"]:
            observer.launch(partial(launch, kernel), kernel, args, options)

    def set_grid_dim(builder: Any, *sizes: int) -> None:
        observer.grid(*sizes)

    # Unmasked accesses, block pointers and descriptors call these two, too.
    def create_masked_load(builder: Any, at: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> None:
        observer.load(*_lanes(at, mask.data), other is None and not np.all(mask.data))

    def create_masked_store(builder: Any, at: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> None:
        observer.store(*_lanes(at, mask.data))

    def create_atomic_rmw(builder: Any, operation: Any, at: Any, value: Any, mask: Any, *rest: Any) -> None:
        observer.atomic(*_lanes(at, mask.data))

    def create_atomic_cas(builder: Any, at: Any, *rest: Any) -> None:
        observer.atomic(*_lanes(at, True))

    def create_dot(builder: Any, a: Any, b: Any, total: Any, precision: Any, *rest: Any) -> None:
        tf32 = precision == interpreter._ir.INPUT_PRECISION.TF32
        observer.dot(a.dtype.scalar, total.dtype.scalar, tf32)

    def told_first(tell: Callable[..., None], method: Any) -> Callable[..., Any]:
        def told(*args: Any, **named: Any) -> Any:
            tell(*args, **named)
            return method(*args, **named)

        return told

    accesses = create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas
    with ExitStack() as stack:
        launch = _with_first(run, InterpretedFunction.run)
        stack.enter_context(mock.patch.object(InterpretedFunction, "run", launch))
        for tell in (set_grid_dim, *accesses, create_dot):
            told = told_first(tell, getattr(InterpreterBuilder, tell.__name__))
            stack.enter_context(mock.patch.object(InterpreterBuilder, tell.__name__, told))
        _observers.append(observer)
        stack.callback(_observers.remove, observer)
        yield


@contextmanager
def corner_programs() -> Iterator[None]:
    """Of each grid, run only the programs at its corners: the first and the last one of every axis.

    Tensors stay where they are, while the interpreter would copy each of them back onto itself.
    """
    corners: list[tuple[int, ...]] = []
    true_sizes: list[int] = []

    def make(init: Any, executor: Any, function: Any, names: Any, grid: Any, *rest: Any) -> None:
        def few(args: Any) -> tuple[int, ...]:
            sizes = grid(args) if callable(grid) else grid
            true_sizes[:] = [*sizes] + [1] * (3 - len(sizes))
            corners[:] = product(*(sorted({0, size - 1}) if size else () for size in true_sizes))
            return (len(corners), 1, 1)

        init(executor, function, names, few, *rest)

    def set_grid_dim(place: Any, builder: Any, *sizes: int) -> None:
        place(builder, *true_sizes)

    def set_grid_idx(place: Any, builder: Any, number: int, *rest: int) -> None:
        place(builder, *corners[number])

    def keep(executor: Any, args: Any, named: Any) -> tuple[Any, Any]:
        return args, named

    with ExitStack() as stack:
        for owner, name, new in (
            (GridExecutor, "__init__", _with_first(make, GridExecutor.__init__)),
            (GridExecutor, "_init_args_hst", keep),
            (GridExecutor, "_restore_args_dev", lambda executor, *copies: None),
            (InterpreterBuilder, "set_grid_dim", _with_first(set_grid_dim, InterpreterBuilder.set_grid_dim)),
            (InterpreterBuilder, "set_grid_idx", _with_first(set_grid_idx, InterpreterBuilder.set_grid_idx)),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


def _lanes(pointers: Any, mask: Any) -> tuple[np.ndarray, int]:
    """Addresses of the lanes that a mask lets through, and the bytes of an element."""
    on = np.broadcast_to(np.asarray(mask, dtype=bool), pointers.data.shape)
    return pointers.data[on].astype(np.int64), max(1, pointers.get_element_ty().primitive_bitwidth // 8)
