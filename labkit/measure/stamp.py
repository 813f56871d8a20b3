"""The stamp of a row: a hash of what was measured. An edit of that makes the row stale, and no other one.

What is measured stands in a lesson's cells tagged ``kernel`` or ``way``, in its solutions, in
``labkit.kernels`` and in ``labkit.work``. Syntax trees are hashed, without docstrings, so neither a comment
nor the formatting counts. Of the cells those definitions count that the measured function reaches by name; of
``labkit.kernels`` whole files, those that are reached by import statements. The clock counts for every row.
"""

import ast
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.lessons import notebooks

TAGS = {"kernel", "way"}
"""Of the cells that define what may be measured."""
KERNELS, WORK = paths.PACKAGE / "kernels", paths.PACKAGE / "work"
CLOCK = paths.PACKAGE / "measure" / "clocks.py"


def stamp_of(lesson: Path, uses: Iterable[str]) -> str:
    """12 hex digits for what a row names in ``uses``, which are others once a name is not there any more."""
    cells, solutions = definitions(lesson), solution_definitions(lesson)
    trees: list[str] = [dump(_parsed(CLOCK))]
    for use in sorted(uses):
        kind, _, name = use.rpartition(" ")
        if kind == "work" and (WORK / f"{name}.py").exists():
            trees += [dump(_parsed(WORK / f"{name}.py"))]
        elif kind == "labkit.kernels":
            trees += [dump(_parsed(file)) for file in kernel_files([name])]
        elif kind in ("cell", "solution"):
            reached = reach(name, {**cells, **solutions.get(name, {})} if kind == "solution" else cells)
            named = {n for tree in reached for n in imported_kernels(tree)}
            trees += [*map(dump, reached), *(dump(_parsed(file)) for file in kernel_files(named))]
    return hashlib.sha256("\n".join(trees).encode()).hexdigest()[:12]


def uses_of(lesson: Path, way: str, function: Callable[..., Any], work: str = "") -> tuple[str, ...]:
    """Where a measured function is defined, as a row names it.

    ValueError, which names the way, for a function that is neither the lesson's, nor a solution, nor
    labkit's, nor PyTorch's: what an edit of it would change could not be told.
    """
    function = getattr(function, "_torchdynamo_orig_callable", function)  # inside torch.compile
    name, module = getattr(function, "__name__", ""), str(getattr(function, "__module__", ""))
    known = [f"work {work}"] if work else []
    if module.startswith(("torch", "triton", "labkit.work")) or module in ("_operator", "builtins"):
        return tuple(known)  # the versions are in the row
    if module.startswith("labkit.kernels"):
        return (f"labkit.kernels {name}", *known)
    if module.startswith("labkit_solutions"):
        return (f"solution {name}", *known)
    if name in definitions(lesson):
        return (f"cell {name}", *known)
    raise ValueError(
        f"way {way!r}: {name or function!r} has to be a function of a cell tagged kernel or way, of "
        "labkit.kernels or of PyTorch"
    )


# ---- cells and solutions -----------------------------------------------------------------------------------


def definitions(lesson: Path) -> dict[str, ast.stmt]:
    """What the lesson's cells tagged ``kernel`` or ``way`` define at their top level, by name."""
    cells = notebooks.code_cells(notebooks.read_json(lesson))
    return _defined(cell["source"] for _, cell in cells if TAGS & set(notebooks.tags(cell)))


def solution_definitions(lesson: Path) -> dict[str, dict[str, ast.stmt]]:
    """What each solution defines, by the name of the function that it hands in, then by name."""
    if not notebooks.solutions_file(lesson).exists():
        return {}
    found = (_defined([source]) for source in notebooks.solution_cells(lesson).values())
    return {list(made)[-1]: made for made in found if made}


def _defined(sources: Iterable[str]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for source in sources:
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                found[statement.name] = statement
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                found |= {
                    name.id: statement
                    for each in targets
                    for name in ast.walk(each)
                    if isinstance(name, ast.Name)
                }
    return found


def reach(name: str, known: Mapping[str, ast.stmt]) -> list[ast.stmt]:
    """The definition of a name and those that it uses, in the order of their names."""
    found: dict[str, ast.stmt] = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in known and one not in found:
            found[one] = known[one]
            waiting += [node.id for node in ast.walk(known[one]) if isinstance(node, ast.Name)]
    return [found[each] for each in sorted(found)]


def imported_kernels(tree: ast.AST) -> set[str]:
    """The names of ``labkit.kernels`` that code uses as ``kernels.affine`` or ``lab.kernels.affine``."""
    chains = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {chain.split("kernels.", 1)[1].split(".")[0] for chain in chains if "kernels." in chain}


# ---- labkit's own files ------------------------------------------------------------------------------------


def kernel_files(names: Iterable[str]) -> list[Path]:
    """The files of ``labkit.kernels`` that define these names, and those that they import, in order."""
    files = {file.stem: file for file in KERNELS.glob("[!_]*.py")}
    exports = {alias.name: module for module, alias in _imports(KERNELS / "__init__.py")}
    waiting = [exports.get(name, name) for name in names]
    found: set[str] = set()
    while waiting:
        one = waiting.pop()
        if one in files and one not in found:
            found.add(one)
            waiting += [module or alias.name for module, alias in _imports(files[one])]
    return [files[each] for each in sorted(found)]


def _imports(file: Path) -> list[tuple[str, ast.alias]]:
    """What a file imports from ``labkit.kernels``: of each name its module there ("" for a module itself)."""
    found = []
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labkit.kernels"):
            module = (node.module or "").removeprefix("labkit.kernels").removeprefix(".")
            found += [(module, alias) for alias in node.names]
    return found


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def dump(node: Any) -> str:
    """A syntax tree as text, without docstrings, places and empty fields: the same with each Python."""
    if isinstance(node, list):
        return f"[{', '.join(map(dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
        docstring = ast.get_docstring(node) is not None
        fields["body"] = node.body[docstring:]
    return f"{type(node).__name__}({', '.join(f'{name}={dump(value)}' for name, value in fields.items())})"
