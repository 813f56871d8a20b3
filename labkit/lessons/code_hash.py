"""The hash of code that was measured, to tell whether a measurement is of the present code.

It covers the cells of a lesson, or the functions of a contender, and the files of labkit that they reach
through imports. Of these files only those in ``MEASURING`` count, which decide what is measured and how:
kernels, workloads, clocks, sampling. A file counts as a whole, without comments, docstrings and blank lines.
"""

import ast
import hashlib
import inspect
import io
import json
import sys
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import labkit

PACKAGE = Path(labkit.__file__).resolve().parent
MEASURING = (
    "gpu", "dispatch_mode", "kernels",
    "measure.accuracy", "measure.clocks", "measure.cold_cache", "measure.contender", "measure.memory",
    "measure.noise", "measure.roofline", "measure.sweeps", "profiling.profiles", "profiling.variants",
    "workloads.elementwise", "workloads.grouped", "workloads.mlp", "workloads.network", "workloads.peers",
    "workloads.recurrent", "workloads.stack",
)  # fmt: skip
"""Modules and packages of labkit whose code decides about a measurement, with all modules inside them."""
LIBRARIES = ("torch", "triton")
"""Packages of which only the names of functions count: another version of them is no change of the code."""
PLAIN = {"int", "float", "bool", "str", "tuple", "constexpr"}
"""Types of values that count as code of a contender: a tile's size, a flag."""


def of_cells(cells: Iterable[str]) -> str:
    """12 hex digits for the source of a notebook's code cells and the project's code that they reach."""
    listed = list(cells)
    imported = {name for cell in listed for name in _imports(cell)}
    return _digest([json.dumps(listed), *of_modules(imported)])


def of_functions(functions: Iterable[Any], options: Iterable[str] = ()) -> str:
    """12 hex digits for functions, what they use, and the code that times them."""
    seen: set[int] = set()
    found = [source for function in functions for source in sources(function, seen)]
    return _digest([*found, *options, *of_modules({"labkit.measure.sweeps"})])


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


# ---- files -------------------------------------------------------------------------------------------------


def of_modules(names: Iterable[str]) -> list[str]:
    """Name and hash of each measuring file among these modules of labkit and all that they import."""
    hashes: dict[str, str] = {}
    waiting = {_module(name) for name in names}
    while waiting:
        name = waiting.pop()
        file = _file(name)
        if file is not None and name not in hashes:
            imported, hashes[name] = _read(file)
            waiting |= {_module(each) for each in imported}
    return sorted(f"{name} {digest}" for name, digest in hashes.items() if _is_measuring(name))


def _module(name: str) -> str:
    """The module that defines a dotted name of labkit; names that a package re-exports are followed."""
    package, _, last = name.rpartition(".")
    file = None if _file(name) else _file(package)
    if file is None or file.name != "__init__.py":
        return name if file is None else package
    origins = [each for each in _read(file)[0] if each.rpartition(".")[2] == last and each != name]
    return _module(origins[0]) if origins else package


def _is_measuring(name: str) -> bool:
    """Whether a module is one of ``MEASURING``, or lies in one."""
    package, _, inside = name.partition(".")
    return package == "labkit" and any(inside == each or inside.startswith(f"{each}.") for each in MEASURING)


def _file(name: str) -> Path | None:
    """The file of a module of labkit, or None if the name is not that of a module."""
    if name.partition(".")[0] != "labkit":
        return None
    path = PACKAGE.joinpath(*name.split(".")[1:])
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


def _read(file: Path) -> tuple[frozenset[str], str]:
    """The names that a file imports from labkit, and the hash of its code."""
    return _parsed(file, file.stat().st_mtime_ns)


@cache
def _parsed(file: Path, changed: int) -> tuple[frozenset[str], str]:
    source = file.read_text(encoding="utf-8")
    return frozenset(_imports(source)), _digest([without_comments(source)])


def _imports(source: str) -> set[str]:
    """The dotted names of modules, and of names in modules, that a source imports from labkit anywhere."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell that a learner left half written
        return set()
    found = {f"labkit.{labkit.FACE.get(name, name)}{rest}" for name, rest in _face_names(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "labkit"}


def _face_names(tree: ast.AST) -> set[tuple[str, str]]:
    """The names used as ``lab.name`` or ``lab.name.rest``, each with its ``.rest`` or ""."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {id(n): n.attr for n in nodes if isinstance(n.value, ast.Name) and n.value.id == "lab"}
    further = {id(n.value): f".{n.attr}" for n in nodes if id(n.value) in own}
    return {(name, further.get(node, "")) for node, name in own.items()}


def without_comments(source: str) -> str:
    """A module's source without comments, docstrings and blank lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            assert node.end_lineno is not None, "a node that was parsed has an end"
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


# ---- functions ---------------------------------------------------------------------------------------------


def sources(function: Any, seen: set[int]) -> list[str]:
    """The source of a function, kernel or class, and of what it uses from its own module or was given.

    Plain values count by their repr, labkit's measuring code by the hashes of its files, functions of a
    library by their names.
    """
    function = _innermost(function)
    if inspect.isbuiltin(function):
        return [function.__qualname__]
    if id(function) in seen or not (hasattr(function, "__code__") or isinstance(function, type)):
        return []
    seen.add(id(function))
    home = str(function.__module__)
    if _is_measuring(home) or home.partition(".")[0] in LIBRARIES:
        held = _held(function)  # what the function was made with, or the function that it wraps
        files = [*of_modules({home}), *_plain_values(held)] if _is_measuring(home) else []
        return [f"{home}.{function.__qualname__}", *files, *(s for one in held for s in sources(one, seen))]
    if isinstance(function, type):  # only its methods: what they use may be a whole library
        members = vars(function).items()
        methods = [(name, inspect.unwrap(getattr(one, "__func__", one))) for name, one in members]
        attributes = _plain_values(value for name, value in members if not name.startswith("__"))
        return [*attributes, *(_source(method) for name, method in methods if _is_written(name, method))]
    found = [_source(function)]
    names = function.__code__.co_names
    used = [function.__globals__[name] for name in names if name in function.__globals__]
    given = [*_held(function), *(function.__defaults__ or ())]
    homes = {getattr(one, "__name__" if isinstance(one, ModuleType) else "__module__", None) for one in used}
    found += _plain_values([*used, *given])
    used += [value for one in used if isinstance(one, dict) for value in one.values()]  # functions by name
    used = [other for other in used if getattr(_innermost(other), "__module__", None) == function.__module__]
    found += of_modules(name for name in homes if name and name.startswith("labkit."))
    return found + [source for other in (*used, *given) for source in sources(other, seen)]


def _held(function: Any) -> list[Any]:
    """The values in a function's closure."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _plain_values(values: Iterable[Any]) -> list[str]:
    return [repr(value) for value in values if type(value).__name__ in PLAIN]


def _is_written(name: str, method: Any) -> bool:
    """Whether a method of a class is written in its source, not made by Python, namedtuple or dataclass.

    What these make is other code in another version of Python.
    """
    code = getattr(method, "__code__", None)
    made = code is None or code.co_filename == "<string>" or name.startswith("__annotate")
    return not made and str(method.__module__).partition(".")[0] not in sys.stdlib_module_names


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # typed into a console: only the bytecode is known
        code: bytes = function.__code__.co_code
        return code.hex()


def _innermost(kernel: Any) -> Any:
    """The Python function inside a Triton kernel or its autotuner; any other function itself."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel
