"""Triton's interpreter in three quarters of its time."""

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
