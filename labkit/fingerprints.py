"""The code behind a call, as text: what tells whether a measurement is of the code that is there now."""

import inspect
import sys
from typing import Any

import triton.language as tl

LIBRARIES = ("torch", "triton")
"""Not part of a contender's code, which is the same beside another version of them."""
PLAIN = (int, float, str, tuple, tl.constexpr)
"""Values that belong to the code of a contender: a tile's size, a flag."""


def sources(function: Any, seen: set[int]) -> list[str]:
    """Source of a function, kernel or class, of what a function uses from its own module or was given, of
    operators made with ops.differentiable; and its plain values. Of a library's functions the names."""
    function = _innermost(function)
    if inspect.isbuiltin(function):
        return [function.__qualname__]
    if id(function) in seen or not (hasattr(function, "__code__") or isinstance(function, type)):
        return []
    seen.add(id(function))
    if str(function.__module__).partition(".")[0] in LIBRARIES:
        cells = getattr(function, "__closure__", None) or ()  # what a decorator holds may be ours
        below = [source for cell in cells for source in sources(cell.cell_contents, seen)]
        return [f"{function.__module__}.{function.__qualname__}", *below]
    if isinstance(function, type):  # its own methods alone: what they use may be a whole library
        held = vars(function).items()
        methods = [(name, inspect.unwrap(getattr(one, "__func__", one))) for name, one in held]
        return [_source(method) for name, method in methods if _is_written(name, method)]
    found = [_source(function)]
    names = function.__code__.co_names
    used = [function.__globals__[name] for name in names if name in function.__globals__]
    given = [*(cell.cell_contents for cell in function.__closure__ or ()), *(function.__defaults__ or ())]
    given += getattr(function, "made_of", ())  # ops.differentiable
    found += [repr(value) for value in (*used, *given) if isinstance(value, PLAIN)]
    used += [value for one in used if isinstance(one, dict) for value in one.values()]  # operators by name
    used = [other for other in used if _belongs(other, function.__module__)]
    return found + [source for other in (*used, *given) for source in sources(other, seen)]


def _is_written(name: str, method: Any) -> bool:
    """Whether somebody wrote this method of a class: what Python itself, namedtuple and dataclass make is
    other code with another version of them."""
    code = getattr(method, "__code__", None)
    made = code is None or code.co_filename == "<string>" or name.startswith("__annotate")
    return not made and str(method.__module__).partition(".")[0] not in sys.stdlib_module_names


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # typed into a console: only its bytecode is known
        code: bytes = function.__code__.co_code
        return code.hex()


def _belongs(other: Any, module: str) -> bool:
    """Whether it is of this module, or an operator, which is made elsewhere of functions of a module."""
    other = _innermost(other)
    return getattr(other, "__module__", None) == module or hasattr(other, "made_of")


def _innermost(kernel: Any) -> Any:
    """The Python function of a kernel, below what tunes it; any other function itself."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel
