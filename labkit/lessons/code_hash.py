"""The hash of code that was measured, to tell whether a measurement is of the present code.

Three things count: the cells of a lesson, or the functions of a contender; the files in
``MEASUREMENT_FILES``, which decide how labkit measures; and the kernels' files whose names, or the names of
whose functions, occur in the cells or functions. A file counts as a whole, without comments, docstrings and
blank lines.
"""

import ast
import dis
import hashlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import labkit

PACKAGE = Path(labkit.__file__).resolve().parent
MEASUREMENT_FILES = (
    "gpu", "dispatch_mode", "kernels/common", "kernels/graphs",
    "measure/accuracy", "measure/clocks", "measure/cold_cache", "measure/contender", "measure/memory",
    "measure/noise", "measure/roofline", "measure/sweeps", "profiling/profiles",
    "workloads/elementwise", "workloads/grouped", "workloads/mlp", "workloads/network", "workloads/peers",
    "workloads/recurrent", "workloads/stack",
)  # fmt: skip
"""Files of labkit whose code decides about every measurement, besides those of the kernels."""
HASHED_BY_NAME = (
    "torch", "triton",
    "labkit.gpu", "labkit.kernels", "labkit.measure", "labkit.profiling", "labkit.workloads",
)  # fmt: skip
"""Packages of which only the names of functions count, since their files are hashed or are another's."""
LITERAL_TYPES = {"int", "float", "bool", "str", "NoneType", "dtype", "constexpr"}
"""Types of values that count as code of a contender: a tile's size, a flag."""


def of_sources(sources: Iterable[str]) -> str:
    """12 hex digits for the sources of cells or functions, and for the files of labkit that count."""
    listed = list(sources)
    files = {PACKAGE / f"{name}.py" for name in MEASUREMENT_FILES} | kernel_files(listed)
    hashed = [f"{file.name} {_of_file(file, file.stat().st_mtime_ns)}" for file in sorted(files)]
    return _digest([*map(repr, listed), *hashed])


def kernel_files(sources: Iterable[str]) -> set[Path]:
    """The kernels' files that sources name, by file or function, and those which these files import."""
    files = {file.stem: file for file in (PACKAGE / "kernels").glob("[!_]*.py")}
    exports = ast.parse((PACKAGE / "kernels" / "__init__.py").read_text(encoding="utf-8")).body
    exported = {a.name: str(n.module) for n in exports if isinstance(n, ast.ImportFrom) for a in n.names}
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    waiting = {exported.get(word, word).rpartition(".")[2] for word in words} & set(files)
    found = set()
    while waiting:
        name = waiting.pop()
        found.add(name)
        imported = re.findall(r"^ *from labkit\.kernels\.(\w+)", files[name].read_text(), re.MULTILINE)
        waiting |= set(imported) - found
    return {files[name] for name in found}


def of_functions(functions: Iterable[Any], options: Iterable[str] = ()) -> str:
    """12 hex digits for functions, what they use, and the code that times them."""
    return of_sources([*options, *sources_of(functions)])


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


@cache
def _of_file(file: Path, changed: int) -> str:
    return _digest([without_comments(file.read_text(encoding="utf-8"))])


def without_comments(source: str) -> str:
    """A module's source without comments, docstrings and blank lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def sources_of(functions: Iterable[Any]) -> list[str]:
    """The sources of functions, kernels and classes, and of what they use of their module or were given.

    Plain values count by their repr, functions of ``HASHED_BY_NAME`` by their names.
    """
    found: list[str] = []
    waiting, seen = list(functions), set()
    while waiting:
        one = _innermost(waiting.pop())
        if type(one).__name__ in LITERAL_TYPES:
            found.append(repr(one))
        elif isinstance(one, partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, tuple | dict):
            waiting += one.values() if isinstance(one, dict) else one
        if id(one) in seen or not hasattr(one, "__qualname__"):
            continue
        seen.add(id(one))
        module = str(getattr(one, "__module__", ""))  # a method of a builtin has none
        # A script's module has another name when it is imported, and is the same code.
        found.append(
            f"{module}.{one.__qualname__}" if module.startswith(HASHED_BY_NAME) else one.__qualname__
        )
        if isinstance(one, type) and not module.startswith(HASHED_BY_NAME):
            # Only its methods and plain values: what its bases use may be a whole library.
            members = [(name, getattr(value, "__func__", value)) for name, value in vars(one).items()]
            waiting += [v for name, v in members if hasattr(v, "__code__") or not name.startswith("__")]
        if not hasattr(one, "__code__"):
            continue
        waiting += [*inspect.getclosurevars(one).nonlocals.values(), *(one.__defaults__ or ())]
        if not module.startswith(HASHED_BY_NAME):
            found.append(_source(one))
            waiting += [value for value in _globals(one) if _counts(value, module)]
    return found


def _globals(function: Any) -> list[Any]:
    """The globals that a function loads, and the functions and comprehensions inside it.

    `inspect.getclosurevars` also takes the names of attributes for globals, and which comprehensions it looks
    into depends on the version of Python.
    """
    codes, names = [function.__code__], set()
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
        names |= {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return [function.__globals__[name] for name in sorted(names & set(function.__globals__))]


def _counts(value: Any, module: str) -> bool:
    """Whether a global that a function uses counts: of other modules only what is ``HASHED_BY_NAME``."""
    home = getattr(_innermost(value), "__module__", None)
    return type(value).__name__ in LITERAL_TYPES or home in (None, module) or str(home).startswith("labkit.")


def _innermost(value: Any) -> Any:
    """The Python function inside a Triton kernel and its autotuner; any other value itself."""
    while hasattr(value, "fn"):
        value = value.fn
    return value


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # typed into a console, or made by a dataclass: only the bytecode is known
        code: bytes = function.__code__.co_code
        return code.hex()
