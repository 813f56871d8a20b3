"""Triton's interpreter in less than half of its time, and with loops up to a number given at run time."""

from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Spare the interpreter work whose result is known or is not looked at; kernels compute the same."""
    if hasattr(interpreter._patch_lang, "once"):
        return
    _replace_once()
    _leave_overflow()
    _remember_types()
    _count_loops()


def _replace_once() -> None:
    """Let the interpreter replace the functions of triton.language once per launch.

    It does so again at each call of a helper from a kernel, `tl.zeros` and `tl.cdiv` among them: nothing is
    left to replace by then, and searching the modules takes a quarter of a lesson's time without a GPU.
    """
    patch = interpreter._patch_lang

    def once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()  # which has nothing to put back
        return patch(function)

    once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = once


def _leave_overflow() -> None:
    """Skip the check of integers for overflow, an assertion that the interpreter makes only to drop it.

    It asserts nothing without its option ``debug``, which nobody can set, but computes every sum, difference
    and product a second time first, in 64 bits: a third of a product's time.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _remember_types() -> None:
    """Work out once what follows from an element's type and a shape: half of what is left."""
    numpy_type = interpreter._get_np_dtype
    new_block, new_tensor = tl.block_type.__init__, tl.tensor.__init__
    broadcast = interpreter.TritonSemantic.broadcast_impl_value
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
        of = _name(element_ty)
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

    def broadcast_unless_equal(self: Any, left: Any, right: Any) -> Any:
        both = left.type.is_block() and right.type.is_block()
        if both and left.type.shape.values == right.type.shape.values:
            return left, right
        return broadcast(self, left, right)

    interpreter._get_np_dtype = known_numpy_type
    tl.block_type.__init__ = block_init
    tl.tensor.__init__ = tensor_init
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_unless_equal


def _name(element: Any) -> Any:
    """What two types of elements have in common only when they are equal; None where that is not known."""
    if type(element) is tl.dtype:
        return element.name
    if type(element) is tl.pointer_type and type(element.element_ty) is tl.dtype:
        return element.name, element.address_space, element.const
    return None


def _count_loops() -> None:
    """Let range() take a number that a kernel was given.

    It lies in an array of one element, which Triton 3.6 hands to int(); numpy 2.4 refuses that.
    """
    replace = interpreter._patch_lang_tensor

    def counted(tensor: Any, scope: Any) -> None:
        replace(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = counted
