"""A Triton kernel's source with all that it refers to, as files another process can import.

The process a lesson runs in may interpret its kernels, and its kernels may live in notebook cells.
Neither reaches the compiler, so the text is carried over: one file per function, in a package.
"""

import ast
import inspect
import symtable
import sys
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime.jit import ConstexprFunction, JITFunction

JIT_OPTIONS = ("noinline", "do_not_specialize", "do_not_specialize_on_alignment", "debug")


def unwrap(kernel: Any) -> Any:
    """The ``@triton.jit`` object below ``autotune`` and ``heuristics``; ValueError when there is none."""
    inner = kernel
    while not _is_jit(inner):
        if not hasattr(inner, "fn"):
            raise ValueError(f"kernel: {kernel!r} is not a function decorated with @triton.jit")
        inner = inner.fn
    return inner


def _is_jit(value: Any) -> bool:
    # by name: the interpreter's module is imported only where kernels are interpreted
    return isinstance(value, JITFunction) or type(value).__name__ == "InterpretedFunction"


class Shipment:
    """The files of one package, ``name.py`` to text, filled by ``add`` and ``write``."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {"__init__.py": ""}
        self._names: dict[int, str] = {}

    def add(self, function: Any) -> str:
        """Ship a function (jit, constexpr or plain) and what it refers to; the name of its module."""
        plain = function if isinstance(function, FunctionType) else function.fn
        if id(plain) not in self._names:
            name = self._names[id(plain)] = f"f{len(self._names)}_{plain.__name__}"
            self.files[f"{name}.py"] = self._function_file(function, plain)
        return self._names[id(plain)]

    def write(self, name: str, values: dict[str, Any]) -> None:
        """Ship a module ``name`` that holds ``values``: constants, tuples, dtypes, functions."""
        file = _File(self)
        file.lines += [f"{key} = {file.expression(key, value)}" for key, value in values.items()]
        self.files[f"{name}.py"] = file.text()

    def _function_file(self, function: Any, plain: FunctionType) -> str:
        source, definition = _source(plain)
        scope = {**plain.__globals__, **inspect.getclosurevars(plain).nonlocals}
        file = _File(self)
        # Triton evaluates the annotations of a helper; of those only modules, tl above all, need to exist.
        modules = {n for n in _annotation_names(definition) if isinstance(scope.get(n), ModuleType)}
        for name in sorted((_global_names(source, definition) | modules) & scope.keys() - {plain.__name__}):
            file.assign(name, scope[name], definition)
        decorator = file.decorator(function)
        return file.text() + f"\n\n{decorator}{source}"


class _File:
    """The lines of one shipped module. Imports get names of their own, so that the kernel's stay free."""

    def __init__(self, shipment: Shipment) -> None:
        self.shipment = shipment
        self.imports: dict[str, str] = {}
        self.lines: list[str] = []

    def text(self) -> str:
        # Annotations stay text: Triton reads them so, and what they name need not exist over there.
        return "\n".join(["from __future__ import annotations", *self.imports.values(), *self.lines, ""])

    def module(self, name: str, package: str = "") -> str:
        """The name under which a module is imported here."""
        alias = f"_m{len(self.imports)}"
        statement = f"from {package} import {name} as" if package else f"import {name} as"
        known = self.imports.setdefault(name, f"{statement} {alias}")
        return known.rsplit(" ", 1)[1]

    def decorator(self, function: Any) -> str:
        if isinstance(function, FunctionType):
            return ""
        here = self.module("triton")
        if isinstance(function, ConstexprFunction):
            return f"@{here}.constexpr_function\n"
        given = getattr(function, "kwargs", None) or vars(function)  # interpreted, or compiled
        options = {key: given[key] for key in JIT_OPTIONS if given.get(key)}
        return f"@{here}.jit({', '.join(f'{key}={value!r}' for key, value in options.items())})\n"

    def assign(self, name: str, value: Any, definition: ast.FunctionDef) -> None:
        """Give ``name`` its value, as the function sees it."""
        if isinstance(value, ModuleType) and not _importable(value):
            self.lines.append(f"{name} = {self.module('types')}.ModuleType({name!r})")
            for path in sorted(_attribute_paths(definition, name)):
                self._assign_attribute(name, value, path)
        else:
            self.lines.append(f"{name} = {self.expression(name, value)}")

    def _assign_attribute(self, name: str, value: Any, path: tuple[str, ...]) -> None:
        for depth, attribute in enumerate(path, start=1):
            if not hasattr(value, attribute):
                return  # Triton reports it, at the line that uses it
            value, target = getattr(value, attribute), ".".join([name, *path[:depth]])
            if isinstance(value, ModuleType) and not _importable(value):
                created = f"{target} = {self.module('types')}.ModuleType({attribute!r})"
                if created not in self.lines:  # by an earlier path through the same module
                    self.lines.append(created)
                continue
            self.lines.append(f"{target} = {self.expression(target, value)}")
            return

    def expression(self, name: str, value: Any) -> str:
        """Python text for ``value``; ValueError naming ``name`` when it cannot be carried over."""
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float):
            return f"float({str(value)!r})"  # also inf and nan
        if isinstance(value, tl.constexpr):
            return f"{self.module('triton.language')}.constexpr({self.expression(name, value.value)})"
        if isinstance(value, tl.pointer_type):
            inner = self.expression(name, value.element_ty)
            return f"{self.module('triton.language')}.pointer_type({inner})"
        if type(value) is tl.dtype:
            return f"{self.module('triton.language')}.dtype({value.name!r})"
        if type(value) in (tuple, list):
            items = "".join(f"{self.expression(name, item)}, " for item in value)
            return f"({items})" if isinstance(value, tuple) else f"[{items}]"
        if isinstance(value, dict):
            items = "".join(f"{key!r}: {self.expression(key, item)}, " for key, item in value.items())
            return f"{{{items}}}"
        if isinstance(value, ModuleType) and _importable(value):
            return self.module(value.__name__)
        plain = getattr(value, "fn", value)
        home = getattr(plain, "__module__", None) or ""
        if home.split(".")[0] in _SHARED and hasattr(plain, "__qualname__"):
            return f"{self.module(home)}.{plain.__qualname__}"
        if _is_jit(value) or isinstance(value, (ConstexprFunction, FunctionType)):
            module = self.shipment.add(value)
            return f"{self.module(module, package='.')}.{plain.__name__}"
        raise ValueError(f"{name}: a kernel cannot use a value of type {type(value).__name__}")


_SHARED = {"triton", *sys.stdlib_module_names}
"""Packages the other process has too; everything else travels as text."""


def _importable(module: ModuleType) -> bool:
    return module.__name__.split(".")[0] in _SHARED - {"__main__"}


def _source(function: FunctionType) -> tuple[str, ast.FunctionDef]:
    """A function's text from its ``def`` on, without decorators, and its syntax tree."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except OSError as error:
        raise ValueError(
            f"kernel: the source of {function.__name__} cannot be read; define it in a cell or in a file"
        ) from error
    definition = ast.parse(text).body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise ValueError(f"kernel: {function.__name__} is not defined by a def statement")
    return "\n".join(text.splitlines()[definition.lineno - 1 :]) + "\n", definition


def _global_names(source: str, definition: ast.FunctionDef) -> set[str]:
    """Names the function looks up outside itself: in its body and in its parameters' defaults."""

    def tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
        for child in table.get_children():
            yield child
            yield from tables(child)

    names = {
        symbol.get_name()
        for table in tables(symtable.symtable(source, "<kernel>", "exec"))
        for symbol in table.get_symbols()
        if symbol.is_global()
    }
    defaults = [*definition.args.defaults, *(d for d in definition.args.kw_defaults if d is not None)]
    return names | {n.id for d in defaults for n in ast.walk(d) if isinstance(n, ast.Name)}


def _annotation_names(definition: ast.FunctionDef) -> set[str]:
    """Names in the annotations of a function's parameters."""
    annotations = [a.annotation for a in definition.args.args + definition.args.kwonlyargs if a.annotation]
    return {node.id for a in annotations for node in ast.walk(a) if isinstance(node, ast.Name)}


def _attribute_paths(definition: ast.FunctionDef, root: str) -> set[tuple[str, ...]]:
    """Every chain of attributes taken from the name ``root``: ``root.a.b`` gives ``("a", "b")``."""
    paths = set()
    for node in ast.walk(definition):
        path: list[str] = []
        current: ast.AST = node
        while isinstance(current, ast.Attribute):
            path.insert(0, current.attr)
            current = current.value
        if path and isinstance(current, ast.Name) and current.id == root:
            paths.add(tuple(path))
    return paths


def parameters(kernel: Any) -> dict[str, inspect.Parameter]:
    """A jit function's parameters by name."""
    return dict(inspect.signature(kernel.fn).parameters)


def is_constexpr(parameter: inspect.Parameter) -> bool:
    """Whether a kernel's parameter is annotated ``tl.constexpr``."""
    return "constexpr" in str(parameter.annotation)
