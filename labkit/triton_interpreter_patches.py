"""Patches for Triton's interpreter: a third of the time, loops up to a given number, products of bfloat16."""

from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_interpreter() -> None:
    """Skip work of the interpreter whose result is known or not used, and do what it cannot or does wrong.

    Right kernels compute the same. A second call changes nothing.
    """
    if hasattr(interpreter._patch_lang, "once"):
        return
    _patch_language_once()
    _skip_overflow_check()
    _cache_types()
    _accept_tensors_in_range()
    _keep_splats_boolean()
    _multiply_bfloat16_by_value()


def _patch_language_once() -> None:
    """Let the interpreter replace the functions of triton.language once per launch.

    It does so again at each call of a helper from a kernel, such as `tl.zeros` and `tl.cdiv`, when nothing is
    left to replace. Searching the modules takes almost half of the time of a kernel's test.
    """
    patch = interpreter._patch_lang

    def once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()  # a scope that has nothing to restore
        return patch(function)

    once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = once


def _skip_overflow_check() -> None:
    """Skip the interpreter's check of integers for overflow.

    The check asserts nothing without the interpreter's option ``debug``, which nobody can set. But it first
    computes every sum, difference and product a second time, in 64 bits.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _cache_types() -> None:
    """Compute once what follows from the type of an element and a shape."""
    numpy_type = interpreter._get_np_dtype
    new_block, new_tensor = tl.block_type.__init__, tl.tensor.__init__
    numpy_types: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}

    def known_numpy_type(of: Any) -> Any:
        scalar = of.element_ty if type(of) is tl.block_type else of
        if type(scalar) is not tl.dtype:
            return numpy_type(of)
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = numpy_type(scalar)
        return numpy_types[scalar.name]

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        of = _type_key(element_ty)
        if of is None or type(shape) is tuple or not all([type(size) is int for size in sizes]):
            new_block(self, element_ty, shape)
            return
        known = blocks.get((of, sizes))
        if known is None:
            new_block(self, element_ty, shape)
            self.of_tensors = {}
            known = blocks[of, sizes] = dict(vars(self))
        self.__dict__.update(known)

    def tensor_init(self: Any, handle: Any, of: Any) -> None:
        known = of.__dict__.get("of_tensors")
        if known:
            self.__dict__.update(known)
            self.handle, self.type = handle, of
            return
        new_tensor(self, handle, of)
        if known is not None:
            known.update(shape=self.shape, numel=self.numel, dtype=self.dtype)

    interpreter._get_np_dtype = known_numpy_type
    tl.block_type.__init__ = block_init
    tl.tensor.__init__ = tensor_init


def _type_key(element: Any) -> Any:
    """A value that two element types share only if they are equal; None if that is not known."""
    if type(element) is tl.dtype:
        return element.name
    if type(element) is tl.pointer_type and type(element.element_ty) is tl.dtype:
        return element.name, element.address_space, element.const
    return None


def _accept_tensors_in_range() -> None:
    """Let range() take a number that a kernel was given.

    It is an array of one element, which Triton 3.6 gives to int(). numpy 2.4 refuses that.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def index(self: Any) -> int:
        if self.dtype.is_floating():
            raise TypeError("must be real number, not tensor")  # as compiled: math.sqrt(block), say
        return int(self.handle.data.squeeze())

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", index)

    interpreter._patch_lang_tensor = with_index


def _keep_splats_boolean() -> None:
    """Let a mask stay boolean where a condition on a scalar is part of it.

    The interpreter makes integers of it when it gives it a shape, and since Triton 3.9 its loads refuse them.
    """
    builder = type(interpreter.interpreter_builder)
    splat = builder.create_splat

    def create_splat(self: Any, *arguments: Any) -> Any:
        made = splat(self, *arguments)
        if arguments[-1].data.dtype == bool:
            made.data = made.data.astype(bool)
        return made

    builder.create_splat = create_splat


def _multiply_bfloat16_by_value() -> None:
    """Let tl.dot multiply bfloat16. The interpreter multiplies the integers that it keeps bfloat16 as."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def by_value(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (builder.cast_impl(side, tl.float32) for side in (a, b))
        return multiply(builder, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = by_value
