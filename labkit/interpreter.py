"""Triton's interpreter in a third of its time, and with loops up to a number given at run time."""

from dataclasses import replace
from functools import wraps
from inspect import getmembers
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

FLOATS, HALVES = {"fp16", "bf16", "fp32", "fp64"}, {"fp16", "bf16"}
BITS = {"int32": 31, "int64": 63}
"""Types of integers, and the bits of what they hold beside the sign."""
MOST_CONSTANTS = 4096


def quicken() -> None:
    """Spare the interpreter work whose result is known or is not looked at; kernels compute the same."""
    if hasattr(interpreter._patch_lang, "once"):
        return
    _replace_once()
    _list_functions_once()
    _leave_overflow()
    _remember_types()
    _call_directly()
    _match_operands()
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


def _list_functions_once() -> None:
    """Look through the modules of triton.language for what is replaced at the first launch, not at each."""
    found: dict[Any, list[tuple[str, Any]]] = {}

    def patch(module: Any, builder: Any, scope: Any) -> None:
        if module not in found:
            found[module] = [(name, each) for name, each in getmembers(module) if tl.core.is_builtin(each)]
        for name, member in found[module]:
            interpreter._patch_attr(module, name, member, builder, scope)

    interpreter._patch_builtin = patch


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


def _call_directly() -> None:
    """Call what is behind a function of triton.language: the layer between only asks for the semantic."""

    def direct(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.interpreter_semantic
        while tl.core.is_builtin(member) and hasattr(member, "__wrapped__"):
            member = member.__wrapped__

        def called(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return member(*arguments, **options)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = direct


def _match_operands() -> None:
    """Bring two operands to one type at once where nothing is converted: half of what an operation takes.

    A number beside a block stays one number, which numpy spreads as it goes, and is made once.
    """
    checked = interpreter.TritonSemantic.binary_op_type_checking_impl
    constants: dict[tuple[float, str | None, str], Any] = {}

    def constant(semantic: Any, value: float, of: Any) -> Any:
        key = (value, str(value) if value == 0 else None, of.name)  # 0.0 and -0.0 are equal, but not the same
        if key not in constants:
            if len(constants) == MOST_CONSTANTS:
                constants.clear()
            constants[key] = semantic.scalar_constant(value, of).handle
        return constants[key]

    @wraps(checked)
    def matched(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if arithmetic_check and type(self.builder) is interpreter.InterpreterBuilder:
            if type(lhs) is type(rhs) is tl.tensor:
                if _agree(lhs.dtype, rhs.dtype, allow_lhs_ptr, div_or_mod):
                    return _spread(lhs, rhs)
            elif type(lhs) is tl.tensor and _takes(lhs.dtype, rhs, div_or_mod):
                return lhs, tl.tensor(constant(self, rhs, lhs.dtype), lhs.type)
            elif type(rhs) is tl.tensor and _takes(rhs.dtype, lhs, div_or_mod):
                return tl.tensor(constant(self, lhs, rhs.dtype), rhs.type), rhs
        return checked(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    interpreter.TritonSemantic.binary_op_type_checking_impl = matched


def _agree(left: Any, right: Any, pointers: bool, division: bool) -> bool:
    """Whether elements of these types are computed with as they are."""
    if type(right) is not tl.dtype:
        return False
    if type(left) is tl.dtype:
        return left.name == right.name and not (division and left.name in HALVES)
    return pointers and type(left) is tl.pointer_type and right.name in BITS


def _takes(of: Any, number: Any, division: bool) -> bool:
    """Whether a Python number takes on this type beside a tensor of it."""
    if type(of) is not tl.dtype or (division and of.name in HALVES):
        return False
    if type(number) is int:
        return of.name in FLOATS or (of.name in BITS and -(2 ** BITS[of.name]) <= number < 2 ** BITS[of.name])
    return type(number) is float and of.name in FLOATS and number == number  # NaN is not found again


def _spread(left: Any, right: Any) -> Any:
    """Both with the shape of the block among them; two blocks of unlike shapes are broadcast by Triton."""
    if left.type.is_block() == right.type.is_block():
        return interpreter.interpreter_semantic.broadcast_impl_value(left, right)
    if left.type.is_block():
        return left, tl.tensor(right.handle, left.type.with_element_ty(right.dtype))
    return tl.tensor(left.handle, right.type.with_element_ty(left.dtype)), right


def _count_loops() -> None:
    """Let range() take a number that a kernel was given.

    It lies in an array of one element, which Triton 3.6 hands to int(); numpy 2.4 refuses that.
    """
    replace = interpreter._patch_lang_tensor

    def index(self: Any) -> int:
        if self.dtype.is_floating():
            raise TypeError("must be real number, not tensor")  # as compiled: math.sqrt(block), say
        return int(self.handle.data.squeeze())

    def counted(tensor: Any, scope: Any) -> None:
        replace(tensor, scope)
        scope.set_attr(tensor, "__index__", index)

    interpreter._patch_lang_tensor = counted
