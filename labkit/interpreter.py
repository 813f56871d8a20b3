"""Triton's interpreter in three quarters of its time, and with loops up to a number given at run time."""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Let the interpreter replace the functions of triton.language once per launch.

    It does so again at each call of a helper from a kernel, `tl.zeros` and `tl.cdiv` among them: nothing is
    left to replace by then, and searching the modules takes a quarter of a lesson's time without a GPU.
    """
    if hasattr(interpreter._patch_lang, "once"):
        return
    replace = interpreter._patch_lang

    def once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()  # which has nothing to put back
        return replace(function)

    once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = once
    _count_loops()


def _count_loops() -> None:
    """Let range() take a number that a kernel was given.

    It lies in an array of one element, which Triton 3.6 hands to int(); numpy 2.4 refuses that.
    """
    replace = interpreter._patch_lang_tensor

    def counted(tensor: Any, scope: Any) -> None:
        replace(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = counted
